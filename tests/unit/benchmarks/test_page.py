"""The benchmark page and its pictures show exactly the stored results."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest

from benchmarks.tables import GoalCount, table, times
from benchmarks.wan_hidden import row_of
from benchmarks.wan_tables import hidden
from tests import ROOT

MEND = "run: python docs/make_benchmarks.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names that the script of the page defines."""
    return runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"))


def test_the_page_is_what_the_results_say(script: dict[str, Any]) -> None:
    """Goal: new results are on the page; if not, the error names the command to run."""
    assert (ROOT / "docs" / "benchmarks.md").read_text() == script["render"](), MEND


def test_pictures_were_drawn_from_the_results(script: dict[str, Any]) -> None:
    """Goal: every picture of the page exists and has the digest of the present results; there is no other picture."""
    wanted = script["pictured"]()

    assert {path: script["source_of"](path.read_bytes()) for path in wanted if path.exists()} == wanted, MEND
    assert set((ROOT / "docs" / "img").glob("*.png")) == set(wanted)


def test_every_result_has_a_section(script: dict[str, Any]) -> None:
    """Goal: every measured result is on the page."""
    sections = {(section.source, section.experiment) for section in script["SECTIONS"]}
    measured = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        experiments = json.loads(path.read_text()).get("experiments", [""])
        measured |= {(path.stem, experiment) for experiment in experiments}

    assert measured <= sections


def test_a_picture_says_what_it_was_drawn_from(script: dict[str, Any]) -> None:
    png = bytes(range(33)) + b"the rest"

    assert script["source_of"](script["with_source"](png, "abc")) == "abc"
    assert script["source_of"](png + bytes(20)) == ""


def test_what_is_missed_is_marked_and_counted() -> None:
    goals = GoalCount()

    assert goals.least(1.5, 1.2, times) == "1.50 (≥ 1.20)"
    assert goals.least(1.0, 1.2, times) == "**1.00** (≥ 1.20, missed)"
    assert goals.most(1.0, 1.2, times) == "1.00 (≤ 1.20)"
    assert goals.most(1.5, 1.2, times) == "**1.50** (≤ 1.20, missed)"
    assert goals.least(0.1, None, times) == "0.10"
    assert (goals.targets, goals.missed) == (4, 2)


def test_a_table_is_markdown() -> None:
    assert (
        table(("call", "median"), [("a", 1), ("b", 2)]) == "| call | median |\n| --- | ---: |\n| a | 1 |\n| b | 2 |\n"
    )


@pytest.mark.parametrize(
    ("hidden_ms", "cell", "wanted", "missed"),
    [(21, "1.05 (≤ 1.10)", 1, 0), (25, "**1.25** (≤ 1.10, missed)", 1, 1), (15, "0.75 (disturbed)", 0, 0)],
)
def test_a_step_shorter_than_its_computing_is_no_success(hidden_ms: int, cell: str, wanted: int, missed: int) -> None:
    """Goal: on a busy machine a goal is neither met nor missed."""
    spent_ms = {"compute": 20, "communication": 10, "waited for": 30, "hidden": hidden_ms}
    rank = {kind: [(0, value * 1_000_000)] for kind, value in spent_ms.items()}
    found = {"bytes": 4, "rate_bits": 1e8, "round_trip_ms": 100, "wanted": 1.1, "loads": [row_of(2.0, [rank], 4)]}
    goals = GoalCount()

    assert f"| {cell} |" in hidden(found, goals)
    assert (goals.targets, goals.missed) == (wanted, missed)
