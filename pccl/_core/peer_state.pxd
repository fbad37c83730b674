# What a peer knows; the bodies are in peer_state.pyx.

from .edge cimport Edge, Lane

cdef class PeerState:
    cdef readonly object options
    cdef readonly str phase               # NEW, DIALLING, JOINING, MEMBER or GONE
    cdef readonly object id               # given by the master; 0 before
    cdef readonly bytes run               # the run's name; empty before
    cdef readonly int lanes               # size of this peer's own pool
    cdef readonly object epoch            # of the latest order
    cdef readonly object reported         # the latest epoch reported as wired
    cdef readonly object wire             # the latest order itself
    cdef readonly Edge next_edge          # to the next peer; None if alone or broken
    cdef readonly Edge previous_edge      # from the previous peer; None if alone or broken
    cdef readonly dict links              # link -> Lane, for every connection that has one
    cdef readonly dict early              # link -> (hello, deadline): lanes that came before their order
    cdef readonly dict calls              # call name -> Call under way
    cdef readonly object connecting       # the Call of connect() under way
    cdef readonly int attempts_left       # to reach the master
    cdef readonly int attempt             # number of the latest attempt
    cdef readonly tuple ending            # (result, kind, text) that every further call gets
    cdef readonly int spawned             # pairs of workers that were asked for
    cdef readonly long long next_deadline_ns
    cdef readonly object story            # the latest events and actions
    cdef object next_call                 # numbers this peer's votes
    cdef object next_link                 # numbers its connections
    cdef long long heard_ns               # when the master was last heard of
    cdef long long beat_ns                # when the last heartbeat was sent
    cdef long long ticked_ns              # when time last passed; tells a stopped process from a silent master
    cdef long long retry_ns               # when to dial the master again
    cdef long long interval_ns
    cdef long long silence_ns
    cdef bint checking
    cdef long long now_ns                 # of the event being handled
    cdef list actions                     # of the event being handled

    cdef _dial_lane(self, Lane lane)
    cdef _set_deadline(self)
