# cython: language_level=3, auto_pickle=False
"""Words in shared memory that processes wait on, and the clock that all processes of a host share.

Callers decide what to wait for and how long. Another system would need another implementation of the same names.

A sleeper passes the value that it read last. The kernel compares it with the memory and sleeps in one atomic step, so
a change between read and sleep is never missed. A wake-up is only a hint: signals, timeouts and spurious wake-ups end a
sleep early, and `wait` then reads from memory whether the value has changed. Callers loop; between two rounds Python
runs its signal handlers, so Ctrl-C ends every blocking call.
"""

import os
cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from . cimport posix

cdef int64_t NS_PER_SECOND = 1_000_000_000


cdef int futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns) noexcept nogil:
    cdef posix.timespec bound
    if timeout_ns < 0:
        timeout_ns = 0
    bound.tv_sec = timeout_ns // NS_PER_SECOND
    bound.tv_nsec = timeout_ns % NS_PER_SECOND
    if posix.syscall(posix.SYS_futex, word, posix.FUTEX_WAIT, expected, &bound, NULL, 0) == 0:
        return 0
    return posix.errno


cdef int futex_wake(uint32_t *word, int count) noexcept nogil:
    cdef long woken = posix.syscall(posix.SYS_futex, word, posix.FUTEX_WAKE, count, NULL, NULL, 0)
    return <int> woken if woken >= 0 else -posix.errno


cdef int64_t now_ns() noexcept nogil:
    cdef posix.timespec now
    posix.clock_gettime(posix.CLOCK_MONOTONIC, &now)
    return now.tv_sec * NS_PER_SECOND + now.tv_nsec


cdef int raise_errno(int code, str doing) except -1:
    raise OSError(code, f"{os.strerror(code)} while {doing}")


# No garbage collection: to break a cycle it would clear the object without the release that the exporter needs.
@cython.no_gc
cdef class Cell:
    """The common part of Word and Stamp: bytes of a buffer that stays exported while the cell lives."""

    def __dealloc__(self):
        PyBuffer_Release(&self.exported)

    cdef int pin(self, object buffer, Py_ssize_t offset, Py_ssize_t size) except -1:
        PyObject_GetBuffer(buffer, &self.exported, PyBUF_WRITABLE)
        if offset < 0 or offset > self.exported.len - size:
            raise ValueError(f"{size} bytes at offset {offset} do not lie in a buffer of {self.exported.len} bytes")
        self.start = <char *> self.exported.buf + offset
        # An atomic access that straddles two cache lines is not atomic, and the kernel refuses such a futex.
        if <uintptr_t> self.start % size != 0:
            raise ValueError(f"offset {offset} is not aligned to {size} bytes in memory")
        return 0


@cython.final
@cython.no_gc
cdef class Word(Cell):
    """A shared u32 at `offset` bytes into a writable `buffer`, on which processes wait for each other."""

    def __cinit__(self, buffer, Py_ssize_t offset=0):
        self.pin(buffer, offset, sizeof(uint32_t))

    def load(self) -> int:
        """The present value; what its writer stored before it is visible too."""
        return word_load(self.at())

    def store(self, uint32_t value) -> None:
        """Publishes `value` and all that was written before it. Wakes no sleeper."""
        word_store(self.at(), value)

    def exchange(self, uint32_t value) -> int:
        """Stores `value` and returns the old value, in one atomic step."""
        return word_exchange(self.at(), value)

    def compare_exchange(self, uint32_t expected, uint32_t desired) -> bool:
        """Stores `desired` if the word holds `expected`; returns whether it did."""
        return word_compare_exchange(self.at(), expected, desired)

    def wake(self, int n=1) -> int:
        """Wakes at most `n` sleepers, in any process, and returns how many it woke."""
        cdef int woken = futex_wake(self.at(), n)
        if woken < 0:
            raise_errno(-woken, "waking the sleepers of a shared word")
        return woken

    def wake_all(self) -> int:
        """Wakes all sleepers, in any process, and returns how many it woke."""
        return self.wake(ALL_WAITERS)

    def look(self, uint32_t expected, int64_t duration_ns) -> bool:
        """Polls while the word holds `expected`, at most that long; True if it holds another value now.

        It yields the processor between two reads and releases the GIL.
        """
        cdef uint32_t *word = self.at()
        cdef int64_t until
        if word_load(word) != expected:
            return True
        with nogil:
            until = now_ns() + duration_ns
            while word_load(word) == expected and now_ns() < until:
                posix.sched_yield()
        return word_load(word) != expected

    def wait(self, uint32_t expected, int64_t timeout_ns) -> bool:
        """Sleeps while the word holds `expected`, at most `timeout_ns`; True if it holds another value now.

        The GIL is released during the sleep. False means that the value is the same, after the timeout or earlier.
        """
        cdef uint32_t *word = self.at()
        cdef int code
        if word_load(word) != expected:
            return True
        if timeout_ns <= 0:
            return False
        with nogil:
            code = futex_wait(word, expected, timeout_ns)
        if code not in (0, posix.EAGAIN, posix.EINTR, posix.ETIMEDOUT):
            raise_errno(code, "waiting for a shared word")
        return word_load(word) != expected


@cython.final
@cython.no_gc
cdef class Stamp(Cell):
    """A shared u64 at `offset` bytes into a writable `buffer`, read and written atomically."""

    def __cinit__(self, buffer, Py_ssize_t offset=0):
        self.pin(buffer, offset, sizeof(uint64_t))

    def load(self) -> int:
        """The present value; what its writer stored before it is visible too."""
        return posix.atomic_load_u64(self.at())

    def store(self, uint64_t value) -> None:
        """Publishes `value` and all that was written before it."""
        posix.atomic_store_u64(self.at(), value)


def monotonic_ns() -> int:
    """Nanoseconds of a clock that never goes back and that all processes of this host share."""
    return now_ns()
