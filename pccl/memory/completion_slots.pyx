# cython: language_level=3, auto_pickle=False
"""Completion slots: how the peer actor tells the training process that a command is done.

This module has the format of the table and the states of a slot. The caller decides what a result means, how long to
wait, and what a late beat means.

One segment, mapped by both processes, native byte order since it never leaves the host:

    header page   offset    0   magic            8 bytes
                            8   slot count       u32
                           12   slot bytes       u32
                           64   actor's beat     u64, monotonic ns, stored on every tick of the actor
                          128   actor's state    u32, a futex word whose values belong to the actor
    slot i        4096 + 1024 i
                  offset    0   state            u32, a futex word
                            4   generation       u32, counts the uses of this slot
                            8   result           i32
                           12   length           u32, bytes of payload
                           16   payload          up to 1008 bytes

The states of a slot form a cycle; each arrow belongs to one side:

    FREE ──acquire──▶ PENDING ──wait──▶ AWAITED        by the training process
                         └──────┬──────────┘
                             complete                  by the actor
                                ▼
    FREE ◀──release──────────  DONE                    by the training process

AWAITED is PENDING with a caller that sleeps or is about to; only then does the actor make the system call that wakes.
Both sides change the state by one atomic operation, so either the caller finds DONE or the actor finds AWAITED.

Only the actor ends PENDING. A caller that gives up *abandons* the slot: it is not used until the actor has completed
it, and `acquire` reuses it when no other is free. So a completion never reaches a slot that belongs to another call,
and a generation that does not match is a completion that was sent twice.

The lists of free and of abandoned slots are ordinary memory of the training process. They must not be touched in a
child of `os.fork`, which has a copy of them but shares the slots; the Communicator ensures this.

Each step here is C code that holds the GIL and runs no Python, so other threads, signal handlers and finalisers see it
done or not begun. Only a sleep releases the GIL. So the lists need no lock, and Ctrl-C cannot lose a slot between its
list and its `Slot`.
"""

import os
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from pccl._core.system cimport posix
from pccl._core.system.futex cimport (
    ALL_WAITERS,
    futex_wait,
    futex_wake,
    now_ns,
    raise_errno,
    word_compare_exchange,
    word_exchange,
    word_load,
    word_store,
)
from pccl._core.system.futex import Word

from .segments import Segment

SLOT_BYTES = <int> BYTES_EACH
PAYLOAD_BYTES_MAX = <int> PAYLOAD_MAX

# The states, for Python.
FREE = <int> IS_FREE
PENDING = <int> IS_PENDING
DONE = <int> IS_DONE
AWAITED = <int> IS_AWAITED

cdef enum:
    HEADER_BYTES = 4096             # a page of its own, so that slots never share one with the beat
    COUNT_OFFSET = 8
    SIZE_OFFSET = 12
    BEAT_OFFSET = 64                # a cache line of its own: it is written all the time
    ACTOR_OFFSET = 128

cdef bytes MAGIC = b"pcclSLOT"
cdef bytes ELLIPSIS = "…".encode()


class SlotsExhaustedError(RuntimeError):
    """Every slot belongs to a call that was not awaited: wait for some before launching more."""


