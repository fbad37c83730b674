# Contents of `lane`: the loops of a sender and a receiver, and the frame between them.

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from .board cimport Board, Job, LaneCount, Op
from .segment_table cimport SegmentTable


cdef enum:
    FRAME_MAGIC = 0x31424350        # "PCB1"
    HEADER_BYTES = 40
    AHEAD_BYTES = 4096              # read together with a header: a small frame costs one system call
    SAVE_BYTES = 1 << 14            # saved and added at a time: what was just read for the one is in cache for the other
    RECRUIT_MS = 1                  # a socket full for this long is a slow one: another lane is asked to help

# Why a loop returned.
cdef enum:
    MAIL = 1                        # something is in the mailbox
    ENDED = 2                       # the connection is over: `problem` says why
    UNMAPPED = 3                    # the segment `wanted` must be mapped first
    FAULT = 4                       # the planned number of frames was reached


# Ahead of every block.
cdef packed struct Header:
    uint32_t magic
    uint16_t hop
    uint16_t reserved               # 0; room for sealed payloads
    uint64_t sequence               # of the operation
    uint32_t chunk
    uint32_t block
    uint32_t length                 # bytes of payload
    uint32_t crc                    # CRC-32C of the payload
    uint32_t spare                  # 0
    uint32_t header_crc             # CRC-32C of all fields above


# What a sender and a receiver have in common: a mailbox, a bell, a connection, and sleeping on all three.
cdef class Lane:
    cdef readonly Board board
    cdef readonly SegmentTable segments
    cdef readonly uint32_t wanted   # the segment that UNMAPPED is about
    cdef int lane
    cdef int epoll
    cdef int connection             # -1: none
    cdef int error                  # errno of the end, or 0
    cdef const char *reason         # of the end, if there is no errno
    cdef bint mail                  # the mailbox has something
    cdef bint broken                # the connection was reported as over
    cdef public uint64_t frames_until_fault  # 0: no mishap is planned
    cdef LaneCount *count

    cdef int sleep(self, int timeout_ms) noexcept nogil
    cdef bint is_called(self) noexcept nogil
    cdef int end(self, int error, const char *reason) noexcept nogil
    cdef int visit(self) noexcept nogil


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


cdef class Receiver(Lane):
    cdef char ahead[HEADER_BYTES + AHEAD_BYTES]
    cdef uint64_t have              # bytes in `ahead`
    cdef Header header              # of the frame being received, if `stage` is past it
    cdef int stage
    cdef Op *op                     # held; NULL: the frame is read and dropped
    cdef char *target               # where the payload goes
    cdef uint64_t received          # bytes of the payload that are there
    cdef char *scratch              # payloads that are to be added, or dropped
    cdef uint64_t scratch_size
    cdef int64_t waiting_ns         # since when a frame has been waited for; 0: not waiting

    cdef int run(self) noexcept nogil
    cdef int read_header(self) noexcept nogil
    cdef int open_frame(self) noexcept nogil
    cdef int aim(self) noexcept nogil
    cdef int read_payload(self) noexcept nogil
    cdef int close_frame(self) noexcept nogil
    cdef void apply(self) noexcept nogil
    cdef uint32_t missing_segment(self, const Op *op) noexcept nogil
    cdef int aim_at_scratch(self) noexcept nogil
    cdef int divert(self) noexcept nogil
    cdef int await_bytes(self) noexcept nogil
    cdef void drop(self) noexcept nogil
