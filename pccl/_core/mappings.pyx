# cython: language_level=3, auto_pickle=False
"""The segments that a worker has mapped, by number.

A block names its memory as segment and offset, because every process maps a segment somewhere else. The lookup happens
for every block, without the GIL, so the table is plain memory. Pages are faulted when a segment is mapped: once, in one
system call, and not one by one while blocks are waiting.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from pccl._core cimport posix

from .park cimport raise_errno

cdef enum:
    PLACES_MIN = 64


@cython.final
@cython.no_gc
cdef class Mappings:
    """`add` maps a segment, `remove` unmaps it; both are rare."""

    def __cinit__(self):
        self.size = PLACES_MIN
        self.places = <Mapping *> calloc(self.size, sizeof(Mapping))
        if self.places == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef uint32_t place
        if self.places != NULL:
            for place in range(self.size):
                if self.places[place].segment:
                    posix.munmap(self.places[place].base, self.places[place].nbytes)
            free(self.places)

    def __contains__(self, uint32_t segment):
        return self.base_of(segment) != NULL

    def add(self, uint32_t segment, int fd, uint64_t nbytes):
        """Map a segment; the descriptor stays the caller's."""
        cdef char *base
        if segment == 0 or self.base_of(segment) != NULL:
            raise ValueError(f"segment {segment} is no number, or mapped already")
        base = <char *> posix.mmap(
            NULL, nbytes, posix.PROT_READ | posix.PROT_WRITE, posix.MAP_SHARED | posix.MAP_POPULATE, fd, 0
        )
        if base == posix.MAP_FAILED:
            raise_errno(posix.errno, f"mapping segment {segment} of {nbytes} bytes")
        self.insert(segment, base, nbytes)

    def remove(self, uint32_t segment):
        """Unmap a segment; harmless if it is not mapped."""
        cdef Mapping *old = self.places
        cdef uint32_t place, size = self.size
        cdef Mapping *fresh
        if self.base_of(segment) == NULL:
            return
        fresh = <Mapping *> calloc(size, sizeof(Mapping))
        if fresh == NULL:
            raise MemoryError
        self.places = fresh
        self.used = 0
        for place in range(size):
            if old[place].segment == segment:
                posix.munmap(old[place].base, old[place].nbytes)
            elif old[place].segment:
                self.insert(old[place].segment, old[place].base, old[place].nbytes)
        free(old)

    cdef int insert(self, uint32_t segment, char *base, uint64_t nbytes) except -1:
        cdef Mapping *old = self.places
        cdef uint32_t place, size = self.size
        if 2 * (self.used + 1) > self.size:
            self.places = <Mapping *> calloc(2 * size, sizeof(Mapping))
            if self.places == NULL:
                self.places = old
                raise MemoryError
            self.size = 2 * size
            self.used = 0
            for place in range(size):
                if old[place].segment:
                    self.insert(old[place].segment, old[place].base, old[place].nbytes)
            free(old)
        place = segment & (self.size - 1)
        while self.places[place].segment:
            place = (place + 1) & (self.size - 1)
        self.places[place].segment, self.places[place].base, self.places[place].nbytes = segment, base, nbytes
        self.used += 1
        return 0
