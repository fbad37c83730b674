"""The actor's side of operations: their order, their waiting, and when an abort has drained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pccl._core.peer.events import BeginOperation, ReduceDrained, ReduceEnded, ReduceProgress, Traffic, WorkerDied
from pccl.actors.peer.op_runner import ABORT_GRACE_NS, OpRunner
from tests.unit._core.dataplane.loopback import operation


class Clock:
    """A loop that only has timers; they run when a test says so."""

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
    """Room for so many operations; workers hold what is in `held`."""

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
    """A board, and whether its workers live."""

    def __init__(self, room: int = 100) -> None:
        self.board = FakeBoard(room)
        self.killed = self.gone = False


class FakeLanes:
    """Holds the worker set in use, and says which workers do not answer."""

    worker_set: FakeWorkerSet | None

    def __init__(self) -> None:
        self.called = 0
        self.mute: list[Any] = []

    def call(self) -> None:
        self.called += 1

    def silent(self) -> list[Any]:
        return list(self.mute)


class Scene:
    """The thing itself, and everything around it."""

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
def scene() -> Scene:
    return Scene()


def test_an_operation_ends_once(scene: Scene) -> None:
    scene.begin(1, 2)
    scene.board.ended, scene.board.finished = {2}, [2, 1]
    scene.reducing.look()
    assert scene.taken() == [ReduceEnded(2, 2, 2, 3, 4, 5)]
    scene.reducing.look()
    assert scene.taken() == []
    scene.reducing.end(2)
    assert scene.board.up == [1]


def test_operations_go_up_in_order() -> None:
    """Goal: the first that finds no room holds up all behind it, because their order is what keeps peers in step."""
    scene = Scene(room=2)
    scene.begin(1, 2, 3, 4)
    assert scene.board.up == [1, 2]
    scene.reducing.end(1)
    assert scene.board.up == [2, 3]
    scene.reducing.end(3)
    assert scene.board.up == [2, 4]


def test_what_was_never_put_up_has_drained_and_lets_the_next_pass() -> None:
    scene = Scene(room=1)
    scene.begin(1, 2, 3)
    scene.reducing.abort(2)
    assert scene.taken() == []  # never from within the call
    scene.clock.run()
    assert scene.taken() == [ReduceDrained(2)]
    assert scene.board.aborted == []
    scene.reducing.end(2)
    scene.reducing.end(1)
    assert scene.board.up == [3]


def test_an_abort_has_drained_when_the_last_worker_let_go(scene: Scene) -> None:
    scene.begin(1)
    scene.board.held = {1}
    scene.reducing.abort(1)
    scene.clock.run()
    assert scene.taken() == []
    assert scene.board.up == [1]
    scene.board.held.clear()
    scene.reducing.look()
    assert scene.taken() == [ReduceDrained(1)]
    assert scene.board.up == []
    assert scene.board.sweeps == 1
    scene.reducing.end(1)
    scene.reducing.look()
    scene.clock.run(2 * ABORT_GRACE_NS)
    assert scene.taken() == []


def test_an_abort_that_no_worker_holds_drains_at_once_but_not_within_the_call(scene: Scene) -> None:
    scene.begin(1)
    scene.reducing.abort(1)
    assert scene.taken() == []
    scene.clock.run()
    assert scene.taken() == [ReduceDrained(1)]


def test_an_aborted_operation_never_ends(scene: Scene) -> None:
    scene.begin(1)
    scene.board.held = {1}
    scene.board.ended, scene.board.finished = {1}, [1]
    scene.reducing.abort(1)
    scene.reducing.look()
    assert scene.taken() == []


def test_queues_are_swept_when_the_last_abort_has_drained(scene: Scene) -> None:
    scene.begin(1, 2, 3)
    scene.board.held = {1, 2}
    scene.reducing.abort(1)
    scene.reducing.abort(2)
    scene.board.held = {2}
    scene.reducing.look()
    assert (scene.taken(), scene.board.sweeps) == ([ReduceDrained(1)], 0)
    scene.board.held = set()
    scene.reducing.look()
    assert (scene.taken(), scene.board.sweeps) == ([ReduceDrained(2)], 1)
    assert scene.board.up == [3]


def test_room_that_an_abort_made_is_used() -> None:
    scene = Scene(room=1)
    scene.begin(1, 2)
    scene.reducing.abort(1)
    scene.clock.run()
    assert scene.taken() == [ReduceDrained(1)]
    assert scene.board.up == [2]


def test_a_worker_that_holds_on_has_its_worker_set_killed(scene: Scene) -> None:
    scene.begin(1)
    scene.board.held = {1}
    scene.reducing.abort(1)
    scene.clock.run(ABORT_GRACE_NS - 1)
    assert scene.taken() == []
    scene.clock.run(1)
    assert scene.taken() == [WorkerDied("a worker did not let go of an aborted operation in 100 ms")]
    scene.kill()
    scene.reducing.look()
    assert scene.taken() == []  # killed is not yet gone
    scene.worker_set.gone = True
    scene.reducing.look()
    assert scene.taken() == [ReduceDrained(1)]


def test_grace_is_given_also_if_nobody_held_it_at_first(scene: Scene) -> None:
    """Goal: a worker that looks at an aborted operation, and is stopped there, is waited for no longer than others."""
    scene.begin(1)
    scene.reducing.abort(1)
    scene.board.held = {1}
    scene.clock.run()
    assert scene.taken() == []
    scene.clock.run(ABORT_GRACE_NS)
    assert scene.taken() == [WorkerDied("a worker did not let go of an aborted operation in 100 ms")]


def test_operations_of_a_killed_worker_set_have_drained_when_it_is_reaped(scene: Scene) -> None:
    scene.begin(1)
    scene.kill()
    scene.reducing.abort(1)
    scene.clock.run(ABORT_GRACE_NS)
    assert scene.taken() == []
    assert scene.board.aborted == []  # its board is nobody's business any more
    scene.worker_set.gone = True
    scene.reducing.look()
    assert scene.taken() == [ReduceDrained(1)]
    scene.reducing.end(1)
    scene.reducing.look()
    assert scene.taken() == []


def test_a_new_worker_set_has_a_board_of_its_own(scene: Scene) -> None:
    """Goal: sequences on the old board are not looked for on the new one."""
    scene.begin(1)
    scene.kill()
    scene.lanes.worker_set = FakeWorkerSet()
    scene.lanes.worker_set.board.finished, scene.lanes.worker_set.board.ended = [1], {1}
    scene.reducing.look()
    assert scene.taken() == []
    scene.begin(2)
    assert scene.lanes.worker_set.board.up == [2]
    scene.reducing.end(1)
    assert scene.lanes.worker_set.board.up == [2]


def test_what_commenced_without_a_worker_set_waits_for_one(scene: Scene) -> None:
    scene.lanes.worker_set = None
    scene.begin(1)
    scene.lanes.worker_set = scene.worker_set
    scene.begin(2)
    assert scene.board.up == [1, 2]


def test_progress_of_what_runs(scene: Scene) -> None:
    scene.begin(1, 2)
    scene.board.bytes = {1: 10, 2: 20}
    scene.board.traffic = 100, 200
    scene.reducing.report()
    assert scene.taken() == [Traffic(100, 200), ReduceProgress(1, 10), ReduceProgress(2, 20)]


def test_who_waits_behind_others_moves_as_they_do() -> None:
    """Goal: an operation that has no turn yet does not look stalled while those before it move."""
    scene = Scene(room=2)
    scene.begin(1, 2, 3)
    scene.board.bytes = {1: 10}
    scene.board.traffic = 4, 6
    scene.reducing.report()
    assert scene.taken() == [Traffic(4, 6), ReduceProgress(1, 10), ReduceProgress(2, 10), ReduceProgress(3, 10)]


def test_traffic_outlives_the_worker_set(scene: Scene) -> None:
    scene.board.traffic = 100, 200
    scene.kill()
    scene.reducing.report()
    scene.lanes.worker_set = FakeWorkerSet()
    scene.lanes.worker_set.board.traffic = 1, 2
    scene.reducing.report()
    assert scene.taken() == [Traffic(100, 200), Traffic(101, 202)]
