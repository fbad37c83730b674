# cython: language_level=3, cdivision=True, auto_pickle=False
"""The receiver of a lane: turns frames of the previous peer into sums, results, and blocks that are ready to be sent.

A block that is to be added is read into scratch memory that stays in the cache; a final block is read directly into the
tensor. A block that lies in the memory of a neighbour on this host is added or copied from there (`host_read`).

The blocks of a quantized operation lie in its area until they are sent on: a sum is encoded there while it is in the
cache; a final block is read into the area and decoded into the tensor. The owner of a chunk encodes its sums once and
takes the decoded values itself, so all members hold the same result.

A frame of an operation that this peer has not begun waits; a frame of an operation that has ended is read and dropped.
Every number of a header is compared with what this peer computes from the operation, before a byte of payload is read.

An in-place tensor is saved piece by piece before it changes. The backup says how much of each block is saved, so the
tensor can be restored, at whatever point this process was killed.
"""

import os
cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, memmove

from pccl._core.kernels.arithmetic cimport coded_bytes, crc32c
from pccl._core.system cimport posix
from pccl._core.system.check cimport check
from pccl._core.system.futex cimport now_ns
from pccl._core.system.mapping import open_memory_of

from .backup cimport mark_of, save
from .block_reduce cimport BlockMemory, reduce_coded_pieces, reduce_pieces
from .board cimport ABORTED, BACKED_UP, Op
from .host_read cimport INTRODUCED, NOTE_MAGIC, RETURNS_AT_ONCE, Note, Offer
from .lane cimport (
    BLOCK, ENDED, FRAME_MAGIC, GO_ON, HEADER_BYTES, HOST_FRAME, HOST_READ, INTRODUCTION, MAIL, OFFER, UNMAPPED,
    WHEREABOUTS_BYTES, WITHDRAWAL, Header, LaneEnd, Scratch, reserve
)
from .plan cimport BLOCK_BYTES_MAX, block_range, blocks_of, chunk_received
from .quantization cimport coded_offset
from .segment_table cimport MappedSegment, SegmentTable

cdef enum:
    LOW_WATER_BYTES_MAX = 1 << 17   # wakes a reader often enough to keep up, and half as often as packets come
    LOW_WATER_MS = 20               # after this time every byte wakes it
    AHEAD_BYTES = 4096              # read together with a header: a small frame costs one system call

# Where a receiver is in a frame.
cdef enum:
    AT_HEADER = 0
    EARLY = 1                       # the header is complete, but its operation has not begun here
    AT_PAYLOAD = 2
    AT_HOST_FRAME = 3                   # the frame is an introduction, an offer or a withdrawal


