# Dispatch of what members say to their group's collectives and consensus; the bodies are in group_dispatch.pyx.

from .group cimport Group
from .membership cimport Membership, Peer
from .optimizer cimport Optimizer

cdef class GroupDispatch:
    cdef Membership members             # peers and rings
    cdef Optimizer optimizer            # knows which peers are in optimize_topology
    cdef dict votes                     # `ballots.votes`: call name -> {peer id: Vote}

    cdef bint _votes_elsewhere(self, Peer peer) except -1
    cdef str _where(self, Peer peer)
    cdef int _kick_if(self, Peer peer, str wrong) except -1

    # What follows in the groups whose members sent a message.
    cdef bint settle(self) except -1
    cdef int _settle_group(self, number) except -1
    cdef int _settle_collectives(self, Group group) except -1
    cdef int _note_overwrite(self, Peer peer, revision, agreed) except -1
    cdef int _settle_consensus(self, Group group) except -1
    cdef tuple _numbers(self, Group group)
    cdef int _tell(self, Peer peer, Group group, message) except -1
