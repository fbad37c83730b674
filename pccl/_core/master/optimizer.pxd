# What the master knows of an optimisation of the rings; the bodies are in optimizing.pyx.

from .membership cimport Membership
from .roster cimport Peer

cdef class Optimizer(Membership):
    cdef readonly bint optimizing       # a vote on the rings was closed and is not answered
    cdef readonly dict optimizers       # peer id -> Vote, of those who wait for that answer
    cdef readonly dict measurements     # number of a group -> its Measurement, while it measures
    cdef readonly object probe_round    # how many rounds of probes were begun in this run
    cdef readonly object searched       # number of the group that a moonshot searches for, or None
    cdef readonly tuple found           # the best ring it has told, or ()

    cdef bint _optimizes(self, Peer peer) except -1
    cdef bint _optimize_is_ripe(self) except -1
    cdef bint _settle_optimization(self) except -1
    cdef bint _carry_on(self) except -1
