"""Segments: memory that several processes map, and that vanishes with the last of them.

Here lives one memory file and its mapping. What is stored in it, and which segments are kept for reuse, is decided
elsewhere. A segment has no name in any file system: it travels as a descriptor, over a socket or across exec,
so a process that is killed leaves nothing behind.

`close()` gives up our claim; it never pulls memory from under somebody's feet. The descriptor goes at once, the
mapping together with the last view of it: a tensor, a slice, a word that a thread sleeps on.
"""

import fcntl
import mmap
import os
import sys
from _warnings import warn  # the built-in part of `warnings`, which also works while the interpreter ends

from pccl._core.park import create_memfd


class Segment:
    """`size` bytes of shared memory: `fd` to pass on, `view` to read and write."""

    __slots__ = ("_view", "fd", "size")

    fd: int
    size: int
    _view: memoryview | None

    def __init__(self, fd: int, size: int) -> None:
        """Maps `size` bytes and owns `fd` from here on; use `create` or `attach`, which check what they map."""
        self.fd = -1
        self.size = size
        self._view = memoryview(_map(fd, size))
        self.fd = fd

    @classmethod
    def create(cls, name: str, size: int) -> "Segment":
        """New memory, all zero, whose size is final; `name` only labels it in /proc."""
        fd = create_memfd(name, size)
        try:
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> "Segment":
        """Memory that another process created; `fd` is ours on success and stays the caller's on failure.

        A file that is too small, or that could still shrink, would turn a later access into SIGBUS: ValueError.
        """
        if size <= 0:
            raise ValueError(f"a segment has at least one byte, not {size}")
        actual = os.fstat(fd).st_size
        if actual < size:
            raise ValueError(f"descriptor {fd} holds {actual} bytes, but a segment of {size} was announced")
        if not _is_sealed(fd):
            raise ValueError(f"descriptor {fd} is no memory file sealed against shrinking")
        return cls(fd, size)

    @property
    def view(self) -> memoryview:
        """All bytes, writable."""
        if self._view is None:
            raise ValueError("the segment is closed")
        return self._view

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._view is None

    def close(self) -> None:
        """Gives up descriptor and mapping; harmless when done before."""
        self._view = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.fd >= 0:
            warn(f"segment of {self.size} bytes was not closed", ResourceWarning, source=self)
            self.close()

    def __repr__(self) -> str:
        return f"<Segment closed, {self.size} bytes>" if self.closed else f"<Segment fd={self.fd}, {self.size} bytes>"


def _map(fd: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        # Older versions keep a duplicate of the descriptor for as long as the mapping lives.
        return mmap.mmap(fd, size, trackfd=False)
    return mmap.mmap(fd, size)


def _is_sealed(fd: int) -> bool:
    try:
        seals: int = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        # Only memory files know seals at all.
        return False
    return bool(seals & fcntl.F_SEAL_SHRINK)