@cython.final
cdef class Receiver(LaneEnd):
    """Turns frames of the previous peer into sums, results, and blocks that are ready to be sent on."""

    cdef char ahead[HEADER_BYTES + AHEAD_BYTES]
    cdef uint64_t have              # bytes in `ahead`
    cdef Header header              # of the frame being received, if `stage` is past AT_HEADER
    cdef int stage
    cdef Op *op                     # held; NULL: the frame is read and dropped
    cdef char *target               # where the payload goes; NULL: to scratch
    cdef uint64_t received          # bytes of the payload that have arrived
    cdef const char *source         # where the complete payload is: at the target, or on loan
    cdef Scratch scratch            # payloads that are added or dropped
    cdef int low_water              # bytes in the socket that wake this worker (SO_RCVLOWAT); 0: never set
    cdef bint slow                  # this block comes slowly, so every byte wakes this worker
    cdef int64_t waiting_ns         # since when it waits for a frame; 0: it does not
    cdef readonly SegmentTable borrowed  # memory of the neighbour
    cdef uint32_t unreturned        # blocks on loan that are read and not yet returned

    def __cinit__(self):
        self.borrowed = SegmentTable()

    def __dealloc__(self):
        free(self.scratch.bytes)

    def detach(self):
        """Stop serving the connection, and unmap the memory of the neighbour."""
        self.drop()
        self.stage = AT_HEADER
        self.have = 0
        self.low_water = 0
        self.waiting_ns = 0
        self.unreturned = 0
        self.borrowed.clear()
        LaneEnd.detach(self)

    def answer_host_frame(self):
        """Map the memory that the neighbour offers, if that is possible and wanted, or unmap what it withdraws."""
        cdef Offer offer
        self.stage = AT_HEADER
        self.borrowed.remove(self.header.segment)
        if self.header.kind == WITHDRAWAL:
            return
        memcpy(&offer, self.ahead, sizeof(offer))
        self.skip(sizeof(offer))
        try:
            if not self.host_read:
                raise ValueError("host reads are off")
            fd = open_memory_of(offer.pid, offer.descriptor, offer.nbytes, offer.inode, offer.device)
            try:
                self.borrowed.add(self.header.segment, fd, offer.nbytes, writable=False)
            finally:
                os.close(fd)
            accepted = True
        except (OSError, OverflowError, ValueError, MemoryError):
            accepted = False  # another user or namespace, no such process, or host reads are off: all blocks are sent
        self.write_note(offer.serial, accepted)

    def serve(self):
        """Move frames until there is something for Python to do; returns its code."""
        cdef int code
        with nogil:
            code = self.run()
        return code

    cdef int run(self) noexcept nogil:
        cdef int code
        while True:
            if self.has_mail():
                return MAIL
            if self.connection < 0:
                self.sleep(-1)
                continue
            if self.stage == AT_HEADER:
                code = self.read_header()
            elif self.stage == EARLY:
                code = self.open_frame()
            elif self.stage == AT_HOST_FRAME:
                code = self.read_host_frame()
            else:
                code = self.read_payload()
            if code:
                return code

    cdef int read_header(self) noexcept nogil:
        """Read until the header is complete; a small payload comes with it."""
        memcpy(&self.header, self.ahead, HEADER_BYTES)
        if self.have >= sizeof(self.header.magic) and self.header.magic != FRAME_MAGIC:
            return self.end(0, b"the received bytes are not a frame")
        if self.have < HEADER_BYTES:
            return self.read_ahead()
        if self.header.header_crc != crc32c(0, &self.header, HEADER_BYTES - 4):
            return self.end(0, b"the received bytes are not a frame")
        self.skip(HEADER_BYTES)
        return self.open_frame() if self.header.kind <= HOST_READ else self.read_host_frame()

    cdef int read_ahead(self) noexcept nogil:
        """Read what has arrived; sleep if nothing has."""
        cdef ssize_t count
        cdef int code
        check(self.have < sizeof(self.ahead), "there is room to read ahead")
        count = posix.recv(self.connection, self.ahead + self.have, sizeof(self.ahead) - self.have, posix.MSG_DONTWAIT)
        if count == 0:
            return self.end(0, b"closed by the other side")
        if count < 0:
            if errno == posix.EAGAIN:
                if self.waiting_ns == 0:
                    self.waiting_ns = now_ns()
                code = self.return_loans()
                if code == GO_ON:
                    self.set_low_water(1)
                    self.sleep(-1)
                return code
            return GO_ON if errno == posix.EINTR else self.end(errno, b"")
        self.have += count
        return GO_ON

    cdef int read_host_frame(self) noexcept nogil:
        """Read until it is complete; the introduction is answered here, the other kinds by `answer_host_frame`."""
        cdef uint64_t nbytes = 0
        cdef bint introduces = self.header.kind == INTRODUCTION, accepted
        self.stage = AT_HOST_FRAME
        if introduces:
            nbytes = WHEREABOUTS_BYTES
        elif self.header.kind == OFFER:
            nbytes = sizeof(Offer)
        if self.header.kind > INTRODUCTION or self.header.length != nbytes or (self.header.segment == 0) != introduces:
            return self.end(0, b"a frame of no known kind")
        if self.have < nbytes:
            return self.read_ahead()
        if crc32c(0, self.ahead, nbytes) != self.header.crc:
            return self.end(0, b"a host frame whose checksum is wrong")
        if not introduces:
            return HOST_FRAME
        accepted = self.same_host_suspected and memcmp(self.ahead, self.whereabouts, nbytes) == 0
        self.skip(nbytes)
        self.stage = AT_HEADER
        return self.write_note(INTRODUCED, accepted)

    cdef void skip(self, uint64_t nbytes) noexcept nogil:
        """Remove bytes that were handled from what was read ahead."""
        check(nbytes <= self.have, "what is skipped was read")
        self.have -= nbytes
        memmove(self.ahead, self.ahead + nbytes, self.have)

    cdef int open_frame(self) noexcept nogil:
        """Find the operation of the frame; wait for it if it has not begun here."""
        cdef uint64_t sequence = self.header.sequence
        cdef int code
        check(self.op == NULL, "a frame begins when the last one has ended")
        self.stage = EARLY
        if sequence > posix.atomic_load_u64(&self.board.shared.commenced):
            code = self.return_loans()
            if code:
                return code
            posix.atomic_add_u32(&self.board.shared.early, 1)
            # A close that was reported together with the frame is not reported again: the sleep would never end.
            if not self.closed and sequence > posix.atomic_load_u64(&self.board.shared.commenced):
                self.sleep(-1)
            posix.atomic_add_u32(&self.board.shared.early, <uint32_t> -1)
            return self.end(0, b"closed by the other side") if self.closed else GO_ON
        self.op = self.board.enter(sequence)
        if self.op != NULL:
            code = self.find_target()
            if code:
                self.drop()
                return code
        if self.header.kind != HOST_READ and (self.op == NULL or self.target == NULL):
            code = self.use_scratch()
            if code:
                return code
        if self.waiting_ns and self.op != NULL:
            self.waiting_ns = now_ns() - larger(self.waiting_ns, self.op.begun_ns)
            self.count.neighbour_ns += self.waiting_ns
            posix.atomic_count_u64(&self.op.neighbour_ns, self.waiting_ns)
        self.waiting_ns = 0
        self.received = 0
        self.slow = False
        self.stage = AT_PAYLOAD
        return GO_ON

    cdef int find_target(self) noexcept nogil:
        """Compare the header with the operation, and find where the payload goes if not to scratch."""
        cdef Op *op = self.op
        cdef BlockMemory memory
        cdef uint64_t begin, end, nbytes
        cdef bint spreads
        if (
            <uint32_t> self.header.hop + 2 >= 2 * op.plan.world
            or self.header.chunk != chunk_received(&op.plan, op.rank, self.header.hop)
            or self.header.block >= blocks_of(&op.plan, self.header.chunk)
        ):
            return self.end(0, b"a frame that does not belong to its operation")
        block_range(&op.plan, self.header.chunk, self.header.block, &begin, &end)
        nbytes = coded_bytes(&op.quantizer, end - begin) if op.quantizer.bits else (end - begin) * op.itemsize
        if self.header.length != nbytes:
            return self.end(0, b"a frame whose length does not fit its block")
        self.wanted = self.missing_segment(op)
        if self.wanted:
            return UNMAPPED
        if not self.board.is_first(op, self.header.hop, self.header.block):
            return self.end(0, b"a block that has come before")
        self.target = NULL
        spreads = <uint32_t> self.header.hop + 1 >= op.plan.world
        if spreads and op.quantizer.bits == 0:
            memory = self.find_memory()
            self.target = memory.out
            # Only this peer's own chunk is overwritten without a sum before; if it was on loan, it is not saved yet.
            if memory.mark != NULL:
                save(memory.mark, memory.out, memory.backup, nbytes)
        elif spreads and self.is_sent_on():
            self.target = self.find_coded()
        return GO_ON

    cdef bint is_sent_on(self) noexcept nogil:
        """Whether this block has another hop to go."""
        return <uint32_t> self.header.hop + 3 < 2 * self.op.plan.world

    cdef BlockMemory find_memory(self) noexcept nogil:
        """Where the block of this frame is; all segments are mapped."""
        cdef Op *op = self.op
        cdef BlockMemory memory
        cdef uint64_t begin, end
        block_range(&op.plan, self.header.chunk, self.header.block, &begin, &end)
        check(begin < end, "a block has elements")
        check(end <= op.plan.count, "a block that is received lies within its tensor")
        memory.count = end - begin
        begin *= op.itemsize
        memory.local = self.segments.base_of(op.asked.send_segment) + op.asked.send_offset + begin
        memory.out = self.segments.base_of(op.asked.recv_segment) + op.asked.recv_offset + begin
        memory.backup, memory.mark = NULL, NULL
        if op.asked.flags & BACKED_UP:
            memory.backup = self.segments.base_of(op.asked.backup_segment) + op.asked.backup_offset
            memory.mark = mark_of(memory.backup, &op.plan, op.itemsize, self.header.chunk, self.header.block)
            memory.backup += begin
        return memory

    cdef char *find_coded(self) noexcept nogil:
        """Where the codes of this block lie in the area until they are sent on."""
        cdef Op *op = self.op
        cdef uint64_t offset = coded_offset(&op.quantizer, &op.plan, self.header.chunk, self.header.block)
        check(self.header.block < op.plan.blocks_each, "a coded block is one of its plan")
        return self.segments.base_of(op.asked.area_segment) + op.asked.area_offset + offset

    cdef uint32_t missing_segment(self, const Op *op) noexcept nogil:
        """The first segment of an operation that is not mapped here; 0 if all are."""
        if self.segments.base_of(op.asked.send_segment) == NULL:
            return op.asked.send_segment
        if self.segments.base_of(op.asked.recv_segment) == NULL:
            return op.asked.recv_segment
        if op.asked.flags & BACKED_UP and self.segments.base_of(op.asked.backup_segment) == NULL:
            return op.asked.backup_segment
        if op.quantizer.bits and self.segments.base_of(op.asked.area_segment) == NULL:
            return op.asked.area_segment
        return 0

    cdef int read_payload(self) noexcept nogil:
        """Read what has arrived of the payload; sleep if nothing has."""
        cdef uint64_t missing = self.header.length - self.received, taken
        cdef char *into = self.target + self.received
        cdef ssize_t count
        if self.header.kind == HOST_READ:
            return self.borrow_block()
        if self.op == NULL:  # dropped: each part overwrites the one before
            into = self.target
            missing = missing if missing < self.scratch.size else self.scratch.size
        if missing and self.have:
            taken = missing if missing < self.have else self.have
            memcpy(into, self.ahead, taken)
            self.skip(taken)
            count = taken
        elif missing:
            count = posix.recv(self.connection, into, missing, posix.MSG_DONTWAIT)
            if count == 0:
                return self.end(0, b"closed by the other side in the middle of a block")
            if count < 0:
                if errno == posix.EAGAIN:
                    return self.wait_for_bytes()
                return GO_ON if errno == posix.EINTR else self.end(errno, b"")
        else:
            count = 0
        self.received += count
        if self.op != NULL:
            posix.atomic_count_u64(&self.op.moved, count)
        self.source = self.target
        return self.close_frame() if self.received == self.header.length else GO_ON

    cdef int borrow_block(self) noexcept nogil:
        """Take a block that is on loan: it is complete, and is not copied if it is to be added."""
        cdef MappedSegment *memory = self.borrowed.find(self.header.segment)
        cdef uint64_t nbytes = self.header.length
        cdef int code
        if memory == NULL or self.header.offset > memory.nbytes or nbytes > memory.nbytes - self.header.offset:
            return self.end(0, b"a block that lies outside of the memory that was offered")
        if self.op != NULL:
            self.source = memory.base + self.header.offset
            self.received = nbytes
            posix.atomic_count_u64(&self.op.moved, nbytes)
            if self.target != NULL:
                memcpy(self.target, self.source, nbytes)
        code = self.close_frame()
        self.unreturned += 1
        if code == GO_ON and self.unreturned >= RETURNS_AT_ONCE:
            code = self.return_loans()
        return code

    cdef int return_loans(self) noexcept nogil:
        """Tell the neighbour how many of its blocks were read since the last note."""
        return self.write_note(0, False) if self.unreturned else GO_ON

    cdef int write_note(self, uint32_t serial, bint accepted) noexcept nogil:
        """Write a note. Few blocks are on loan, so few notes are in flight, and the socket has room or is closed."""
        cdef Note note
        note.magic, note.returned, note.serial, note.accepted = NOTE_MAGIC, self.unreturned, serial, accepted
        self.unreturned = 0
        if posix.send(self.connection, &note, sizeof(note), posix.MSG_NOSIGNAL | posix.MSG_DONTWAIT) != sizeof(note):
            return self.end(errno, b"")
        return GO_ON

    cdef int wait_for_bytes(self) noexcept nogil:
        """Sleep in the middle of a block. On a fast link many bytes wake this worker; after a while, any byte does."""
        cdef int64_t began = now_ns(), waited
        cdef uint64_t missing = self.header.length - self.received
        if self.return_loans() != GO_ON:
            return ENDED
        if not self.slow:
            self.set_low_water(<int> missing if missing < LOW_WATER_BYTES_MAX else LOW_WATER_BYTES_MAX)
        if not self.sleep(-1 if self.slow else LOW_WATER_MS):
            self.slow = True
            self.set_low_water(1)
        waited = now_ns() - began
        self.count.network_ns += waited
        if self.op != NULL:
            posix.atomic_count_u64(&self.op.network_ns, waited)
            if posix.atomic_load_u32(&self.op.state) == ABORTED:
                return self.drop_payload()
        return GO_ON

    cdef void set_low_water(self, int nbytes) noexcept nogil:
        """Make the socket wake this worker when it holds that many bytes."""
        if nbytes != self.low_water:
            self.low_water = nbytes
            posix.setsockopt(self.connection, posix.SOL_SOCKET, posix.SO_RCVLOWAT, &nbytes, sizeof(nbytes))

    cdef int drop_payload(self) noexcept nogil:
        """Leave an operation that was aborted in the middle of a frame; read the rest into scratch."""
        self.drop()
        return self.use_scratch()

    cdef int use_scratch(self) noexcept nogil:
        """Make scratch memory the target of the payload."""
        cdef uint64_t needed = self.header.length
        if self.op == NULL and needed > BLOCK_BYTES_MAX:
            needed = BLOCK_BYTES_MAX  # this length was not checked
        if reserve(&self.scratch, needed) != 0:
            self.drop()
            return self.end(posix.ENOMEM, b"")
        self.target = self.scratch.bytes
        return GO_ON

    cdef void drop(self) noexcept nogil:
        """Release the operation."""
        if self.op != NULL:
            self.board.leave(self.op)
            self.op = NULL

    cdef int close_frame(self) noexcept nogil:
        """Finish a complete block: reduce it if it is not final, and make it ready to be sent on."""
        cdef Op *op = self.op
        cdef uint32_t crc = self.header.crc
        cdef bint has_crc = self.header.kind == BLOCK, reduces
        cdef int64_t began
        check(self.stage == AT_PAYLOAD, "a frame that is closed was open")
        self.stage = AT_HEADER
        self.count.frames += 1
        self.count.payload_bytes += self.received
        if op == NULL:
            return GO_ON
        if has_crc and crc32c(0, self.source, self.received) != crc:
            return self.end(0, b"a block whose checksum is wrong")
        reduces = <uint32_t> self.header.hop + 1 < op.plan.world
        if reduces or op.quantizer.bits:
            began = now_ns()
            if reduces:
                has_crc = not posix.atomic_load_u32(&self.board.shared.same_host_verified)
            crc = self.reduce(crc, has_crc)
            began = now_ns() - began
            self.count.reduce_ns += began
            posix.atomic_count_u64(&op.reduce_ns, began)
        posix.atomic_count_u64(&op.received_bytes, self.received)
        if self.is_sent_on():
            if not self.board.push(op, <uint32_t> self.header.hop + 1, self.header.block, crc, has_crc):
                return self.end(0, b"the queue of ready blocks is full")
        self.board.account(op)
        self.drop()
        return self.count_to_fault()

    cdef uint32_t reduce(self, uint32_t crc, bint has_crc) noexcept nogil:
        """Reduce or decode the block; returns the CRC of what is sent on, which for a final block is `crc`."""
        cdef BlockMemory memory = self.find_memory()
        cdef uint32_t hop = self.header.hop, computed
        if not self.op.quantizer.bits:
            return reduce_pieces(self.op, hop, &memory, self.source, has_crc)
        computed = reduce_coded_pieces(self.op, hop, &memory, self.source, self.find_coded(), has_crc)
        return computed if hop + 1 < self.op.plan.world else crc


cdef inline int64_t larger(int64_t one, int64_t other) noexcept nogil:
    return one if one > other else other
