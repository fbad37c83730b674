# Contents of `inflight`: how many bytes the lanes of a far link may have in flight together.

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    FAR_US = 5_000                  # a link with a longer round trip is a far one


# What happened on one connection, or on all connections of a pool together.
cdef struct LinkCount:
    uint64_t arrived                # bytes that the other side has acknowledged
    uint64_t packets                # sent, retransmissions included
    uint64_t resent
    uint64_t in_flight              # bytes sent and not acknowledged
    uint64_t unsent                 # bytes that wait in the kernel


# What the senders of a pool share. All zero: nothing is known about the link.
cdef struct InflightBudget:
    uint64_t best                   # bytes per second: the most that arrived during a sample
    uint64_t flat                   # samples in a row that found a full link and no higher rate
    uint64_t began_ns               # when the present sample began; 0: there is none; or ENDING
    LinkCount began                 # the counts at that time


# What one sender knows of its connection.
cdef struct LinkReport:
    LinkCount counted               # since the connection was attached
    uint32_t delivered              # packets that have arrived, as the kernel counts them
    uint32_t packets                # packets sent, as the kernel counts them
    uint32_t resent                 # packets retransmitted, as the kernel counts them
    uint32_t round_trip_us          # the smoothed round trip
    uint32_t shortest_us            # the shortest round trip of the last minutes


# Asks the kernel. False if this is no TCP connection.
cdef bint refresh(LinkReport *report, int fd) noexcept nogil
# Starts the report of a connection.
cdef void begin(LinkReport *report, int fd) noexcept nogil
cdef bint is_far(const LinkReport *report) noexcept nogil
cdef void add(LinkCount *total, const LinkCount *one) noexcept nogil
# Ends the present sample if it has lasted long enough, and updates the budget from the counts of all lanes.
cdef void learn(InflightBudget *budget, const LinkCount *total, const LinkReport *report, int64_t now) noexcept nogil
# Drops the present sample, because a lane began or stopped to report.
cdef void restart_sample(InflightBudget *budget) noexcept nogil
# Bytes that may be given to the kernel now, if all lanes together have `total` in flight.
cdef uint64_t free_bytes(const InflightBudget *budget, const LinkCount *total, const LinkReport *report) noexcept nogil
