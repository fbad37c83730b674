# The peers and rings of a run, and the actions of the event being handled; the bodies are in membership.pyx.

from .group cimport Group

cdef class Peer:
    cdef readonly object id             # given out in order of registration, never reused
    cdef readonly object conn           # the actor's number for its control link
    cdef readonly object group          # the peer group it asked for
    cdef readonly int lanes             # its pool size
    cdef readonly str host              # where other peers dial it
    cdef readonly int port
    cdef readonly bytes instance        # names its process: whoever dials that port can tell that it is the right one
    cdef readonly bint is_proven        # it was in a wired ring with another peer, so peers can reach it
    cdef readonly str phase             # REGISTERED, ACCEPTED or GONE
    cdef readonly long long phase_ns    # when that phase began
    cdef public long long heard_ns      # when it was last heard of
    cdef readonly unsigned int threads  # the most of its threads that were in calls at the same time
    cdef public int overwritten         # how many syncs overwrote it as a divergent member
    cdef public long long told_world    # `world_changes` when it last got the numbers of the world
    cdef readonly object tx_bytes       # bytes that its lanes have sent, as of its latest heartbeat
    cdef readonly object rx_bytes
    cdef readonly double tx_rate        # bytes per second between its latest two heartbeats
    cdef readonly double rx_rate
    cdef tuple mark                     # when the rates were last taken, and tx_bytes and rx_bytes then

cdef class Membership:
    cdef readonly bytes run             # names the run: lanes of another run are refused
    cdef readonly str run_name          # chosen by users; empty: it has none
    cdef readonly object options
    cdef readonly long long began_ns    # when this master started
    cdef readonly dict peers            # id -> Peer
    cdef readonly dict conns            # connection -> Peer
    cdef readonly dict groups           # number -> Group
    cdef readonly set accepted          # ids of members
    cdef readonly set registered        # ids of newcomers that wait for a topology round
    cdef readonly set admitting         # ids of newcomers of the closed topology round, which is being wired
    cdef readonly object round          # how many topology rounds were completed
    cdef readonly long long world_changes   # how often the numbers of the world have changed, for any group
    cdef readonly object next_id        # the next peer's id
    cdef readonly object reserved_id    # the first id that is not set aside for this master
    cdef readonly dict counters         # name of what happened -> how often
    cdef public object on_removed       # called with a Peer that was removed, and whether it was in a ring
    cdef readonly long long interval_ns  # heartbeat interval
    cdef readonly long long silence_ns  # heartbeat timeout
    cdef readonly str timing            # the options that peers take over from this master
    cdef readonly long long now_ns      # of the event being handled
    cdef list actions                   # of the event being handled
    cdef readonly set wiring            # numbers of groups whose members have not all reported
    cdef readonly set changed           # numbers of groups that need a new order; empty between events
    cdef readonly set unsettled         # numbers of groups that must be settled; empty between events
    cdef readonly set reordered         # numbers of groups whose ring has changed; empty between events

    # The event being handled, and what every part of the machine may do.
    cdef list begin(self, long long now_ns)
    cdef int send(self, Peer peer, message) except -1
    cdef int log(self, int level, str line) except -1
    cdef int kick(self, Peer peer, int result, str reason) except -1
    cdef int act(self, action) except -1
    cdef int count(self, str name, int times=*) except -1

    # Peers come, become members, and go.
    cdef Peer register(self, event)
    cdef int remove(self, Peer peer, str how, str reason) except -1
    cdef int admit(self, number, ring, newcomers) except -1
    cdef set accept_admitted(self)
    cdef tuple world(self)
    cdef tuple numbers(self, Group group, tuple world)
    cdef int resume(self, next_id, round) except -1

    # Groups and their rings.
    cdef Group new_group(self, number)
    cdef Group group_to_settle(self, Peer peer)
    cdef Group _ring_of(self, Peer peer)
    cdef int disturb(self, Group group, str reason) except -1
    cdef bint order_changed_rings(self) except -1
