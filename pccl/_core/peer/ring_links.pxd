# What a peer knows of its two edges; the bodies are in wiring.pyx.

from .edge cimport Edge, Lane

cdef class RingLinks:
    cdef readonly object options
    cdef readonly object id               # this peer, as its neighbours know it; 0 before the master named it
    cdef readonly bytes run               # the run's name; empty before
    cdef public int lanes                 # size of this peer's own pool
    cdef readonly object epoch            # of the latest order
    cdef readonly object reported         # the latest epoch reported as wired
    cdef readonly object wire             # the latest order itself
    cdef readonly Edge next_edge          # to the next peer; None if alone or broken
    cdef readonly Edge previous_edge      # from the previous peer; None if alone or broken
    cdef readonly dict links              # link -> Lane, for every connection that has one
    cdef readonly dict early              # link -> (hello, deadline): lanes that came before their order
    cdef readonly int spawned             # pairs of workers that were asked for
    cdef object next_link                 # numbers the connections
    cdef long long now_ns                 # of the event being handled
    cdef list actions                     # of the event being handled

    cdef begin(self, list actions, long long now_ns)
    cpdef bint is_whole(self)
    cdef long long soonest(self, long long soonest)
    cdef _dial_lane(self, Lane lane)
