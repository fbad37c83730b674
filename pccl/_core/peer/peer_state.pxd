# What a peer knows; the bodies are in peer_state.pyx.

from .member cimport Member
from .outbox cimport Outbox
from .ring_links cimport RingLinks

cdef class PeerState:
    cdef readonly object options
    cdef readonly str phase               # NEW, DIALLING, JOINING, MEMBER or GONE
    cdef readonly Member member           # what this peer takes part in
    cdef readonly RingLinks ring_links    # the member's: its id and its edges
    cdef readonly list leaving            # calls of close() that wait until no worker holds memory
    cdef readonly object connecting       # the Call of connect() under way
    cdef readonly int attempts_left       # to reach the master
    cdef readonly int attempt             # number of the latest attempt
    cdef readonly int threads             # the most threads that were in calls at the same time
    cdef readonly tuple ending            # (result, kind, text) that every further call gets
    cdef readonly object story            # the latest events and actions
    cdef readonly long long next_deadline_ns  # when to tick next
    cdef Outbox outbox
    cdef long long heard_ns               # when the last message of the master came
    cdef long long beat_ns                # when the last heartbeat was sent
    cdef long long ticked_ns              # when the last Tick came
    cdef str master_at                    # its addresses, for lines in the log
    cdef long long dialled_ns             # when the latest attempt began
    cdef long long retry_ns               # when to dial the master again
    cdef long long interval_ns
    cdef long long silence_ns
    cdef bint checking

    cpdef list handle(self, event, long long now_ns)
    cpdef bint is_busy(self)
    cdef list _handle(self, event, long long now_ns)
    cdef _dispatch(self, tuple entry, kind, argument)
    cdef _set_deadline(self)
