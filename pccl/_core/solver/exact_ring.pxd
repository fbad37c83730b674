# Contents of `exact_ring`: the best ring of few members, proven.

from libc.stdint cimport int32_t, int64_t


cdef enum:
    FEW_MAX = 12                    # members: two passes over 2^11 sets with 11 ends each take three milliseconds

# Writes the ring with the fastest slowest step, and of those the one with the least cost, into `order`, member 0 first.
# Tables have a row for each source; a rate of 0 is no edge. Returns 1, or 0 if there is no ring, or -1 without memory.
cdef int find_best_ring(const double *rates, const int64_t *costs, int count, int32_t *order) noexcept nogil
