# What a peer knows; the bodies are in peer_state.pyx.

from .reductions cimport Reductions
from .wiring cimport Wiring

cdef class PeerState:
    cdef readonly object options
    cdef readonly str phase               # NEW, DIALLING, JOINING, MEMBER or GONE
    cdef readonly Wiring wiring           # the two edges, and this peer's name in the ring
    cdef readonly Reductions reductions   # this peer's part in the collectives of its group
    cdef readonly dict calls              # call name -> Call under way
    cdef readonly list leaving            # calls of close() that wait for the lanes to let go
    cdef readonly object tx_bytes         # what all lanes have sent so far
    cdef readonly object rx_bytes
    cdef readonly object connecting       # the Call of connect() under way
    cdef readonly int attempts_left       # to reach the master
    cdef readonly int attempt             # number of the latest attempt
    cdef readonly tuple ending            # (result, kind, text) that every further call gets
    cdef readonly long long next_deadline_ns
    cdef readonly object story            # the latest events and actions
    cdef object next_call                 # numbers this peer's votes
    cdef long long heard_ns               # when the master was last heard of
    cdef long long beat_ns                # when the last heartbeat was sent
    cdef long long ticked_ns              # when time last passed
    cdef long long retry_ns               # when to dial the master again
    cdef long long interval_ns
    cdef long long silence_ns
    cdef bint checking
    cdef long long now_ns                 # of the event being handled
    cdef list actions                     # of the event being handled

    cdef _set_deadline(self)
    cdef list _handle(self, event, long long now_ns)
