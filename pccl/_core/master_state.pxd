# What the master knows; the bodies are in master_state.pyx.

from .roster cimport Peer

cdef class MasterState:
    cdef readonly bytes run             # names the run: lanes of another run are refused
    cdef readonly object options
    cdef readonly dict peers            # id -> Peer
    cdef readonly dict conns            # connection -> Peer
    cdef readonly dict groups           # number -> Group
    cdef readonly set accepted          # ids of members
    cdef readonly set registered        # ids of newcomers that wait for a round
    cdef readonly set admitting         # newcomers of the round that is being wired
    cdef readonly bint admission        # a closed round waits for its rings
    cdef readonly object ballots        # who is in which blocking call
    cdef readonly dict votes            # the ballots' own: call name -> {peer id: Vote}
    cdef readonly object next_id        # the next peer's id
    cdef readonly object round          # how many topology rounds were completed
    cdef readonly long long next_deadline_ns  # when the machine wants its next Tick
    cdef readonly object story          # the latest events and actions
    cdef public object counters         # what happened how often
    cdef long long beat_ns              # when the master last sent its own heartbeats
    cdef long long interval_ns          # heartbeat interval
    cdef long long silence_ns           # heartbeat timeout
    cdef bint checking                  # run check() after each event
    cdef long long now_ns               # of the event being handled
    cdef list actions                   # of the event being handled
    cdef readonly set wiring            # numbers of groups whose members have not all reported
    cdef set changed                    # numbers of groups that need a new order
    cdef bint held                      # the topology vote is unanimous, but every voter waits for a larger group
    cdef bint stopped                   # the latest sweep came so late that it judged nobody

    cdef _send(self, Peer peer, message)
    cdef _log(self, int level, str line)
    cdef list _handle(self, event, long long now_ns)
