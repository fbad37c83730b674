# cython: language_level=3, cdivision=True, auto_pickle=False
"""What is under way: how much the lanes of a far link have sent together that nobody has confirmed yet.

A link carries so many bytes in a round trip. Less under way leaves it idle; more does not arrive earlier, it queues up on
the way. Congestion control knows that of one connection, but not that it is one of a pool: each of them believes in the
best rate it ever saw, their sum is a multiple of the link's, the queue fills and overflows, and who lost its last packets
keeps everybody waiting. At 1 Gbit/s and 100 ms four connections lost nothing and used 88 % of the link, eight lost 6 %
of their packets and used 77 %, sixteen 14 % and 76 %. Queues also delay what confirms the packets of the other direction.

So the senders of a pool measure their link together, in *looks* of a few round trips: what arrived over all lanes. The
rate is known once it stops growing although more is in flight than arrives. From then on they have a quarter more under
way than the link carries in its shortest round trip, and the congestion control of a connection only matters if it wants
less. The quarter is room to grow: who gets more through has a higher rate to go by. A rate that has become too high shows
by packets lost, and is lowered. What was learned outlives operations, and is forgotten with the edge.

Round trips also become longer because of others, and need more under way for the same rate. That is granted in part: all
of it would keep a queue of our own for ever.

With this, 8, 16 and 32 connections at 1 Gbit/s and 100 ms lose nothing once the link is known, and use 88 to 89 % of it.
Two simpler rules starved the link: to stop at a long round trip, and to give each lane what itself had got through in its
last one. Both take a queue on the way back, which delays what confirms our packets, for one on the way there.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from pccl._core.system cimport posix
from pccl._core.system.tcp_info cimport TcpInfo, read_tcp_info

FAR_ROUND_TRIP_US = <int> FAR_US


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
    """LinkReport of a connection from now on."""
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
    if began == ENDING or (began and now - began < <int64_t> report.shortest_us * 1000 * LOOK_ROUND_TRIPS):
        return
    if not posix.atomic_compare_exchange_u64(&budget.began_ns, began, ENDING):
        return  # another sender learns from this look
    budget.began = total[0]
    posix.atomic_compare_exchange_u64(&budget.began_ns, ENDING, now)  # unless somebody wants a new one already
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


cdef void look_anew(InflightBudget *budget) noexcept nogil:
    posix.atomic_store_u64(&budget.began_ns, 0)


cdef uint64_t allowed(const InflightBudget *budget, const LinkReport *report) noexcept nogil:
    cdef uint64_t shortest = report.shortest_us, late = report.round_trip_us
    if budget.flat < FLAT_LOOKS:
        return <uint64_t> -1
    return max(carried(budget.best, max(shortest + max(shortest // 4, SLACK_US), 5 * late // 8)), LEAST_BYTES)


cdef inline uint64_t carried(uint64_t rate, uint64_t duration_us) noexcept nogil:
    return rate * duration_us // 1_000_000


cdef class InflightModel:
    """What senders share and one of them knows, as Python sees it: for tests."""

    cdef InflightBudget budget
    cdef LinkReport report

    def __init__(self, uint32_t shortest_us):
        self.report.shortest_us = self.report.round_trip_us = shortest_us

    @property
    def best(self):
        """Bytes in a second that the link is known to carry, so far."""
        return self.budget.best

    def look_anew(self):
        """Forget the present look."""
        look_anew(&self.budget)

    def learn(self, int64_t now, uint64_t arrived, uint64_t in_flight, uint64_t packets, uint64_t resent, uint32_t round_trip_us):
        """What has happened so far. Returns how much may be under way; None: no limit is known."""
        cdef LinkCount total
        cdef uint64_t most
        total.arrived, total.in_flight, total.unsent, total.packets, total.resent = arrived, in_flight, 0, packets, resent
        self.report.round_trip_us = round_trip_us
        learn(&self.budget, &total, &self.report, now)
        most = allowed(&self.budget, &self.report)
        return None if most == <uint64_t> -1 else most


def reported(int fd):
    """What the kernel says of a connection since it was opened: bytes arrived, in flight and unsent; None if it is not TCP."""
    cdef LinkReport report
    memset(&report, 0, sizeof(report))
    if not refresh(&report, fd):
        return None
    return report.counted.arrived, report.counted.in_flight, report.counted.unsent
