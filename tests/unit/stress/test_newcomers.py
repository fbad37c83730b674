"""Bad newcomers of a stress run: what they do wrong, how the supervisor follows them, and the laws about them."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from pccl.stress import bad_newcomer, newcomers
from pccl.stress.checkers import REFUSALS, SECOND, Judge
from pccl.stress.faults import FAMILIES, MENDED, NEWCOMERS, OUTVOTED, Fault, FaultKind
from pccl.stress.records import (
    CONNECT,
    REDUCE,
    REFUSED,
    SPARED,
    SYNC,
    TOPOLOGY,
    UNTOLD,
    Bounds,
    Numbers,
    Reduced,
    Step,
    Task,
    Violation,
)

from pccl import KickedError, Options, PeerLostError, Result, UsageError
from pccl._core.records import replace

PID = 4711
SHORT = 0.2  # seconds that a dial waits here


def judge_of(*lives: int) -> Judge:
    """Return a judge that has seen these lives join in the first second."""
    judge = Judge(Bounds(call=1.0, hang=4.0, refusal=15.0), slack=0.5)
    for life in lives:
        judge.born(life, 0)
        told = Numbers(life, 1, 1, len(lives), len(lives), 1, len(lives))
        judge.told(Step(life, 0, CONNECT, 0, SECOND // 2, told))
    return judge


def laws(judge: Judge) -> list[str]:
    return [violation.law for violation in judge.violations]


def took(judge: Judge, start: float, end: float) -> None:
    """Tell the judge that a topology round of life 1 took from `start` to `end`."""
    told = Numbers(1, 2, 1, 2, 2, 1, 2)
    judge.told(Step(1, 0, TOPOLOGY, int(start * SECOND), int(end * SECOND), told))


def failed(judge: Judge, start: float, attempt: int) -> None:
    """Tell the judge that an attempt of life 1 at a reduce failed."""
    fact = Reduced(1, 0, attempt, False, 0, 7, 7)
    judge.told(Step(1, 0, REDUCE, int(start * SECOND), int(start * SECOND) + 1, fact=fact))


# ---------------------------------------------------------------------------------------------- the laws


@pytest.mark.parametrize("kind", sorted(NEWCOMERS))
def test_every_mistake_has_a_rare_path(kind: FaultKind) -> None:
    """Goal: a long run shows for each mistake that it was refused at least once."""
    judge = judge_of(1, 2)
    judge.came(3, kind, 2 * SECOND, 0, 9)
    judge.went(3, REFUSED, 3 * SECOND)

    assert judge.totals.paths == {REFUSALS[kind]: 1}
    assert judge.totals.faults == {kind.value: 1}
    assert laws(judge) == []


@pytest.mark.parametrize(("status", "told"), [(REFUSED, True), (SPARED, True), (UNTOLD, False), (1, False)])
def test_a_newcomer_must_be_told(status: int, told: bool) -> None:
    judge = judge_of(1, 2)
    judge.came(3, FaultKind.NEWCOMER_DEAF, 2 * SECOND, 0, 9)
    judge.went(3, status, 3 * SECOND)

    assert laws(judge) == ([] if told else ["admission"])


@pytest.mark.parametrize("kind", sorted(NEWCOMERS))
def test_nobody_waits_for_an_address_or_a_name(kind: FaultKind) -> None:
    """Goal: only what a majority must decide may hold up a call, and only while the newcomer is there."""
    judge = judge_of(1, 2)
    judge.came(3, kind, 2 * SECOND, 0, 9)
    took(judge, 2.0, 4.0)
    assert laws(judge) == ([] if kind in OUTVOTED else ["promptness"])

    judge.went(3, REFUSED, 5 * SECOND)
    judge.violations.clear()
    took(judge, 5.5, 7.0)
    assert laws(judge) == ["promptness"]


def test_a_newcomer_reports_nothing_and_counts_in_worlds() -> None:
    """Goal: no law waits for its steps; until it is gone, a round may count it."""
    judge = judge_of(1)
    judge.came(2, FaultKind.NEWCOMER_SHAPE, SECOND, 0, 9)
    took(judge, 2.0, 2.1)
    judge.tick(6 * SECOND)
    judge.finish(20 * SECOND)

    assert laws(judge) == []


@pytest.mark.parametrize(
    ("kind", "attempt", "found"),
    [
        (FaultKind.NEWCOMER_SHAPE, 1, []),
        (FaultKind.NEWCOMER_SHAPE, 2, ["innocence"]),
        (FaultKind.NEWCOMER_SILENT, 1, ["innocence"]),
        (FaultKind.NEWCOMER_CALL, 1, ["innocence"]),
    ],
)
def test_a_reduce_fails_once_at_most(kind: FaultKind, attempt: int, found: list[str]) -> None:
    """Goal: of all newcomers, only one that reduces something else costs the others an attempt, and only the first."""
    judge = judge_of(1, 2)
    judge.came(3, kind, 2 * SECOND, 0, 9)
    failed(judge, 2.5, attempt)

    assert laws(judge) == found


def test_a_lost_peer_explains_a_failure_that_a_newcomer_does_not() -> None:
    judge = judge_of(1, 2)
    failed(judge, 1.5, 1)
    assert laws(judge) == ["innocence"]
    judge.harmed(FaultKind.KILL_TRAINING, [2], 2 * SECOND, 0.0, -9)
    failed(judge, 2.5, 2)
    assert laws(judge) == ["innocence"]


def test_a_newcomer_is_no_reason_to_lose_a_state() -> None:
    judge = judge_of(1, 2)
    judge.came(3, FaultKind.NEWCOMER_STATE, 2 * SECOND, 0, 9)
    judge.told(Step(1, 0, SYNC, 2 * SECOND, 3 * SECOND, error="PeerLostError: gone"))

    assert laws(judge) == ["innocence"]


# ---------------------------------------------------------------------------------------------- the supervisor's side


class FakeZygote:
    """Starts nothing; keeps the tasks."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def spawn(self, task: Task, report_fd: int, log_fd: int) -> int:
        """As that of a zygote."""
        self.tasks.append(task)
        return PID


