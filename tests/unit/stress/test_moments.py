"""Checks of the stress harness that depend on time: events during optimisations, and kills that wait for a moment."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
from pccl.stress.checkers import SECOND, Judge
from pccl.stress.faults import Fault, FaultKind
from pccl.stress.paths import Path
from pccl.stress.records import CONNECT, OPTIMIZE, REDUCE, TOPOLOGY, Bounds, Numbers, Reduced, Step
from pccl.stress.round_check import RoundCheck
from pccl.stress.stalls import Stalls
from pccl.stress.timed_faults import FAILURE_SECONDS, RETRY_SECONDS, TimedFaults

BOUNDS = Bounds(call=1.0, measuring=0.5)
REFUSAL = "UsageError: optimize_topology needs at least 2 peers in the run, and there is 1: let others join first"


def numbers(life: int, number: int = 1, epoch: int = 1, world: int = 2) -> Numbers:
    """Return the numbers of a run with one group."""
    return Numbers(life, number, epoch, world, world, 1, world)


def step(life: int, start: float, end: float, told: Numbers | None, call: str = TOPOLOGY, error: str = "") -> Step:
    """Return a step with times in seconds."""
    return Step(life, 0, call, int(start * SECOND), int(end * SECOND), told, error)


def judge_of_two() -> Judge:
    """Return a judge that has seen lives 1 and 2 join."""
    judge = Judge(BOUNDS, slack=0.5)
    for life in (1, 2):
        judge.born(life, 0)
        judge.told(step(life, 0.0, 0.5, numbers(life), CONNECT))
    return judge


def laws(judge: Judge) -> list[str]:
    return [violation.law for violation in judge.violations]


def test_optimisations_are_told_to_all_alike() -> None:
    """Goal: an optimisation is no topology round, may raise epochs, and gives all members the same numbers."""
    agreement = RoundCheck()
    for life in (1, 2):
        agreement.add(step(life, 1.0, 1.1, numbers(life, 4)))
        agreement.add(step(life, 2.0, 2.5, numbers(life, 4, 2), OPTIMIZE))
        agreement.add(step(life, 3.0, 3.1, numbers(life, 5, 2)))
    assert agreement.found == []
    assert agreement.count == 2

    agreement.add(step(1, 4.0, 4.1, numbers(1, 5, 3), OPTIMIZE))
    agreement.add(step(2, 4.0, 4.1, numbers(2, 5, 4), OPTIMIZE))
    assert [violation.law for violation in agreement.found] == ["agreement"]

    agreement.add(step(2, 4.0, 4.1, numbers(2, 6, 4), OPTIMIZE))
    assert [violation.law for violation in agreement.found] == ["agreement", "order"]


def test_only_who_is_alone_has_nothing_to_optimise() -> None:
    """Goal: a refusal is legal only for a peer that is alone; other refusals are violations."""
    other = "UsageError: deadlock"
    for victims, error, found in [([2], REFUSAL, []), ([], REFUSAL, ["innocence"]), ([2], other, ["innocence"])]:
        judge = judge_of_two()
        judge.harmed(FaultKind.KILL_TRAINING, victims, SECOND, 0.0, -9)
        judge.told(step(1, 1.1, 1.2, None, OPTIMIZE, error))
        assert laws(judge) == found


@pytest.mark.parametrize(("asked", "died", "paths"), [
    (1.5, 1.5, {Path.JOINED_OPTIMIZING, Path.DIED_OPTIMIZING}),
    (0.8, 0.9, {Path.JOINED_OPTIMIZING}),
    (2.2, 2.3, set()),
])  # fmt: skip
def test_what_happens_during_an_optimisation_is_noticed(asked: float, died: float, paths: set[Path]) -> None:
    """Goal: a death while all survivors were in it, and a newcomer that asked before it and was accepted after it."""
    judge = judge_of_two()
    judge.born(3, 0)
    judge.told(step(3, 0.5, 0.6, numbers(3, 2, world=3), CONNECT))
    judge.born(4, int(asked * SECOND))
    judge.harmed(FaultKind.KILL_TRAINING, [3], int(died * SECOND), 0.0, -9)
    for life in (1, 2):
        judge.told(step(life, 1.0 + life / 100, 1.98 + life / 100, numbers(life), OPTIMIZE))
    judge.told(step(4, asked, 3.0, numbers(4, 3, world=3), CONNECT))
    judge.finish(4 * SECOND)

    assert laws(judge) == []
    assert paths == {Path.JOINED_OPTIMIZING, Path.DIED_OPTIMIZING} & judge.totals.paths.keys()


def test_measuring_takes_its_time_and_no_more() -> None:
    """Goal: an optimisation may take the time of other calls plus the time for probes."""
    for seconds, found in [(1.4, []), (1.6, ["promptness"])]:
        judge = judge_of_two()
        judge.told(step(1, 1.0, 1.0 + seconds, numbers(1), OPTIMIZE))
        assert laws(judge) == found


def test_a_second_kill_waits_for_the_first_to_be_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: it comes during the retry of its own group; if nothing fails, it comes anyway."""
    now = 100.0
    monkeypatch.setattr("pccl.stress.timed_faults.time.monotonic", lambda: now)
    timed = TimedFaults()
    first, second = (Fault(place, 0.0, FaultKind.KILL_TRAINING, place, 1.0) for place in (2, 3))
    failed = Step(1, 0, REDUCE, 1, 2, fact=Reduced(1, 0, 1, False, 0, 7, 7))
    timed.await_failure(first, 0)
    timed.await_failure(second, 1)
    timed.note(replace(failed, fact=Reduced(1, 0, 1, True, 2, 7, 8)))
    timed.note(failed)
    assert timed.due() == []

    now += RETRY_SECONDS + 1e-6
    assert timed.due() == [first]
    now += FAILURE_SECONDS
    assert timed.waits
    assert timed.due() == [second]
    assert not timed.waits


@pytest.mark.parametrize(
    ("kind", "at", "found"),
    [
        (FaultKind.STOP_ACTOR, 9.0, 0),
        (FaultKind.BLACK_HOLE, 4.0, 0),
        (FaultKind.FLIP_RING, 9.0, 0),
        (FaultKind.KILL_TRAINING, 9.0, 1),
        (FaultKind.STOP_ACTOR, 10.5, 1),
    ],
)
def test_a_reduce_that_stands_still_needs_a_cause(
    tmp_path: pathlib.Path, kind: FaultKind, at: float, found: int
) -> None:
    """Goal: the cause is a recent stop or silence; a kill is noticed at once, and a later fault is no cause."""
    log = tmp_path / "master.log"
    log.touch()
    objections: list[str] = []
    stalls = Stalls(log, Bounds(), lambda law, _: objections.append(law))
    stalls.harmed(kind, at, 0.5)
    stalls.look()
    with log.open("a") as file:
        file.write(
            "10.000000 30 edge=1->2 broken reason='no byte of tag 5 moved for 1.6 s (stall_timeout)'\n11.0 30 half"
        )
    stalls.look()
    stalls.look()

    assert objections == ["stalls"] * found
