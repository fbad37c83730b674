# cython: language_level=3, cdivision=True, boundscheck=False, wraparound=False, auto_pickle=False
"""The best ring over measured bandwidths.

**The best ring.** `rates` is a table with one row for each source: the bandwidth of each directed edge, in any one
unit; 0 if there is no edge. Of two rings the better is the one whose slowest step is faster (its *bottleneck*: a
ring moves as fast as its slowest step). If these are equal, it is the one whose steps cost less in sum (its *total*),
where a step costs 1 / rate: the time that one more unit of data spends on it. Costs are whole numbers of a quantum,
which is the cost of the fastest edge divided by 2^20, so that sums are exact and equal rings are equal; a step that
costs more than 2^40 quanta counts as 2^40. A ring may not take a step without a rate.

**Method.** Up to `EXACT_MAX` members `exact_ring` finds it, with proof; beyond that `local_search` does, which has a
proof only sometimes. The present ring, if given, is a ring candidate and wins every tie: the answer is never worse than
the present ring, and lanes are not reconnected without a gain.

**Result.** The ring begins with the first member of the present ring, or else with member 0. The clock is used only to
stop: without a time limit the same arguments give the same answer.
"""

cimport cython
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from pccl._core.system.futex cimport now_ns
from pccl._core.records import record

from .exact_ring cimport FEW_MAX, find_best_ring
from .local_search cimport COST_BITS, Search
from .local_search cimport MEMBERS_MAX as SEARCH_MAX, MEMBERS_MIN as SEARCH_MIN, RATE_MIN as SLOWEST_MIN

cdef enum:
    RESOLUTION_BITS = 20            # a quantum is 2^-20 of the cost of the fastest edge

EXACT_MAX = FEW_MAX
MEMBERS_MAX = SEARCH_MAX
STEPS = 20_000  # default of a search: less than a second for a hundred members
RATE_MIN = SLOWEST_MIN  # below it there is no edge
RATE_MAX = 1e18  # far above any network; keeps costs away from zero

cdef double FASTEST_MAX = RATE_MAX


@record
class Solution:
    """A ring, its bottleneck and its total."""

    order: list[int]
    bottleneck: float  # rate of the slowest step; infinite for a ring of one, which has no steps
    total: float  # sum of 1 / rate over all steps, in whole quanta
    exact: bool  # it is proven that there is no better ring


def evaluate(const double[::1] rates not None, order not None) -> tuple[float, float] | None:
    """Bottleneck and total of a ring; None if it takes a forbidden step."""
    cdef Table table = Table(rates, len(order))
    table.read(order)
    cdef Worth worth = table.judge(table.order)
    return (worth.bottleneck, worth.total * table.quantum) if worth.bottleneck > 0 else None


def solve(
    const double[::1] rates not None, int count, start=None,
    uint64_t seed=0, int64_t steps=STEPS, int64_t budget_ns=0, bint exact=True,
) -> Solution | None:
    """Return the best ring; None if there is none or, with many members, if none was found.

    `steps` bounds the search with many members, and so does `budget_ns` unless it is 0. Every edge is read before the
    search (milliseconds for a hundred members, half a second for a thousand). Without `exact`, the search is used for
    few members too, to find out how good it is.
    """
    cdef int64_t deadline_ns = now_ns() + budget_ns if budget_ns > 0 else 0
    cdef Table table = Table(rates, count)
    cdef bint proven = True
    cdef Worth worth
    if start is not None:
        table.read(start)
    if count < SEARCH_MIN or (exact and count <= FEW_MAX):
        table.solve_exactly(start is not None)
    else:
        proven = table.search(Search(count, seed), start is not None, steps, deadline_ns)
    worth = table.judge(table.order)
    if worth.bottleneck <= 0:
        return None
    order = table.write(0 if start is None else start[0])
    return Solution(order, worth.bottleneck, worth.total * table.quantum, proven)


# How good a ring is.
cdef struct Worth:
    double bottleneck               # rate of its slowest step; 0: it takes a forbidden one
    int64_t total                   # cost of all steps, in quanta


