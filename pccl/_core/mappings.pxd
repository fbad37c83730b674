# Contents of `mappings`: the segments that a worker has mapped, found by number without the GIL.

from libc.stdint cimport uint32_t, uint64_t


cdef struct Mapping:
    uint32_t segment                # 0: an empty place
    char *base
    uint64_t nbytes


cdef class Mappings:
    cdef Mapping *places            # open addressing, at most half full
    cdef uint32_t size              # a power of two
    cdef uint32_t used

    # Where a segment begins in this process, or NULL if it is not mapped.
    cdef inline char *base_of(self, uint32_t segment) noexcept nogil:
        cdef uint32_t place = segment & (self.size - 1)
        while self.places[place].segment:
            if self.places[place].segment == segment:
                return self.places[place].base
            place = (place + 1) & (self.size - 1)
        return NULL

    cdef int insert(self, uint32_t segment, char *base, uint64_t nbytes) except -1
