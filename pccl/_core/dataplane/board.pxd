# Contents of `board`: what the actor and its workers share while operations run.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t, uint64_t

from pccl._core.kernels.arithmetic cimport Codec

from .inflight cimport InflightBudget, LinkCount
from .plan cimport Plan


cdef enum:
    OPERATIONS_MAX = 256            # on the board at a time; an operation stands at its sequence modulo this
    OPERATION_WORDS = 4             # of 64 bits: one bit for each operation
    LANES_MAX = 256                 # as in options: senders, and as many receivers
    LANE_WORDS = 4                  # of 64 bits: one bit for each lane
    QUEUE_BITS = 17
    QUEUE_CELLS = 1 << QUEUE_BITS   # twice BLOCKS_ADMITTED: stale entries of aborted operations need room as well
    BLOCKS_ADMITTED = 1 << 16       # blocks of all operations on the board together, so that a queue is never full
    SMALL_BYTES_MAX = 1 << 20       # operations up to this size go ahead of larger ones
    ARRIVAL_WORDS = 512             # of 64 bits: one bit for each block of each hop, which are less than 2 * BLOCKS_MAX

# What an operation on the board is.
cdef enum:
    FREE = 0                        # nobody's
    RUNNING = 1
    ABORTED = 2                     # workers let go of its memory; its frames are dropped

# Flags of an operation, set by the communicator.
cdef enum:
    BACKED_UP = 1                   # in place and zero-copy: what is overwritten is saved first


cdef inline uint64_t lane_bit(int lane) noexcept nogil:
    """The bit of a lane in its word."""
    return <uint64_t> 1 << lane % 64


# One operation, from commence to verdict. The actor writes the lower part before it publishes the state.
cdef struct Op:
    uint64_t sequence               # the group's number for it
    uint32_t state
    uint32_t users                  # workers that touch its memory now; never reset, because late ones still count down
    uint64_t remaining              # blocks to receive plus blocks to send
    uint32_t own_next               # the next block of this peer's own chunk that no sender has taken
    uint32_t own_blocks
    uint64_t moved                  # bytes received and sent so far: what a stall is measured by
    uint64_t sent_bytes             # payload
    uint64_t received_bytes         # payload
    uint64_t network_ns             # workers waited in the middle of a frame
    uint64_t neighbour_ns           # receivers waited for a frame to begin
    uint64_t reduce_ns              # receivers added
    uint64_t begun_ns
    uint32_t rank
    uint32_t datatype
    uint32_t op
    uint32_t itemsize
    uint32_t flags
    uint32_t small                  # 1: goes ahead of large ones
    uint32_t send_segment
    uint32_t recv_segment
    uint32_t backup_segment
    uint32_t area_segment           # of a quantized operation: where coded blocks lie between receiver and sender
    uint64_t send_offset
    uint64_t recv_offset
    uint64_t backup_offset
    uint64_t area_offset
    Codec codec
    Plan plan


# A block that is ready to be sent. The state of a cell counts laps, so fresh zero pages are an empty queue.
cdef struct QueueCell:
    uint64_t state                  # twice the lap: writable; one more: readable
    uint64_t sequence
    uint32_t hop
    uint32_t block
    uint32_t crc                    # of the payload: who made it ready had it in cache
    uint32_t has_crc                # 0: nobody has computed that, because it is not likely to be sent


cdef struct Queue:
    uint64_t head                   # where the next block is put
    uint64_t pad0[7]
    uint64_t tail                   # where the next block is taken
    uint64_t pad1[7]
    QueueCell cells[QUEUE_CELLS]


# What one worker has done since it started.
cdef struct LaneCount:
    uint64_t payload_bytes
    uint64_t frames
    uint64_t network_ns
    uint64_t neighbour_ns
    uint64_t reduce_ns
    uint32_t attention              # 1: the actor put something into the mailbox of this worker
    uint32_t pad0
    uint64_t frame_ns               # of a sender: from taking a large block to having given it to the kernel, on average
    LinkCount counted               # of a sender on a far link: what its connection has done
    uint64_t pad1[4]


cdef struct Shared:
    uint64_t commenced              # the highest sequence that was put on the board
    uint32_t early                  # receivers that wait for a sequence beyond it
    uint32_t same_host_verified     # 1: there is nothing between us and the next peer, and blocks need no checksums
    uint64_t present[LANE_WORDS]    # senders that have a connection
    uint64_t idle[LANE_WORDS]       # senders that found nothing to do and sleep
    uint64_t blocked[LANE_WORDS]    # senders whose socket has been full for a while
    InflightBudget budget           # what all senders have under way on a far link
    uint64_t owning[2][OPERATION_WORDS]  # operations, large and small, whose own chunk is not all taken
    uint32_t turn[2]                # of large and small operations, the place whose own chunk comes next
    uint64_t finished[OPERATION_WORDS]  # operations that the actor should look at
    LaneCount lanes[2][LANES_MAX]   # receivers, senders
    Op ops[OPERATIONS_MAX]
    uint64_t arrivals[OPERATIONS_MAX][ARRIVAL_WORDS]  # blocks whose frames have begun to arrive, by operation
    Queue queues[2]                 # blocks of large operations, of small ones


# A block to send, as a sender takes it.
cdef struct Job:
    Op *op
    uint32_t hop
    uint32_t block
    uint32_t crc                    # of the payload
    uint32_t has_crc                # 0: nobody has computed that yet


cdef class Board:
    cdef Py_buffer exported         # keeps the memory mapped
    cdef Shared *shared
    cdef readonly int lanes         # of this peer's pool
    cdef int *sender_bells          # one for each sender
    cdef int *receiver_bells        # and for each receiver
    cdef int actor_bell
    cdef uint64_t admitted          # blocks of the operations on the board; only the actor counts

    cdef Op *find(self, uint64_t sequence) noexcept
    cdef void ring_receivers(self) noexcept
    cdef void ring_senders(self) noexcept
    # Whether an operation of that sequence is running; if so, the caller must `leave` it.
    cdef Op *enter(self, uint64_t sequence) noexcept nogil
    cdef void leave(self, Op *op) noexcept nogil
    # Whether this is the first frame of a block at a hop: only that one may touch memory or be counted.
    cdef bint is_first(self, Op *op, uint32_t hop, uint32_t block) noexcept nogil
    # One block less to receive or to send.
    cdef void account(self, Op *op) noexcept nogil
    cdef int push(self, Op *op, uint32_t hop, uint32_t block, uint32_t crc, bint has_crc) noexcept nogil
    # The next block to send: 1, and the caller must `leave` its operation; or 0.
    cdef int take(self, Job *job) noexcept nogil
    cdef int take_forward(self, Queue *queue, Job *job) noexcept nogil
    cdef int take_own(self, int small, Job *job) noexcept nogil
    cdef int take_own_of(self, uint32_t place, int small, Job *job) noexcept nogil
    cdef bint has_work(self) noexcept nogil
    cdef bint has_work_of(self, int small) noexcept nogil
    # Wake a sender, if none is at work and one sleeps.
    cdef void wake_sender(self) noexcept nogil
    cdef void tell_actor(self, Op *op) noexcept nogil
