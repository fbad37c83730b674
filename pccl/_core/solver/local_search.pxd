# Contents of `local_search`: a ring that is improved by exchanges until its perturbations or its time are used up.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from .path_builder cimport PathBuilder


cdef enum:
    MEMBERS_MAX = 1024              # of one ring; the tables below take 20 bytes for each pair
    MEMBERS_MIN = 4                 # a perturbation cuts the ring in four
    COST_BITS = 40                  # a step costs at most 2^40 quanta, so a ring of 1024 costs less than a penalty

cdef double RATE_MIN                # no measured edge is slower; below it there is no edge
cdef int64_t PENALTY                # added to the cost of a step that is slower than the goal


cdef class Search:
    cdef int count                  # members
    cdef const double *rates        # row: source, column: target; 0: forbidden. Lent by the caller, as are the costs
    cdef const int64_t *costs       # in quanta, see `solver`
    cdef int64_t *weights           # row: source. Costs, with the penalty where the rate is below the goal
    cdef int64_t *weights_into      # row: target. The same table transposed, because columns are slow to read
    cdef int32_t *fastest           # row: source. All its targets, the fastest first
    cdef int32_t *ring              # the members in order, written twice, so that no loop has to wrap around
    cdef int64_t *steps             # weight of the step from each position to the next, also written twice
    cdef int32_t *position             # member -> its position in the ring, below `count`
    cdef int32_t *spare             # the members of a stretch that is being rewritten
    cdef int32_t *saved_ring        # the ring before a perturbation, to be restored if the perturbation did not help
    cdef int64_t *saved_steps
    cdef int32_t *saved_position
    cdef int32_t *queue             # members whose step has changed and was not examined since
    cdef uint8_t *queued            # by member
    cdef int queue_begin
    cdef int queue_length
    cdef int64_t weight             # of the ring: the sum of its steps
    cdef uint64_t chance            # state of the random number generator
    cdef int64_t perturbations_left
    cdef int64_t deadline_ns        # 0: none
    cdef bint stopped               # the time is used up
    cdef int32_t *best              # the best legal ring so far
    cdef double best_bottleneck     # its slowest rate; 0: no legal ring is known
    cdef int64_t best_total         # its cost
    cdef PathBuilder builder        # builds the rings with which attempts begin
    cdef int32_t *order             # the latest of them
    cdef double bound               # no ring has a faster slowest step

    # Prepares the search; rates and costs must be set. The present ring, if not NULL and legal, is a ring candidate.
    cdef void begin(self, const int32_t *order) noexcept nogil

    # Searches until perturbations or time are used up, or no better ring can exist. Returns whether that is proven.
    cdef bint run(self, int64_t perturbations, int64_t deadline_ns) noexcept nogil

    cdef bint is_proven(self) noexcept nogil

    # Goals: what the slowest step should be.
    cdef void find_bound(self) noexcept nogil
    cdef void lift(self, int64_t quota) noexcept nogil
    cdef double widest(self, bint into) noexcept nogil
    cdef double rate_between(self, double low, double high) noexcept nogil
    cdef void aim(self, double goal) noexcept nogil
    cdef bint attempt(self, double goal, int64_t quota, bint until_reached) noexcept nogil
    cdef void note(self) noexcept nogil

    # Moves: how the ring changes.
    cdef void descend(self) noexcept nogil
    cdef bint improve(self, int32_t source) noexcept nogil
    cdef void exchange(self, int first, int one, int two, int three) noexcept nogil
    cdef void turn(self, int first, int one, int two, int three) noexcept nogil
    cdef void perturb(self) noexcept nogil
    cdef void shuffle(self, int first, int longest) noexcept nogil
    cdef void scramble(self) noexcept nogil
    cdef void go_greedily(self) noexcept nogil

    # The ring as memory.
    cdef void sort_targets(self, int source) noexcept nogil
    cdef void load(self, const int32_t *order) noexcept nogil
    cdef void put(self, int position, int32_t member) noexcept nogil
    cdef void weigh(self, int position) noexcept nogil
    cdef void push(self, int32_t member) noexcept nogil
    cdef void save(self) noexcept nogil
    cdef void restore(self, int64_t weight) noexcept nogil
