"""The window: how workers reach tensors that only the training process can touch.

A tensor in ordinary memory or on a GPU lies in no segment. While its state is transferred, the training process waits
in the call anyway; so it copies for the workers, a piece at a time, through a segment that both map. However large the
tensor is, the window is all the memory that this takes. Here live the places of the window and the orders in them;
which bytes move when is the workers' business, and what a copy is the training process's.

    header page   offset   0   bell         u32, a futex word: changes with every order, and when the call is over
                           4   vacancy      u32, a futex word: changes when a place becomes free
    place i       header at 64 (i + 1), bytes at 4096 + i PLACE_BYTES
                  offset   0   state        u32, a futex word: owner << 3 | phase
                           4   key          u32, the index of the tensor in the description
                           8   begin        u64, first byte of the piece in the tensor
                          16   nbytes       u64

A place moves in a circle. The first arrow says who owns it from then on, in one atomic step with taking it:

    FREE ──take──▶ HELD ──order──▶ WANTED or FULL                      by a worker
                     ▲                  │ claim
                     │             COPYING ──▶ DONE or FAILED          by the training process
                     └──collect───────────────────┘                    by the worker
    FREE ◀──give_back── HELD                                           by the worker
    FREE ◀──reclaim──── any, of a worker that died                     by the actor

WANTED asks for bytes of the tensor, FULL brings some. A place that is being copied is not taken away from under the
copy: it becomes LEFT, and free when the copy ends. Every wait has a bound: whoever is dead, nobody waits for long.
"""

from __future__ import annotations

import struct

from pccl._core.system.futex import Word, monotonic_ns

from .segments import Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    Copy = Callable[[int, int, memoryview], None]  # key, first byte, the bytes in the window

PLACES = 16  # enough for a few workers to wait for the network while one piece is being copied
PLACE_BYTES = 1 << 20  # four blocks: a copy that is long enough to be worth the order
WINDOW_BYTES = 4096 + PLACES * PLACE_BYTES
OWNER_MAX = (1 << 29) - 1  # what is left of a word beside the phase

FREE, HELD, WANTED, FULL, COPYING, DONE, FAILED, LEFT = range(8)

_PHASE = 7
_ORDER = struct.Struct("<IQQ")
_ORDER_OFFSET = 4
_PLACE_HEADER_BYTES = 64  # a cache line of its own
_DATA_OFFSET = 4096
_EVERYBODY = 0x7FFFFFFF


class WindowError(RuntimeError):
    """The training process did not copy: it failed, stopped or died."""


