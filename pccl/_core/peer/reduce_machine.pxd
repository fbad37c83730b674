# What a peer knows of its reduces; the bodies are in reductions.pyx.

cdef class Reduction:
    cdef readonly object operation       # as its caller asked for it
    cdef readonly object tag
    cdef readonly object sequence        # of the collective; 0 before it commenced
    cdef readonly str phase              # INITIATED, RUNNING, VOTED or ABORTING
    cdef readonly bint begun             # lanes were told of it
    cdef readonly bint quiet             # aborted, and nobody touches its memory any more
    cdef readonly bint answers           # the master waits to hear that it is quiet
    cdef readonly bint cancelled         # its caller gave up
    cdef readonly bint awaited           # the master knows that its caller blocks
    cdef readonly str reason             # why this peer gave it up
    cdef readonly tuple ending           # (result, kind, payload) of its slot, as soon as it is known
    cdef bytes payload                   # what its caller gets if it succeeds
    cdef bytes numbers                   # of the world in which it commenced
    cdef object world                    # members of the ring when it began
    cdef object moved                    # bytes so far
    cdef long long moved_ns              # when that last grew
    cdef long long pause_ns              # the longest time in which it did not

cdef class ReduceMachine:
    cdef readonly dict tags              # tag -> Reduction, until its slot is completed
    cdef readonly dict sequences         # sequence -> Reduction, of those that commenced, in that order
    cdef readonly object latest          # sequence number of the latest that commenced
    cdef bytes numbers                   # of the world, as the master told them last, packed
    cdef long long stall_ns
    cdef long long now_ns                # of the event being handled
    cdef list actions                    # of the event being handled

    cdef begin(self, list actions, long long now_ns)
    cpdef call(self, bytes operations)
    cpdef str commence(self, message, order, bint whole)
    cpdef str done(self, sequence)
    cpdef ended(self, event)
    cdef Reduction _find(self, slot, sequence)
    cdef _abort(self, Reduction reduction, str reason)
    cdef _finish(self, Reduction reduction)
    cdef _complete(self, operation, int result, int kind, bytes payload)
