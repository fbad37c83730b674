"""The tensors of a state, as a worker reads and writes them: one part at a time, from segments or through the window.

A tensor in a segment is one part, which is mapped when it is first needed. A tensor that only the training process can
read and write is copied through the window; the next part is copied while the last one is sent or received. If a worker
fails in the middle, the actor reclaims its window buffers after it is dead.
"""

from __future__ import annotations

from collections import deque

from pccl._core.system.mapping import Mapping
from pccl.memory.window import BUFFER_BYTES, FULL, WANTED, Window

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from pccl._core.protocol.state_manifest import StateManifest

PIECES_AHEAD = 2  # in the window: one to send or fill, one that is copied meanwhile


class StateMemory:
    """All tensors that a manifest names."""

    def __init__(
        self,
        own: StateManifest,
        segments: dict[int, tuple[int, int]],
        window: tuple[int, int] | None,
        patience_ns: int,
    ) -> None:
        """Map the window. Raises ValueError if a tensor is not in its segment, or needs a window and there is none."""
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
        """The descriptors that a worker must keep open."""
        return [fd for fd, _ in self._segments.values()]

    def read(self, key: int, begin: int, nbytes: int) -> Iterator[memoryview]:
        """Yield bytes of a tensor in parts; each is valid until the next is asked for."""
        row = self._own.rows[key]
        if row.segment:
            at = row.offset + begin
            yield memoryview(self._map(row.segment))[at : at + nbytes]
            return
        window = self._reach()
        ahead: deque[tuple[int, int]] = deque()  # buffer and bytes of each order
        for offset, size in _pieces(begin, nbytes):
            buffer = window.try_to_take(self.owner)
            while buffer is None and ahead:
                yield from self._collect(ahead)
                buffer = window.try_to_take(self.owner)
            if buffer is None:
                buffer = window.take(self.owner, self._patience_ns)
            window.order(buffer, WANTED, key, offset, size)
            ahead.append((buffer, size))
            if len(ahead) == PIECES_AHEAD:
                yield from self._collect(ahead)
        while ahead:
            yield from self._collect(ahead)

    def write(self, key: int, begin: int, nbytes: int) -> Iterator[tuple[memoryview, int]]:
        """Yield memory, and its address, for bytes of a tensor, in parts.

        The caller fills and verifies a part before it asks for the next. After the last one the tensor has all bytes.
        """
        row = self._own.rows[key]
        if row.segment:
            mapping, at = self._map(row.segment), row.offset + begin
            mapping.populate(at, nbytes)  # otherwise page faults would take a quarter of the time
            yield memoryview(mapping)[at : at + nbytes], mapping.address + at
            return
        window = self._reach()
        assert self._window_mapping is not None
        ahead: deque[int] = deque()  # buffers that are being emptied
        for offset, size in _pieces(begin, nbytes):
            buffer = window.try_to_take(self.owner)
            while buffer is None and ahead:
                self._settle(ahead)
                buffer = window.try_to_take(self.owner)
            if buffer is None:
                buffer = window.take(self.owner, self._patience_ns)
            yield window.piece(buffer, size), self._window_mapping.address + window.offset(buffer)
            window.order(buffer, FULL, key, offset, size)
            ahead.append(buffer)
            if len(ahead) == PIECES_AHEAD:
                self._settle(ahead)
        while ahead:
            self._settle(ahead)

    def _collect(self, ahead: deque[tuple[int, int]]) -> Iterator[memoryview]:
        """Yield the part of the oldest order."""
        window = self._reach()
        buffer, size = ahead.popleft()
        window.collect(buffer, self._patience_ns)
        yield window.piece(buffer, size)
        window.give_back(buffer)

    def _settle(self, ahead: deque[int]) -> None:
        """Wait until the oldest buffer is emptied, and free it."""
        window = self._reach()
        buffer = ahead.popleft()
        window.collect(buffer, self._patience_ns)
        window.give_back(buffer)

    def _reach(self) -> Window:
        assert self.window is not None, "the constructor has checked this"
        return self.window

    def _map(self, segment: int) -> Mapping:
        mapping = self._mappings.get(segment)
        if mapping is None:
            mapping = self._mappings[segment] = Mapping(*self._segments[segment])
        return mapping


def _pieces(begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(begin, begin + nbytes, BUFFER_BYTES):
        yield offset, min(BUFFER_BYTES, begin + nbytes - offset)
