# What a peer knows of its reduces; the bodies are in reduce_machine.pyx.

from .outbox cimport Outbox

cdef class Reduce:
    cdef readonly object operation       # as its caller asked for it
    cdef readonly object tag
    cdef readonly object sequence        # of the collective; 0 before it commenced
    cdef readonly str phase              # see the table in reduce_machine.pyx
    cdef readonly str reason             # why this peer aborted it
    cdef readonly tuple ending           # (result, kind, payload) of its slot, as soon as the verdict is known
    cdef bytes payload                   # what its caller gets if it succeeds
    cdef bytes numbers                   # of the world in which it commenced
    cdef object world                    # members of the ring when it began
    cdef object moved                    # bytes moved so far
    cdef long long moved_ns              # when that last grew
    cdef long long pause_ns              # the longest time in which it did not grow

cdef class ReduceMachine:
    cdef readonly dict tags              # tag -> Reduce, until its slot is completed
    cdef readonly dict sequences         # sequence -> Reduce, of those that commenced, in that order
    cdef readonly object latest          # sequence of the latest reduce that commenced
    cdef bytes numbers                   # of the world, as the master told them last, packed
    cdef Outbox outbox
    cdef object slow                     # reports on a reduce that takes long
    cdef long long stall_ns
    cdef bint checking                   # whether every step is compared with the table

    cpdef call(self, bytes operations)
    cpdef commence(self, message, order)
    cpdef done(self, message)
    cpdef ended(self, event)
    cdef int _step(self, Reduce reduce, subject, argument) except -1
    cdef Reduce _find(self, slot, generation)
    cdef _finish(self, Reduce reduce, bint begun)
    cdef _complete(self, operation, int result, int kind, bytes payload)
