# The topology round, from its votes to its wired rings; the bodies are in topology_round.pyx.

from .admission cimport Admission
from .ballots cimport Ballots
from .membership cimport Membership, Peer
from .optimizer cimport Optimizer

cdef class TopologyRound:
    cdef Membership members             # peers and rings
    cdef Ballots ballots                # votes of all members
    cdef Admission admission            # newcomers and their places
    cdef Optimizer optimizer            # of the rings: never at the same time
    cdef dict votes                     # `ballots.votes`: call name -> {peer id: Vote}
    cdef readonly str phase             # VOTING, HELD or CLOSED
    cdef readonly dict wanting          # member whose group is smaller than it wants -> (since when, how many it wants)
    cdef bint checking                  # compare every phase with the table

    cdef int stop_wanting(self, peer_id) except -1
    cdef bint settle(self) except -1
    cpdef int _step(self, subject) except -1
    cdef _due(self)
    cdef bint _is_complete(self) except -1
    cdef tuple _numbers(self, Peer peer, tuple world)
