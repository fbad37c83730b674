# Contents of `sender`.

from libc.stdint cimport uint64_t

from .board cimport Job
from .lane cimport Header, Lane


cdef enum:
    RECRUIT_MS = 1                  # a socket full for this long is a slow one: another lane is asked to help


cdef class Sender(Lane):
    cdef Job job                    # the block being sent
    cdef bint pending               # `job` was taken, but its frame is not begun
    cdef bint entered               # the operation of `job` is held
    cdef Header header
    cdef uint64_t header_left       # bytes of the header still to send
    cdef const char *payload
    cdef uint64_t payload_left
    cdef uint64_t length
    cdef char *rescue               # the rest of a frame whose operation was aborted under way
    cdef uint64_t rescue_size
    cdef bint blocked               # the socket has been full for a while, and the others know

    cdef int run(self) noexcept nogil
    cdef int prepare(self) noexcept nogil
    cdef int transmit(self) noexcept nogil
    cdef int await_room(self) noexcept nogil
    cdef void set_blocked(self, bint blocked) noexcept nogil
    cdef void rest(self) noexcept nogil
    cdef int finish(self) noexcept nogil
    cdef int let_go(self) noexcept nogil
