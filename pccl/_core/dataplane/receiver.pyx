# cython: language_level=3, cdivision=True, auto_pickle=False
"""The receiver of a lane: turns frames of the previous peer into sums, results, and blocks that are ready for the next.

A block that is to be added is read into a scratch buffer that stays in the cache; one that is final is read straight
into the tensor. A block that lies in the memory of a neighbour on this host is added, or copied, from there
(`host_read`).

Of a quantized operation, what is sent on lies coded in its area: a sum is coded there, while it is in the cache, and a
final block is read straight to there, and decoded into the tensor. The owner of a chunk codes its sums once, and takes
for itself what all others will: the decoded ones.

A frame of an operation that this peer has not begun waits; one that is over is read and dropped. Every number of a
header is compared with what this peer computes itself from the operation, before a byte of payload is read.

An in-place tensor is saved piece by piece before it is changed; how much of each block is saved stands beside
the backup, so that the tensor can be restored whenever and wherever this process was killed.
"""

import os
cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memmove

from pccl._core.kernels.arithmetic cimport coded_bytes, crc32c, decode_block, encode_block, reduce_block, reduce_coded
from pccl._core.system cimport posix
from pccl._core.system.check cimport check
from pccl._core.system.futex cimport now_ns
from pccl._core.system.mapping import open_memory_of

from .backup cimport mark_of, save
from .board cimport ABORTED, BACKED_UP, Op
from .host_read cimport INTRODUCED, NOTE_MAGIC, RETURNS_AT_ONCE, Note, Offer
from .lane cimport (
    BLOCK, FRAME_MAGIC, GO_ON, HEADER_BYTES, HOST_READ, INTRODUCTION, MAIL, NOTICE, OFFER, PIECE_BYTES, UNMAPPED,
    WHEREABOUTS_BYTES, WITHDRAWAL, Lane
)
from .plan cimport BLOCK_BYTES_MAX, block_range, blocks_of, chunk_received
from .quantization cimport coded_offset
from .segment_table cimport MappedSegment, SegmentTable

# Where a receiver is in a frame.
cdef enum:
    AT_HEADER = 0
    EARLY = 1                       # the header is complete, but its operation has not begun here
    AT_PAYLOAD = 2
    AT_NOTICE = 3                   # it is about memory

cdef enum:
    AVERAGE = 1                     # ReduceOp.AVG


