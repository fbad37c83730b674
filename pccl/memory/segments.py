"""Segments: memory that several processes map, and that disappears with its last holder.

This module has one memory file and its mapping. Other modules decide what is stored in it, and which segments are kept
for reuse. A segment has no name in any file system: it is passed on as a file descriptor, over a socket or across exec,
so a process that is killed leaves nothing behind.

`close()` never unmaps memory that is still in use. It closes the file descriptor at once; the mapping ends with the
last view of it: a tensor, a slice, a word that a thread sleeps on.

A populated segment has all its memory pages before it is used, and huge pages if the system has them. They are
allocated where a lack of memory can still be an error: first we check how much memory is available, because the kernel
kills a process instead of refusing; then `reserve_pages` raises an error, where the first access would raise SIGBUS.
"""

import errno
import os
from _warnings import warn  # the built-in part of `warnings`, which also works while the interpreter ends

from pccl._core.system.headroom import available_bytes
from pccl._core.system.mapping import Mapping, create_memory_file, enlarge_pages, is_size_final, reserve_pages


class Segment:
    """`size` bytes of shared memory: `fd` to pass on, `view` to read and write."""

    __slots__ = ("_mapping", "fd", "size")

    fd: int
    size: int
    _mapping: Mapping | None

    def __init__(self, fd: int, size: int, *, populate: bool = False) -> None:
        """Map `size` bytes and take over `fd`; use `create` or `attach`, which check what they map."""
        self.fd = -1
        self.size = size
        self._mapping = Mapping(fd, size, populate=populate)
        self.fd = fd

    @classmethod
    def create(cls, name: str, size: int, *, populate: bool = False) -> "Segment":
        """Create memory, all zero, whose size is final; `name` only labels it in /proc.

        Raises MemoryError if `populate` is true and there is not enough memory.
        """
        fd = create_memory_file(name, size)
        try:
            if populate:
                _reserve(fd, size)
            return cls(fd, size, populate=populate)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> "Segment":
        """Map memory that another process created; the segment owns `fd` on success, the caller on failure.

        Raises ValueError if the file is too small or could still shrink, because a later access would raise SIGBUS.
        """
        if size <= 0:
            raise ValueError(f"a segment has at least one byte, not {size}")
        actual = os.fstat(fd).st_size
        if actual < size:
            raise ValueError(f"descriptor {fd} holds {actual} bytes, but a segment of {size} was announced")
        if not is_size_final(fd):
            raise ValueError(f"descriptor {fd} is no memory file sealed against shrinking")
        return cls(fd, size)

    @property
    def mapping(self) -> Mapping:
        """The mapping; a reference to it, or to a buffer of it, keeps the memory mapped."""
        if self._mapping is None:
            raise ValueError("the segment is closed")
        return self._mapping

    @property
    def view(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self.mapping)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._mapping is None

    def close(self) -> None:
        """Close the file descriptor and release the mapping; a second call does nothing."""
        self._mapping = None
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


def _reserve(fd: int, size: int) -> None:
    """Allocate all memory pages now. Raises MemoryError if there is not enough memory."""
    left = available_bytes()
    lack = (
        f"no room for a segment of {size} bytes of shared memory: {left} are available; drop tensors that are not"
        " needed, reduce less at a time, or raise the memory limit of the container"
    )
    if size > left:
        raise MemoryError(lack)
    enlarge_pages(fd, size)
    try:
        reserve_pages(fd, size)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise MemoryError(lack) from error
        raise
