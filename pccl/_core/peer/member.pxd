# What a member takes part in; the bodies are in member.pyx.

from .outbox cimport Outbox
from .reduce_machine cimport ReduceMachine
from .ring_links cimport RingLinks
from .sync_machine cimport SyncMachine

cdef class PassiveRate:
    cdef unsigned long long uncounted             # the sequence of the last reduce that commenced before the last reset
    cdef long long running               # reduces under way
    cdef long long since_ns              # when the first of them began
    cdef long long busy_ns               # time before `since_ns` in which at least one ran
    cdef long long received              # bytes of payload
    cdef long long network_ns            # time that receivers waited in the middle of frames
    cdef long long spent_ns              # time that receivers waited or added

    cpdef reset(self, unsigned long long latest)
    cpdef began(self, long long count, long long now_ns)
    cpdef ended(self, event, long long now_ns)

cdef class Member:
    cdef readonly RingLinks ring_links    # the two edges, and this peer's id
    cdef readonly object calls            # votes of the training process
    cdef readonly ReduceMachine reduces   # this peer's part in the collectives of its group
    cdef readonly SyncMachine syncs       # this peer's part in keeping the shared state
    cdef readonly PassiveRate passive_rate  # what reduces have shown of the edge from the previous peer
    cdef readonly object probe            # the order for the Probe under way, or None
    cdef readonly object tx_bytes         # what all lanes have sent so far
    cdef readonly object rx_bytes
    cdef Outbox outbox

    cpdef bint is_busy(self)
