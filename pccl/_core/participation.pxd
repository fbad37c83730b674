# What a member takes part in; the bodies are in participation.pyx.

from .calls cimport Calls
from .metering cimport Meter
from .reductions cimport Reductions
from .syncing cimport Syncing
from .wiring cimport Wiring

cdef class Participation:
    cdef readonly object options
    cdef readonly Wiring wiring           # the two edges, and this peer's name in the ring
    cdef readonly Calls calls             # votes of the training process
    cdef readonly Reductions reductions   # this peer's part in the collectives of its group
    cdef readonly Syncing syncing         # this peer's part in keeping the shared state
    cdef readonly object probe            # the Probe that this peer measures for, or None
    cdef readonly Meter meter             # what reduces have shown of the edge from the previous peer
    cdef readonly object tx_bytes         # what all lanes have sent so far
    cdef readonly object rx_bytes
    cdef readonly long long next_deadline_ns
    cdef long long now_ns                 # of the event being handled
    cdef list actions                     # of the event being handled

    cdef list _begin(self, long long now_ns)
    cpdef bint is_busy(self)
    cdef _lose_master_if(self, str wrong)
