# Contents of `segment_table`: the segments that a worker has mapped, found by number without the GIL.

from libc.stdint cimport uint32_t, uint64_t


cdef struct MappedSegment:
    uint32_t segment                # 0: the entry is free
    uint32_t serial                 # of its offer to the neighbour; 0: not offered
    uint32_t accepted               # 1: the neighbour has mapped it
    int descriptor                  # open; the caller closes it
    char *base                      # where the segment is mapped in this process
    uint64_t nbytes
    uint64_t inode
    uint64_t device


cdef class SegmentTable:
    cdef dict mappings              # number -> Mapping, which keeps the segment mapped
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

    # The address of a segment in this process, or NULL if it is not mapped.
    cdef inline char *base_of(self, uint32_t segment) noexcept nogil:
        cdef MappedSegment *entry = self.find(segment)
        return NULL if entry == NULL else entry.base

    # Forgets all offers, because the neighbour is a new one.
    cdef void forget_offers(self) noexcept nogil
    # Records the neighbour's answer to an offer.
    cdef void answer(self, uint32_t serial, bint accepted) noexcept nogil
    # Builds the table from the mappings, the old entries and `added`.
    cdef int rebuild(self, const MappedSegment *added) except -1
