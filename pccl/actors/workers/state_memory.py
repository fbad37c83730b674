"""The tensors of a state, as a worker reads and writes them: a piece at a time, wherever they lie.

A tensor in a segment is one piece of memory, which is mapped when it is first needed. One that only the training
process can touch comes and goes through the window, and the next piece is under way while the last one is sent or
received. A worker that fails in the middle leaves its places in the window to the actor, which reclaims them when it is
dead.
"""

from __future__ import annotations

from collections import deque

from pccl._core.system.mapping import Mapping
from pccl.memory.window import BUFFER_BYTES, FULL, WANTED, Window

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from pccl._core.protocol.state_manifest import StateManifest

PIECES_AHEAD = 2  # of the window: one to send or fill, one to be copied meanwhile


class StateMemory:
    """All tensors that a manifest names."""

    def __init__(
        self,
        own: StateManifest,
        segments: dict[int, tuple[int, int]],
        window: tuple[int, int] | None,
        patience_ns: int,
    ) -> None:
        """Check that every tensor lies in a segment that is there, or raise ValueError; map only the window."""
        self._own = own
        self._segments = segments  # number -> descriptor and size
        self._mappings: dict[int, Mapping] = {}
        self._patience_ns = patience_ns  # how long the training process may take for a copy
        self.owner = 1  # the number of this process in the window
        for row in own.rows:
            if row.segment and row.offset + row.nbytes > segments.get(row.segment, (-1, -1))[1]:
                raise ValueError(f"{row.name!r} does not lie in the segment that it should lie in")
            if not row.segment and window is None:
                raise ValueError(f"{row.name!r} can only be reached through a window, and there is none")
        # Mapped before workers are forked, so that it is the same for the actor and all of them.
        self._window_mapping = Mapping(*window) if window is not None else None
        self.window = Window(self._window_mapping) if self._window_mapping is not None else None

    @property
    def descriptors(self) -> list[int]:
        """What a worker needs to keep open."""
        return [fd for fd, _ in self._segments.values()]

    def read(self, key: int, begin: int, nbytes: int) -> Iterator[memoryview]:
        """The pieces of a part of a tensor; each is good until the next is asked for."""
        row = self._own.rows[key]
        if row.segment:
            at = row.offset + begin
            yield memoryview(self._map(row.segment))[at : at + nbytes]
            return
        window = self._reach()
        ahead: deque[tuple[int, int]] = deque()  # place and bytes of what was ordered
        for offset, size in _pieces(begin, nbytes):
            place = window.try_to_take(self.owner)
            while place is None and ahead:
                yield from self._collect(ahead)
                place = window.try_to_take(self.owner)
            if place is None:
                place = window.take(self.owner, self._patience_ns)
            window.order(place, WANTED, key, offset, size)
            ahead.append((place, size))
            if len(ahead) == PIECES_AHEAD:
                yield from self._collect(ahead)
        while ahead:
            yield from self._collect(ahead)

    def write(self, key: int, begin: int, nbytes: int) -> Iterator[tuple[memoryview, int]]:
        """Where a part of a tensor is to be put: pieces of memory and their addresses.

        A caller that asks for the next piece has filled and verified this one. After the last, the tensor is complete.
        """
        row = self._own.rows[key]
        if row.segment:
            mapping, at = self._map(row.segment), row.offset + begin
            mapping.populate(at, nbytes)  # else a quarter of the time would be faults
            yield memoryview(mapping)[at : at + nbytes], mapping.address + at
            return
        window = self._reach()
        assert self._window_mapping is not None
        ahead: deque[int] = deque()  # places that are being emptied
        for offset, size in _pieces(begin, nbytes):
            place = window.try_to_take(self.owner)
            while place is None and ahead:
                self._settle(ahead)
                place = window.try_to_take(self.owner)
            if place is None:
                place = window.take(self.owner, self._patience_ns)
            yield window.piece(place, size), self._window_mapping.address + window.offset(place)
            window.order(place, FULL, key, offset, size)
            ahead.append(place)
            if len(ahead) == PIECES_AHEAD:
                self._settle(ahead)
        while ahead:
            self._settle(ahead)

    def _collect(self, ahead: deque[tuple[int, int]]) -> Iterator[memoryview]:
        """The oldest piece that was ordered."""
        window = self._reach()
        place, size = ahead.popleft()
        window.collect(place, self._patience_ns)
        yield window.piece(place, size)
        window.give_back(place)

    def _settle(self, ahead: deque[int]) -> None:
        """See the oldest piece emptied."""
        window = self._reach()
        place = ahead.popleft()
        window.collect(place, self._patience_ns)
        window.give_back(place)

    def _reach(self) -> Window:
        assert self.window is not None, "the constructor has looked"
        return self.window

    def _map(self, segment: int) -> Mapping:
        mapping = self._mappings.get(segment)
        if mapping is None:
            mapping = self._mappings[segment] = Mapping(*self._segments[segment])
        return mapping


def _pieces(begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(begin, begin + nbytes, BUFFER_BYTES):
        yield offset, min(BUFFER_BYTES, begin + nbytes - offset)
