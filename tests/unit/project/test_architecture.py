"""The page on architecture names files that exist, and its diagrams come from tables that hold together."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from pccl._core.master import optimizer, topology_round
from pccl._core.peer import fetch, peer_state, reduce_machine, ring_links, sync_machine
from tests import ROOT

PAGE = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
TABLES: dict[str, dict[tuple[str, type[Any]], tuple[Any, tuple[str, ...]]]] = {
    "peer": peer_state.TRANSITIONS,
    "reduce": reduce_machine.TRANSITIONS,
    "sync": sync_machine.TRANSITIONS,
    "lane": ring_links.TRANSITIONS,
    "fetch": fetch.TRANSITIONS,
    "fetch link": fetch.LINK_TRANSITIONS,
    "topology round": topology_round.TRANSITIONS,
    "optimisation": optimizer.TRANSITIONS,
}


@pytest.mark.parametrize("title", PAGE["WALKS"])
def test_every_file_of_a_walk_exists(title: str) -> None:
    """Goal: when a file is renamed, the walks on the page are changed too."""
    assert [file for file, _ in PAGE["WALKS"][title] if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("title", PAGE["WALKS"])
def test_a_step_of_a_walk_names_what_its_file_has(title: str) -> None:
    """Goal: a message, an event or a phase that a step names is one of the step's file, so the step is in its place."""
    wrong = [
        f"{file}: {name}"
        for file, what in PAGE["WALKS"][title]
        for name in re.findall(r"[`*](\w+)[`*]", what)
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text(), re.IGNORECASE)
    ]
    assert wrong == []


def test_every_room_has_its_line() -> None:
    """Goal: a new folder is named on the page."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("pccl/**/*.py")} - {"pccl/actors"}

    assert folders == {room for room in PAGE["ROOMS"] if room.startswith("pccl")}


@pytest.mark.parametrize("name", TABLES)
def test_every_phase_of_a_table_is_reached(name: str) -> None:
    """Goal: every phase can be reached, and every phase but the last can be left."""
    table = TABLES[name]
    first = next(phase for phase, _ in table)
    sources = {phase for phase, _ in table}
    targets = {target for _, next_phases in table.values() for target in next_phases}

    assert sources - targets <= {first}
    assert targets - sources <= {"completed", "closed"}
    assert all(next_phases for _, next_phases in table.values())
