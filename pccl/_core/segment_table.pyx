# cython: language_level=3, auto_pickle=False
"""The segments that a worker has mapped, by number.

A block names its memory as segment and offset, because every process maps a segment somewhere else. The lookup happens
for every block, without the GIL, so the table is plain memory, built anew whenever a segment comes or goes. Pages are
faulted when a segment is mapped: once, in one system call, and not one by one while blocks are waiting.
"""

cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free

from .mapping cimport Mapping

cdef enum:
    PLACES_MIN = 64


@cython.final
cdef class SegmentTable:
    """`add` maps a segment, `remove` unmaps it; both are rare."""

    def __cinit__(self):
        self.mappings = {}
        self.rebuild()

    def __dealloc__(self):
        free(self.places)

    def __contains__(self, uint32_t segment):
        return segment in self.mappings

    def add(self, uint32_t segment, int fd, Py_ssize_t nbytes):
        """Map a segment; the descriptor stays the caller's."""
        if segment == 0 or segment in self.mappings:
            raise ValueError(f"segment {segment} is no number, or mapped already")
        self.mappings[segment] = Mapping(fd, nbytes, populate=True)
        self.rebuild()

    def remove(self, uint32_t segment):
        """Unmap a segment; harmless if it is not mapped."""
        mapping = self.mappings.pop(segment, None)
        if mapping is not None:
            self.rebuild()

    cdef int rebuild(self) except -1:
        cdef uint32_t size = PLACES_MIN, segment, place
        cdef Mapping mapping
        cdef Place *places
        while size < 2 * len(self.mappings):
            size *= 2
        places = <Place *> calloc(size, sizeof(Place))
        if places == NULL:
            raise MemoryError
        for segment, mapping in self.mappings.items():
            place = segment & (size - 1)
            while places[place].segment:
                place = (place + 1) & (size - 1)
            places[place].segment, places[place].base = segment, mapping.place
        free(self.places)
        self.places, self.size = places, size
        return 0
