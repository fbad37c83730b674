# cython: language_level=3, cdivision=True, auto_pickle=False
"""The loops of a lane: a sender that turns ready blocks into frames, a receiver that turns frames into ready blocks.

Both run without the GIL until there is something for Python: mail, the end of the connection, a segment to map. Then
`run` returns a code and is called again; a frame that was under way goes on where it was.

**A frame** is a header and a block. It describes itself, so receivers keep no other state, and it carries two checksums:
a flipped bit is the end of the connection, never a wrong sum. Nothing is resynchronised by guessing. Every number of a
header is compared with what this peer computes itself from the operation, before a byte of payload is read.

**The sender** takes the next block from the board whenever its socket has room. A socket that stays full for a while is
slow: the sender says so, and another lane is woken to take what it cannot.

**The receiver** reads a block that is to be added into a scratch buffer that stays in the cache, and one that is final
straight into the tensor. A frame of an operation that this peer has not begun waits; one that is over is read and dropped.
An in-place tensor is saved piece by piece before it is changed; how much of each block is saved stands beside
the backup, so that the tensor can be restored whenever and wherever this process was killed.

**Abort** finds a worker between two blocks, or asleep on its socket. A receiver then sends the rest of the frame to
scratch; a sender copies the rest of its frame and sends that, because half a frame would cost the connection. Both let
go of the tensor at once.
"""

import os

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, memset

from pccl._core cimport posix

from .backup cimport mark_of, save
from .board cimport ABORTED, BACKED_UP
from .kernels cimport crc32c, reduce_block
from .park cimport now_ns, raise_errno
from .plan cimport block_range, blocks_of, chunk_received, chunk_sent

# Python's view of the codes.
LANE_MAIL = <int> MAIL
LANE_ENDED = <int> ENDED
LANE_UNMAPPED = <int> UNMAPPED
LANE_FAULT = <int> FAULT

# Where a receiver is in a frame.
cdef enum:
    AT_HEADER = 0
    EARLY = 1                       # the header is complete, but its operation has not begun here
    AT_PAYLOAD = 2

# What an epoll event belongs to.
cdef enum:
    FROM_MAILBOX = 0
    FROM_BELL = 1
    FROM_CONNECTION = 2

# What a step says beside the codes of `run`.
cdef enum:
    GO_ON = 0


cdef class Lane:
    """What a sender and a receiver have in common."""

    def __cinit__(self, Board board not None, int lane, bint sends, int mailbox, int bell):
        self.board = board
        self.lane = lane
        self.connection = -1
        self.segments = SegmentTable()
        self.count = &board.shared.lanes[sends][lane]
        memset(self.count, 0, sizeof(LaneCount))
        self.epoll = posix.epoll_create1(posix.EPOLL_CLOEXEC)
        if self.epoll < 0:
            raise_errno(errno, "creating an epoll")
        self._watch(mailbox, posix.EPOLLIN, FROM_MAILBOX)
        self._watch(bell, posix.EPOLLIN | posix.EPOLLET, FROM_BELL)

    def __dealloc__(self):
        if self.epoll >= 0:
            posix.close(self.epoll)

    def _watch(self, int fd, uint32_t events, uint32_t whose):
        cdef posix.epoll_event event
        event.events = events
        event.data.u64 = whose
        if posix.epoll_ctl(self.epoll, posix.EPOLL_CTL_ADD, fd, &event) != 0:
            raise_errno(errno, f"watching descriptor {fd}")

    def attach(self, int fd):
        """Serve this connection, which stays the caller's to close."""
        self.broken = False
        self._watch(fd, posix.EPOLLIN | posix.EPOLLOUT | posix.EPOLLRDHUP | posix.EPOLLET, FROM_CONNECTION)
        self.connection = fd

    def detach(self):
        """Serve no connection; whatever frame was under way is given up."""
        if self.connection >= 0:
            posix.epoll_ctl(self.epoll, posix.EPOLL_CTL_DEL, self.connection, NULL)
            self.connection = -1

    @property
    def problem(self):
        """Why the connection ended."""
        return os.strerror(self.error) if self.error else (<bytes> self.reason).decode()

    cdef int end(self, int error, const char *reason) noexcept nogil:
        self.error = error
        self.reason = reason
        return ENDED

    cdef int visit(self) noexcept nogil:
        """A frame is whole, and nothing else was done about it: the worst moment for a mishap."""
        if self.frames_until_fault:
            self.frames_until_fault -= 1
            if self.frames_until_fault == 0:
                return FAULT
        return GO_ON

    cdef bint is_called(self) noexcept nogil:
        """Whether there is mail: found asleep, or announced by the actor while this worker was busy."""
        if posix.atomic_load_u32(&self.count.attention):
            posix.atomic_store_u32(&self.count.attention, 0)
            self.mail = True
        if self.mail:
            self.mail = False
            return True
        return False

    cdef int sleep(self, int timeout_ms) noexcept nogil:
        """Until something happens. 0 if nothing did in that time."""
        cdef posix.epoll_event events[4]
        cdef int count, index
        count = posix.epoll_wait(self.epoll, events, 4, timeout_ms)
        for index in range(count):
            if events[index].data.u64 == FROM_MAILBOX:
                self.mail = True
            elif events[index].data.u64 == FROM_CONNECTION:
                if events[index].events & (posix.EPOLLRDHUP | posix.EPOLLHUP | posix.EPOLLERR):
                    self.broken = True
        return 0 if count == 0 else 1


