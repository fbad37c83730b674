# cython: language_level=3, auto_pickle=False
"""The loop of an actor: one thread, one epoll, a few timers. It runs until `stop`.

An actor registers its mailbox and its sockets; the loop calls back. This module does not know messages or machines. It
contains everything about waiting that is specific to Linux: another system would need its own `Loop` with the same five
verbs.

It is compiled, as `connection` is, because every message of a vote passes through here several times: interpreted, half
of an actor's time for a vote was spent in these two files (measured with `perf`).
"""

import gc
import os
from cpython.exc cimport PyErr_CheckSignals
from heapq import heappop, heappush
from libc.stdint cimport int64_t, uint32_t, uint64_t

from pccl._core.system cimport posix
from pccl._core.system.futex cimport now_ns, raise_errno

IDLE_NS = 1_000_000_000  # the longest sleep: nothing is ever later than this
cdef int64_t idle_ns = IDLE_NS


cdef class Watcher:
    """The interface of an object that the loop wakes; `ready` is called for its descriptor and must be overridden."""

    cdef int ready(self, uint32_t events) except -1:
        raise NotImplementedError(f"{type(self).__name__} does not say what it is woken for")

    cpdef close(self):
        """The loop is closed and still watches the descriptor. Nothing to do for an object that does not own it."""


cdef class Handler(Watcher):
    """A callable that is called with the events."""

    def __init__(self, handle):
        self.handle = handle

    cdef int ready(self, uint32_t events) except -1:
        self.handle(events)
        return 0


def open_bell() -> int:
    """Return an eventfd. Any process that holds it can ring it, to wake the processes that sleep on it."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


cdef class Bell(Watcher):
    """An eventfd that others ring; several rings since the last call cause one call of the callable."""

    def __init__(self, int fd, handle):
        self.fd = fd
        self.handle = handle

    cdef int ready(self, uint32_t events) except -1:
        cdef uint64_t rung
        if posix.eventfd_read(self.fd, &rung) == 0:  # otherwise it was not rung, or another process has read it
            self.handle()
        return 0


cdef class Loop:
    """Calls handlers when descriptors are ready and timers are due."""

    def __cinit__(self):
        self.epoll = self.bell = -1
        self.watchers = {}
        self.timers = []
        self.running = True

    def __init__(self):
        self.epoll = posix.epoll_create1(posix.EPOLL_CLOEXEC)
        if self.epoll < 0:
            raise_errno(posix.errno, "making a loop")
        self.bell = open_bell()
        self.watch(self.bell, lambda _: None)

    def __dealloc__(self):
        if self.epoll >= 0:
            posix.close(self.epoll)
        if self.bell >= 0:
            posix.close(self.bell)

    cpdef watch(self, int fd, handler, uint32_t events=READABLE):
        """Call the handler with the ready events whenever the descriptor is ready."""
        self.control(posix.EPOLL_CTL_ADD, fd, events)
        self.watchers[fd] = handler if isinstance(handler, Watcher) else Handler(handler)

    cpdef change(self, int fd, uint32_t events):
        """Wait for other events on a descriptor that is watched."""
        self.control(posix.EPOLL_CTL_MOD, fd, events)

    cpdef forget(self, int fd):
        """Stop watching a descriptor; call this before closing it."""
        if self.watchers.pop(fd, None) is not None:
            self.control(posix.EPOLL_CTL_DEL, fd, 0)

    cdef int control(self, int operation, int fd, uint32_t events) except -1:
        cdef posix.epoll_event event
        event.events = events
        event.data.u64 = fd
        if posix.epoll_ctl(self.epoll, operation, fd, &event) < 0:
            raise_errno(posix.errno, f"watching descriptor {fd}")
        return 0

    def after(self, int64_t delay_ns, callback):
        """Call back once, after the delay. There is no cancel: a callback that became useless must do nothing."""
        self.numbers += 1
        heappush(self.timers, (now_ns() + delay_ns, self.numbers, callback))

    def collect(self, int64_t interval_ns):
        """Collect garbage now and after every interval: old callbacks, and the objects that they refer to.

        For a process that has disabled automatic collection, which could run at any time, also in its forked children.
        """
        gc.collect()
        self.after(interval_ns, lambda: self.collect(interval_ns))

    cpdef expect(self):
        """Poll for a moment before the next sleep, because an event is likely to follow at once.

        A wake-up takes tens of microseconds, more than the handling of a vote. Between two polls the loop yields the
        processor to other processes.
        """
        self.expecting = True

    def run(self, deadline, tick):
        """Serve until `stop`. `tick` is called whenever `deadline()` has passed, after the ready descriptors were read.

        A `stop` before `run` counts: a signal may come just after an actor has said that it is ready.
        """
        cdef int64_t due = deadline(), now = now_ns(), sleep_ns
        cdef int i, count
        while self.running:
            sleep_ns = min(due - now, idle_ns)
            if self.timers:
                sleep_ns = min(sleep_ns, <int64_t> self.timers[0][0] - now)
            count = 0
            if self.expecting:
                self.expecting = False
                with nogil:
                    count = self.look(now)
            if count == 0:
                count = self.sleep(sleep_ns)
            for i in range(count):
                watcher = self.watchers.get(<int> self.events[i].data.u64)
                if watcher is not None:  # None: a handler of the same round has forgotten it
                    (<Watcher> watcher).ready(self.events[i].events)
            now = now_ns()
            while self.timers and <int64_t> self.timers[0][0] <= now:
                heappop(self.timers)[2]()
            due = deadline()
            if now >= due:
                tick(now)
                due = deadline()
        self.running = True  # one stop ends one run

    cdef int look(self, int64_t now) noexcept nogil:
        cdef int64_t until = now + self.look_ns
        cdef int count
        while now < until:
            count = posix.epoll_wait(self.epoll, self.events, EVENTS_MAX, 0)
            if count:
                return max(count, 0)
            posix.sched_yield()
            now = now_ns()
        return 0

    cdef int sleep(self, int64_t sleep_ns) except -1:
        cdef int count, timeout_ms
        # Rounded up: a wake-up before the deadline would be useless.
        timeout_ms = <int> ((sleep_ns + 999_999) // 1_000_000) if sleep_ns > 0 else 0
        PyErr_CheckSignals()
        with nogil:
            count = posix.epoll_wait(self.epoll, self.events, EVENTS_MAX, timeout_ms)
        if count < 0:
            if posix.errno != posix.EINTR:
                raise_errno(posix.errno, "waiting for events")
            PyErr_CheckSignals()
            return 0
        return count

    def stop(self):
        """End `run` after the present round. If the loop is not running, the next `run` returns at once."""
        self.running = False
        os.eventfd_write(self.bell, 1)

    def close(self):
        """Close every watcher that is left, then the loop's own descriptors."""
        for watcher in list(self.watchers.values()):
            (<Watcher> watcher).close()
        self.watchers.clear()
        self.timers.clear()
        if self.epoll >= 0:
            os.close(self.epoll)
            os.close(self.bell)
            self.epoll = self.bell = -1
