# Contents of `call_slots`: the fast path of a call from the training process to its actor and back.

from libc.stdint cimport int32_t, int64_t, uint32_t

from pccl.memory.arena cimport Arena
from pccl.memory.completion_slots cimport Slot, SlotTable


cdef enum:
    SLICE_NS = 50_000_000           # how long a caller sleeps between two checks of the actor


cdef class CallSlots:
    cdef readonly SlotTable table   # the completion slots
    cdef public int fd              # of the mailbox; -1 after it was closed: the number may belong to another file then
    cdef public set shared          # segments that the actor knows
    cdef public int64_t looked_ns   # when a caller last checked the actor, or posted to it
    cdef public int64_t noticed_ns  # when log lines of the actor were last collected
    cdef int sleepers               # threads that sleep in calls at this moment
    cdef int threads                # the most that ever did; the master knows it
    cdef public bint over           # the membership has ended; every further call fails
    cdef readonly object fault      # the fault that a test has planned for this process, or None
    cdef object callbacks           # for rare cases: a Callbacks
    cdef int64_t look_ns            # how long a caller polls its slot before it sleeps
    cdef int64_t notice_ns          # how often log lines are collected by calls that never sleep

    # To the actor
    cdef Slot slot_for(self, str name)
    cdef int visit(self, str point) except -1
    cdef int send(self, str name, const char *data, size_t length) except -1
    cdef int make_known(self, str name, uint32_t segment, Arena arena) except -1

    # From the actor
    cdef bint sleep(self, str name, Slot slot, int64_t slice_ns) except -1
    cdef int tell_threads(self, str name) except -1
    cdef int collect_notices(self) except -1
    cdef bytes outcome(self, Slot slot, int32_t *result)
