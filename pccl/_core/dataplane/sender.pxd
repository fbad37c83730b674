# Contents of `sender`.

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from .board cimport Job
from .host_read cimport Loans, Note
from .inflight cimport LinkReport
from .lane cimport Header, Lane
from .segment_table cimport MappedSegment


cdef enum:
    RECRUIT_MS = 4                  # a socket full for this long is a slow one: another lane is asked to help
    RECRUIT_MS_MAX = 1024           # and asked again, ever more rarely, while it lasts
    SLOW_NS = 1_000_000             # a frame that takes longer may be slow enough to matter at the end
    SLOW_TIMES = 4                  # so much slower than another lane is slow
    STREAK = 8                      # frames without a full socket are the link's doing, fewer its buffer's
    REPORT_MS = 5                   # so often a full socket of a far link is asked what it has under way
    AWAIT_PART = 32_000             # and who finds enough under way looks again after a 32nd of a round trip, from µs to ms
    BACKLOG_FRAMES = 3              # what a slow lane has in the kernel when it takes one more
    NOTES_MAX = 16                  # answers read at a time


cdef class Sender(Lane):
    cdef Job job                    # the block being sent
    cdef bint pending               # `job` was taken, but its frame is not begun
    cdef bint entered               # the operation of `job` is held
    cdef Header header
    cdef uint64_t header_left       # bytes of the header still to send
    cdef MappedSegment *mapped      # of the segment that the payload lies in; NULL: in memory of our own
    cdef const char *payload
    cdef uint64_t payload_left
    cdef uint64_t length
    cdef char *own                  # memory of this process: a block that was coded here, or what was left of an aborted one
    cdef uint64_t own_size
    cdef bint blocked               # the socket has been full for a while, and the others know
    cdef int patience_ms            # until the others are asked again
    cdef int streak                 # frames since the socket was last full
    cdef int64_t taken_ns           # when `job` was taken
    cdef int64_t declining_ns       # since when blocks are left to faster lanes; 0: they are not
    cdef bint far                   # the link has long round trips: what is under way is counted
    cdef LinkReport report          # of its connection
    cdef bint reporting             # the others know it
    cdef readonly bint same_host_verified  # there is nothing between us and the next peer, which has said so
    cdef uint32_t pid               # of this process
    cdef uint32_t offers            # made on this connection
    cdef bint by_host_read          # the frame being sent is only a header: its block is lent
    cdef Loans loans
    cdef char *notices              # frames about memory that go out before the next block
    cdef uint64_t notices_length
    cdef uint64_t notices_size
    cdef Note notes[NOTES_MAX]      # what is being read of the neighbour's answers
    cdef uint64_t notes_length      # bytes of it

    cdef bint would_be_last(self) noexcept nogil
    cdef void leave_it_to_others(self) noexcept nogil
    cdef int prepare(self) noexcept nogil
    cdef int find_payload(self, uint32_t chunk) noexcept nogil
    cdef int save_payload(self, uint32_t chunk) noexcept nogil
    cdef int encode(self, const char *values, uint64_t count) noexcept nogil
    cdef int reserve(self, uint64_t nbytes) noexcept nogil
    cdef bint may_be_read_there(self) noexcept nogil
    cdef int notify(self, uint16_t kind, uint32_t segment, const void *body, uint32_t nbytes) noexcept nogil
    cdef void send_notices(self) noexcept nogil
    cdef int offer(self) noexcept nogil
    cdef int hear(self) noexcept nogil
    cdef int obey(self, const Note *note) noexcept nogil
    cdef void await_return(self) noexcept nogil
    cdef void write_header(self, uint32_t chunk) noexcept nogil
    cdef int transmit(self) noexcept nogil
    cdef uint64_t room(self) noexcept nogil
    cdef void cease_to_report(self) noexcept nogil
    cdef int await_room(self) noexcept nogil
    cdef int await_others(self) noexcept nogil
    cdef int wake_up(self, int64_t began) noexcept nogil
    cdef void set_blocked(self, bint blocked) noexcept nogil
    cdef void rest(self) noexcept nogil
    cdef int finish(self) noexcept nogil
    cdef void measure(self) noexcept nogil
    cdef int let_go(self) noexcept nogil
