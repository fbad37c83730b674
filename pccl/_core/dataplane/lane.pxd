# Contents of `lane`: the frame, and what a sender and a receiver have in common.

from libc.stdint cimport uint16_t, uint32_t, uint64_t

from .board cimport Board, LaneCount
from .segment_table cimport SegmentTable


cdef enum:
    FRAME_MAGIC = 0x33424350        # "PCB3"
    HEADER_BYTES = 48
    WHEREABOUTS_BYTES = 32

# Why a loop returned.
cdef enum:
    GO_ON = 0                       # the loop continues: returned by a step, never by the loop
    MAIL = 1                        # something is in the mailbox
    ENDED = 2                       # the connection has ended: `problem` says why
    UNMAPPED = 3                    # the segment `wanted` must be mapped first
    FAULT = 4                       # the planned number of frames was reached
    HOST_FRAME = 5                  # the neighbour offers memory or withdraws it: call `answer_host_frame`

# What a frame is.
cdef enum:
    BLOCK = 0                       # the block follows
    PLAIN = 1                       # the block follows without a CRC: both ends are on the same host
    HOST_READ = 2                   # the block lies in memory that was offered
    OFFER = 3                       # of memory; `Offer` follows
    WITHDRAWAL = 4                  # of memory
    INTRODUCTION = 5                # of the sender; its whereabouts follow


# The header of every frame; of a host read it is the whole frame.
cdef packed struct Header:
    uint32_t magic
    uint16_t hop
    uint16_t kind
    uint64_t sequence               # of the operation
    uint64_t offset                 # of a block on loan: in its segment
    uint32_t segment                # the sender's number for it; 0 if the frame is not about memory
    uint32_t chunk
    uint32_t block
    uint32_t length                 # bytes of payload
    uint32_t crc                    # CRC-32C of the payload, if it follows and is not plain
    uint32_t header_crc             # CRC-32C of all fields above


# Memory of this process that grows and is reused.
cdef struct Scratch:
    char *bytes
    uint64_t size


# Makes room for that many bytes; the old content is lost. Returns 0, or -1 if there is no memory.
cdef int reserve(Scratch *scratch, uint64_t nbytes) noexcept nogil


# What a sender and a receiver have in common: a mailbox, a bell, a connection, and sleeping on all three.
cdef class LaneEnd:
    cdef readonly Board board
    cdef readonly SegmentTable segments
    cdef readonly uint32_t wanted   # the segment that is not mapped, after UNMAPPED
    cdef int lane
    cdef int wait_set
    cdef int connection             # -1: none
    cdef int error                  # errno of the end, or 0
    cdef const char *reason         # of the end, if there is no errno
    cdef bint mail                  # the mailbox has something
    cdef bint closed                # the other side has closed the connection
    cdef bint readable              # the connection has something to read
    cdef bint same_host_suspected   # the other end seems to be on this host
    cdef char whereabouts[WHEREABOUTS_BYTES]  # equal at both ends if the connection does not leave the host
    cdef bint host_read             # blocks may be read in the sender's memory
    cdef public uint64_t frames_until_fault  # 0: no fault is planned
    cdef LaneCount *count

    cdef int sleep(self, int timeout_ms) noexcept nogil
    cdef bint has_mail(self) noexcept nogil
    cdef int end(self, int error, const char *reason) noexcept nogil
    cdef int count_to_fault(self) noexcept nogil
