# Contents of `wait_set`: sleeping on several descriptors at once, for loops that hold no GIL.
#
# A wait set is a descriptor. Functions return -1, with errno, if they fail.

from libc.stdint cimport uint32_t

from . cimport posix


cdef enum:
    WAITED_MAX = 4                  # events that one sleep tells of

# What happened to a descriptor.
cdef enum:
    IS_READABLE = 1
    IS_OVER = 2                     # the other side will send no more, or the connection is broken


cdef struct Happened:
    uint32_t whose                  # the number that the descriptor was added with
    uint32_t what                   # IS_READABLE, IS_OVER, both, or neither: there is room to write


cdef inline int open_wait_set() noexcept nogil:
    return posix.epoll_create1(posix.EPOLL_CLOEXEC)


# Tell whenever there is something to read.
cdef inline int wait_for_input(int wait_set, int fd, uint32_t whose) noexcept nogil:
    return watch(wait_set, fd, posix.EPOLLIN, whose)


# Tell once for every ring, so that nothing has to be read for the next one.
cdef inline int wait_for_bell(int wait_set, int fd, uint32_t whose) noexcept nogil:
    return watch(wait_set, fd, posix.EPOLLIN | posix.EPOLLET, whose)


# Tell once for every change: something to read, room to write, the end.
cdef inline int wait_for_changes(int wait_set, int fd, uint32_t whose) noexcept nogil:
    return watch(wait_set, fd, posix.EPOLLIN | posix.EPOLLOUT | posix.EPOLLRDHUP | posix.EPOLLET, whose)


cdef inline int watch(int wait_set, int fd, uint32_t events, uint32_t whose) noexcept nogil:
    cdef posix.epoll_event event
    event.events = events
    event.data.u64 = whose
    return posix.epoll_ctl(wait_set, posix.EPOLL_CTL_ADD, fd, &event)


cdef inline int stop_waiting_for(int wait_set, int fd) noexcept nogil:
    return posix.epoll_ctl(wait_set, posix.EPOLL_CTL_DEL, fd, NULL)


# Sleep until something happens, at most that long, or without end if below zero. Returns how many of `happened`.
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


# Wake whoever sleeps on a bell.
cdef inline void ring_bell(int fd) noexcept nogil:
    posix.eventfd_write(fd, 1)