class Scene:
    """One newcomer that was started, and what the supervisor's side did with it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FaultKind, refusal: float) -> None:
        self.signals: list[tuple[int, int]] = []
        self.judge = judge_of(1, 2)
        self.judge.bounds = Bounds(refusal=refusal)
        monkeypatch.setattr(newcomers, "send", lambda *signal: self.signals.append(signal))
        self.present = newcomers.BadNewcomers(self.judge, tmp_path / "log", self._add_violation)
        zygote: Any = FakeZygote()
        self.present.start(zygote, Fault(1, 0.0, kind, 4, 0.0), Task(3, "", "127.0.0.1:1", group=1, place=9))
        self.tasks = zygote.tasks

    def _add_violation(self, law: str, text: str) -> None:
        self.judge.violations.append(Violation(0, law, text))


def test_a_newcomer_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: its task names its mistake; its end is counted; the ends of other processes are left to others."""
    scene = Scene(tmp_path, monkeypatch, FaultKind.NEWCOMER_CALL, 60.0)
    assert [task.mistake for task in scene.tasks] == ["newcomer-call"]
    assert scene.present.any_left
    scene.present.look()

    assert not scene.present.ended(PID + 1, 0)
    assert scene.present.ended(PID, REFUSED)
    assert not scene.present.any_left
    assert (scene.judge.totals.refused, scene.judge.totals.missed) == (1, 0)
    assert (laws(scene.judge), scene.signals) == ([], [])


def test_a_newcomer_that_stays_is_reported_once_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, FaultKind.NEWCOMER_SILENT, 0.0)
    scene.present.look()
    scene.present.look()

    assert scene.signals == [(PID, signal.SIGKILL)]
    assert scene.present.ended(PID, -signal.SIGKILL)
    assert laws(scene.judge) == ["admission"]


def test_the_others_stay_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: while a misfit is there, one fault may cost a member; for the others, and afterwards, all may."""
    reachable = Scene(tmp_path, monkeypatch, FaultKind.NEWCOMER_DEAF, 60.0).present
    assert all(reachable.allow(kind) for kind in FaultKind)

    scene = Scene(tmp_path, monkeypatch, FaultKind.NEWCOMER_SHAPE, 60.0)
    allowed = {kind for kind in FaultKind if scene.present.allow(kind)}
    assert allowed == MENDED | NEWCOMERS - OUTVOTED | {FaultKind.KILL_TRAINING}

    scene.present.ended(PID, REFUSED)
    assert all(scene.present.allow(kind) for kind in FaultKind)


def test_newcomers_go_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, FaultKind.NEWCOMER_SILENT, 60.0)
    scene.present.dismiss()

    assert scene.signals == [(PID, signal.SIGKILL)]
    assert scene.present.ended(PID, -signal.SIGKILL)
    assert laws(scene.judge) == []


# ---------------------------------------------------------------------------------------------- the mistakes


@pytest.mark.parametrize(
    ("kind", "failure"), [(FaultKind.NEWCOMER_DEAF, ConnectionRefusedError), (FaultKind.NEWCOMER_SILENT, TimeoutError)]
)
def test_an_address_that_cannot_be_dialled(kind: FaultKind, failure: type[OSError]) -> None:
    """Goal: one refuses at once, the other one gives no answer."""
    with bad_newcomer.wrong_way(kind, Options()) as options:
        host, _, port = options.advertise.partition(":")
        with pytest.raises(failure):
            socket.create_connection((host, int(port)), SHORT)


def test_a_stranger_names_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an operator's name for the run does not make it one of its peers; it shows its real address."""
    monkeypatch.setenv("PCCL_RUN", "voyage")
    with bad_newcomer.wrong_way(FaultKind.NEWCOMER_STRANGER, Options()) as options:
        assert options == Options()
        assert os.environ["PCCL_RUN"] == bad_newcomer.OTHER_RUN


@pytest.mark.parametrize("kind", sorted(NEWCOMERS))
def test_a_refusal_is_meant_for_the_newcomer(kind: FaultKind) -> None:
    """Goal: an error that all peers get, or a lost peer, does not count as told."""
    kick, usage, lost = (
        error(Result.INVALID_USAGE, "connect", "x") for error in (KickedError, UsageError, PeerLostError)
    )

    assert bad_newcomer.is_refusal(kind, kick)
    assert bad_newcomer.is_refusal(kind, usage) == (kind is FaultKind.NEWCOMER_STRANGER)
    assert not bad_newcomer.is_refusal(kind, lost)


def test_all_newcomers_have_a_way_to_be_wrong() -> None:
    """Goal: none of the kinds is an ordinary peer."""
    assert set(FAMILIES["misfit"]) == set(bad_newcomer.ACTS)
    assert set(FAMILIES["unreachable"]) == bad_newcomer.ADDRESSES
    task = Task(3, replace(Options(), port=0).encode(), mistake=FaultKind.NEWCOMER_CALL.value)
    assert Task.decode(task.encode()).mistake == "newcomer-call"