@cython.final
cdef class Table:
    """The rates with their costs, and the ring that is the answer so far."""

    cdef const double[::1] view     # keeps the memory of the rates
    cdef const double *rates        # row: source, column: target; the diagonal is ignored
    cdef int64_t *costs             # likewise, in quanta; forbidden edges cost most
    cdef int count                  # members
    cdef double quantum             # what the total is counted in
    cdef int32_t *order             # the ring; at first by number

    def __cinit__(self, const double[::1] rates, int count):
        cdef int member
        if not 1 <= count <= SEARCH_MAX:
            raise ValueError(f"rings have 1 to {SEARCH_MAX} members, not {count}")
        if rates.shape[0] != count * count:
            raise ValueError(f"{count} members need {count * count} rates, not {rates.shape[0]}")
        self.view = rates
        self.rates = &rates[0]
        self.count = count
        self.costs = <int64_t *> calloc(<size_t> count * count, sizeof(int64_t))
        self.order = <int32_t *> calloc(count, sizeof(int32_t))
        if self.costs == NULL or self.order == NULL:
            raise MemoryError
        for member in range(count):
            self.order[member] = member
        self.price()

    def __dealloc__(self):
        free(self.costs)
        free(self.order)

    cdef int price(self) except -1:
        """Check the rates and turn them into costs."""
        cdef double rate, fastest = 0, cost, most = <double> ((<int64_t> 1) << COST_BITS)
        cdef Py_ssize_t index, pairs = <Py_ssize_t> self.count * self.count
        for index in range(pairs):
            rate = self.rates[index]
            if index % (self.count + 1) == 0:
                continue
            # Written so that NaN is refused too.
            if not (rate == 0 or SLOWEST_MIN <= rate <= FASTEST_MAX):
                raise ValueError(
                    f"the rate from member {index // self.count} to {index % self.count} must be 0 or "
                    f"from {RATE_MIN:g} to {RATE_MAX:g}, not {rate}"
                )
            fastest = max(fastest, rate)
        for index in range(pairs):
            rate = self.rates[index]
            cost = fastest / rate * (1 << RESOLUTION_BITS) if rate > 0 else most
            self.costs[index] = <int64_t> (min(cost, most) + 0.5)
        self.quantum = 1 / fastest / (1 << RESOLUTION_BITS) if fastest > 0 else 0
        return 0

    cdef int read(self, order) except -1:
        """Take over a ring. Raises ValueError if a member is missing or named twice."""
        cdef int index
        if sorted(order) != list(range(self.count)):
            raise ValueError(f"a ring of {self.count} names each member from 0 to {self.count - 1} once, not {order}")
        for index in range(self.count):
            self.order[index] = order[index]
        return 0

    cdef list write(self, int first):
        """Return the ring, beginning with the member `first`."""
        found = [self.order[index] for index in range(self.count)]
        begin = found.index(first)
        return found[begin:] + found[:begin]

    cdef Worth judge(self, const int32_t *order) noexcept nogil:
        """Return how good a ring is."""
        cdef Worth worth
        cdef Py_ssize_t step
        cdef int index
        worth.bottleneck, worth.total = INFINITY, 0
        for index in range(self.count if self.count > 1 else 0):
            step = <Py_ssize_t> order[index] * self.count + order[index + 1 if index + 1 < self.count else 0]
            worth.bottleneck = min(worth.bottleneck, self.rates[step])
            worth.total += self.costs[step]
        return worth

    cdef int solve_exactly(self, bint present) except -1:
        """Take over the best ring, unless there is none or the present ring is equally good."""
        cdef int32_t *order = <int32_t *> calloc(self.count, sizeof(int32_t))
        cdef Worth here = self.judge(self.order), there
        cdef int found = -1
        if order != NULL:
            with nogil:
                found = find_best_ring(self.rates, self.costs, self.count, order)
                there = self.judge(order)
        if found > 0 and not (present and here.bottleneck == there.bottleneck and here.total == there.total):
            memcpy(self.order, order, self.count * sizeof(int32_t))
        free(order)
        if found < 0:
            raise MemoryError
        return 0

    cdef bint search(self, Search search, bint present, int64_t steps, int64_t deadline_ns) except -1:
        """Take over the best ring that is found, if any. Returns whether it is proven that there is no better one."""
        cdef bint proven
        search.rates, search.costs = self.rates, self.costs
        with nogil:
            search.begin(self.order if present else NULL)
            proven = search.run(steps, deadline_ns)
            if search.best_bottleneck > 0:
                memcpy(self.order, search.best, self.count * sizeof(int32_t))
        return proven
