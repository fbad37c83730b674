"""The window: workers get copies from the training process, and no side waits for a dead one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pccl.memory.window import BUFFER_BYTES, BUFFERS, COPYING, FULL, WANTED, WINDOW_BYTES, Window, WindowError

SECOND = 1_000_000_000
MOMENT = 5_000_000


class Trainer:
    """A training process: its private tensors, and a thread that waits in its call."""

    def __init__(self, window: Window) -> None:
        self.tensors = [bytearray(b"abcdefgh"), bytearray(3 * BUFFER_BYTES)]
        self._window = window
        self._over = False
        self._thread = threading.Thread(target=self._pump, daemon=True)

    def copy_in(self, key: int, begin: int, view: memoryview) -> None:
        self.tensors[key][begin : begin + len(view)] = view

    def copy_out(self, key: int, begin: int, view: memoryview) -> None:
        view[:] = self.tensors[key][begin : begin + len(view)]

    def serve(self, timeout_ns: int = 0) -> int:
        return self._window.serve(self.copy_in, self.copy_out, timeout_ns)

    def _pump(self) -> None:
        while not self._over:
            self.serve(10 * SECOND)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over = True
        self._window.ring()
        if self._thread.ident is not None:
            self._thread.join(5)
            assert not self._thread.is_alive(), "ring() did not wake it"


@pytest.fixture
def window() -> Iterator[Window]:
    created = Window.create()
    yield created
    created.close()


@pytest.fixture
def trainer(window: Window) -> Iterator[Trainer]:
    created = Trainer(window)
    yield created
    created.stop()


def test_pieces_go_both_ways(window: Window, trainer: Trainer) -> None:
    trainer.start()
    place = window.take(1, SECOND)
    assert bytes(window.fetch(place, 0, 2, 3, SECOND)) == b"cde"
    window.piece(place, 2)[:] = b"XY"
    window.store(place, 0, 6, 2, SECOND)
    assert trainer.tensors[0] == b"abcdefXY"
    window.give_back(place)


def test_both_sides_see_the_same_memory(window: Window, trainer: Trainer) -> None:
    """Goal: another process that maps the segment works as well as the one that created it."""
    assert window.segment is not None
    worker = Window(window.segment.mapping)
    place = worker.take(1, SECOND)
    worker.order(place, WANTED, 0, 0, 8)
    assert trainer.serve() == 1
    worker.collect(place, 0)
    assert bytes(worker.piece(place, 8)) == b"abcdefgh"
    assert window.offset(place) % 4096 == 0
    worker.close()


def test_there_are_only_so_many_places(window: Window) -> None:
    """Goal: memory is bounded; a worker without a free window buffer waits for one, but not for ever."""
    places = [window.take(owner, 0) for owner in range(1, BUFFERS + 1)]
    assert sorted(places) == list(range(BUFFERS))
    assert window.try_to_take(99) is None
    with pytest.raises(WindowError, match="no buffer"):
        window.take(99, MOMENT)
    threading.Timer(0.02, lambda: window.give_back(5)).start()
    assert window.take(99, 5 * SECOND) == 5


def test_a_trainer_that_does_nothing_is_not_waited_for(window: Window) -> None:
    place = window.take(1, 0)
    with pytest.raises(WindowError, match="copied nothing"):
        window.fetch(place, 0, 0, 1, MOMENT)


def test_nothing_to_do_is_waited_for_within_the_bound(window: Window, trainer: Trainer) -> None:
    assert trainer.serve(MOMENT) == 0


def test_an_error_in_a_copy_reaches_both_sides(window: Window) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such memory")

    place = window.take(1, 0)
    window.order(place, FULL, 0, 0, 1)
    with pytest.raises(RuntimeError, match="no such memory"):
        window.serve(fail, fail, 0)
    with pytest.raises(WindowError, match="could not copy"):
        window.collect(place, SECOND)


def test_an_order_larger_than_a_place_is_refused(window: Window) -> None:
    with pytest.raises(ValueError, match="a buffer of the window has"):
        window.piece(0, BUFFER_BYTES + 1)


@pytest.mark.parametrize("phase", [0, WANTED, FULL])
def test_what_a_dead_worker_held_is_free_again(window: Window, trainer: Trainer, phase: int) -> None:
    mine, other = window.take(1, 0), window.take(2, 0)
    if phase:
        window.order(mine, phase, 0, 0, 1)
    window.reclaim(1)
    assert trainer.serve() == 0
    assert window.try_to_take(3) == mine
    window.reclaim(2)
    assert window.try_to_take(3) == other


def test_a_place_is_not_taken_from_under_a_copy(window: Window) -> None:
    """Goal: when a worker dies during a copy, its window buffer stays occupied until the copy has ended."""
    place = window.take(1, 0)
    window.order(place, WANTED, 0, 0, 1)
    seen = []

    def copy(*_: object) -> None:
        window.reclaim(1)
        window.reclaim(1)
        seen.append(window._states[place].load() & 7 != COPYING)
        seen.append(window.try_to_take(2) != place)
        window.reclaim(2)

    assert window.serve(copy, copy, 0) == 1
    assert seen == [True, True]
    assert window.try_to_take(3) == place


def test_memory_that_is_too_small_is_no_window() -> None:
    with pytest.raises(ValueError, match="a window has"):
        Window(bytearray(WINDOW_BYTES - 1))


def test_many_workers_share_it(window: Window, trainer: Trainer) -> None:
    """Goal: more workers than window buffers, each with its own bytes, and every byte is correct."""
    trainer.tensors[1][:] = bytes(range(256)) * (len(trainer.tensors[1]) // 256)
    trainer.start()
    wrong: list[int] = []

    def work(owner: int) -> None:
        for step in range(20):
            place = window.take(owner, 5 * SECOND)
            begin = (owner * 7919 + step * 104729) % (2 * BUFFER_BYTES)
            found = bytes(window.fetch(place, 1, begin, 1000, 5 * SECOND))
            if found != trainer.tensors[1][begin : begin + 1000]:
                wrong.append(owner)
            window.give_back(place)

    workers = [threading.Thread(target=work, args=(owner,)) for owner in range(1, 2 * BUFFERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)
