# Contents of `lane`: the frame, and what a sender and a receiver have in common.

from libc.stdint cimport uint16_t, uint32_t, uint64_t

from .board cimport Board, LaneCount
from .segment_table cimport SegmentTable


cdef enum:
    FRAME_MAGIC = 0x33424350        # "PCB3"
    HEADER_BYTES = 48
    WHEREABOUTS_BYTES = 32
    PIECE_BYTES = 1 << 14           # saved, added, coded and summed up at a time: each finds it in cache after the other

# Why a loop returned.
cdef enum:
    GO_ON = 0                       # it did not: what a step says when there is another
    MAIL = 1                        # something is in the mailbox
    ENDED = 2                       # the connection is over: `problem` says why
    UNMAPPED = 3                    # the segment `wanted` must be mapped first
    FAULT = 4                       # the planned number of frames was reached
    NOTICE = 5                      # the neighbour offers memory or withdraws it: `consider` it

# What a frame is.
cdef enum:
    BLOCK = 0                       # the block follows
    PLAIN = 1                       # the block follows, without a checksum: there is nothing between the two ends
    HOST_READ = 2                   # the block lies in memory that was offered
    OFFER = 3                       # of memory; `Offer` follows
    WITHDRAWAL = 4                  # of memory
    INTRODUCTION = 5                # of the sender; its whereabouts follow


# Ahead of every block, or all that travels of it.
cdef packed struct Header:
    uint32_t magic
    uint16_t hop
    uint16_t kind
    uint64_t sequence               # of the operation
    uint64_t offset                 # of a block that is lent: in its segment
    uint32_t segment                # the sender's number for it; 0 unless memory is meant
    uint32_t chunk
    uint32_t block
    uint32_t length                 # bytes of payload
    uint32_t crc                    # CRC-32C of the payload, if it follows and is not plain
    uint32_t header_crc             # CRC-32C of all fields above


# Writes a frame that is no block, header and body.
cdef void write_notice(char *room, uint16_t kind, uint32_t segment, const void *body, uint32_t nbytes) noexcept nogil


# What a sender and a receiver have in common: a mailbox, a bell, a connection, and sleeping on all three.
cdef class Lane:
    cdef readonly Board board
    cdef readonly SegmentTable segments
    cdef readonly uint32_t wanted   # the segment that UNMAPPED is about
    cdef int lane
    cdef int wait_set
    cdef int connection             # -1: none
    cdef int error                  # errno of the end, or 0
    cdef const char *reason         # of the end, if there is no errno
    cdef bint mail                  # the mailbox has something
    cdef bint broken                # the connection was reported as over
    cdef bint heard                 # the connection has something to read
    cdef bint same_host_suspected   # the other end seems to be on this host
    cdef char whereabouts[WHEREABOUTS_BYTES]  # what both ends say alike, if there is nothing between them
    cdef bint host_read             # the other end may read our memory, or lend us its own
    cdef public uint64_t frames_until_fault  # 0: no mishap is planned
    cdef LaneCount *count

    cdef int run(self) noexcept nogil
    cdef int sleep(self, int timeout_ms) noexcept nogil
    cdef bint is_called(self) noexcept nogil
    cdef int end(self, int error, const char *reason) noexcept nogil
    cdef int visit(self) noexcept nogil
