# Contents of `futex`: words that processes share and sleep on, the clock, and how an error code becomes an exception.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint32_t, uint64_t

from . cimport posix


# Atomic access to a shared word, for loops that hold no GIL. Loads acquire, stores release.

cdef inline uint32_t word_load(const uint32_t *word) noexcept nogil:
    return posix.atomic_load_u32(word)


cdef inline void word_store(uint32_t *word, uint32_t value) noexcept nogil:
    posix.atomic_store_u32(word, value)


cdef inline uint32_t word_exchange(uint32_t *word, uint32_t value) noexcept nogil:
    return posix.atomic_exchange_u32(word, value)


cdef inline bint word_compare_exchange(uint32_t *word, uint32_t expected, uint32_t desired) noexcept nogil:
    return posix.atomic_compare_exchange_u32(word, expected, desired)


# Sleeps while the word holds `expected`, at most `timeout_ns` (below zero: not at all). Returns 0 when woken,
# otherwise the error code: EAGAIN (the word has changed already), EINTR and ETIMEDOUT are normal.
cdef int futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns) noexcept nogil

# For `futex_wake`: all threads that sleep on the word.
cdef enum:
    ALL_WAITERS = 0x7FFFFFFF

# Wakes at most `count` sleepers and returns how many it woke, or minus the error code.
cdef int futex_wake(uint32_t *word, int count) noexcept nogil

# CLOCK_MONOTONIC, the same in all processes of a host.
cdef int64_t now_ns() noexcept nogil

# Raises OSError for an error code; `doing` completes "... while ".
cdef int raise_errno(int code, str doing) except -1


# A few aligned bytes in a buffer, which stays exported as long as the cell lives.
cdef class Cell:
    cdef Py_buffer exported         # keeps the memory mapped while a thread may sleep on it
    cdef void *start                # the first byte of the cell

    cdef int pin(self, object buffer, Py_ssize_t offset, Py_ssize_t size) except -1


# 32 bits that processes wait on.
cdef class Word(Cell):
    cdef inline uint32_t *at(self) noexcept nogil:
        return <uint32_t *> self.start


# 64 bits that are read and written atomically: counters and times. A futex has only 32 bits.
cdef class Stamp(Cell):
    cdef inline uint64_t *at(self) noexcept nogil:
        return <uint64_t *> self.start
