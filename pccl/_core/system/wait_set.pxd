# Contents of `wait_set`: sleep on several descriptors at once, for loops that hold no GIL.
#
# A wait set is a descriptor. Functions return -1, with errno, if they fail.

from libc.stdint cimport uint32_t

from . cimport posix


cdef enum:
    WAITED_MAX = 4                  # events that one sleep returns

# What happened to a descriptor.
cdef enum:
    IS_READABLE = 1
    IS_OVER = 2                     # the other side has closed, or the connection has failed


cdef struct Happened:
    uint32_t whose                  # the number that the descriptor was added with
    uint32_t what                   # IS_READABLE, IS_OVER, both, or 0: there is room to write


cdef inline int open_wait_set() noexcept nogil:
    return posix.epoll_create1(posix.EPOLL_CLOEXEC)


# Reports as long as there is something to read.
cdef inline int wait_for_input(int wait_set, int fd, uint32_t whose) noexcept nogil:
    return watch(wait_set, fd, posix.EPOLLIN, whose)


# Reports once for every ring, so that the bell need not be read.
cdef inline int wait_for_bell(int wait_set, int fd, uint32_t whose) noexcept nogil:
    return watch(wait_set, fd, posix.EPOLLIN | posix.EPOLLET, whose)


# Reports once for every change: something to read, room to write, the end.
cdef inline int wait_for_changes(int wait_set, int fd, uint32_t whose) noexcept nogil:
    return watch(wait_set, fd, posix.EPOLLIN | posix.EPOLLOUT | posix.EPOLLRDHUP | posix.EPOLLET, whose)


cdef inline int watch(int wait_set, int fd, uint32_t events, uint32_t whose) noexcept nogil:
    cdef posix.epoll_event event
    event.events = events
    event.data.u64 = whose
    return posix.epoll_ctl(wait_set, posix.EPOLL_CTL_ADD, fd, &event)


cdef inline int stop_waiting_for(int wait_set, int fd) noexcept nogil:
    return posix.epoll_ctl(wait_set, posix.EPOLL_CTL_DEL, fd, NULL)


# Sleeps until an event, at most that long, or without limit if below zero. Returns the number of events.
cdef inline int sleep_on(int wait_set, Happened *happened, int timeout_ms) noexcept nogil:
    cdef posix.epoll_event events[WAITED_MAX]
    cdef int count = posix.epoll_wait(wait_set, events, WAITED_MAX, timeout_ms), index
    for index in range(count):
        happened[index].whose = events[index].data.u64
        happened[index].what = 0
        if events[index].events & posix.EPOLLIN:
            happened[index].what |= IS_READABLE
        if events[index].events & (posix.EPOLLRDHUP | posix.EPOLLHUP | posix.EPOLLERR):
            happened[index].what |= IS_OVER
    return count


# Wakes the process that sleeps on a bell.
cdef inline void ring_bell(int fd) noexcept nogil:
    posix.eventfd_write(fd, 1)
