# cython: language_level=3, cdivision=True
"""The best ring of few members, by dynamic programming over sets (Held and Karp).

A walk begins at member 0 and visits a set of the other members; `ends` below is the number of these, which are numbered
from 0. All walks over the same set to the same end have the same continuations, so only the best of them is kept. Rings
are compared first by their slowest step, then by their sum. Parts of a ring cannot be compared so: a slower step later
removes the advantage of the faster part. So there are two passes: the first finds the slowest step of the best ring,
the second the least sum over edges that are at least that fast.

Pure arithmetic without the GIL. If several rings are equally good, the result is always the same one.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc


cdef int find_best_ring(const double *rates, const int64_t *costs, int count, int32_t *order) noexcept nogil:
    cdef size_t states = (<size_t> 1 << (count - 1)) * (count - 1)
    cdef double *widest = <double *> malloc(states * sizeof(double))
    cdef int64_t *least = <int64_t *> malloc(states * sizeof(int64_t))
    cdef uint8_t *before = <uint8_t *> malloc(states * sizeof(uint8_t))
    cdef double bottleneck
    cdef int outcome = -1
    if count == 1:
        order[0] = 0
        outcome = 1
    elif widest != NULL and least != NULL and before != NULL:
        bottleneck = find_bottleneck(rates, count, widest)
        outcome = bottleneck > 0
        if outcome:
            find_least(rates, costs, count, bottleneck, least, before)
            walk_back(rates, costs, count, bottleneck, least, before, order)
    free(widest)
    free(least)
    free(before)
    return outcome


cdef double find_bottleneck(const double *rates, int count, double *widest) noexcept nogil:
    """The rate of the slowest step of the best ring; 0 if there is no ring."""
    cdef int ends = count - 1, visited, before, end, previous, all_visited = (1 << (count - 1)) - 1
    cdef double best
    for visited in range(1, all_visited + 1):
        for end in range(ends):
            if not visited >> end & 1:
                continue
            before = visited ^ (1 << end)
            best = 0 if before else rates[end + 1]
            for previous in range(ends):
                if before >> previous & 1:
                    best = max(best, min(widest[before * ends + previous], rates[(previous + 1) * count + end + 1]))
            widest[visited * ends + end] = best
    best = 0
    for end in range(ends):
        best = max(best, min(widest[all_visited * ends + end], rates[(end + 1) * count]))
    return best


cdef void find_least(
    const double *rates, const int64_t *costs, int count, double slowest, int64_t *least, uint8_t *origin
) noexcept nogil:
    """Compute the least cost of each walk over edges that are fast enough, and the last but one member of that walk."""
    cdef int ends = count - 1, visited, before, end, previous
    cdef int64_t best, found
    for visited in range(1, 1 << ends):
        for end in range(ends):
            if not visited >> end & 1:
                continue
            before = visited ^ (1 << end)
            best = INT64_MAX
            if before == 0 and rates[end + 1] >= slowest:
                best = costs[end + 1]
            for previous in range(ends):
                if before >> previous & 1 and rates[(previous + 1) * count + end + 1] >= slowest:
                    found = least[before * ends + previous]
                    if found < INT64_MAX and found + costs[(previous + 1) * count + end + 1] < best:
                        best = found + costs[(previous + 1) * count + end + 1]
                        origin[visited * ends + end] = previous
            least[visited * ends + end] = best


cdef void walk_back(
    const double *rates, const int64_t *costs, int count, double slowest,
    const int64_t *least, const uint8_t *origin, int32_t *order,
) noexcept nogil:
    """Write the ring with the least cost into `order`, from its last member to its first."""
    cdef int ends = count - 1, visited = (1 << (count - 1)) - 1, end, last = 0, position
    cdef int64_t best = INT64_MAX, found
    for end in range(ends):
        found = least[visited * ends + end]
        if found < INT64_MAX and rates[(end + 1) * count] >= slowest and found + costs[(end + 1) * count] < best:
            best = found + costs[(end + 1) * count]
            last = end
    for position in range(count - 1, 0, -1):
        order[position] = last + 1
        end = last
        last = origin[visited * ends + end]
        visited ^= 1 << end
    order[0] = 0
