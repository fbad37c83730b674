# Contents of `inflight`: how much the lanes of a far link have under way together.

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    FAR_US = 5_000                  # a link with longer round trips is a far one
    SLACK_US = 5_000                # a link is given at least so much more than a round trip: workers oversleep
    LOOK_ROUND_TRIPS = 5            # in a single one, what confirms packets may come late and in a heap
    FLAT_LOOKS = 2                  # at a full link without growth: then its rate is known
    LOST_ONE_IN = 50                # one packet in so many lost on a full link is too many: 2 %
    LEAST_BYTES = 1 << 16           # may be under way, whatever is known
    ENDING = 1                      # in place of a time: one sender ends a look and begins the next


# What happened on one connection, or on all of a pool together.
cdef struct LinkCount:
    uint64_t arrived                # bytes that the other side has confirmed
    uint64_t packets                # sent, those again included
    uint64_t resent
    uint64_t in_flight              # bytes now on their way
    uint64_t unsent                 # bytes that wait in the kernel


# What the senders of a pool share. Zeros are a link about which nothing is known.
cdef struct InflightBudget:
    uint64_t best                   # bytes in a second: the most that arrived during a look
    uint64_t flat                   # looks in a row that found a full link and no higher rate
    uint64_t began_ns               # when the present look began; 0: there is none; or ENDING
    LinkCount began                 # what had happened by then


# What one sender knows of its connection.
cdef struct LinkReport:
    LinkCount counted               # since it was attached
    uint32_t delivered              # packets that had arrived, as the kernel counts them
    uint32_t packets                # the same of those sent
    uint32_t resent                 # and of those sent again
    uint32_t round_trip_us          # of late
    uint32_t shortest_us            # of the last minutes


# Ask the kernel. False if this is no TCP connection.
cdef bint refresh(LinkReport *report, int fd) noexcept nogil
cdef void begin(LinkReport *report, int fd) noexcept nogil
cdef bint is_far(const LinkReport *report) noexcept nogil
cdef void add(LinkCount *total, const LinkCount *one) noexcept nogil
# A sender comes by. If the present look has lasted long enough, learn from what happened over all lanes.
cdef void learn(InflightBudget *budget, const LinkCount *total, const LinkReport *report, int64_t now) noexcept nogil
# The present look says nothing: a lane began or ceased to report.
cdef void look_anew(InflightBudget *budget) noexcept nogil
# Bytes that all lanes together may have under way.
cdef uint64_t allowed(const InflightBudget *budget, const LinkReport *report) noexcept nogil
