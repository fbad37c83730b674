# Contents of `completion_slots`: the table that a training process and its actor share, and one use of a slot.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pccl._core.system.futex cimport word_load
from pccl._core.system.mapping cimport Mapping


cdef enum:
    BYTES_EACH = 1024               # room for a refusal with its reason, or for the fixed results of a collective
    PAYLOAD_MAX = BYTES_EACH - 16   # the bytes after the four numbers of a slot


# The states of a slot.
cdef enum:
    IS_FREE = 0                     # not in use
    IS_PENDING = 1                  # the actor owes a completion
    IS_DONE = 2                     # result and payload are there
    IS_AWAITED = 3                  # the actor owes a completion and a wake-up


# One slot in shared memory.
cdef struct Entry:
    uint32_t state                  # the futex word
    uint32_t generation             # counts the uses of this slot
    int32_t result
    uint32_t length                 # bytes of payload
    char payload[PAYLOAD_MAX]


# One use of one slot by the training process.
cdef class Slot:
    cdef readonly uint32_t index
    cdef readonly uint32_t generation  # which use of the slot this is
    cdef bint held                  # neither released nor abandoned
    cdef SlotTable table            # keeps the memory mapped while a thread may sleep on it
    cdef Entry *entry

    cpdef release(self)
    cdef bint sleep(self, int64_t timeout_ns, int64_t look_ns) except -1
    cdef int require_held(self) except -1
    cdef int require_done(self) except -1

    cdef inline bint is_done(self) noexcept:
        return self.held and word_load(&self.entry.state) == IS_DONE


# All slots of one communicator, as one of its two processes holds them.
cdef class SlotTable:
    cdef readonly object segment
    cdef readonly object actor      # the futex word of the actor's state
    cdef readonly uint32_t count    # of slots
    cdef Mapping mapping            # keeps the entries mapped, also when the segment is closed
    cdef Entry *entries
    cdef uint32_t *idle             # free slots, the next one last; room for all
    cdef uint32_t idle_count
    cdef uint32_t *abandoned        # given up and maybe not completed; room for all
    cdef uint32_t abandoned_count
    cdef bint closed

    cpdef Slot acquire(self)
    cpdef bint complete(self, Py_ssize_t index, uint32_t generation, int32_t result, bytes payload=*) except -1
    cpdef beat(self, uint64_t awake_ns)
    cdef uint64_t beaten_ns(self) noexcept
    cdef void recycle(self, uint32_t index) noexcept
    cdef void reclaim(self) noexcept
    cdef exhausted(self)
