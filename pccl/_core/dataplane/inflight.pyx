# cython: language_level=3, cdivision=True, auto_pickle=False
"""The in-flight budget: how many bytes all lanes of a far link may have sent that are not yet acknowledged.

A link carries a certain number of bytes in a round trip. Fewer bytes in flight leave it idle; more do not arrive
earlier, they wait in a queue on the way. Congestion control knows this of one connection, but not that the connection
belongs to a pool. Each connection assumes the best rate it has seen; the sum is a multiple of the link's rate; the
queue fills and overflows; and the lane that lost its last packets delays the whole operation. At 1 Gbit/s and 100 ms
four connections lost nothing and used 88 % of the link, eight lost 6 % of their packets and used 77 %, sixteen lost
14 % and used 76 %. Queues also delay the acknowledgements of the other direction.

So the senders of a pool measure their link together, in *samples* of a few round trips: how many bytes arrived over all
lanes. The rate is known once it stops growing although more is in flight than arrives. From then on the senders keep a
quarter more in flight than the link carries in its shortest round trip, and the congestion control of a connection
matters only if it allows less. The quarter is room to grow: if more arrives, the known rate rises. If the known rate is
too high, packets are lost, and it is lowered. The budget lasts longer than an operation and ends with the edge.

Round trips also become longer because of other traffic, and then the same rate needs more in flight. The budget follows
in part only: if it followed fully, we would keep a queue of our own for ever.

With this, 8, 16 and 32 connections at 1 Gbit/s and 100 ms lose nothing once the rate is known, and use 88 to 89 % of
the link. Two simpler rules left the link idle: to stop at a long round trip, and to allow each lane what arrived over
it in the last round trip. Both mistake a queue on the way back, which delays acknowledgements, for one on the way out.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from pccl._core.system cimport posix
from pccl._core.system.tcp_info cimport TcpInfo, read_tcp_info

FAR_ROUND_TRIP_US = <int> FAR_US  # as Python sees it

cdef enum:
    SLACK_US = 5_000                # the budget covers at least this much more than a round trip: workers oversleep
    SAMPLE_ROUND_TRIPS = 5          # in a single one, acknowledgements may come late and all at once
    FLAT_SAMPLES = 2                # on a full link without growth: then its rate is known
    LOST_ONE_IN = 50                # if one packet in this many (2 %) is lost on a full link, the rate is too high
    LEAST_BYTES = 1 << 16           # may always be in flight
    ENDING = 1                      # instead of a time: one sender ends a sample and begins the next


cdef bint refresh(LinkReport *report, int fd) noexcept nogil:
    cdef TcpInfo now
    if not read_tcp_info(&now, fd):
        return False
    # The kernel counts packets, modulo 2**32, and their size may change.
    report.counted.arrived += <uint64_t> <uint32_t> (now.delivered - report.delivered) * now.packet_bytes
    report.counted.packets += <uint32_t> (now.sent - report.packets)
    report.counted.resent += <uint32_t> (now.resent - report.resent)
    report.counted.in_flight, report.counted.unsent = now.in_flight, now.unsent
    report.delivered, report.packets, report.resent = now.delivered, now.sent, now.resent
    report.round_trip_us, report.shortest_us = now.round_trip_us, now.shortest_us
    return True


cdef void begin(LinkReport *report, int fd) noexcept nogil:
    memset(report, 0, sizeof(report[0]))
    refresh(report, fd)
    memset(&report.counted, 0, sizeof(report.counted))


cdef bint is_far(const LinkReport *report) noexcept nogil:
    return report.round_trip_us >= FAR_US


cdef void add(LinkCount *total, const LinkCount *one) noexcept nogil:
    total.arrived += one.arrived
    total.packets += one.packets
    total.resent += one.resent
    total.in_flight += one.in_flight
    total.unsent += one.unsent


cdef void learn(InflightBudget *budget, const LinkCount *total, const LinkReport *report, int64_t now) noexcept nogil:
    cdef int64_t began = <int64_t> posix.atomic_load_u64(&budget.began_ns)
    cdef LinkCount before = budget.began
    cdef uint64_t rate
    if began == ENDING or (began and now - began < <int64_t> report.shortest_us * 1000 * SAMPLE_ROUND_TRIPS):
        return
    if not posix.atomic_compare_exchange_u64(&budget.began_ns, began, ENDING):
        return  # another sender ends this sample
    budget.began = total[0]
    posix.atomic_compare_exchange_u64(&budget.began_ns, ENDING, now)  # unless another sender has restarted it
    if began == 0 or total.arrived < before.arrived:
        return
    rate = (total.arrived - before.arrived) * 1_000_000 // (<uint64_t> (now - began) // 1000 + 1)
    if rate > budget.best:
        if rate > budget.best + budget.best // 4:
            budget.flat = 0
        budget.best = rate
    elif 4 * total.in_flight > 5 * carried(rate, report.shortest_us):
        budget.flat += 1
        if (total.resent - before.resent) * LOST_ONE_IN > total.packets - before.packets:
            budget.best = max(rate, budget.best - budget.best // 8)


cdef void restart_sample(InflightBudget *budget) noexcept nogil:
    posix.atomic_store_u64(&budget.began_ns, 0)


cdef uint64_t free_bytes(const InflightBudget *budget, const LinkCount *total, const LinkReport *report) noexcept nogil:
    cdef uint64_t most = allowed(budget, report), in_flight = total.in_flight + total.unsent
    return most - in_flight if in_flight < most else 0


cdef uint64_t allowed(const InflightBudget *budget, const LinkReport *report) noexcept nogil:
    """Bytes that all lanes together may have in flight."""
    cdef uint64_t shortest = report.shortest_us, late = report.round_trip_us
    if budget.flat < FLAT_SAMPLES:
        return <uint64_t> -1
    return max(carried(budget.best, max(shortest + max(shortest // 4, SLACK_US), 5 * late // 8)), LEAST_BYTES)


cdef inline uint64_t carried(uint64_t rate, uint64_t duration_us) noexcept nogil:
    return rate * duration_us // 1_000_000


cdef class InflightModel:
    """A budget and the report of one sender as Python sees them, for tests."""

    cdef InflightBudget budget
    cdef LinkReport report

    def __init__(self, uint32_t shortest_us):
        self.report.shortest_us = self.report.round_trip_us = shortest_us

    @property
    def best(self):
        """The highest rate that was seen, in bytes per second."""
        return self.budget.best

    def restart_sample(self):
        """Drop the present sample."""
        restart_sample(&self.budget)

    def learn(
        self,
        int64_t now,
        uint64_t arrived,
        uint64_t in_flight,
        uint64_t packets,
        uint64_t resent,
        uint32_t round_trip_us,
    ):
        """Take the counts so far. Returns how many bytes may be in flight, or None if no limit is known."""
        cdef LinkCount total
        cdef uint64_t most
        total.arrived, total.in_flight, total.unsent = arrived, in_flight, 0
        total.packets, total.resent = packets, resent
        self.report.round_trip_us = round_trip_us
        learn(&self.budget, &total, &self.report, now)
        most = allowed(&self.budget, &self.report)
        return None if most == <uint64_t> -1 else most


def reported(int fd):
    """Bytes arrived, in flight and unsent on a connection since it was opened; None if it is not TCP."""
    cdef LinkReport report
    memset(&report, 0, sizeof(report))
    if not refresh(&report, fd):
        return None
    return report.counted.arrived, report.counted.in_flight, report.counted.unsent
