"""Plans of a stress run: made from a seed, limited to families of faults, read from a command line and a bundle."""

from __future__ import annotations

import shlex
from itertools import islice, pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from pccl.cli.stress import stress
from pccl.stress.faults import ALL_FAMILIES, ELDER, FAMILIES, LINK_FAULTS, MENDED, FaultKind, draw_plan, is_proxied
from pccl.stress.paths import Path as RarePath
from pccl.stress.paths import missing
from pccl.stress.records import Bounds
from pccl.stress.report import read_settings, replay_command, write_settings
from pccl.stress.settings import Settings


def test_a_plan_repeats_from_its_seed() -> None:
    """Goal: the command that a failed run prints gives the same faults, times and places."""
    first, again, other = (list(islice(draw_plan(seed, 10, (0.5, 1.0), 2.0), 500)) for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_a_plan_has_everything_and_spares_the_elder() -> None:
    """Goal: every kind of fault occurs; place 0 gets only faults that it survives; times are within the interval."""
    plan = list(islice(draw_plan(3, 5, (0.5, 1.0), 2.0), 5000))

    assert {fault.kind for fault in plan} == set(FaultKind)
    elder = {fault.kind for fault in plan if fault.place == ELDER}
    assert elder == (MENDED | {FaultKind.MASS_DEATH}) - set(LINK_FAULTS)
    assert {fault.place for fault in plan} == set(range(5))
    assert all(is_proxied(fault.place) for fault in plan if fault.kind in LINK_FAULTS)
    gaps = [after.at - before.at for before, after in pairwise(plan)]
    assert 0.5 <= min(gaps)
    assert max(gaps) <= 1.0


def test_faults_are_switched_by_family() -> None:
    """Goal: only the selected families occur; with none the plan is empty, and rare paths require no other faults."""
    plan = islice(draw_plan(3, 5, (0.5, 1.0), 2.0, ("term", "mass")), 500)

    assert {fault.kind for fault in plan} == {FaultKind.TERMINATE, FaultKind.MASS_DEATH}
    assert list(draw_plan(3, 5, (0.5, 1.0), 2.0, ())) == []
    assert {kind for processes in FAMILIES.values() for kind in processes} == set(FaultKind)
    asked = missing({RarePath.MADE_AGAIN: 1}, {FaultKind.TERMINATE}, 2)
    assert RarePath.MASS_DEATH not in asked
    assert RarePath.MADE_AGAIN not in asked
    assert RarePath.DIED_AFTER_VOTE in asked


def test_a_run_can_be_replayed(tmp_path: Path) -> None:
    """Goal: the command that a failed run prints is accepted by a shell, and gives the same plan."""
    tmp_path /= "a folder"
    tmp_path.mkdir()
    settings = Settings(duration=90.0, peers=7, groups=3, interval=(0.25, 2.0), families=("kill",), seed=42,
                        folder=tmp_path, bounds=Bounds(call=3.0))  # fmt: skip
    write_settings(settings)

    words = shlex.split(replay_command(settings))[2:]
    context = stress.make_context("stress", words)
    again = read_settings(context.params["replay"], context.params["report"])

    assert context.params["report"] != tmp_path
    assert (again.duration, again.peers, again.groups, again.seed) == (90.0, 7, 3, 42)
    assert (again.interval, again.families, again.bounds) == ((0.25, 2.0), ("kill",), Bounds(call=3.0))


@pytest.mark.parametrize(("word", "families"), [("all", ALL_FAMILIES), ("none", ()), ("mass,kill", ("kill", "mass"))])
def test_families_are_read(word: str, families: tuple[str, ...]) -> None:
    assert stress.make_context("stress", ["--churn", "--faults", word]).params["faults"] == families


@pytest.mark.parametrize("words", [["--churn", "--faults", "kill,laugh"], [], ["--churn", "--duration", "soon"]])
def test_a_command_that_makes_no_sense_is_explained(words: list[str]) -> None:
    outcome = CliRunner().invoke(stress, words)

    assert outcome.exit_code == 2
    assert "kill, term" in outcome.output or "--replay" in outcome.output or "10m" in outcome.output


@pytest.mark.parametrize(("word", "seconds"), [("45", 45.0), ("60s", 60.0), ("10m", 600.0), ("8h", 28800.0)])
def test_durations_are_read(word: str, seconds: float) -> None:
    assert stress.make_context("stress", ["--churn", "--duration", word]).params["duration"] == seconds
