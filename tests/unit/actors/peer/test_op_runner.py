"""The op runner of a peer actor: the order of operations, how they wait, and when an abort has drained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pccl._core.peer.events import BeginOperation, ReduceDrained, ReduceEnded, ReduceProgress, Traffic, WorkerDied
from pccl.actors.peer.op_runner import ABORT_GRACE_NS, OpRunner
from tests.unit._core.dataplane.loopback import operation


class Clock:
    """A loop that only has timers; they run when a test calls run()."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._timers: list[tuple[int, Callable[[], None]]] = []

    def after(self, delay_ns: int, callback: Callable[[], None]) -> None:
        self._timers.append((self.now_ns + delay_ns, callback))

    def run(self, nanoseconds: int = 0) -> None:
        self.now_ns += nanoseconds
        for _ in range(100):
            due = [timer for timer in self._timers if timer[0] <= self.now_ns]
            if not due:
                return
            self._timers.remove(due[0])
            due[0][1]()
        raise AssertionError("timers without end")


class FakeBoard:
    """A board with room for this many operations; workers hold the sequences in `held`."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.up: list[int] = []
        self.held: set[int] = set()
        self.aborted: list[int] = []
        self.finished: list[int] = []
        self.ended: set[int] = set()
        self.bytes: dict[int, int] = {}
        self.traffic = 0, 0
        self.sweeps = 0

    def begin(self, sequence: int, what: Any, rank: int, world: int) -> bool:
        if len(self.up) >= self.room:
            return False
        self.up.append(sequence)
        return True

    def abort(self, sequence: int) -> bool:
        self.aborted.append(sequence)
        return sequence not in self.held

    def is_drained(self, sequence: int) -> bool:
        return sequence not in self.held

    def release(self, sequence: int) -> None:
        self.up.remove(sequence)

    def sweep(self) -> None:
        self.sweeps += 1

    def take_finished(self) -> list[int]:
        taken, self.finished = self.finished, []
        return taken

    def has_ended(self, sequence: int) -> bool:
        return sequence in self.ended

    def moved(self, sequence: int) -> int:
        return self.bytes.get(sequence, 0)

    def statistics(self, sequence: int) -> tuple[int, int, int, int, int]:
        return sequence, 2, 3, 4, 5

    def totals(self) -> tuple[int, int]:
        return self.traffic


class FakeWorkerSet:
    """A board, and whether its workers are killed or gone."""

    def __init__(self, room: int = 100) -> None:
        self.board = FakeBoard(room)
        self.killed = self.gone = False


class FakeLanes:
    """A lane pool: holds the worker set in use and returns the workers that do not answer."""

    worker_set: FakeWorkerSet | None

    def __init__(self) -> None:
        self.called = 0
        self.mute: list[Any] = []

    def call(self) -> None:
        self.called += 1

    def silent(self) -> list[Any]:
        return list(self.mute)


class RunnerHarness:
    """An op runner with a fake clock, fake lanes and a fake board."""

    def __init__(self, room: int = 100) -> None:
        self.clock = Clock()
        self.lanes = FakeLanes()
        self.worker_set = self.lanes.worker_set = FakeWorkerSet(room)
        self.board = self.worker_set.board
        self.fed: list[Any] = []
        self.reducing = OpRunner(self.clock, self.lanes, self.fed.append)  # type: ignore[arg-type]

    def begin(self, *sequences: int) -> None:
        for sequence in sequences:
            self.reducing.begin(BeginOperation(sequence, operation(10), 0, 2))

    def taken(self) -> list[Any]:
        taken, self.fed[:] = list(self.fed), []
        return taken

    def kill(self) -> None:
        self.reducing.keep_traffic()
        self.worker_set.killed = True
        self.lanes.worker_set = None


@pytest.fixture
def harness() -> RunnerHarness:
    return RunnerHarness()


def test_an_operation_ends_once(harness: RunnerHarness) -> None:
    harness.begin(1, 2)
    harness.board.ended, harness.board.finished = {2}, [2, 1]
    harness.reducing.look()
    assert harness.taken() == [ReduceEnded(2, 2, 2, 3, 4, 5)]
    harness.reducing.look()
    assert harness.taken() == []
    harness.reducing.end(2)
    assert harness.board.up == [1]


def test_operations_go_up_in_order() -> None:
    """Goal: an operation that finds no room delays all later ones, because all peers must begin them in one order."""
    harness = RunnerHarness(room=2)
    harness.begin(1, 2, 3, 4)
    assert harness.board.up == [1, 2]
    harness.reducing.end(1)
    assert harness.board.up == [2, 3]
    harness.reducing.end(3)
    assert harness.board.up == [2, 4]


def test_what_was_never_put_up_has_drained_and_lets_the_next_pass() -> None:
    harness = RunnerHarness(room=1)
    harness.begin(1, 2, 3)
    harness.reducing.abort(2)
    assert harness.taken() == []  # never fed from within the call
    harness.clock.run()
    assert harness.taken() == [ReduceDrained(2)]
    assert harness.board.aborted == []
    harness.reducing.end(2)
    harness.reducing.end(1)
    assert harness.board.up == [3]


def test_an_abort_has_drained_when_the_last_worker_let_go(harness: RunnerHarness) -> None:
    harness.begin(1)
    harness.board.held = {1}
    harness.reducing.abort(1)
    harness.clock.run()
    assert harness.taken() == []
    assert harness.board.up == [1]
    harness.board.held.clear()
    harness.reducing.look()
    assert harness.taken() == [ReduceDrained(1)]
    assert harness.board.up == []
    assert harness.board.sweeps == 1
    harness.reducing.end(1)
    harness.reducing.look()
    harness.clock.run(2 * ABORT_GRACE_NS)
    assert harness.taken() == []


def test_an_abort_that_no_worker_holds_drains_at_once_but_not_within_the_call(harness: RunnerHarness) -> None:
    harness.begin(1)
    harness.reducing.abort(1)
    assert harness.taken() == []
    harness.clock.run()
    assert harness.taken() == [ReduceDrained(1)]


def test_an_aborted_operation_never_ends(harness: RunnerHarness) -> None:
    harness.begin(1)
    harness.board.held = {1}
    harness.board.ended, harness.board.finished = {1}, [1]
    harness.reducing.abort(1)
    harness.reducing.look()
    assert harness.taken() == []


def test_queues_are_swept_when_the_last_abort_has_drained(harness: RunnerHarness) -> None:
    harness.begin(1, 2, 3)
    harness.board.held = {1, 2}
    harness.reducing.abort(1)
    harness.reducing.abort(2)
    harness.board.held = {2}
    harness.reducing.look()
    assert (harness.taken(), harness.board.sweeps) == ([ReduceDrained(1)], 0)
    harness.board.held = set()
    harness.reducing.look()
    assert (harness.taken(), harness.board.sweeps) == ([ReduceDrained(2)], 1)
    assert harness.board.up == [3]


def test_room_that_an_abort_made_is_used() -> None:
    harness = RunnerHarness(room=1)
    harness.begin(1, 2)
    harness.reducing.abort(1)
    harness.clock.run()
    assert harness.taken() == [ReduceDrained(1)]
    assert harness.board.up == [2]


def test_a_worker_that_holds_on_has_its_worker_set_killed(harness: RunnerHarness) -> None:
    harness.begin(1)
    harness.board.held = {1}
    harness.reducing.abort(1)
    harness.clock.run(ABORT_GRACE_NS - 1)
    assert harness.taken() == []
    harness.clock.run(1)
    assert harness.taken() == [WorkerDied("a worker did not let go of an aborted operation in 100 ms")]
    harness.kill()
    harness.reducing.look()
    assert harness.taken() == []  # the worker set is killed but not yet gone
    harness.worker_set.gone = True
    harness.reducing.look()
    assert harness.taken() == [ReduceDrained(1)]


def test_grace_is_given_also_if_nobody_held_it_at_first(harness: RunnerHarness) -> None:
    """Goal: a worker that is stopped while it looks at an aborted operation gets the same grace as others."""
    harness.begin(1)
    harness.reducing.abort(1)
    harness.board.held = {1}
    harness.clock.run()
    assert harness.taken() == []
    harness.clock.run(ABORT_GRACE_NS)
    assert harness.taken() == [WorkerDied("a worker did not let go of an aborted operation in 100 ms")]


def test_operations_of_a_killed_worker_set_have_drained_when_it_is_reaped(harness: RunnerHarness) -> None:
    harness.begin(1)
    harness.kill()
    harness.reducing.abort(1)
    harness.clock.run(ABORT_GRACE_NS)
    assert harness.taken() == []
    assert harness.board.aborted == []  # the board of a killed worker set is not used any more
    harness.worker_set.gone = True
    harness.reducing.look()
    assert harness.taken() == [ReduceDrained(1)]
    harness.reducing.end(1)
    harness.reducing.look()
    assert harness.taken() == []


def test_a_new_worker_set_has_a_board_of_its_own(harness: RunnerHarness) -> None:
    """Goal: sequences on the old board are not looked for on the new one."""
    harness.begin(1)
    harness.kill()
    harness.lanes.worker_set = FakeWorkerSet()
    harness.lanes.worker_set.board.finished, harness.lanes.worker_set.board.ended = [1], {1}
    harness.reducing.look()
    assert harness.taken() == []
    harness.begin(2)
    assert harness.lanes.worker_set.board.up == [2]
    harness.reducing.end(1)
    assert harness.lanes.worker_set.board.up == [2]


def test_what_commenced_without_a_worker_set_waits_for_one(harness: RunnerHarness) -> None:
    harness.lanes.worker_set = None
    harness.begin(1)
    harness.lanes.worker_set = harness.worker_set
    harness.begin(2)
    assert harness.board.up == [1, 2]


def test_progress_of_what_runs(harness: RunnerHarness) -> None:
    harness.begin(1, 2)
    harness.board.bytes = {1: 10, 2: 20}
    harness.board.traffic = 100, 200
    harness.reducing.report()
    assert harness.taken() == [Traffic(100, 200), ReduceProgress(1, 10), ReduceProgress(2, 20)]


def test_a_reduce_that_waits_behind_others_moves_as_they_do() -> None:
    """Goal: an operation that has not begun does not look stalled while those before it move."""
    harness = RunnerHarness(room=2)
    harness.begin(1, 2, 3)
    harness.board.bytes = {1: 10}
    harness.board.traffic = 4, 6
    harness.reducing.report()
    assert harness.taken() == [Traffic(4, 6), ReduceProgress(1, 10), ReduceProgress(2, 10), ReduceProgress(3, 10)]


def test_traffic_outlives_the_worker_set(harness: RunnerHarness) -> None:
    harness.board.traffic = 100, 200
    harness.kill()
    harness.reducing.report()
    harness.lanes.worker_set = FakeWorkerSet()
    harness.lanes.worker_set.board.traffic = 1, 2
    harness.reducing.report()
    assert harness.taken() == [Traffic(100, 200), Traffic(101, 202)]
