# Contents of `board`: what a peer actor and its lane workers share while operations run.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t, uint64_t

from pccl._core.kernels.arithmetic cimport Quantizer
from pccl._core.protocol.operations cimport PackedOperation

from .inflight cimport InflightBudget, LinkCount
from .plan cimport Plan


cdef enum:
    BOARD_ENTRIES = 256             # operations at a time; the entry of an operation is its sequence modulo this
    ENTRY_WORDS = 4                 # of 64 bits: one bit for each entry
    LANES_MAX = 256                 # senders, and as many receivers; a test compares it with that of options
    LANE_WORDS = 4                  # of 64 bits: one bit for each lane
    QUEUE_BITS = 17
    QUEUE_CELLS = 1 << QUEUE_BITS   # twice BLOCKS_ADMITTED: blocks of aborted operations need room as well
    BLOCKS_ADMITTED = 1 << 16       # blocks of all operations on the board together, so that a queue is never full
    SMALL_BYTES_MAX = 1 << 20       # operations up to this size overtake larger ones
    ARRIVAL_WORDS = 512             # of 64 bits: one bit for each block of each hop, fewer than 2 * BLOCKS_MAX

# The state of an entry.
cdef enum:
    FREE = 0                        # no operation
    RUNNING = 1
    ABORTED = 2                     # workers leave it; its frames are dropped

# Flags of an operation, set by the training process.
cdef enum:
    BACKED_UP = 1                   # in place and zero-copy: old bytes are saved before they are overwritten


cdef inline uint64_t lane_bit(int lane) noexcept nogil:
    """The bit of a lane in its word."""
    return <uint64_t> 1 << lane % 64


# The board entry of one operation, from commence to verdict. The actor writes all fields before it sets the state.
cdef struct Op:
    uint64_t sequence               # the number that the master gave to it
    uint32_t state
    uint32_t users                  # workers inside; never reset, because late workers still decrement it
    uint64_t remaining              # blocks to receive plus blocks to send
    uint32_t own_next               # the next block of this peer's own chunk that no sender has taken
    uint32_t own_blocks
    uint64_t moved                  # bytes received and sent so far; a stall is a time without change
    uint64_t sent_bytes             # payload
    uint64_t received_bytes         # payload
    uint64_t network_ns             # time that workers waited in the middle of a frame
    uint64_t neighbour_ns           # time that receivers waited for a frame to begin
    uint64_t reduce_ns              # time that receivers spent on sums
    uint64_t begun_ns
    uint32_t rank
    uint32_t itemsize
    uint32_t small                  # 1: overtakes large operations
    PackedOperation asked           # what the training process asked for
    Quantizer quantizer
    Plan plan


# A block that is ready to be sent. The state of a cell counts laps, so zeroed memory is an empty queue.
cdef struct QueueCell:
    uint64_t state                  # 2 * lap: free; 2 * lap + 1: filled
    uint64_t sequence
    uint32_t hop
    uint32_t block
    uint32_t crc                    # of the payload; computed by the receiver, which had the payload in the cache
    uint32_t has_crc                # 0: not computed, because it is probably not sent


cdef struct Queue:
    uint64_t head                   # position of the next push
    uint64_t pad0[7]
    uint64_t tail                   # position of the next pop
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
    uint64_t frame_ns               # of a sender: average time from taking a large block until the kernel has it
    LinkCount counted               # of a sender on a far link: what its connection has done
    uint64_t pad1[4]


cdef struct Shared:
    uint64_t commenced              # the highest sequence that was put on the board
    uint32_t early                  # receivers that wait for a sequence beyond it
    uint32_t same_host_verified     # 1: the next peer is on this host, and blocks need no CRC
    uint64_t present[LANE_WORDS]    # senders that have a connection
    uint64_t idle[LANE_WORDS]       # senders that found no block and sleep
    uint64_t blocked[LANE_WORDS]    # senders whose socket has been full for a while
    InflightBudget budget           # of all senders on a far link
    uint64_t owning[2][ENTRY_WORDS]  # large and small operations with untaken blocks of the own chunk
    uint32_t turn[2]                # of large and small operations: the entry whose own chunk is next
    uint64_t finished[ENTRY_WORDS]  # operations that the actor must check
    LaneCount lanes[2][LANES_MAX]   # receivers, senders
    Op ops[BOARD_ENTRIES]
    uint64_t arrivals[BOARD_ENTRIES][ARRIVAL_WORDS]  # by entry: blocks whose frames have begun to arrive
    Queue queues[2]                 # of large operations, of small ones


# A block that a sender has taken.
cdef struct Job:
    Op *op
    uint32_t hop
    uint32_t block
    uint32_t crc                    # of the payload
    uint32_t has_crc                # 0: not computed yet


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
    # Returns the operation of that sequence if it runs; the caller must `leave` it. Otherwise NULL.
    cdef Op *enter(self, uint64_t sequence) noexcept nogil
    cdef void leave(self, Op *op) noexcept nogil
    # Whether this is the first frame of a block at a hop: only that one may write memory or be counted.
    cdef bint is_first(self, Op *op, uint32_t hop, uint32_t block) noexcept nogil
    # Counts one block as received or sent.
    cdef void account(self, Op *op) noexcept nogil
    # Makes a block ready to be sent; 0 if the queue is full.
    cdef int push(self, Op *op, uint32_t hop, uint32_t block, uint32_t crc, bint has_crc) noexcept nogil
    # Takes the next block to send. Returns 1, and the caller must `leave` its operation; or 0 if there is none.
    cdef int take(self, Job *job) noexcept nogil
    cdef int take_forward(self, Queue *queue, Job *job) noexcept nogil
    cdef int take_own(self, int small, Job *job) noexcept nogil
    cdef int take_own_of(self, uint32_t entry, int small, Job *job) noexcept nogil
    cdef bint has_work(self) noexcept nogil
    cdef bint has_work_of(self, int small) noexcept nogil
    # How many connected senders take at most that long for a large block; `best` becomes the shortest time.
    cdef uint64_t count_senders_below(self, uint64_t frame_ns, uint64_t *best) noexcept nogil
    # Wakes a sender if none works and one sleeps.
    cdef void wake_sender(self) noexcept nogil
    # Marks an operation as finished or drained, and rings the actor's bell.
    cdef void tell_actor(self, Op *op) noexcept nogil
