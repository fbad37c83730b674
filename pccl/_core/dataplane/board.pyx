# cython: language_level=3, cdivision=True, auto_pickle=False
"""The board: running operations, blocks that are ready to be sent, and sleeping workers, in shared memory.

An actor shares its board with its lane workers. No socket is used here, and nothing waits.

**Operations.** The entry of an operation is found by its sequence modulo the size of the board, so a frame finds its
operation with one division. The actor adds operations in the order of their sequences, which is the same on all peers:
an admitted operation can always finish, because the oldest one is on the board of every peer. `commenced` is the
highest sequence so far. A frame beyond it is early and waits; a frame at or below it whose operation is not running
belongs to an operation that has ended, and is dropped.

**Abort.** A worker *enters* an operation before it uses its memory and *leaves* it afterwards: it increments the user
count, then reads the state. The actor changes the state, then reads the count. So either the worker sees the abort or
the actor sees the worker, and the last worker that leaves an aborted operation rings the actor's bell.

**Each block once.** The first frame of a block at a hop claims it; a second one ends its connection. So a receiver that
is inside an operation holds a block that is not counted yet, and an operation ends only when no receiver is inside.

**Ready blocks** are in two queues, one for small and one for large operations. Receivers push blocks that they have
added or written. Senders take from the queue first and from the own chunk only when the queue is empty, so a block is
sent on while it is still in the cache. Both ends of a queue are lock-free and bounded. A queue cannot overflow: a block
is in it at most once, and the actor admits no more blocks than it holds.

**Waking in order.** A sender that finds no block sets its idle bit, checks again, and sleeps. A worker that makes a
block ready wakes the lowest sleeper, but only if no sender works, that is, all others sleep or have waited for their
socket for a while. So a fast link runs on one lane, and a slow link recruits as many lanes as it can use.

A worker may be killed at any instruction. Its board ends with it: the actor kills the whole worker set, and the next
set starts with a new board, so no half-written cell is ever read.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from pccl._core.kernels.arithmetic cimport itemsize_of
from pccl._core.protocol.operations cimport Operation, PackedOperation
from pccl._core.system cimport posix
from pccl._core.system.check cimport check
from pccl._core.system.futex cimport now_ns
from pccl._core.system.wait_set cimport ring_bell

from .plan cimport BLOCKS_MAX, blocks_handled, blocks_numbered, blocks_of, make_plan
from .quantization cimport make_quantizer

BOARD_BYTES = sizeof(Shared)
BOARD_LANES = <int> LANES_MAX
FLAG_BACKED_UP = <int> BACKED_UP


@cython.final
@cython.no_gc
cdef class Board:
    """The board in `buffer`, which must be all zero. Bells are file descriptors: one per sender, receiver and actor."""

    def __cinit__(self, buffer, list sender_bells not None, list receiver_bells not None, int actor_bell):
        cdef int lane
        PyObject_GetBuffer(buffer, &self.exported, PyBUF_WRITABLE)
        if self.exported.len < <Py_ssize_t> sizeof(Shared):
            raise ValueError(f"a board needs {sizeof(Shared)} bytes, not {self.exported.len}")
        self.shared = <Shared *> self.exported.buf
        self.lanes = len(sender_bells)
        if not 0 < self.lanes <= LANES_MAX or len(receiver_bells) != self.lanes:
            raise ValueError(
                f"a pool has 1 to {LANES_MAX} lanes; bells were given for {len(sender_bells)} senders and "
                f"{len(receiver_bells)} receivers"
            )
        self.actor_bell = actor_bell
        self.sender_bells = <int *> calloc(self.lanes, sizeof(int))
        self.receiver_bells = <int *> calloc(self.lanes, sizeof(int))
        if self.sender_bells == NULL or self.receiver_bells == NULL:
            raise MemoryError
        for lane in range(self.lanes):
            self.sender_bells[lane] = sender_bells[lane]
            self.receiver_bells[lane] = receiver_bells[lane]

    def __dealloc__(self):
        free(self.sender_bells)
        free(self.receiver_bells)
        PyBuffer_Release(&self.exported)

    # ------------------------------------------------------------------------------------------ the actor's part

    def begin(self, uint64_t sequence, Operation operation not None, uint32_t rank, uint32_t world):
        """Add an operation; return False if it must wait for the end of others. Raises ValueError if it is invalid."""
        cdef Op *op = &self.shared.ops[sequence % BOARD_ENTRIES]
        cdef Plan plan
        cdef Quantizer quantizer
        cdef PackedOperation asked = operation.packed
        cdef uint32_t itemsize = <uint32_t> itemsize_of(asked.datatype)
        if itemsize == 0 or rank >= world or world > BLOCKS_MAX:
            raise ValueError(f"datatype {asked.datatype} at rank {rank} of {world} cannot be reduced")
        if make_quantizer(&quantizer, asked.datatype, asked.algorithm, asked.quantized) != 0:
            raise ValueError(f"{operation.signature} cannot be quantized so")
        if op.state != FREE:
            return False
        make_plan(&plan, asked.count, itemsize, world)
        if self.admitted and self.admitted + blocks_numbered(&plan) > BLOCKS_ADMITTED:
            return False
        self.admitted += blocks_numbered(&plan)
        op.plan = plan
        op.sequence = sequence
        op.asked, op.quantizer = asked, quantizer
        op.rank, op.itemsize = rank, itemsize
        op.small = asked.count * itemsize <= SMALL_BYTES_MAX
        op.moved = op.sent_bytes = op.received_bytes = op.network_ns = op.neighbour_ns = op.reduce_ns = 0
        op.begun_ns = now_ns()
        op.remaining = blocks_handled(&plan, rank)
        op.own_next = 0
        memset(self.shared.arrivals[sequence % BOARD_ENTRIES], 0, 8 * (arrivals_of(&plan) // 64 + 1))
        op.own_blocks = blocks_of(&plan, rank) if world > 1 else 0  # a single peer sends nothing
        check(op.own_blocks <= plan.blocks_each, "a chunk has no more blocks than the plan numbers")
        check(sequence > self.shared.commenced, "operations begin in the order of their sequences")
        posix.atomic_store_u32(&op.state, RUNNING)
        posix.atomic_store_u64(&self.shared.commenced, sequence)
        if op.own_blocks:
            posix.atomic_set_bits_u64(&self.shared.owning[op.small][sequence % BOARD_ENTRIES // 64], bit_of(sequence))
            self.wake_sender()
        posix.fence()
        if posix.atomic_load_u32(&self.shared.early):
            self.ring_receivers()
        if op.remaining == 0:
            self.tell_actor(op)
        return True

    def abort(self, uint64_t sequence):
        """Make all workers leave an operation; return whether none is inside."""
        cdef Op *op = self.find(sequence)
        if op == NULL:
            return True
        check(op.state != FREE, "an operation that is aborted is on the board")
        posix.atomic_exchange_u32(&op.state, ABORTED)
        posix.atomic_clear_bits_u64(&self.shared.owning[op.small][sequence % BOARD_ENTRIES // 64], bit_of(sequence))
        if posix.atomic_load_u32(&op.users) == 0:
            return True
        self.ring_receivers()
        self.ring_senders()
        return False

    def is_drained(self, uint64_t sequence):
        """Whether no worker is inside an operation that was aborted."""
        cdef Op *op = self.find(sequence)
        return op == NULL or posix.atomic_load_u32(&op.users) == 0

    def release(self, uint64_t sequence):
        """Remove an operation that has ended, or that is aborted and drained."""
        cdef Op *op = self.find(sequence)
        if op != NULL:
            check(blocks_numbered(&op.plan) <= self.admitted, "blocks that are released were admitted")
            self.admitted -= blocks_numbered(&op.plan)
            posix.atomic_store_u32(&op.state, FREE)

    def sweep(self):
        """Remove the blocks of aborted operations from the queues."""
        cdef Queue *queue
        cdef QueueCell cell
        cdef uint64_t count
        cdef int which
        for which in range(2):
            queue = &self.shared.queues[which]
            count = posix.atomic_load_u64(&queue.head) - posix.atomic_load_u64(&queue.tail)
            while count and pop_cell(queue, &cell):
                count -= 1
                op = self.enter(cell.sequence)
                if op != NULL:
                    push_cell(queue, &cell)
                    self.leave(op)
        if self.has_work():
            self.wake_sender()

    def take_finished(self):
        """The sequences of operations that have ended or drained since the last call."""
        cdef uint64_t bits
        cdef int word, bit
        found = []
        for word in range(ENTRY_WORDS):
            if posix.atomic_load_u64(&self.shared.finished[word]):
                bits = posix.atomic_take_u64(&self.shared.finished[word])
                while bits:
                    bit = posix.lowest_bit_u64(bits)
                    bits &= bits - 1
                    found.append(self.shared.ops[word * 64 + bit].sequence)
        return found

    def has_ended(self, uint64_t sequence):
        """Whether this peer has received and sent all blocks of an operation."""
        cdef Op *op = self.find(sequence)
        return op != NULL and op.state == RUNNING and posix.atomic_load_u64(&op.remaining) == 0

    def moved(self, uint64_t sequence):
        """Bytes of an operation that were sent and received so far."""
        cdef Op *op = self.find(sequence)
        return 0 if op == NULL else posix.atomic_load_u64(&op.moved)

    def statistics(self, uint64_t sequence):
        """Return the payload sent and received, and nanoseconds: waits for network and neighbour, and time for sums."""
        cdef Op *op = self.find(sequence)
        if op == NULL:
            return 0, 0, 0, 0, 0
        return op.sent_bytes, op.received_bytes, op.network_ns, op.neighbour_ns, op.reduce_ns

    def lane_statistics(self, bint sends, int lane):
        """Return the payload and frames of one worker, and the same three times as `statistics`."""
        cdef LaneCount *count = &self.shared.lanes[sends][lane % LANES_MAX]
        return count.payload_bytes, count.frames, count.network_ns, count.neighbour_ns, count.reduce_ns

    def totals(self):
        """Payload sent and received by all lanes."""
        cdef uint64_t sent = 0, received = 0
        cdef int lane
        for lane in range(self.lanes):
            received += self.shared.lanes[0][lane].payload_bytes
            sent += self.shared.lanes[1][lane].payload_bytes
        return sent, received

    def call(self, bint sends, int lane):
        """Make a worker read its mailbox, even if it is busy."""
        posix.atomic_store_u32(&self.shared.lanes[sends][lane].attention, 1)
        posix.fence()
        ring_bell(self.sender_bells[lane] if sends else self.receiver_bells[lane])

    def has_answered(self, bint sends, int lane):
        """Whether a worker has read its mailbox since it was called."""
        return posix.atomic_load_u32(&self.shared.lanes[sends][lane].attention) == 0

    cdef void ring_receivers(self) noexcept:
        cdef int lane
        for lane in range(self.lanes):
            ring_bell(self.receiver_bells[lane])

    cdef void ring_senders(self) noexcept:
        cdef int lane
        for lane in range(self.lanes):
            ring_bell(self.sender_bells[lane])

    cdef Op *find(self, uint64_t sequence) noexcept:
        cdef Op *op = &self.shared.ops[sequence % BOARD_ENTRIES]
        return op if op.state != FREE and op.sequence == sequence else NULL

    # ------------------------------------------------------------------------------------------ the workers' part

    cdef Op *enter(self, uint64_t sequence) noexcept nogil:
        cdef Op *op = &self.shared.ops[sequence % BOARD_ENTRIES]
        posix.atomic_add_u32(&op.users, 1)
        if posix.atomic_load_u32(&op.state) == RUNNING and op.sequence == sequence:
            return op
        self.leave(op)
        return NULL

    cdef void leave(self, Op *op) noexcept nogil:
        check(op.users != 0, "an operation that is left was entered")
        if posix.atomic_add_u32(&op.users, <uint32_t> -1) == 0 and posix.atomic_load_u32(&op.state) == ABORTED:
            self.tell_actor(op)

    cdef bint is_first(self, Op *op, uint32_t hop, uint32_t block) noexcept nogil:
        cdef uint64_t number = hop * op.plan.blocks_each + block
        cdef uint64_t *word = &self.shared.arrivals[op.sequence % BOARD_ENTRIES][number // 64]
        check(number < arrivals_of(&op.plan), "a block that arrives is one of its operation")
        return not posix.atomic_set_bits_u64(word, bit_of(number)) & bit_of(number)

    cdef void account(self, Op *op) noexcept nogil:
        check(op.remaining != 0, "no more blocks are counted than an operation has")
        if posix.atomic_add_u64(&op.remaining, <uint64_t> -1) == 0:
            self.tell_actor(op)

    cdef void tell_actor(self, Op *op) noexcept nogil:
        cdef uint64_t entry = op.sequence % BOARD_ENTRIES
        posix.atomic_set_bits_u64(&self.shared.finished[entry // 64], bit_of(entry))
        ring_bell(self.actor_bell)

    cdef int push(self, Op *op, uint32_t hop, uint32_t block, uint32_t crc, bint has_crc) noexcept nogil:
        cdef QueueCell cell
        check(hop < 2 * op.plan.world - 2, "a hop that is ready is one of its operation")
        check(block < op.plan.blocks_each, "a block that is ready is one of its plan")
        cell.sequence, cell.hop, cell.block, cell.crc, cell.has_crc = op.sequence, hop, block, crc, has_crc
        if not push_cell(&self.shared.queues[op.small], &cell):
            return 0
        self.wake_sender()
        return 1

    cdef int take(self, Job *job) noexcept nogil:
        return (
            self.take_forward(&self.shared.queues[1], job) or self.take_own(1, job)
            or self.take_forward(&self.shared.queues[0], job) or self.take_own(0, job)
        )

    cdef int take_forward(self, Queue *queue, Job *job) noexcept nogil:
        cdef QueueCell cell
        while pop_cell(queue, &cell):
            job.op = self.enter(cell.sequence)
            if job.op != NULL:
                job.hop, job.block, job.crc, job.has_crc = cell.hop, cell.block, cell.crc, cell.has_crc
                check(job.block < job.op.plan.blocks_each, "a block that is taken is one of its plan")
                return 1
        return 0

    cdef int take_own(self, int small, Job *job) noexcept nogil:
        """Take a block of this peer's own chunk. Operations take turns, so that none waits for a larger one."""
        cdef uint32_t turn = posix.atomic_load_u32(&self.shared.turn[small]) % BOARD_ENTRIES
        cdef uint32_t step, word, entry
        cdef uint64_t bits
        # The word that contains the turn is read twice: first the bits from the turn on, at the end those before it.
        for step in range(ENTRY_WORDS + 1):
            word = (turn // 64 + step) % ENTRY_WORDS
            bits = posix.atomic_load_u64(&self.shared.owning[small][word])
            if step == 0:
                bits &= ~(bit_of(turn) - 1)
            elif step == ENTRY_WORDS:
                bits &= bit_of(turn) - 1
            while bits:
                entry = word * 64 + posix.lowest_bit_u64(bits)
                bits &= bits - 1
                if self.take_own_of(entry, small, job):
                    posix.atomic_store_u32(&self.shared.turn[small], entry + 1)
                    return 1
        return 0

    cdef int take_own_of(self, uint32_t entry, int small, Job *job) noexcept nogil:
        cdef Op *op = self.enter(self.shared.ops[entry].sequence)
        cdef uint32_t block
        if op == NULL:
            return 0  # aborted just now: its bit will be cleared
        block = op.own_blocks
        if posix.atomic_load_u32(&op.own_next) < op.own_blocks:
            block = posix.atomic_add_u32(&op.own_next, 1) - 1
        # Only the sender that took the last block clears the bit: a later one might clear it for the next operation.
        if block + 1 == op.own_blocks:
            posix.atomic_clear_bits_u64(&self.shared.owning[small][entry // 64], bit_of(entry))
        if block < op.own_blocks:
            job.op, job.hop, job.block, job.crc, job.has_crc = op, 0, block, 0, False
            return 1
        self.leave(op)
        return 0  # all are taken: its bit will be cleared

    cdef bint has_work(self) noexcept nogil:
        return self.has_work_of(0) or self.has_work_of(1)

    cdef bint has_work_of(self, int small) noexcept nogil:
        """Whether blocks of large (0) or of small (1) operations wait."""
        cdef Queue *queue = &self.shared.queues[small]
        cdef int word
        for word in range(ENTRY_WORDS):
            if posix.atomic_load_u64(&self.shared.owning[small][word]):
                return True
        return posix.atomic_load_u64(&queue.head) != posix.atomic_load_u64(&queue.tail)

    cdef uint64_t count_senders_below(self, uint64_t frame_ns, uint64_t *best) noexcept nogil:
        cdef uint64_t found = 0, taken
        cdef int lane
        for lane in range(self.lanes):
            taken = self.shared.lanes[1][lane].frame_ns
            if taken and taken <= frame_ns and self.shared.present[lane // 64] & lane_bit(lane):
                found += 1
                best[0] = taken if best[0] == 0 or taken < best[0] else best[0]
        return found

    cdef void wake_sender(self) noexcept nogil:
        cdef uint64_t idle, bit
        cdef int word
        posix.fence()
        for word in range(LANE_WORDS):
            if self.shared.present[word] & ~(self.shared.idle[word] | self.shared.blocked[word]):
                return
        for word in range(LANE_WORDS):
            idle = posix.atomic_load_u64(&self.shared.idle[word]) & self.shared.present[word]
            while idle:
                bit = idle & (~idle + 1)
                idle ^= bit
                if posix.atomic_clear_bits_u64(&self.shared.idle[word], bit) & bit:
                    ring_bell(self.sender_bells[word * 64 + posix.lowest_bit_u64(bit)])
                    return


cdef inline uint64_t arrivals_of(const Plan *plan) noexcept nogil:
    """The number of bits that record which blocks have arrived at which hop."""
    return (2 * plan.world - 2) * plan.blocks_each


cdef inline uint64_t bit_of(uint64_t index) noexcept nogil:
    return <uint64_t> 1 << index % 64


cdef bint push_cell(Queue *queue, const QueueCell *content) noexcept nogil:
    """Add a cell; False if the queue is full."""
    cdef uint64_t position, state, lap
    cdef QueueCell *cell
    while True:
        position = posix.atomic_load_u64(&queue.head)
        lap = 2 * (position >> QUEUE_BITS)
        cell = &queue.cells[position % QUEUE_CELLS]
        state = posix.atomic_load_u64(&cell.state)
        # Signed: since the head was read, others may have pushed and popped, and the tail may be beyond that position.
        check(
            <int64_t> (position - posix.atomic_load_u64(&queue.tail)) <= QUEUE_CELLS,
            "a queue holds no more than it has cells",
        )
        if state < lap:
            return False
        if state == lap and posix.atomic_compare_exchange_u64(&queue.head, position, position + 1):
            cell.sequence, cell.hop, cell.block = content.sequence, content.hop, content.block
            cell.crc, cell.has_crc = content.crc, content.has_crc
            posix.atomic_store_u64(&cell.state, lap + 1)
            return True


cdef bint pop_cell(Queue *queue, QueueCell *content) noexcept nogil:
    """Take a cell; False if the queue is empty."""
    cdef uint64_t position, state, lap
    cdef QueueCell *cell
    while True:
        position = posix.atomic_load_u64(&queue.tail)
        lap = 2 * (position >> QUEUE_BITS)
        cell = &queue.cells[position % QUEUE_CELLS]
        state = posix.atomic_load_u64(&cell.state)
        if state <= lap:
            return False
        if state == lap + 1 and posix.atomic_compare_exchange_u64(&queue.tail, position, position + 1):
            content[0] = cell[0]
            posix.atomic_store_u64(&cell.state, lap + 2)
            return True