# No garbage collection: a slot refers to its table, and a table to no slot.
@cython.final
@cython.no_gc
@cython.freelist(16)
cdef class Slot:
    """One use of one slot by the training process, from `acquire` to `release` or `abandon`."""

    def __init__(self):
        raise TypeError("a slot comes from SlotTable.acquire()")

    @property
    def done(self) -> bool:
        """Whether the actor completed it: one load from memory."""
        return self.is_done()

    def wait(self, int64_t timeout_ns, int64_t look_ns=0) -> bool:
        """Wait until done, at most `timeout_ns`; returns False early if a signal arrives, so callers loop.

        Polls for `look_ns` before it sleeps: a completion in that time needs no wake-up.
        """
        return self.sleep(timeout_ns, look_ns)

    @property
    def result(self) -> int:
        """The number that the actor completed it with."""
        self.require_done()
        return self.entry.result

    @property
    def payload(self) -> bytes:
        """The bytes that the actor completed it with."""
        self.require_done()
        return PyBytes_FromStringAndSize(self.entry.payload, self.entry.length)

    cpdef release(self):
        """Free the slot, which must be done; result and payload are lost then."""
        self.require_done()
        self.held = False
        self.table.recycle(self.index)

    def abandon(self) -> None:
        """Give up waiting; the slot can be used again once the actor has completed it."""
        self.require_held()
        if self.is_done():
            self.release()
        else:
            self.held = False
            self.table.abandoned[self.table.abandoned_count] = self.index
            self.table.abandoned_count += 1

    cdef bint sleep(self, int64_t timeout_ns, int64_t look_ns) except -1:
        cdef uint32_t *word = &self.entry.state
        cdef int64_t until
        cdef int code = 0
        self.require_held()
        if word_load(word) == IS_DONE:
            return True
        if look_ns > 0:
            # Other processes get the processor between two polls, and other threads get the GIL.
            with nogil:
                until = now_ns() + look_ns
                while word_load(word) == IS_PENDING and now_ns() < until:
                    posix.sched_yield()
            if word_load(word) == IS_DONE:
                return True
            # A signal that came during the polling would not interrupt the sleep below.
            PyErr_CheckSignals()
        word_compare_exchange(word, IS_PENDING, IS_AWAITED)
        if timeout_ns > 0 and word_load(word) == IS_AWAITED:
            with nogil:
                code = futex_wait(word, IS_AWAITED, timeout_ns)
        if code not in (0, posix.EAGAIN, posix.EINTR, posix.ETIMEDOUT):
            raise_errno(code, "waiting for a completion slot")
        return word_load(word) != IS_AWAITED

    cdef int require_held(self) except -1:
        if not self.held:
            raise ValueError(f"slot {self.index}, generation {self.generation}, was released or abandoned")
        return 0

    cdef int require_done(self) except -1:
        self.require_held()
        if word_load(&self.entry.state) != IS_DONE:
            raise ValueError(f"slot {self.index}, generation {self.generation}, is not done: wait for it or abandon it")
        return 0

    def __repr__(self) -> str:
        state = "given back" if not self.held else "done" if self.is_done() else "pending"
        return f"<Slot {self.index} generation={self.generation} {state}>"


