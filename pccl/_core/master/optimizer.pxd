# One optimisation of the rings; the bodies are in optimizer.pyx.

from .ballots cimport Ballots
from .group cimport Group
from .membership cimport Membership, Peer

cdef class Optimizer:
    cdef Membership members             # peers and rings
    cdef Ballots ballots                # votes of all members
    cdef dict votes                     # `ballots.votes`: call name -> {peer id: Vote}
    cdef readonly str phase             # IDLE, MEASURING or WIRING
    cdef bint checking                  # compare every phase with the table
    cdef readonly dict waiting          # peer id -> Vote, of peers that wait for the answer
    cdef readonly dict measurements     # number of a group -> its Measurement, while it measures
    cdef readonly object probe_round    # how many probe rounds were begun in this run
    cdef readonly object searched       # number of the group that a moonshot searches for, or None
    cdef readonly tuple found           # the best ring that it has found, or ()

    cdef bint involves(self, peer_id) except -1
    cdef int withdraw(self, Peer peer, call) except -1
    cdef int remove(self, Peer peer, bint in_ring) except -1
    cdef int sweep(self, tick) except -1
    cdef long long next_deadline_ns(self, long long latest_ns) except? -1
    cdef int take_moonshot(self, event) except -1
    cdef int cancel_moonshot(self, number) except -1

    # Everything that follows from an event.
    cdef bint settle(self) except -1
    cdef bint _is_ripe(self) except -1
    cpdef int _step(self, subject, argument) except -1
    cdef tuple _due(self)
