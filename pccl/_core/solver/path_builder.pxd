# Contents of `path_builder`: rings over the edges of a directed graph, built from the steps that are forced.

from libc.stdint cimport int32_t, uint8_t, uint64_t


# A random number below a bound (splitmix64); the caller holds the state.
cdef inline int draw(uint64_t *chance, int below) noexcept nogil:
    cdef uint64_t mixed
    chance[0] += <uint64_t> 0x9E3779B97F4A7C15
    mixed = chance[0]
    mixed = (mixed ^ (mixed >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * <uint64_t> 0x94D049BB133111EB
    return <int> ((mixed ^ (mixed >> 31)) % <uint64_t> below)


# The edges that may still be taken, and the paths that consist of the steps taken so far.
cdef struct PartialRing:
    uint64_t *leaving               # row: source; a bit for each target that it may still go to
    uint64_t *entering              # row: target; a bit for each source that may still come
    int32_t *exits                  # source -> number of its bits; 0 also when its step is taken
    int32_t *entries                # target -> likewise
    int32_t *following              # source -> target of the step that is taken; -1: none yet
    int32_t *preceding              # target -> its source; -1: none yet
    int32_t *last_of                # first member of a path -> its last; a lone member is both
    int32_t *first_of               # last member of a path -> its first
    int taken                       # steps


cdef class PathBuilder:
    cdef int count                  # members
    cdef int words                  # of a row of bits
    cdef size_t nbytes              # of the memory of one partial
    cdef PartialRing root           # with all steps that follow from the graph alone
    cdef PartialRing partial        # with choices
    cdef void *root_memory          # what the pointers above point into
    cdef void *partial_memory
    cdef int32_t *queue             # members with one exit (below count) or with one entry (count and above)
    cdef int queued
    cdef bint dead_end              # a member has no exit or no entry left

    # Takes the edges with at least the rate `goal`. False: it is proven that there is no ring over them.
    cdef bint prepare(self, const double *rates, double goal) noexcept nogil

    # Writes a ring into `order`, with as few steps outside the graph as it can. True: there is none.
    cdef bint write(self, uint64_t *chance, int32_t *order) noexcept nogil

    cdef void lay_out(self, PartialRing *partial, char *memory) noexcept nogil
    cdef void forbid(self, int source, int target) noexcept nogil
    cdef void check_exits(self, int source) noexcept nogil
    cdef void check_entries(self, int target) noexcept nogil
    cdef void take(self, int source, int target) noexcept nogil
    cdef void follow(self) noexcept nogil
    cdef bint choose(self, uint64_t *chance) noexcept nogil
    cdef int pick(self, const uint64_t *row, const int32_t *degrees, uint64_t *chance) noexcept nogil