@cython.final
cdef class SlotTable:
    """All slots of one communicator. The training process creates it and acquires; the actor attaches and completes.

    Made by `create` or `attach`; `acquires` tells which of the two sides this is.
    """

    def __cinit__(self, segment not None, *, bint acquires):
        cdef uint32_t index
        self.segment = segment
        self.mapping = segment.mapping
        self.actor = Word(self.mapping, ACTOR_OFFSET)
        self.count = (<uint32_t *> (self.mapping.start + COUNT_OFFSET))[0]
        if self.mapping.nbytes < HEADER_BYTES + <Py_ssize_t> self.count * BYTES_EACH:
            raise ValueError(f"{self.count} slots do not fit into {self.mapping.nbytes} bytes")
        self.entries = <Entry *> (self.mapping.start + HEADER_BYTES)
        self.idle = <uint32_t *> malloc(2 * sizeof(uint32_t) * max(self.count, 1))
        if self.idle == NULL:
            raise MemoryError
        self.abandoned = self.idle + self.count
        if acquires:
            self.idle_count = self.count
            # `acquire` takes the last one: low indexes come first, so that few memory pages are touched.
            for index in range(self.count):
                self.idle[index] = self.count - 1 - index

    def __dealloc__(self):
        free(self.idle)

    @classmethod
    def create(cls, Py_ssize_t count) -> SlotTable:
        """A table of `count` free slots, for the process that waits; memory pages are touched when their slots are."""
        if count <= 0:
            raise ValueError(f"a table has at least one slot, not {count}")
        segment = Segment.create("pccl-slots", HEADER_BYTES + count * BYTES_EACH)
        cdef Mapping mapping = segment.mapping
        (<uint32_t *> (mapping.start + COUNT_OFFSET))[0] = <uint32_t> count
        (<uint32_t *> (mapping.start + SIZE_OFFSET))[0] = BYTES_EACH
        memcpy(mapping.start, PyBytes_AS_STRING(MAGIC), PyBytes_GET_SIZE(MAGIC))
        return cls(segment, acquires=True)

    @classmethod
    def attach(cls, int fd) -> SlotTable:
        """The table in the memory of `fd`, for the process that completes; the table owns `fd` on success."""
        header = memoryview(os.pread(fd, 16, 0))
        if header[: len(MAGIC)] != MAGIC:
            raise ValueError(f"descriptor {fd} is no table of completion slots")
        _, _, count, slot_bytes = header.cast("I")
        if slot_bytes != BYTES_EACH:
            raise ValueError(f"the slots behind descriptor {fd} have {slot_bytes} bytes, ours {BYTES_EACH}")
        return cls(Segment.attach(fd, HEADER_BYTES + count * BYTES_EACH), acquires=False)

    cpdef Slot acquire(self):
        """A slot in state PENDING, for one command; from any thread of the process that created the table."""
        # Created first: after this allocation nothing can interrupt the steps from the list to the slot.
        cdef Slot slot = Slot.__new__(Slot)
        cdef Entry *entry
        if self.idle_count == 0:
            self.reclaim()
            if self.idle_count == 0:
                raise self.exhausted()
        self.idle_count -= 1
        slot.index = self.idle[self.idle_count]
        entry = &self.entries[slot.index]
        entry.generation += 1
        slot.generation = entry.generation
        slot.table = self
        slot.entry = entry
        slot.held = True
        word_store(&entry.state, IS_PENDING)
        return slot

    cpdef bint complete(self, Py_ssize_t index, uint32_t generation, int32_t result, bytes payload=b"") except -1:
        """Publish a result and wake the threads that wait for it.

        Returns False, and changes nothing, if the slot is not pending or has another generation. A payload that does
        not fit is treated as text and cut.
        """
        if not 0 <= index < <Py_ssize_t> self.count:
            raise ValueError(f"slot {index} is not in a table of {self.count}")
        cdef Entry *entry = &self.entries[index]
        cdef uint32_t state = word_load(&entry.state)
        cdef int woken
        if entry.generation != generation or state != IS_PENDING and state != IS_AWAITED:
            return False
        if PyBytes_GET_SIZE(payload) > PAYLOAD_MAX:
            payload = cut(payload)
        memcpy(entry.payload, PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))
        entry.result = result
        entry.length = <uint32_t> PyBytes_GET_SIZE(payload)
        if word_exchange(&entry.state, IS_DONE) == IS_AWAITED:
            woken = futex_wake(&entry.state, ALL_WAITERS)
            if woken < 0:
                raise_errno(-woken, "waking the threads that wait for a completion slot")
        return True

    cpdef beat(self, uint64_t awake_ns):
        """Store that the actor was awake at `awake_ns` of the monotonic clock."""
        posix.atomic_store_u64(<uint64_t *> (self.mapping.start + BEAT_OFFSET), awake_ns)

    @property
    def last_beat_ns(self) -> int:
        """When the actor was last awake; 0 before its first beat."""
        return self.beaten_ns()

    cdef uint64_t beaten_ns(self) noexcept:
        return posix.atomic_load_u64(<uint64_t *> (self.mapping.start + BEAT_OFFSET))

    @property
    def idle_slots(self) -> int:
        """How many slots are free; abandoned ones are not, though some of them may have been completed."""
        return self.idle_count

    def close(self) -> None:
        """Close the segment; slots that are still held stay readable, and the memory is released with the last one."""
        self.closed = True
        self.idle_count = self.abandoned_count = 0
        self.segment.close()

    def __enter__(self) -> SlotTable:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    cdef void recycle(self, uint32_t index) noexcept:
        word_store(&self.entries[index].state, IS_FREE)
        if not self.closed:
            self.idle[self.idle_count] = index
            self.idle_count += 1

    cdef void reclaim(self) noexcept:
        # Frees the abandoned slots that the actor has completed.
        cdef uint32_t i, owed = 0
        for i in range(self.abandoned_count):
            if word_load(&self.entries[self.abandoned[i]].state) == IS_DONE:
                self.recycle(self.abandoned[i])
            else:
                self.abandoned[owed] = self.abandoned[i]
                owed += 1
        self.abandoned_count = owed

    cdef exhausted(self):
        if self.closed:
            return ValueError("the table of completion slots is closed")
        return SlotsExhaustedError(
            f"all {self.count} completion slots are in use: {self.count - self.abandoned_count} operations were "
            f"launched and not awaited, {self.abandoned_count} were given up and are still running; await some before "
            "launching more"
        )


cdef bytes cut(bytes text):
    # Steps back over the continuation bytes of a character that would be split.
    cdef Py_ssize_t end = PAYLOAD_MAX - PyBytes_GET_SIZE(ELLIPSIS)
    while end > 0 and (<unsigned char *> PyBytes_AS_STRING(text))[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end] + ELLIPSIS