# ---------------------------------------------------------------------------------------------- sending


@cython.final
cdef class Sender(Lane):
    """Frames ready blocks to the next peer."""

    def __dealloc__(self):
        free(self.rescue)

    def attach(self, int fd):
        """Serve this connection."""
        Lane.attach(self, fd)
        posix.atomic_set_bits_u64(&self.board.shared.present[self.lane // 64], lane_bit(self.lane))

    def detach(self):
        """Serve no connection."""
        posix.atomic_clear_bits_u64(&self.board.shared.present[self.lane // 64], lane_bit(self.lane))
        self.set_blocked(False)
        if self.entered:
            self.board.leave(self.job.op)
        self.entered = self.pending = False
        self.header_left = self.payload_left = 0
        Lane.detach(self)
        if self.board.has_work():
            self.board.wake_sender()  # what this lane would have taken

    def serve(self):
        """Send until there is something for Python; returns its code."""
        cdef int code
        with nogil:
            code = self.run()
        return code

    cdef int run(self) noexcept nogil:
        cdef int code
        while True:
            if self.is_called():
                return MAIL
            if self.connection < 0:
                self.sleep(-1)
                continue
            if self.broken:
                return self.end(0, b"closed by the other side")
            if self.header_left == 0 and self.payload_left == 0:
                if not self.pending and not self.board.take(&self.job):
                    self.rest()
                    continue
                code = self.prepare()
            else:
                code = self.transmit()
            if code:
                return code

    cdef void rest(self) noexcept nogil:
        """Sleep until there is work. The bit is set before the last look, so no work can slip in between."""
        cdef uint64_t *word = &self.board.shared.idle[self.lane // 64]
        posix.atomic_set_bits_u64(word, lane_bit(self.lane))
        if not self.board.has_work() and not posix.atomic_load_u32(&self.count.attention):
            self.sleep(-1)
        posix.atomic_clear_bits_u64(word, lane_bit(self.lane))

    cdef int prepare(self) noexcept nogil:
        """Begin the frame of the block in `job`."""
        cdef Op *op = self.job.op
        cdef uint32_t chunk = chunk_sent(&op.plan, op.rank, self.job.hop)
        cdef uint32_t segment = op.recv_segment if self.job.hop else op.send_segment
        cdef char *base = self.segments.base_of(segment)
        cdef uint64_t begin, end
        self.entered = True
        self.pending = base == NULL
        if base == NULL and posix.atomic_load_u32(&op.state) == ABORTED:
            self.pending = self.entered = False
            self.board.leave(op)
            return GO_ON
        if base == NULL:
            self.wanted = segment
            return UNMAPPED
        block_range(&op.plan, chunk, self.job.block, &begin, &end)
        self.payload = base + (op.recv_offset if self.job.hop else op.send_offset) + begin * op.itemsize
        self.length = self.payload_left = (end - begin) * op.itemsize
        if not self.job.known:
            self.job.crc = crc32c(0, self.payload, self.length)
        self.header.magic = FRAME_MAGIC
        self.header.hop = self.job.hop
        self.header.reserved = 0
        self.header.sequence = op.sequence
        self.header.chunk = chunk
        self.header.block = self.job.block
        self.header.length = self.length
        self.header.crc = self.job.crc
        self.header.spare = 0
        self.header.header_crc = crc32c(0, &self.header, HEADER_BYTES - 4)
        self.header_left = HEADER_BYTES
        return GO_ON

    cdef int transmit(self) noexcept nogil:
        """Write what the socket takes of the frame."""
        cdef posix.iovec parts[2]
        cdef posix.msghdr message
        cdef ssize_t sent
        cdef uint64_t taken
        memset(&message, 0, sizeof(message))
        parts[0].iov_base = <char *> &self.header + (HEADER_BYTES - self.header_left)
        parts[0].iov_len = self.header_left
        parts[1].iov_base = <void *> self.payload
        parts[1].iov_len = self.payload_left
        message.msg_iov = parts
        message.msg_iovlen = 2
        sent = posix.sendmsg(self.connection, &message, posix.MSG_NOSIGNAL | posix.MSG_DONTWAIT)
        if sent < 0:
            if errno == posix.EAGAIN:
                return self.await_room()
            return GO_ON if errno == posix.EINTR else self.end(errno, b"")
        if self.blocked:
            self.set_blocked(False)
        taken = <uint64_t> sent if <uint64_t> sent < self.header_left else self.header_left
        self.header_left -= taken
        sent -= taken
        self.payload += sent
        self.payload_left -= sent
        if self.entered:
            posix.atomic_count_u64(&self.job.op.moved, sent)
        return self.finish() if self.header_left == 0 and self.payload_left == 0 else GO_ON

    cdef int finish(self) noexcept nogil:
        """The frame is with the kernel."""
        cdef Op *op = self.job.op
        self.count.payload_bytes += self.length
        self.count.frames += 1
        if self.entered:
            self.entered = False
            posix.atomic_count_u64(&op.sent_bytes, self.length)
            self.board.account(op)
            self.board.leave(op)
        return self.visit()

    cdef int await_room(self) noexcept nogil:
        """The socket is full. If that lasts, another lane may take what waits."""
        cdef int64_t began = now_ns(), waited
        cdef int happened = self.sleep(-1 if self.blocked else RECRUIT_MS)
        waited = now_ns() - began
        self.count.network_ns += waited
        if self.entered:
            posix.atomic_count_u64(&self.job.op.network_ns, waited)
        if not happened:
            self.set_blocked(True)
            if self.board.has_work():
                self.board.wake_sender()
        if self.entered and posix.atomic_load_u32(&self.job.op.state) == ABORTED:
            return self.let_go()
        return GO_ON

    cdef void set_blocked(self, bint blocked) noexcept nogil:
        self.blocked = blocked
        if blocked:
            posix.atomic_set_bits_u64(&self.board.shared.blocked[self.lane // 64], lane_bit(self.lane))
        else:
            posix.atomic_clear_bits_u64(&self.board.shared.blocked[self.lane // 64], lane_bit(self.lane))

    cdef int let_go(self) noexcept nogil:
        """The operation was aborted in the middle of its frame, which goes on from a copy."""
        if self.payload_left > self.rescue_size:
            free(self.rescue)
            self.rescue_size = 0
            self.rescue = <char *> malloc(self.payload_left)
            if self.rescue == NULL:
                return self.end(posix.ENOMEM, b"")
            self.rescue_size = self.payload_left
        memcpy(self.rescue, self.payload, self.payload_left)
        self.payload = self.rescue
        self.entered = False
        self.board.leave(self.job.op)
        return GO_ON


# ---------------------------------------------------------------------------------------------- receiving


@cython.final
cdef class Receiver(Lane):
    """Turns the frames of the previous peer into sums, results, and blocks that are ready for the next."""

    def __dealloc__(self):
        free(self.scratch)

    def detach(self):
        """Serve no connection."""
        self.drop()
        self.stage = AT_HEADER
        self.have = 0
        self.waiting_ns = 0
        Lane.detach(self)

    def serve(self):
        """Receive until there is something for Python; returns its code."""
        cdef int code
        with nogil:
            code = self.run()
        return code

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
            else:
                code = self.read_payload()
            if code:
                return code

    cdef int read_header(self) noexcept nogil:
        """Up to a whole header, and whatever small payload comes with it."""
        cdef ssize_t count
        if self.have < HEADER_BYTES:
            count = posix.recv(self.connection, self.ahead + self.have, sizeof(self.ahead) - self.have, posix.MSG_DONTWAIT)
            if count == 0:
                return self.end(0, b"closed by the other side")
            if count < 0:
                if errno == posix.EAGAIN:
                    if self.waiting_ns == 0:
                        self.waiting_ns = now_ns()
                    self.sleep(-1)
                    return GO_ON
                return GO_ON if errno == posix.EINTR else self.end(errno, b"")
            self.have += count
            if self.have < HEADER_BYTES:
                return GO_ON
        memcpy(&self.header, self.ahead, HEADER_BYTES)
        if self.header.magic != FRAME_MAGIC or self.header.header_crc != crc32c(0, &self.header, HEADER_BYTES - 4):
            return self.end(0, b"what came is no frame")
        self.have -= HEADER_BYTES
        memmove(self.ahead, self.ahead + HEADER_BYTES, self.have)
        return self.open_frame()

    cdef int open_frame(self) noexcept nogil:
        """Find the operation of the frame; wait for it if it has not begun here."""
        cdef uint64_t sequence = self.header.sequence
        cdef int code
        self.stage = EARLY
        if sequence > posix.atomic_load_u64(&self.board.shared.commenced):
            posix.atomic_add_u32(&self.board.shared.early, 1)
            if sequence > posix.atomic_load_u64(&self.board.shared.commenced):
                self.sleep(-1)
            posix.atomic_add_u32(&self.board.shared.early, <uint32_t> -1)
            return self.end(0, b"closed by the other side") if self.broken else GO_ON
        self.op = self.board.enter(sequence)
        if self.op != NULL:
            code = self.aim()
            if code:
                self.drop()
                return code
        if self.op == NULL or self.header.hop + 1 < self.op.plan.world:
            code = self.aim_at_scratch()
            if code:
                return code
        if self.waiting_ns and self.op != NULL:
            self.waiting_ns = now_ns() - larger(self.waiting_ns, self.op.begun_ns)
            self.count.neighbour_ns += self.waiting_ns
            posix.atomic_count_u64(&self.op.neighbour_ns, self.waiting_ns)
        self.waiting_ns = 0
        self.received = 0
        self.stage = AT_PAYLOAD
        return GO_ON

    cdef int aim(self) noexcept nogil:
        """Compare the header with what the operation says, and find where a final block goes."""
        cdef Op *op = self.op
        cdef uint64_t begin, end
        cdef char *backup
        cdef uint32_t *mark
        if (
            self.header.hop > 2 * op.plan.world - 3
            or self.header.chunk != chunk_received(&op.plan, op.rank, self.header.hop)
            or self.header.block >= blocks_of(&op.plan, self.header.chunk)
        ):
            return self.end(0, b"a frame that does not belong to its operation")
        block_range(&op.plan, self.header.chunk, self.header.block, &begin, &end)
        if self.header.length != (end - begin) * op.itemsize:
            return self.end(0, b"a frame whose length does not fit its block")
        self.wanted = self.missing_segment(op)
        if self.wanted:
            return UNMAPPED
        self.target = self.segments.base_of(op.recv_segment) + op.recv_offset + begin * op.itemsize
        if self.header.hop + 1 >= op.plan.world and op.flags & BACKED_UP:
            # Only this peer's own chunk is overwritten without ever having been added to, and saved then.
            backup = self.segments.base_of(op.backup_segment) + op.backup_offset
            mark = mark_of(backup, &op.plan, op.itemsize, self.header.chunk, self.header.block)
            save(mark, self.target, backup + begin * op.itemsize, self.header.length)
        return GO_ON

    cdef uint32_t missing_segment(self, const Op *op) noexcept nogil:
        """The first segment of an operation that is not mapped here; 0 if all are."""
        if self.segments.base_of(op.send_segment) == NULL:
            return op.send_segment
        if self.segments.base_of(op.recv_segment) == NULL:
            return op.recv_segment
        if op.flags & BACKED_UP and self.segments.base_of(op.backup_segment) == NULL:
            return op.backup_segment
        return 0

    cdef int read_payload(self) noexcept nogil:
        cdef uint64_t missing = self.header.length - self.received, taken
        cdef ssize_t count
        if missing and self.have:
            taken = missing if missing < self.have else self.have
            memcpy(self.target + self.received, self.ahead, taken)
            self.have -= taken
            memmove(self.ahead, self.ahead + taken, self.have)
            count = taken
        elif missing:
            count = posix.recv(self.connection, self.target + self.received, missing, posix.MSG_DONTWAIT)
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
        return self.close_frame() if self.received == self.header.length else GO_ON

    cdef int await_bytes(self) noexcept nogil:
        cdef int64_t began = now_ns(), waited
        self.sleep(-1)
        waited = now_ns() - began
        self.count.network_ns += waited
        if self.op != NULL:
            posix.atomic_count_u64(&self.op.network_ns, waited)
            if posix.atomic_load_u32(&self.op.state) == ABORTED:
                return self.divert()
        return GO_ON

    cdef int divert(self) noexcept nogil:
        """The operation was aborted in the middle of a frame: the rest goes to scratch."""
        self.drop()
        return self.aim_at_scratch()

    cdef int aim_at_scratch(self) noexcept nogil:
        if self.header.length > self.scratch_size:
            free(self.scratch)
            self.scratch_size = 0
            self.scratch = <char *> malloc(self.header.length)
            if self.scratch == NULL:
                self.drop()
                return self.end(posix.ENOMEM, b"")
            self.scratch_size = self.header.length
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
        cdef bint reducing
        cdef int64_t began
        self.stage = AT_HEADER
        self.count.frames += 1
        self.count.payload_bytes += self.received
        if op == NULL:
            return GO_ON
        if crc32c(0, self.target, self.received) != self.header.crc:
            return self.end(0, b"a block whose checksum is wrong")
        reducing = self.header.hop + 1 < op.plan.world
        if reducing:
            began = now_ns()
            self.apply()
            began = now_ns() - began
            self.count.reduce_ns += began
            posix.atomic_count_u64(&op.reduce_ns, began)
        posix.atomic_count_u64(&op.received_bytes, self.received)
        if self.header.hop < 2 * op.plan.world - 3:
            if not self.board.push(op, self.header.hop + 1, self.header.block, self.header.crc, not reducing):
                return self.end(0, b"the queue of ready blocks is full")
        self.board.account(op)
        self.drop()
        return self.visit()

    cdef void apply(self) noexcept nogil:
        """Add the block in scratch to the tensor, a piece at a time, each saved before it changes."""
        cdef Op *op = self.op
        cdef uint64_t begin, end, at = 0, piece
        cdef uint32_t divisor
        cdef char *local
        cdef char *out
        cdef char *backup = NULL
        cdef uint32_t *mark = NULL
        block_range(&op.plan, self.header.chunk, self.header.block, &begin, &end)
        begin *= op.itemsize
        local = self.segments.base_of(op.send_segment) + op.send_offset + begin
        out = self.segments.base_of(op.recv_segment) + op.recv_offset + begin
        if op.flags & BACKED_UP:
            backup = self.segments.base_of(op.backup_segment) + op.backup_offset
            mark = mark_of(backup, &op.plan, op.itemsize, self.header.chunk, self.header.block)
            backup += begin
        # The owner's last sum is the one that an average divides.
        divisor = op.plan.world if self.header.hop + 2 == op.plan.world and op.op == AVERAGE else 0
        while at < self.received:
            piece = self.received - at
            if mark != NULL:
                piece = piece if piece < SAVE_BYTES else SAVE_BYTES
                save(mark, local, backup, at + piece)
            reduce_block(op.datatype, op.op, out + at, local + at, self.scratch + at, piece // op.itemsize, divisor)
            at += piece


cdef enum:
    AVERAGE = 1                     # ReduceOp.AVG


cdef inline uint64_t lane_bit(int lane) noexcept nogil:
    return <uint64_t> 1 << lane % 64


cdef inline int64_t larger(int64_t one, int64_t other) noexcept nogil:
    return one if one > other else other
