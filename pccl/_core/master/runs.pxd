# Which run the master serves, its begin and its end; the bodies are in runs.pyx.

from .admission cimport Admission
from .ballots cimport Ballots
from .membership cimport Membership, Peer
from .optimizer cimport Optimizer
from .topology_round cimport TopologyRound

cdef class Runs:
    cdef Admission admission            # newcomers
    cdef Membership members             # peers and rings of the present run, its name and its id
    cdef Ballots ballots                # votes of all members
    cdef dict votes                     # `ballots.votes`: call name -> {peer id: Vote}
    cdef Optimizer optimizer            # of the rings: no run is finished while one is under way
    cdef TopologyRound topology_round   # the same
    cdef readonly object table          # the other runs that this master remembers
    cdef readonly bint finished         # the present run is
    cdef bint voting                    # a member may be in finish: most events need not look
    cdef readonly long long told_ns     # when a peer was last told so; when this master started, if none was

    cdef bint admits(self, event) except -1
    cdef bint settle(self) except -1
    cdef bint _is_ripe(self) except -1
    cdef int _refuse(self, conn, message) except -1
    cdef int _serve(self, str name, run) except -1
