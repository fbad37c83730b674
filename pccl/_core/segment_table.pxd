# Contents of `segment_table`: the segments that a worker has mapped, found by number without the GIL.

from libc.stdint cimport uint32_t


cdef struct Place:
    uint32_t segment                # 0: nothing here
    char *base                      # where the segment begins in this process


cdef class SegmentTable:
    cdef dict mappings              # number -> Mapping: what keeps them mapped
    cdef Place *places              # open addressing, at most half full
    cdef uint32_t size              # of `places`; a power of two

    # Where a segment begins in this process, or NULL if it is not mapped.
    cdef inline char *base_of(self, uint32_t segment) noexcept nogil:
        cdef uint32_t place = segment & (self.size - 1)
        while self.places[place].segment:
            if self.places[place].segment == segment:
                return self.places[place].base
            place = (place + 1) & (self.size - 1)
        return NULL

    cdef int rebuild(self) except -1
