"""The window: how workers reach tensors that only the training process can access.

A tensor in ordinary memory or on a GPU is in no segment. While its state is transferred, the training process waits
in the call anyway, so it copies for the workers, one piece at a time, through a segment that both map. The window has
a fixed size, for tensors of any size. This module has the buffers of the window and the orders in them. Workers decide
which bytes move when; the training process decides how to copy.

    header page   offset   0   bell         u32, a futex word: changes with every order, and when the call has ended
                           4   vacancy      u32, a futex word: changes when a buffer becomes free
    buffer i      header at 64 (i + 1), bytes at HEADER_BYTES + i BUFFER_BYTES
                  offset   0   state        u32, a futex word: owner << 3 | phase
                           4   key          u32, the index of the tensor in the manifest
                           8   begin        u64, first byte of the piece in the tensor
                          16   nbytes       u64

The phases of a buffer form a cycle. `take` sets the owner in the same atomic step:

    FREE ──take──▶ HELD ──order──▶ WANTED or FULL                      by a worker
                     ▲                  │ claim
                     │             COPYING ──▶ DONE or FAILED          by the training process
                     └──collect───────────────────┘                    by the worker
    FREE ◀──give_back── HELD                                           by the worker
    FREE ◀──reclaim──── any, of a worker that died                     by the actor

WANTED asks for bytes of the tensor, FULL brings some. A buffer that is being copied is not reclaimed at once: it
becomes LEFT, and free when the copy ends. Every wait has a bound, so the death of a process delays the others briefly.
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

BUFFERS = 16  # enough for a few workers to wait for the network while one piece is being copied
BUFFER_BYTES = 1 << 20  # four digest blocks: long enough that the order costs little beside the copy
HEADER_BYTES = 4096  # a memory page before the first buffer
WINDOW_BYTES = HEADER_BYTES + BUFFERS * BUFFER_BYTES

FREE, HELD, WANTED, FULL, COPYING, DONE, FAILED, LEFT = range(8)

_PHASE = 7
_ORDER = struct.Struct("<IQQ")
_ORDER_OFFSET = 4
_BUFFER_HEADER_BYTES = 64  # a cache line of its own


class WindowError(RuntimeError):
    """The training process did not copy: it failed, stopped or died."""


class Window:
    """A view of a window, from any of the processes that share it."""

    def __init__(self, memory: Buffer) -> None:
        """The window in this memory, which has WINDOW_BYTES; all zero is an empty window."""
        view = memoryview(memory).cast("B")
        if len(view) < WINDOW_BYTES:
            raise ValueError(f"a window has {WINDOW_BYTES} bytes, this memory {len(view)}")
        self._view = view
        self._bell = Word(view, 0)
        self._vacancy = Word(view, 4)
        self._states = [Word(view, _BUFFER_HEADER_BYTES * (buffer + 1)) for buffer in range(BUFFERS)]
        self.segment: Segment | None = None  # if this process created it

    @classmethod
    def create(cls) -> Window:
        """Create the memory of a window."""
        segment = Segment.create("pccl-window", WINDOW_BYTES)
        window = cls(segment.view)
        window.segment = segment
        return window

    def close(self) -> None:
        """Release the memory."""
        self._states.clear()
        del self._bell, self._vacancy, self._view
        if self.segment is not None:
            self.segment.close()

    def ring(self) -> None:
        """Wake the training process: there is an order, or its call has ended."""
        _bump(self._bell)

    # ------------------------------------------------------------------------------------------ training process

    def serve(self, copy_in: Copy, copy_out: Copy, timeout_ns: int) -> int:
        """Perform the present orders, or sleep until there may be some; returns how many were performed.

        `copy_in` copies bytes of the window into a tensor, `copy_out` copies bytes of a tensor into the window. If they
        raise, the order fails and the exception is passed on.
        """
        bell = self._bell.load()
        performed = 0
        for buffer, state in enumerate(self._states):
            order = state.load()
            phase = order & _PHASE
            if phase in (WANTED, FULL) and state.compare_exchange(order, order - phase + COPYING):
                end = FAILED
                try:
                    key, begin, nbytes = self._order(buffer)
                    (copy_in if phase == FULL else copy_out)(key, begin, self.piece(buffer, nbytes))
                    end = DONE
                finally:
                    if not state.compare_exchange(order - phase + COPYING, order - phase + end):
                        self.give_back(buffer)  # its owner is dead
                    state.wake()
                performed += 1
        if not performed:
            self._bell.wait(bell, timeout_ns)
        return performed

    # ------------------------------------------------------------------------------------------ worker

    def try_to_take(self, owner: int) -> int | None:
        """Take a free buffer, or return None; owners count from 1."""
        for buffer, state in enumerate(self._states):
            if state.compare_exchange(FREE, owner << 3 | HELD):
                return buffer
        return None

    def take(self, owner: int, timeout_ns: int) -> int:
        """Take a free buffer. Raises WindowError if none becomes free in time.

        A worker that holds a buffer must not wait here for another: two such workers could wait for each other.
        """
        deadline_ns = monotonic_ns() + timeout_ns
        while True:
            vacancy = self._vacancy.load()
            buffer = self.try_to_take(owner)
            if buffer is not None:
                return buffer
            left_ns = deadline_ns - monotonic_ns()
            if left_ns <= 0:
                raise WindowError(f"no buffer of the window became free in {timeout_ns / 1e9:g} s")
            self._vacancy.wait(vacancy, left_ns)

    def give_back(self, buffer: int) -> None:
        """Free a buffer."""
        self._states[buffer].store(FREE)
        _bump(self._vacancy)

    def piece(self, buffer: int, nbytes: int) -> memoryview:
        """The first bytes of a buffer."""
        if not 0 <= nbytes <= BUFFER_BYTES:
            raise ValueError(f"a buffer of the window has {BUFFER_BYTES} bytes, not {nbytes}")
        begin = HEADER_BYTES + buffer * BUFFER_BYTES
        return self._view[begin : begin + nbytes]

    def offset(self, buffer: int) -> int:
        """The offset of a buffer in the window's memory."""
        return HEADER_BYTES + buffer * BUFFER_BYTES

    def order(self, buffer: int, phase: int, key: int, begin: int, nbytes: int) -> None:
        """Ask for a copy of a piece: WANTED into the buffer, FULL out of it. `collect` it before the next order."""
        state = self._states[buffer]
        held = state.load()
        _ORDER.pack_into(self._view, _BUFFER_HEADER_BYTES * (buffer + 1) + _ORDER_OFFSET, key, begin, nbytes)
        state.store(held - HELD + phase)
        self.ring()

    def collect(self, buffer: int, timeout_ns: int) -> None:
        """Wait until the copy is made. Raises WindowError if it fails or takes too long."""
        state = self._states[buffer]
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

    def fetch(self, buffer: int, key: int, begin: int, nbytes: int, timeout_ns: int) -> memoryview:
        """Copy a piece of a tensor into a buffer and return it."""
        self.order(buffer, WANTED, key, begin, nbytes)
        self.collect(buffer, timeout_ns)
        return self.piece(buffer, nbytes)

    def store(self, buffer: int, key: int, begin: int, nbytes: int, timeout_ns: int) -> None:
        """Copy the first bytes of a buffer into the tensor."""
        self.order(buffer, FULL, key, begin, nbytes)
        self.collect(buffer, timeout_ns)

    # ------------------------------------------------------------------------------------------ actor

    def reclaim(self, owner: int) -> None:
        """Free all buffers of a worker that has died."""
        for state in self._states:
            while (seen := state.load()) >> 3 == owner and seen & _PHASE != LEFT:
                after = owner << 3 | LEFT if seen & _PHASE == COPYING else FREE
                if state.compare_exchange(seen, after):
                    break
        _bump(self._vacancy)

    def _order(self, buffer: int) -> tuple[int, int, int]:
        key, begin, nbytes = _ORDER.unpack_from(self._view, _BUFFER_HEADER_BYTES * (buffer + 1) + _ORDER_OFFSET)
        return key, begin, nbytes


def _bump(word: Word) -> None:
    """Change a word, and wake all threads that wait for a change."""
    while not word.compare_exchange(value := word.load(), (value + 1) & 0xFFFFFFFF):
        pass
    word.wake_all()
