# Contents of `reduces`: all reduces of one membership that are under way, and how one ended.

from libc.stdint cimport int32_t, uint32_t

from pccl._core.protocol.operations cimport PackedNumbers

from .call_slots cimport CallSlots
from .reduce_request cimport Launched, Request


# How a reduce ended.
cdef class Outcome:
    cdef readonly int32_t result    # the number of a Result
    cdef readonly int32_t kind      # what kind of end it was
    cdef readonly object info       # a ReduceInfo
    cdef readonly str reason


cdef class Reduces:
    cdef object actor               # the ActorClient of this membership
    cdef CallSlots calls            # its fast path
    cdef PackedNumbers world        # the numbers of the last round or collective; all zero: this peer is no member
    cdef dict pending               # tag -> un-awaited
    cdef list abandoned
    cdef Outcome ended              # the first failure that said that the membership has ended
    cdef object lock                # held where a reduce ends: another thread may close the membership meanwhile

    # Launching
    cpdef Launched launch(self, str name, Request request)
    cdef uint32_t require_ready(self, str name) except 0
    cdef int require_unused(self, str name, Request request) except -1
    cdef Launched prepare(self, str name, Request request, uint32_t world)

    # Waiting
    cpdef Outcome run(self, str name, Request request)
    cdef Outcome complete(self, str name, Launched one)
    cpdef Outcome finish(self, str name, Launched one, deadline_ns=*)
    cdef Outcome settle(self, Launched one)

    # Ending
    cdef fail(self, Launched one)
    cdef int forget(self, Launched one) except -1
    cdef abandon(self, Launched one)
    cdef sort_abandoned(self)
