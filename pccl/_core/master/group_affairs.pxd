# What the master adds to the collectives and agreements of its groups; the bodies are in affairs.pyx.

from .group cimport Group
from .optimizer cimport Optimizer
from .roster cimport Peer

cdef class Affairs(Optimizer):
    # Who said something, and what is wrong with it.
    cdef Group _stir(self, Peer peer)
    cdef int _kick_if(self, Peer peer, str wrong) except -1

    # Who is told what follows.
    cdef bint _settle_groups(self) except -1
    cdef int _settle_group(self, number) except -1
    cdef int _settle_collectives(self, Group group) except -1
    cdef int _settle_consensus(self, Group group) except -1
    cdef int _tell(self, Peer peer, Group group, message) except -1
