# cython: language_level=3, auto_pickle=False
"""The segments that a worker has mapped, by number: those of its peer, or those that a neighbour has offered.

A block names its memory as segment and offset, because each process maps a segment at a different address. The lookup
happens for every block, without the GIL, so the table is plain memory. It is rebuilt when a segment is added or
removed. Memory pages are faulted in when a segment is mapped: in one system call, and not one by one while blocks wait.
"""

import os
cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from pccl._core.system.check cimport check
from pccl._core.system.mapping cimport Mapping

cdef enum:
    ENTRIES_MIN = 64


@cython.final
cdef class SegmentTable:
    """A table from segment number to mapping. `add` and `remove` are rare; `find` is called for every block."""

    def __cinit__(self):
        self.mappings = {}
        self.rebuild(NULL)

    def __dealloc__(self):
        free(self.entries)

    def __contains__(self, uint32_t segment):
        return segment in self.mappings

    def __len__(self):
        return len(self.mappings)

    def add(self, uint32_t segment, int fd, Py_ssize_t nbytes, *, bint writable=True):
        """Map a segment. The caller keeps the descriptor open. Raises ValueError if the number is 0 or in the table."""
        cdef MappedSegment entry
        cdef Mapping mapping
        if segment == 0 or segment in self.mappings:
            raise ValueError(f"segment {segment} is 0, which no segment has, or is mapped already")
        mapping = Mapping(fd, nbytes, populate=True, writable=writable)
        found = os.fstat(fd)
        memset(&entry, 0, sizeof(entry))
        entry.segment, entry.descriptor, entry.base, entry.nbytes = segment, fd, mapping.start, nbytes
        entry.inode, entry.device = found.st_ino, found.st_dev
        self.mappings[segment] = mapping
        self.rebuild(&entry)

    def remove(self, uint32_t segment):
        """Unmap a segment; does nothing if it is not mapped."""
        mapping = self.mappings.pop(segment, None)
        if mapping is not None:
            self.rebuild(NULL)

    def clear(self):
        """Unmap all segments."""
        if self.mappings:
            self.mappings.clear()
            self.rebuild(NULL)

    cdef void forget_offers(self) noexcept nogil:
        cdef uint32_t index
        for index in range(self.size):
            self.entries[index].serial = self.entries[index].accepted = 0

    cdef void answer(self, uint32_t serial, bint accepted) noexcept nogil:
        cdef uint32_t index
        for index in range(self.size):
            if self.entries[index].segment and self.entries[index].serial == serial:
                self.entries[index].accepted = accepted
                return  # if none matches, the offer was withdrawn meanwhile

    cdef int rebuild(self, const MappedSegment *added) except -1:
        cdef uint32_t size = ENTRIES_MIN, index
        cdef MappedSegment *entries
        while size < 2 * len(self.mappings):
            size *= 2
        check(2 * len(self.mappings) <= size, "a table of segments is at most half full")
        entries = <MappedSegment *> calloc(size, sizeof(MappedSegment))
        if entries == NULL:
            raise MemoryError
        for index in range(self.size):
            if self.entries[index].segment and self.entries[index].segment in self.mappings:
                put(entries, size, &self.entries[index])
        if added != NULL:
            put(entries, size, added)
        free(self.entries)
        self.entries, self.size = entries, size
        return 0


cdef void put(MappedSegment *entries, uint32_t size, const MappedSegment *content) noexcept:
    """Copy `content` into the first free entry at or after its hash."""
    cdef uint32_t entry = content.segment & (size - 1)
    while entries[entry].segment:
        entry = (entry + 1) & (size - 1)
    entries[entry] = content[0]
