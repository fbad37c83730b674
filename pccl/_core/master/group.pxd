# One peer group: its ring, its collectives, its consensus; the bodies are in group.pyx.

from .collectives cimport Collectives
from .state_consensus cimport StateConsensus

cdef class Group:
    cdef readonly object number        # the peer group's number, chosen by users
    cdef readonly list ring            # peer ids in ring order, newcomers among them
    cdef readonly set newcomers        # in the ring, but not yet accepted
    cdef public unsigned int epoch     # of the latest order; grows by one with each
    cdef readonly dict edges           # (source, target) -> epoch in which the edge was ordered
    cdef readonly set waiting          # members that have not reported this epoch
    cdef readonly dict losses          # (source, target) -> how often that edge broke since the ring was last whole
    cdef readonly dict marks           # (source, target) -> (expiry, reason): pairs that cannot connect
    cdef readonly long long ordered_ns  # when the latest order was given
    cdef readonly object bandwidths    # rates of its edges, as far as they were measured
    cdef readonly Collectives collectives  # of its members
    cdef readonly StateConsensus consensus    # on the shared state of its members

    cpdef int size(self) except -1
