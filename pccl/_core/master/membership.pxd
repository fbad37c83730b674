# What the master knows of its peers and their rings; the bodies are in membership.pyx.

from .roster cimport Peer

cdef class Membership:
    cdef readonly bytes run             # names the run: lanes of another run are refused
    cdef readonly object options
    cdef readonly long long began_ns    # when this master started
    cdef readonly dict peers            # id -> Peer
    cdef readonly dict conns            # connection -> Peer
    cdef readonly dict groups           # number -> Group
    cdef readonly set accepted          # ids of members
    cdef readonly set registered        # ids of newcomers that wait for a round
    cdef readonly set admitting         # newcomers of the round that is being wired
    cdef readonly bint admission        # a closed round waits for its rings
    cdef readonly object round          # how many topology rounds were completed
    cdef readonly long long world_changes   # how often the numbers of the world have changed, for any group
    cdef readonly object ballots        # who is in which blocking call
    cdef readonly dict votes            # the ballots' own: call name -> {peer id: Vote}
    cdef readonly object next_id        # the next peer's id
    cdef object reserved_id             # the first one that is not set aside for this master
    cdef public object counters         # what happened how often
    cdef long long interval_ns          # heartbeat interval
    cdef long long silence_ns           # heartbeat timeout
    cdef long long now_ns               # of the event being handled
    cdef list actions                   # of the event being handled
    cdef readonly set wiring            # numbers of groups whose members have not all reported
    cdef readonly set changed           # numbers of groups that need a new order; empty between events
    cdef readonly set stirred           # numbers of groups in which something may follow; likewise

    cdef bint _order_changed_rings(self) except -1
    cdef int _send(self, Peer peer, message) except -1
    cdef int _log(self, int level, str line) except -1
