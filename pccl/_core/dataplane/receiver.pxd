# Contents of `receiver`.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from .board cimport Op
from .lane cimport HEADER_BYTES, Header, Lane
from .segment_table cimport SegmentTable


cdef enum:
    WORTH_BYTES_MAX = 1 << 17       # wakes a reader often enough to keep up, and half as often as segments come
    WORTH_MS = 20                   # and not waited for any longer
    AHEAD_BYTES = 4096              # read together with a header: a small frame costs one system call


# Where a block is on this peer, or a piece of it.
cdef struct BlockMemory:
    uint64_t count                  # elements
    char *local                     # what this peer contributes
    char *out                       # where the result goes
    char *backup                    # where the old bytes of `out` go; NULL: nowhere
    uint32_t *mark                  # how many of them are there


cdef class Receiver(Lane):
    cdef char ahead[HEADER_BYTES + AHEAD_BYTES]
    cdef uint64_t have              # bytes in `ahead`
    cdef Header header              # of the frame being received, if `stage` is past it
    cdef int stage
    cdef Op *op                     # held; NULL: the frame is read and dropped
    cdef char *target               # where the payload goes; NULL: to scratch
    cdef uint64_t received          # bytes of the payload that are there
    cdef const char *source         # where the payload is, once it is whole: at the target, or lent
    cdef char *scratch              # payloads that are to be added, or dropped
    cdef uint64_t scratch_size
    cdef int worth                  # bytes that the socket wakes this worker for; 0: as many as it likes
    cdef bint trickling             # this block comes slowly, so every byte counts
    cdef int64_t waiting_ns         # since when a frame has been waited for; 0: not waiting
    cdef readonly SegmentTable borrowed  # memory of the neighbour
    cdef uint32_t unreturned        # blocks that were lent, are read, and were not given back yet

    cdef int read_header(self) noexcept nogil
    cdef int read_ahead(self) noexcept nogil
    cdef int read_notice(self) noexcept nogil
    cdef void skip(self, uint64_t nbytes) noexcept nogil
    cdef int open_frame(self) noexcept nogil
    cdef int aim(self) noexcept nogil
    cdef int read_payload(self) noexcept nogil
    cdef int close_frame(self) noexcept nogil
    cdef int borrow_block(self) noexcept nogil
    cdef int give_back(self) noexcept nogil
    cdef int write_note(self, uint32_t serial, bint accepted) noexcept nogil
    cdef uint32_t apply(self, bint has_crc) noexcept nogil
    cdef uint32_t apply_coded(self, bint has_crc) noexcept nogil
    cdef uint32_t divisor(self) noexcept nogil
    cdef bint is_sent_on(self) noexcept nogil
    cdef BlockMemory find_memory(self) noexcept nogil
    cdef char *find_coded(self) noexcept nogil
    cdef uint32_t missing_segment(self, const Op *op) noexcept nogil
    cdef int aim_at_scratch(self) noexcept nogil
    cdef void set_worth(self, int nbytes) noexcept nogil
    cdef int divert(self) noexcept nogil
    cdef int await_bytes(self) noexcept nogil
    cdef void drop(self) noexcept nogil