class Window:
    """A view of a window, from any of the processes that share it."""

    def __init__(self, memory: Buffer) -> None:
        """The window in this memory, which is WINDOW_BYTES long; all zero is an empty one."""
        view = memoryview(memory).cast("B")
        if len(view) < WINDOW_BYTES:
            raise ValueError(f"a window has {WINDOW_BYTES} bytes, this memory {len(view)}")
        self._view = view
        self._bell = Word(view, 0)
        self._vacancy = Word(view, 4)
        self._states = [Word(view, _PLACE_HEADER_BYTES * (place + 1)) for place in range(PLACES)]
        self.segment: Segment | None = None  # if this process created it

    @classmethod
    def create(cls) -> Window:
        """New memory with an empty window in it."""
        segment = Segment.create("pccl-window", WINDOW_BYTES)
        window = cls(segment.view)
        window.segment = segment
        return window

    def close(self) -> None:
        """Give up the memory."""
        self._states.clear()
        del self._bell, self._vacancy, self._view
        if self.segment is not None:
            self.segment.close()

    def ring(self) -> None:
        """Have the training process look up: there is an order, or its call is over."""
        _bump(self._bell)

    # ------------------------------------------------------------------------------------------ training process

    def serve(self, copy_in: Copy, copy_out: Copy, timeout_ns: int) -> int:
        """Perform the orders that are there, or sleep until there may be some; how many were performed.

        `copy_in` puts bytes of the window into a tensor, `copy_out` puts bytes of a tensor into the window. What they
        raise ends the order, and comes out here.
        """
        bell = self._bell.load()
        performed = 0
        for place, state in enumerate(self._states):
            order = state.load()
            phase = order & _PHASE
            if phase in (WANTED, FULL) and state.compare_exchange(order, order - phase + COPYING):
                end = FAILED
                try:
                    key, begin, nbytes = self._order(place)
                    (copy_in if phase == FULL else copy_out)(key, begin, self.piece(place, nbytes))
                    end = DONE
                finally:
                    if not state.compare_exchange(order - phase + COPYING, order - phase + end):
                        self.give_back(place)  # its owner is dead
                    state.wake()
                performed += 1
        if not performed:
            self._bell.wait(bell, timeout_ns)
        return performed

    # ------------------------------------------------------------------------------------------ worker

    def try_to_take(self, owner: int) -> int | None:
        """A place of one's own, if there is one; owners count from 1."""
        for place, state in enumerate(self._states):
            if state.compare_exchange(FREE, owner << 3 | HELD):
                return place
        return None

    def take(self, owner: int, timeout_ns: int) -> int:
        """A place of one's own. WindowError if there is none in time.

        Whoever waits here while it holds another place may wait for somebody who waits for it.
        """
        deadline_ns = monotonic_ns() + timeout_ns
        while True:
            vacancy = self._vacancy.load()
            place = self.try_to_take(owner)
            if place is not None:
                return place
            left_ns = deadline_ns - monotonic_ns()
            if left_ns <= 0:
                raise WindowError(f"no place in the window became free in {timeout_ns / 1e9:g} s")
            self._vacancy.wait(vacancy, left_ns)

    def give_back(self, place: int) -> None:
        """The place is not needed any more."""
        self._states[place].store(FREE)
        _bump(self._vacancy)

    def piece(self, place: int, nbytes: int) -> memoryview:
        """The first bytes of a place."""
        if not 0 <= nbytes <= PLACE_BYTES:
            raise ValueError(f"a place has {PLACE_BYTES} bytes, not {nbytes}")
        begin = _DATA_OFFSET + place * PLACE_BYTES
        return self._view[begin : begin + nbytes]

    def offset(self, place: int) -> int:
        """Where the bytes of a place begin in the window's memory."""
        return _DATA_OFFSET + place * PLACE_BYTES

    def order(self, place: int, phase: int, key: int, begin: int, nbytes: int) -> None:
        """Ask for a copy of a piece of the tensor: WANTED into the place, FULL out of it. `collect` before the next."""
        state = self._states[place]
        held = state.load()
        _ORDER.pack_into(self._view, _PLACE_HEADER_BYTES * (place + 1) + _ORDER_OFFSET, key, begin, nbytes)
        state.store(held - HELD + phase)
        self.ring()

    def collect(self, place: int, timeout_ns: int) -> None:
        """Wait until the copy is made. WindowError if it is not, or not in time."""
        state = self._states[place]
        deadline_ns = monotonic_ns() + timeout_ns
        while True:
            seen = state.load()
            phase = seen & _PHASE
            if phase == DONE:
                state.store(seen - DONE + HELD)
                return
            if phase == FAILED:
                raise WindowError("the training process could not copy a piece of a tensor")
            left_ns = deadline_ns - monotonic_ns()
            if left_ns <= 0:
                raise WindowError(f"the training process copied nothing for {timeout_ns / 1e9:g} s")
            state.wait(seen, left_ns)

    def fetch(self, place: int, key: int, begin: int, nbytes: int, timeout_ns: int) -> memoryview:
        """A piece of a tensor, as it is now."""
        self.order(place, WANTED, key, begin, nbytes)
        self.collect(place, timeout_ns)
        return self.piece(place, nbytes)

    def store(self, place: int, key: int, begin: int, nbytes: int, timeout_ns: int) -> None:
        """Put the first bytes of the place into the tensor."""
        self.order(place, FULL, key, begin, nbytes)
        self.collect(place, timeout_ns)

    # ------------------------------------------------------------------------------------------ actor

    def reclaim(self, owner: int) -> None:
        """Free all places of a worker that is dead."""
        for state in self._states:
            while (seen := state.load()) >> 3 == owner and seen & _PHASE != LEFT:
                after = owner << 3 | LEFT if seen & _PHASE == COPYING else FREE
                if state.compare_exchange(seen, after):
                    break
        _bump(self._vacancy)

    def _order(self, place: int) -> tuple[int, int, int]:
        key, begin, nbytes = _ORDER.unpack_from(self._view, _PLACE_HEADER_BYTES * (place + 1) + _ORDER_OFFSET)
        return key, begin, nbytes


def _bump(word: Word) -> None:
    """Change a word, and wake everybody who waits for that."""
    while not word.compare_exchange(value := word.load(), (value + 1) & 0xFFFFFFFF):
        pass
    word.wake(_EVERYBODY)
