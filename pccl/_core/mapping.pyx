# cython: language_level=3, auto_pickle=False
"""Shared memory of a descriptor, as objects that export buffers and that know their address.

Here lives what `mmap` of the standard library lacks: a mapping that keeps no duplicate of the descriptor (before
Python 3.13 it does, and a thousand segments would need two thousand), that can be populated at once, and an extent
of it that is the owner of every buffer taken from it: an array over an extent holds the extent, whatever else that
stands for. Which memory is mapped, and when it is reused, is never decided here.

Nothing is unmapped while somebody can reach it: buffers hold their extent, extents hold their mapping.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uintptr_t

from pccl._core cimport posix
from pccl._core.park cimport raise_errno

cdef enum:
    PAGE_BYTES = 4096
    POPULATE_WRITE = 23             # MADV_POPULATE_WRITE, which older headers lack


@cython.final
@cython.no_gc
cdef class Mapping:
    """The first `nbytes` of the memory behind `fd`, which may be closed afterwards.

    `populate` fills the page tables now, without the GIL; a later first touch then costs no fault. What is not `writable`
    may be a descriptor for reading only, and exports buffers of that kind.
    """

    def __cinit__(self, int fd, Py_ssize_t nbytes, *, bint populate=False, bint writable=True):
        cdef int flags = posix.MAP_SHARED | posix.MAP_POPULATE if populate else posix.MAP_SHARED
        cdef int access = posix.PROT_READ | posix.PROT_WRITE if writable else posix.PROT_READ
        cdef void *place
        cdef int code
        if nbytes <= 0:
            raise ValueError(f"a mapping has at least one byte, not {nbytes}")
        with nogil:
            place = posix.mmap(NULL, nbytes, access, flags, fd, 0)
            code = posix.errno
        if place == posix.MAP_FAILED:
            raise_errno(code, f"mapping {nbytes} bytes of shared memory")
        self.place = <char *> place
        self.nbytes = nbytes
        self.readonly = not writable

    def __dealloc__(self):
        if self.place != NULL:
            # Gigabytes take tens of milliseconds, in which other threads may run.
            with nogil:
                posix.munmap(self.place, self.nbytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.place, self.nbytes, self.readonly, flags)

    @property
    def address(self) -> int:
        """Where the first byte lies in this process."""
        return <uintptr_t> self.place

    def populate(self, Py_ssize_t offset, Py_ssize_t nbytes) -> None:
        """Fill the page tables for bytes that are about to be written: one call instead of a fault for each page.

        A kernel before 5.14 does not know how, and lets them fault.
        """
        cdef Py_ssize_t begin = offset & ~<Py_ssize_t> (PAGE_BYTES - 1)
        if offset < 0 or nbytes < 0 or offset > self.nbytes - nbytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} do not lie in a mapping of {self.nbytes} bytes")
        with nogil:
            posix.madvise(self.place + begin, offset + nbytes - begin, POPULATE_WRITE)


# No garbage collection: an extent refers to a mapping, which refers to nothing.
@cython.no_gc
cdef class Extent:
    """`nbytes` of a mapping from `offset` on; its buffers keep the extent alive, and not only the mapping."""

    def __cinit__(self, Mapping mapping not None, Py_ssize_t offset, Py_ssize_t nbytes, *_):
        if offset < 0 or nbytes < 0 or offset > mapping.nbytes - nbytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} do not lie in a mapping of {mapping.nbytes} bytes")
        self.mapping = mapping
        self.place = mapping.place + offset
        self.nbytes = nbytes
        self.surrendered = False

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.place, self.nbytes, 0, flags)

    @property
    def address(self) -> int:
        """Where the first byte lies in this process."""
        return <uintptr_t> self.place

    @property
    def view(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self)

    def surrender(self) -> bool:
        """True for the first caller, whichever thread that is, and False ever after."""
        cdef bint first = not self.surrendered
        self.surrendered = True
        return first
