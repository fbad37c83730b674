# cython: language_level=3, auto_pickle=False
"""The segments that a worker has mapped, by number: its own peer's, or what a neighbour on the same host has offered.

A block names its memory as segment and offset, because every process maps a segment somewhere else. The lookup happens
for every block, without the GIL, so the table is plain memory, built anew whenever a segment comes or goes. Pages are
faulted when a segment is mapped: once, in one system call, and not one by one while blocks are waiting.
"""

import os
cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from pccl._core.system.check cimport check
from pccl._core.system.mapping cimport Mapping

cdef enum:
    PLACES_MIN = 64


@cython.final
cdef class SegmentTable:
    """`add` maps a segment, `remove` unmaps it; both are rare."""

    def __cinit__(self):
        self.mappings = {}
        self.rebuild(NULL)

    def __dealloc__(self):
        free(self.places)

    def __contains__(self, uint32_t segment):
        return segment in self.mappings

    def __len__(self):
        return len(self.mappings)

    def add(self, uint32_t segment, int fd, Py_ssize_t nbytes, *, bint writable=True):
        """Map a segment; the descriptor stays the caller's."""
        cdef Place place
        cdef Mapping mapping
        if segment == 0 or segment in self.mappings:
            raise ValueError(f"segment {segment} is no number, or mapped already")
        mapping = Mapping(fd, nbytes, populate=True, writable=writable)
        found = os.fstat(fd)
        memset(&place, 0, sizeof(place))
        place.segment, place.descriptor, place.base, place.nbytes = segment, fd, mapping.place, nbytes
        place.inode, place.device = found.st_ino, found.st_dev
        self.mappings[segment] = mapping
        self.rebuild(&place)

    def remove(self, uint32_t segment):
        """Unmap a segment; harmless if it is not mapped."""
        mapping = self.mappings.pop(segment, None)
        if mapping is not None:
            self.rebuild(NULL)

    def clear(self):
        """Unmap all."""
        if self.mappings:
            self.mappings.clear()
            self.rebuild(NULL)

    cdef void recall(self) noexcept nogil:
        cdef uint32_t index
        for index in range(self.size):
            self.places[index].serial = self.places[index].accepted = 0

    cdef void answer(self, uint32_t serial, bint accepted) noexcept nogil:
        cdef uint32_t index
        for index in range(self.size):
            if self.places[index].segment and self.places[index].serial == serial:
                self.places[index].accepted = accepted
                return  # otherwise it was withdrawn meanwhile

    cdef int rebuild(self, const Place *added) except -1:
        """The table of what is in `mappings`: what the old one has of it, and `added`."""
        cdef uint32_t size = PLACES_MIN, index
        cdef Place *places
        while size < 2 * len(self.mappings):
            size *= 2
        check(2 * len(self.mappings) <= size, "a table of segments is at most half full")
        places = <Place *> calloc(size, sizeof(Place))
        if places == NULL:
            raise MemoryError
        for index in range(self.size):
            if self.places[index].segment and self.places[index].segment in self.mappings:
                put(places, size, &self.places[index])
        if added != NULL:
            put(places, size, added)
        free(self.places)
        self.places, self.size = places, size
        return 0


cdef void put(Place *places, uint32_t size, const Place *content) noexcept:
    cdef uint32_t place = content.segment & (size - 1)
    while places[place].segment:
        place = (place + 1) & (size - 1)
    places[place] = content[0]
