# Contents of `segment_table`: the segments that a worker has mapped, found by number without the GIL.

from libc.stdint cimport uint32_t, uint64_t


cdef struct MappedSegment:
    uint32_t segment                # 0: nothing here
    uint32_t serial                 # of its offer to the neighbour; 0: not offered
    uint32_t accepted               # 1: the neighbour has mapped it
    int descriptor                  # which the caller keeps open
    char *base                      # where the segment begins in this process
    uint64_t nbytes
    uint64_t inode
    uint64_t device


cdef class SegmentTable:
    cdef dict mappings              # number -> Mapping: what keeps them mapped
    cdef MappedSegment *entries     # open addressing, at most half full
    cdef uint32_t size              # of `entries`; a power of two

    # The entry of a segment, or NULL if it is not mapped.
    cdef inline MappedSegment *find(self, uint32_t segment) noexcept nogil:
        cdef uint32_t entry = segment & (self.size - 1)
        while self.entries[entry].segment:
            if self.entries[entry].segment == segment:
                return &self.entries[entry]
            entry = (entry + 1) & (self.size - 1)
        return NULL

    # Where a segment begins in this process, or NULL if it is not mapped.
    cdef inline char *base_of(self, uint32_t segment) noexcept nogil:
        cdef MappedSegment *entry = self.find(segment)
        return NULL if entry == NULL else entry.base

    # The neighbour is another one: nothing has been offered to it.
    cdef void recall(self) noexcept nogil
    # The neighbour's answer to an offer.
    cdef void answer(self, uint32_t serial, bint accepted) noexcept nogil
    cdef int rebuild(self, const MappedSegment *added) except -1
