# What a peer knows; the bodies are in peer_state.pyx.

from .member cimport Participation

cdef class PeerState(Participation):
    cdef readonly str phase               # NEW, DIALLING, JOINING, MEMBER or GONE
    cdef readonly list leaving            # calls of close() that wait for the workers to let go
    cdef readonly object connecting       # the Call of connect() under way
    cdef readonly int attempts_left       # to reach the master
    cdef readonly int attempt             # number of the latest attempt
    cdef readonly tuple ending            # (result, kind, text) that every further call gets
    cdef readonly object story            # the latest events and actions
    cdef long long heard_ns               # when the master was last heard of
    cdef long long beat_ns                # when the last heartbeat was sent
    cdef long long ticked_ns              # when time last passed
    cdef long long retry_ns               # when to dial the master again
    cdef long long interval_ns
    cdef long long silence_ns
    cdef bint checking

    cpdef list handle(self, event, long long now_ns)
    cdef _set_deadline(self)
    cdef list _handle(self, event, long long now_ns)
