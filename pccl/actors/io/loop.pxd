# The loop of an actor, and the interface of the objects that it wakes; the bodies are in loop.pyx.

from libc.stdint cimport int64_t, uint32_t

from pccl._core.system cimport posix


cdef enum:
    EVENTS_MAX = 64                     # per wake-up, so that timers are checked even if the sockets are busy


# What a descriptor is watched for, and what happened to it.
cdef extern from * nogil:
    """
    #include <sys/epoll.h>
    #define PCCL_READABLE EPOLLIN
    #define PCCL_WRITABLE EPOLLOUT
    #define PCCL_BROKEN (EPOLLHUP | EPOLLERR)
    """
    uint32_t READABLE "PCCL_READABLE"
    uint32_t WRITABLE "PCCL_WRITABLE"
    uint32_t BROKEN "PCCL_BROKEN"       # the other side is gone, or the descriptor has failed; always watched for


# The interface of an object that is woken when a descriptor is ready; `ready` must be overridden. An object that owns
# its descriptor overrides `close` too: the loop calls it if it is closed first.
cdef class Watcher:
    cdef int ready(self, uint32_t events) except -1
    cpdef close(self)


# A callable that is called with the events.
cdef class Handler(Watcher):
    cdef object handle


# An eventfd, and the callable that is called when it was rung.
cdef class Bell(Watcher):
    cdef int fd
    cdef object handle


cdef class Loop:
    cdef int epoll
    cdef int bell                       # written by stop(), also from a signal handler, to wake a sleeping loop
    cdef dict watchers                  # descriptor -> the Watcher that is woken for it
    cdef list timers                    # a heap of (due, number, callback)
    cdef int64_t numbers                # of timers so far: timers that are due at the same time keep their order
    cdef bint running
    cdef bint expecting                 # an event is likely to follow at once
    cdef public int64_t look_ns         # how long to poll for an expected event before sleeping
    cdef posix.epoll_event events[EVENTS_MAX]

    cpdef watch(self, int fd, handler, uint32_t events=*)
    cpdef change(self, int fd, uint32_t events)
    cpdef forget(self, int fd)
    cpdef expect(self)

    cdef int control(self, int operation, int fd, uint32_t events) except -1
    cdef int look(self, int64_t now) noexcept nogil
    cdef int sleep(self, int64_t sleep_ns) except -1
