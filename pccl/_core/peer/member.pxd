# What a member takes part in; the bodies are in participation.pyx.

from .calls cimport Calls
from .passive_rate cimport PassiveRate
from .reduce_machine cimport ReduceMachine
from .ring_links cimport RingLinks
from .sync_machine cimport SyncMachine

cdef class Participation:
    cdef readonly object options
    cdef readonly RingLinks wiring           # the two edges, and this peer's name in the ring
    cdef readonly Calls calls             # votes of the training process
    cdef readonly ReduceMachine reductions   # this peer's part in the collectives of its group
    cdef readonly SyncMachine syncing         # this peer's part in keeping the shared state
    cdef readonly object probe            # the Probe that this peer measures for, or None
    cdef readonly PassiveRate meter             # what reduces have shown of the edge from the previous peer
    cdef readonly object tx_bytes         # what all lanes have sent so far
    cdef readonly object rx_bytes
    cdef readonly long long next_deadline_ns
    cdef long long now_ns                 # of the event being handled
    cdef list actions                     # of the event being handled

    cdef list _begin(self, long long now_ns)
    cpdef bint is_busy(self)
    cdef _lose_master_if(self, str wrong)
