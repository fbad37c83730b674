# What a peer knows of its two edges; the bodies are in ring_links.pyx.

from .outbox cimport Outbox

cdef class LaneLink:
    cdef readonly Edge edge              # the edge it belongs to
    cdef readonly int index              # its index in the pool
    cdef readonly object link            # the actor's number for the connection; 0: none
    cdef readonly str phase              # ABSENT, DIALLING, PAUSED or UP
    cdef int attempts                    # dials that failed
    cdef long long deadline_ns           # when the dial times out, or the next one is due

cdef class Edge:
    cdef readonly bint sends             # True: to the next peer; False: from the previous one
    cdef readonly object peer            # the peer on the other side
    cdef readonly object epoch           # in which the master ordered it
    cdef readonly str host               # where the other side listens; only if `sends`
    cdef readonly int port
    cdef readonly list lanes             # one LaneLink per connection of the pool

cdef class RingLinks:
    cdef public object options
    cdef readonly object id               # this peer's id; 0 before the master gave it
    cdef readonly bytes run               # the run's name; empty before the master gave it
    cdef readonly int lanes               # size of this peer's own pool
    cdef readonly object epoch            # of the latest order
    cdef readonly object reported         # the latest epoch reported as wired
    cdef readonly object order            # the latest RingOrder
    cdef readonly Edge next_edge          # to the next peer; None if alone or broken
    cdef readonly Edge previous_edge      # from the previous peer; None if alone or broken
    cdef readonly dict links              # link -> LaneLink, for every connection that has one
    cdef readonly dict early              # link -> (hello, deadline): lanes that came before their order
    cdef readonly int spawned             # pairs of lane workers that were asked for
    cdef object next_link                 # numbers the connections
    cdef Outbox outbox

    cpdef bint is_whole(self)
    cdef long long soonest(self, long long soonest)
    cdef int _step(self, LaneLink lane, subject, argument) except -1
