# Newcomers and their way into a ring; the bodies are in admission.pyx.

from .group cimport Group
from .membership cimport Membership, Peer
from .trial_table cimport Trial, TrialTable

cdef class Newcomer:
    cdef readonly Peer peer
    cdef readonly str back              # the dial-back: None under way, "" the master reached it, else why it did not
    cdef readonly long long back_ns     # when the dial-back began
    cdef readonly bint reached          # the master or a peer has reached it
    cdef readonly bint is_stuck         # a trial failed at every gap
    cdef readonly bint is_waiting       # at some gap a member is silent
    cdef bint told                      # it was told why it is stuck

cdef class Admission:
    cdef Membership members             # peers and rings
    cdef readonly TrialTable table      # which pairs were tried
    cdef readonly dict newcomers        # id -> Newcomer, of registered peers
    cdef readonly dict queues           # number of a group -> ids of its newcomers, in order of registration
    cdef readonly set fitting           # newcomers that fit: a topology round admits one of them at least
    cdef dict dirty                     # newcomers to look at again, in this order; empty between events

    # What the master's machine passes on.
    cdef int register(self, Peer peer) except -1
    cdef int remove(self, Peer peer) except -1
    cdef int sweep(self) except -1
    cdef bint settle(self) except -1
    cdef set admit(self)
    cdef bint has_reached(self) except -1

    cdef int _dial_back(self, Newcomer newcomer) except -1
    cdef int _look_at_ends(self, Trial trial) except -1
    cdef list _leave_queue(self, Peer peer)
    cdef list _ring_of(self, Peer peer)

    # The way of one newcomer into a ring.
    cdef int _look(self, Newcomer newcomer) except -1
    cdef bint _find_partner(self, Newcomer newcomer, list queue) except -1
    cdef bint _find_gap(self, Newcomer newcomer, list ring, list queue) except -1
    cdef list _gaps(self, Newcomer newcomer, list ring, list queue)
    cdef str _outcome(self, source, target)
    cdef bint _may_be_dead(self, target, peer_id) except -1
    cdef _founder(self, list queue)
    cdef list _begin_ring(self, queue)
    cdef _find_source(self, dict following, list begin, peer_id)
    cdef int _forget_inserted(self, Group group, list inserted) except -1

    # Newcomers without a gap.
    cdef int _judge(self, Newcomer newcomer, Group group) except -1
    cdef list _witnesses(self, list ring)
    cdef bint _is_replaceable(self, Group group) except -1
    cdef int _replace(self, Peer alone, list rivals, Group group) except -1
    cdef int _refuse(self, Newcomer newcomer, str what, Group group) except -1
    cdef str _explain(self, Newcomer newcomer, Group group)
    cdef str _describe(self, source, target, str reason)