@cython.final
cdef class Receiver(Lane):
    """Turns the frames of the previous peer into sums, results, and blocks that are ready for the next."""

    def __cinit__(self):
        self.borrowed = SegmentTable()

    def __dealloc__(self):
        free(self.scratch)

    def detach(self):
        """Serve no connection."""
        self.drop()
        self.stage = AT_HEADER
        self.have = 0
        self.worth = 0
        self.waiting_ns = 0
        self.unreturned = 0
        self.borrowed.clear()
        Lane.detach(self)

    def consider(self):
        """The neighbour offers memory, which is mapped if it can be had, or withdraws it."""
        cdef Offer offer
        self.stage = AT_HEADER
        self.borrowed.remove(self.header.segment)
        if self.header.kind == WITHDRAWAL:
            return
        memcpy(&offer, self.ahead, sizeof(offer))
        self.skip(sizeof(offer))
        try:
            if not self.host_read:
                raise ValueError("memory is not wanted")
            fd = open_memory_of(offer.pid, offer.descriptor, offer.nbytes, offer.inode, offer.device)
            try:
                self.borrowed.add(self.header.segment, fd, offer.nbytes, writable=False)
            finally:
                os.close(fd)
            accepted = True
        except (OSError, OverflowError, ValueError, MemoryError):
            accepted = False  # another user, another namespace, no process at all, not wanted: then everything is sent
        self.write_note(offer.serial, accepted)

    cdef int run(self) noexcept nogil:
        cdef int code
        while True:
            if self.is_called():
                return MAIL
            if self.connection < 0:
                self.sleep(-1)
                continue
            if self.stage == AT_HEADER:
                code = self.read_header()
            elif self.stage == EARLY:
                code = self.open_frame()
            elif self.stage == AT_NOTICE:
                code = self.read_notice()
            else:
                code = self.read_payload()
            if code:
                return code

    cdef int read_header(self) noexcept nogil:
        """Up to a whole header, and whatever small payload comes with it."""
        memcpy(&self.header, self.ahead, HEADER_BYTES)
        if self.have >= sizeof(self.header.magic) and self.header.magic != FRAME_MAGIC:
            return self.end(0, b"what came is no frame")
        if self.have < HEADER_BYTES:
            return self.read_ahead()
        if self.header.header_crc != crc32c(0, &self.header, HEADER_BYTES - 4):
            return self.end(0, b"what came is no frame")
        self.skip(HEADER_BYTES)
        return self.open_frame() if self.header.kind <= HOST_READ else self.read_notice()

    cdef int read_ahead(self) noexcept nogil:
        """Whatever has come; sleep if nothing has."""
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
                code = self.give_back()
                if code == GO_ON:
                    self.set_worth(1)
                    self.sleep(-1)
                return code
            return GO_ON if errno == posix.EINTR else self.end(errno, b"")
        self.have += count
        return GO_ON

    cdef int read_notice(self) noexcept nogil:
        """Up to the whole of what the neighbour says about itself or its memory."""
        cdef uint64_t nbytes = 0
        cdef bint introduces = self.header.kind == INTRODUCTION, accepted
        self.stage = AT_NOTICE
        if introduces:
            nbytes = WHEREABOUTS_BYTES
        elif self.header.kind == OFFER:
            nbytes = sizeof(Offer)
        if self.header.kind > INTRODUCTION or self.header.length != nbytes or (self.header.segment == 0) != introduces:
            return self.end(0, b"a frame of no known kind")
        if self.have < nbytes:
            return self.read_ahead()
        if crc32c(0, self.ahead, nbytes) != self.header.crc:
            return self.end(0, b"a notice whose checksum is wrong")
        if not introduces:
            return NOTICE
        accepted = self.same_host_suspected and memcmp(self.ahead, self.whereabouts, nbytes) == 0
        self.skip(nbytes)
        self.stage = AT_HEADER
        return self.write_note(INTRODUCED, accepted)

    cdef void skip(self, uint64_t nbytes) noexcept nogil:
        """That much of what was read ahead is dealt with."""
        check(nbytes <= self.have, "what is skipped was read")
        self.have -= nbytes
        memmove(self.ahead, self.ahead + nbytes, self.have)

    cdef int open_frame(self) noexcept nogil:
        """Find the operation of the frame; wait for it if it has not begun here."""
        cdef uint64_t sequence = self.header.sequence
        cdef int code
        check(self.op == NULL, "a frame begins when the last one was left")
        self.stage = EARLY
        if sequence > posix.atomic_load_u64(&self.board.shared.commenced):
            posix.atomic_add_u32(&self.board.shared.early, 1)
            self.give_back()
            # A close that was seen together with the frame is not told twice: sleeping on it would take for ever.
            if not self.broken and sequence > posix.atomic_load_u64(&self.board.shared.commenced):
                self.sleep(-1)
            posix.atomic_add_u32(&self.board.shared.early, <uint32_t> -1)
            return self.end(0, b"closed by the other side") if self.broken else GO_ON
        self.op = self.board.enter(sequence)
        if self.op != NULL:
            code = self.aim()
            if code:
                self.drop()
                return code
        if self.header.kind != HOST_READ and (self.op == NULL or self.target == NULL):
            code = self.aim_at_scratch()
            if code:
                return code
        if self.waiting_ns and self.op != NULL:
            self.waiting_ns = now_ns() - larger(self.waiting_ns, self.op.begun_ns)
            self.count.neighbour_ns += self.waiting_ns
            posix.atomic_count_u64(&self.op.neighbour_ns, self.waiting_ns)
        self.waiting_ns = 0
        self.received = 0
        self.trickling = False
        self.stage = AT_PAYLOAD
        return GO_ON

    cdef int aim(self) noexcept nogil:
        """Compare the header with what the operation says, and find where a block goes that is not for scratch."""
        cdef Op *op = self.op
        cdef BlockMemory place
        cdef uint64_t begin, end, nbytes
        cdef bint spreads
        if (
            <uint32_t> self.header.hop + 2 >= 2 * op.plan.world
            or self.header.chunk != chunk_received(&op.plan, op.rank, self.header.hop)
            or self.header.block >= blocks_of(&op.plan, self.header.chunk)
        ):
            return self.end(0, b"a frame that does not belong to its operation")
        block_range(&op.plan, self.header.chunk, self.header.block, &begin, &end)
        nbytes = coded_bytes(&op.codec, end - begin) if op.codec.bits else (end - begin) * op.itemsize
        if self.header.length != nbytes:
            return self.end(0, b"a frame whose length does not fit its block")
        self.wanted = self.missing_segment(op)
        if self.wanted:
            return UNMAPPED
        if not self.board.is_first(op, self.header.hop, self.header.block):
            return self.end(0, b"a block that has come before")
        self.target = NULL
        spreads = <uint32_t> self.header.hop + 1 >= op.plan.world
        if spreads and op.codec.bits == 0:
            place = self.find_memory()
            self.target = place.out
            # Only this peer's own chunk is overwritten without ever having been added to, and saved now, if it was lent.
            if place.mark != NULL:
                save(place.mark, place.out, place.backup, nbytes)
        elif spreads and self.is_sent_on():
            self.target = self.find_coded()
        return GO_ON

    cdef bint is_sent_on(self) noexcept nogil:
        """Whether this block has another hop to go."""
        return <uint32_t> self.header.hop + 3 < 2 * self.op.plan.world

    cdef BlockMemory find_memory(self) noexcept nogil:
        """Where the block of this frame is, now that all segments are mapped."""
        cdef Op *op = self.op
        cdef BlockMemory place
        cdef uint64_t begin, end
        block_range(&op.plan, self.header.chunk, self.header.block, &begin, &end)
        check(begin < end, "a block has elements")
        check(end <= op.plan.count, "a block that is received lies within its tensor")
        place.count = end - begin
        begin *= op.itemsize
        place.local = self.segments.base_of(op.send_segment) + op.send_offset + begin
        place.out = self.segments.base_of(op.recv_segment) + op.recv_offset + begin
        place.backup, place.mark = NULL, NULL
        if op.flags & BACKED_UP:
            place.backup = self.segments.base_of(op.backup_segment) + op.backup_offset
            place.mark = mark_of(place.backup, &op.plan, op.itemsize, self.header.chunk, self.header.block)
            place.backup += begin
        return place

    cdef char *find_coded(self) noexcept nogil:
        """Where the block of this frame lies coded until it is sent on."""
        cdef Op *op = self.op
        cdef uint64_t offset = coded_offset(&op.codec, &op.plan, self.header.chunk, self.header.block)
        check(self.header.block < op.plan.blocks_each, "a coded block is one of its plan")
        return self.segments.base_of(op.area_segment) + op.area_offset + offset

    cdef uint32_t missing_segment(self, const Op *op) noexcept nogil:
        """The first segment of an operation that is not mapped here; 0 if all are."""
        if self.segments.base_of(op.send_segment) == NULL:
            return op.send_segment
        if self.segments.base_of(op.recv_segment) == NULL:
            return op.recv_segment
        if op.flags & BACKED_UP and self.segments.base_of(op.backup_segment) == NULL:
            return op.backup_segment
        if op.codec.bits and self.segments.base_of(op.area_segment) == NULL:
            return op.area_segment
        return 0

    cdef int read_payload(self) noexcept nogil:
        cdef uint64_t missing = self.header.length - self.received, taken
        cdef char *place = self.target + self.received
        cdef ssize_t count
        if self.header.kind == HOST_READ:
            return self.borrow_block()
        if self.op == NULL:  # dropped, piece by piece, in the same place
            place = self.target
            missing = missing if missing < self.scratch_size else self.scratch_size
        if missing and self.have:
            taken = missing if missing < self.have else self.have
            memcpy(place, self.ahead, taken)
            self.skip(taken)
            count = taken
        elif missing:
            count = posix.recv(self.connection, place, missing, posix.MSG_DONTWAIT)
            if count == 0:
                return self.end(0, b"closed by the other side in the middle of a block")
            if count < 0:
                if errno == posix.EAGAIN:
                    return self.await_bytes()
                return GO_ON if errno == posix.EINTR else self.end(errno, b"")
        else:
            count = 0
        self.received += count
        if self.op != NULL:
            posix.atomic_count_u64(&self.op.moved, count)
        self.source = self.target
        return self.close_frame() if self.received == self.header.length else GO_ON

    cdef int borrow_block(self) noexcept nogil:
        """A block that is lent: it is whole, and goes nowhere if it is to be added."""
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
            code = self.give_back()
        return code

    cdef int give_back(self) noexcept nogil:
        """Tell the neighbour how many of its blocks were read since the last time."""
        return self.write_note(0, False) if self.unreturned else GO_ON

    cdef int write_note(self, uint32_t serial, bint accepted) noexcept nogil:
        """Few of them are ever under way, because few blocks are, so the socket has room or is broken."""
        cdef Note note
        note.magic, note.returned, note.serial, note.accepted = NOTE_MAGIC, self.unreturned, serial, accepted
        self.unreturned = 0
        if posix.send(self.connection, &note, sizeof(note), posix.MSG_NOSIGNAL | posix.MSG_DONTWAIT) != sizeof(note):
            return self.end(errno, b"")
        return GO_ON

    cdef int await_bytes(self) noexcept nogil:
        """Sleep in the middle of a block. On a fast link not for every segment; what takes long is a slow one."""
        cdef int64_t began = now_ns(), waited
        cdef uint64_t missing = self.header.length - self.received
        self.give_back()
        if not self.trickling:
            self.set_worth(<int> missing if missing < WORTH_BYTES_MAX else WORTH_BYTES_MAX)
        if not self.sleep(-1 if self.trickling else WORTH_MS):
            self.trickling = True
            self.set_worth(1)
        waited = now_ns() - began
        self.count.network_ns += waited
        if self.op != NULL:
            posix.atomic_count_u64(&self.op.network_ns, waited)
            if posix.atomic_load_u32(&self.op.state) == ABORTED:
                return self.divert()
        return GO_ON

    cdef void set_worth(self, int nbytes) noexcept nogil:
        """How many bytes are worth being woken for."""
        if nbytes != self.worth:
            self.worth = nbytes
            posix.setsockopt(self.connection, posix.SOL_SOCKET, posix.SO_RCVLOWAT, &nbytes, sizeof(nbytes))

    cdef int divert(self) noexcept nogil:
        """The operation was aborted in the middle of a frame: the rest goes to scratch."""
        self.drop()
        return self.aim_at_scratch()

    cdef int aim_at_scratch(self) noexcept nogil:
        cdef uint64_t needed = self.header.length
        if self.op == NULL and needed > BLOCK_BYTES_MAX:
            needed = BLOCK_BYTES_MAX  # nobody has checked this length
        if needed > self.scratch_size:
            free(self.scratch)
            self.scratch_size = 0
            self.scratch = <char *> malloc(needed)
            if self.scratch == NULL:
                self.drop()
                return self.end(posix.ENOMEM, b"")
            self.scratch_size = needed
        self.target = self.scratch
        return GO_ON

    cdef void drop(self) noexcept nogil:
        """Hold the operation no longer."""
        if self.op != NULL:
            self.board.leave(self.op)
            self.op = NULL

    cdef int close_frame(self) noexcept nogil:
        """The block is whole: add it or keep it, and say so."""
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
        if reduces or op.codec.bits:
            began = now_ns()
            if reduces:
                has_crc = not posix.atomic_load_u32(&self.board.shared.same_host_verified)
            crc = self.apply_coded(has_crc) if op.codec.bits else self.apply(has_crc)
            began = now_ns() - began
            self.count.reduce_ns += began
            posix.atomic_count_u64(&op.reduce_ns, began)
        posix.atomic_count_u64(&op.received_bytes, self.received)
        if self.is_sent_on():
            if not self.board.push(op, <uint32_t> self.header.hop + 1, self.header.block, crc, has_crc):
                return self.end(0, b"the queue of ready blocks is full")
        self.board.account(op)
        self.drop()
        return self.visit()

    cdef uint32_t divisor(self) noexcept nogil:
        """The owner's last sum is the one that an average divides."""
        cdef Op *op = self.op
        return op.plan.world if <uint32_t> self.header.hop + 2 == op.plan.world and op.op == AVERAGE else 0

    cdef uint32_t apply(self, bint has_crc) noexcept nogil:
        """Add the block to the tensor, and return the checksum of the sum, which is what is sent on, if it is wanted.

        A piece at a time: saved before it changes, and summed up while it is in the nearest cache.
        """
        cdef Op *op = self.op
        cdef BlockMemory place = self.find_memory()
        cdef uint64_t at = 0, piece
        cdef uint32_t divisor = self.divisor(), crc = 0
        while at < self.received:
            piece = self.received - at if self.received - at < PIECE_BYTES else PIECE_BYTES
            if place.mark != NULL:
                save(place.mark, place.out, place.backup, at + piece)
            reduce_block(
                op.datatype, op.op, place.out + at, place.local + at, self.source + at, piece // op.itemsize, divisor
            )
            if has_crc:
                crc = crc32c(crc, place.out + at, piece)
            at += piece
        return crc

    cdef uint32_t apply_coded(self, bint has_crc) noexcept nogil:
        """The same of a coded block: added, coded anew and summed up; or only decoded, if it is final.

        Returns the checksum of what is sent on, if anything is.
        """
        cdef Op *op = self.op
        cdef BlockMemory place = self.find_memory()
        cdef bint reduces = <uint32_t> self.header.hop + 1 < op.plan.world
        cdef bint owned = <uint32_t> self.header.hop + 2 == op.plan.world
        cdef uint32_t divisor = self.divisor(), crc = 0 if reduces else self.header.crc
        cdef const char *coded = self.source
        cdef char *forward = self.find_coded()
        cdef uint64_t done = 0, some, at, nbytes
        while done < place.count:
            some = PIECE_BYTES // op.itemsize
            some = place.count - done if place.count - done < some else some
            at, nbytes = done * op.itemsize, coded_bytes(&op.codec, some)
            if place.mark != NULL:
                save(place.mark, place.out, place.backup, at + some * op.itemsize)
            if reduces:
                reduce_coded(&op.codec, op.op, place.out + at, place.local + at, coded, some, divisor)
                encode_block(&op.codec, forward, place.out + at, some)
                if has_crc:
                    crc = crc32c(crc, forward, nbytes)
            if owned:
                decode_block(&op.codec, place.out + at, forward, some)
            elif not reduces:
                decode_block(&op.codec, place.out + at, coded, some)
            coded += nbytes
            forward += nbytes
            done += some
        return crc


cdef inline int64_t larger(int64_t one, int64_t other) noexcept nogil:
    return one if one > other else other
