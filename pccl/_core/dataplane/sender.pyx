# cython: language_level=3, cdivision=True, auto_pickle=False
"""The sender of a lane: turns blocks that are ready into frames to the next peer.

It takes the next block from the board whenever its socket has room. A socket that stays full for a while is slow: the
sender says so, and wakes another lane to take what this one cannot. On a far link it also waits while all lanes together
have as much under way as the link bears (`inflight`), and wakes no lane: more of them would not be faster.

A neighbour on the same host reads blocks in our memory (`host_read`): such a block counts as sent after the neighbour
has given it back.
"""

import os
cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from pccl._core.kernels.arithmetic cimport coded_bytes, crc32c, encode_block
from pccl._core.system cimport posix
from pccl._core.system.check cimport check
from pccl._core.system.futex cimport now_ns

from .backup cimport save_block
from .board cimport ABORTED, BACKED_UP, Op, lane_bit
from .host_read cimport HOST_READ_BYTES_MIN, INTRODUCED, LOANS_MAX, NOTE_MAGIC, Loan, Note, Offer, lend, take_back
from .inflight cimport InflightBudget, LinkCount, add, allowed, begin, is_far, learn, look_anew, refresh
from .lane cimport (
    BLOCK, FRAME_MAGIC, GO_ON, HEADER_BYTES, HOST_READ, INTRODUCTION, MAIL, OFFER, PIECE_BYTES, PLAIN, UNMAPPED,
    WHEREABOUTS_BYTES, WITHDRAWAL, Header, Lane, write_notice
)
from .plan cimport block_range, chunk_sent
from .quantization cimport coded_offset


@cython.final
cdef class Sender(Lane):
    """Frames ready blocks to the next peer."""

    def __dealloc__(self):
        free(self.own)
        free(self.notices)

    def attach(self, int fd, *, bytes whereabouts=b"", bint host_read=False):
        """Serve this connection."""
        Lane.attach(self, fd, whereabouts=whereabouts, host_read=host_read)
        self.pid = os.getpid()
        self.offers = 0
        self.segments.recall()
        self.same_host_verified = False
        posix.atomic_store_u32(&self.board.shared.same_host_verified, 0)
        if self.same_host_suspected and self.notify(INTRODUCTION, 0, self.whereabouts, WHEREABOUTS_BYTES) != GO_ON:
            raise MemoryError
        begin(&self.report, fd)
        self.far = is_far(&self.report)
        memset(&self.board.shared.budget, 0, sizeof(InflightBudget))  # another edge, another link
        posix.atomic_set_bits_u64(&self.board.shared.present[self.lane // 64], lane_bit(self.lane))

    def detach(self):
        """Serve no connection."""
        posix.atomic_clear_bits_u64(&self.board.shared.present[self.lane // 64], lane_bit(self.lane))
        self.set_blocked(False)
        self.cease_to_report()
        if self.entered:
            self.board.leave(self.job.op)
        self.entered = self.pending = False
        self.header_left = self.payload_left = 0
        self.loans.count = self.notices_length = self.notes_length = 0
        self.by_host_read = False
        Lane.detach(self)
        if self.board.has_work():
            self.board.wake_sender()  # what this lane would have taken

    def withdraw(self, uint32_t segment):
        """Tell the neighbour that this memory goes, if it was offered."""
        cdef MappedSegment *mapped = self.segments.find(segment)
        if mapped != NULL and mapped.serial and self.notify(WITHDRAWAL, segment, NULL, 0) != GO_ON:
            raise MemoryError

    cdef int run(self) noexcept nogil:
        cdef int code = GO_ON
        while True:
            if self.is_called():
                return MAIL
            if self.connection < 0:
                self.sleep(-1)
                continue
            if self.broken:
                return self.end(0, b"closed by the other side")
            if self.heard and self.same_host_suspected:
                code = self.hear()
            elif self.header_left == 0 and self.payload_left == 0:
                if self.notices_length:
                    self.send_notices()
                    continue
                if self.loans.count == LOANS_MAX:
                    self.await_return()
                    continue
                if not self.pending:
                    if not self.board.take(&self.job):
                        self.rest()
                        continue
                    self.taken_ns = now_ns()
                    if self.would_be_last():
                        self.leave_it_to_others()
                        continue
                code = self.prepare()
            else:
                code = self.transmit()
            if code:
                return code

    cdef void rest(self) noexcept nogil:
        """Sleep until there is work. The bit is set before the last look, so no work can slip in between."""
        cdef uint64_t *word = &self.board.shared.idle[self.lane // 64]
        if self.reporting:
            self.cease_to_report()
        posix.atomic_set_bits_u64(word, lane_bit(self.lane))
        if not self.board.has_work() and not posix.atomic_load_u32(&self.count.attention):
            self.sleep(-1)
        posix.atomic_clear_bits_u64(word, lane_bit(self.lane))

    cdef bint would_be_last(self) noexcept nogil:
        """Whether faster lanes will have sent all the rest before this one is through with the block it just took.

        Everybody would wait for it then. Not for ever, though: who was fast may be stuck.
        """
        cdef Op *op = self.job.op
        cdef uint64_t mine = self.count.frame_ns, best = 0, rival
        cdef uint64_t fast = 0
        cdef int lane
        if op.small or mine < SLOW_NS:
            return False
        for lane in range(self.board.lanes):
            rival = self.board.shared.lanes[1][lane].frame_ns
            if rival and SLOW_TIMES * rival <= mine and self.board.shared.present[lane // 64] & lane_bit(lane):
                fast += 1
                best = rival if best == 0 or rival < best else best
        # Half of what remains is to be sent, half to be received.
        if fast == 0 or BACKLOG_FRAMES * mine <= posix.atomic_load_u64(&op.remaining) // 2 * best // fast:
            self.declining_ns = 0
            return False
        if self.declining_ns == 0:
            self.declining_ns = self.taken_ns
        return <uint64_t> (self.taken_ns - self.declining_ns) < BACKLOG_FRAMES * mine

    cdef void leave_it_to_others(self) noexcept nogil:
        """Put the block back. Blocked, and not idle, because it must not be this lane that is woken for it."""
        self.set_blocked(True)
        self.board.push(self.job.op, self.job.hop, self.job.block, self.job.crc, self.job.has_crc)
        self.board.leave(self.job.op)
        self.sleep(RECRUIT_MS)
        self.set_blocked(False)

    cdef int prepare(self) noexcept nogil:
        """Begin the frame of the block in `job`."""
        cdef Op *op = self.job.op
        cdef uint32_t chunk = chunk_sent(&op.plan, op.rank, self.job.hop)
        cdef int code
        check(self.payload_left == 0, "a frame is begun when the last one is whole")
        check(posix.atomic_load_u32(&op.users) != 0, "the operation of a block that is sent is held")
        self.entered = True
        self.pending = False
        code = self.find_payload(chunk)
        if code == GO_ON:
            self.by_host_read = self.may_be_read_there()
            code = self.save_payload(chunk)
        if code == UNMAPPED and posix.atomic_load_u32(&op.state) == ABORTED:
            self.entered = False
            self.board.leave(op)
            return GO_ON
        if code:
            self.pending = code == UNMAPPED
            return code
        if not self.same_host_verified and not self.by_host_read and not self.job.has_crc:
            self.job.crc = crc32c(0, self.payload, self.length)
        self.write_header(chunk)
        return self.offer()

    cdef int find_payload(self, uint32_t chunk) noexcept nogil:
        """What is sent: of a quantized operation what lies coded in its area, but for the own chunk, coded here and now."""
        cdef Op *op = self.job.op
        cdef bint coded = op.codec.bits and self.job.hop
        cdef uint32_t segment = op.area_segment if coded else op.recv_segment if self.job.hop else op.send_segment
        cdef uint64_t begin, end
        cdef char *base
        self.mapped = self.segments.find(segment)
        if self.mapped == NULL:
            self.wanted = segment
            return UNMAPPED
        base = self.mapped.base
        block_range(&op.plan, chunk, self.job.block, &begin, &end)
        check(end <= op.plan.count, "a block that is sent lies within its tensor")
        if coded:
            self.payload = base + op.area_offset + coded_offset(&op.codec, &op.plan, chunk, self.job.block)
            self.length = self.payload_left = coded_bytes(&op.codec, end - begin)
            return GO_ON
        self.payload = base + (op.recv_offset if self.job.hop else op.send_offset) + begin * op.itemsize
        if op.codec.bits:
            return self.encode(self.payload, end - begin)
        self.length = self.payload_left = (end - begin) * op.itemsize
        return GO_ON

    cdef int save_payload(self, uint32_t chunk) noexcept nogil:
        """Save the own chunk, which its result will overwrite, now that it is read anyway: a twentieth less time."""
        cdef Op *op = self.job.op
        cdef char *backup
        if self.job.hop or self.by_host_read or op.codec.bits or not op.flags & BACKED_UP:
            return GO_ON
        backup = self.segments.base_of(op.backup_segment)
        if backup == NULL:
            self.wanted, self.payload_left = op.backup_segment, 0
            return UNMAPPED
        save_block(&op.plan, op.itemsize, chunk, self.job.block, self.payload, backup + op.backup_offset)
        return GO_ON

    cdef int encode(self, const char *values, uint64_t count) noexcept nogil:
        """Code a block into memory of our own, a piece at a time, so that the checksum finds it in the nearest cache."""
        cdef Op *op = self.job.op
        cdef uint64_t done = 0, some, piece = PIECE_BYTES // op.itemsize, nbytes
        cdef uint32_t crc = 0
        cdef char *target
        self.length = self.payload_left = coded_bytes(&op.codec, count)
        if self.reserve(self.length) != 0:
            return self.end(posix.ENOMEM, b"")
        target = self.own
        while done < count:
            some = count - done if count - done < piece else piece
            nbytes = coded_bytes(&op.codec, some)
            encode_block(&op.codec, target, values + done * op.itemsize, some)
            if not self.same_host_verified:
                crc = crc32c(crc, target, nbytes)
            target += nbytes
            done += some
        self.payload = self.own
        self.mapped = NULL
        self.job.crc, self.job.has_crc = crc, True
        return GO_ON

    cdef int reserve(self, uint64_t nbytes) noexcept nogil:
        """Have that much memory of our own; -1 if there is none."""
        if nbytes > self.own_size:
            free(self.own)
            self.own_size = 0
            self.own = <char *> malloc(nbytes)
            if self.own == NULL:
                return -1
            self.own_size = nbytes
        return 0

    cdef void write_header(self, uint32_t chunk) noexcept nogil:
        self.header.magic = FRAME_MAGIC
        self.header.hop = self.job.hop
        self.header.kind = HOST_READ if self.by_host_read else PLAIN if self.same_host_verified else BLOCK
        self.header.sequence = self.job.op.sequence
        self.header.segment = self.mapped.segment if self.by_host_read else 0
        self.header.offset = self.payload - self.mapped.base if self.by_host_read else 0
        self.header.chunk = chunk
        self.header.block = self.job.block
        self.header.length = self.length
        self.header.crc = self.job.crc if self.header.kind == BLOCK else 0
        self.header.header_crc = crc32c(0, &self.header, HEADER_BYTES - 4)
        self.header_left = HEADER_BYTES
        if self.by_host_read:
            self.payload_left = 0

    cdef int transmit(self) noexcept nogil:
        """Write what the socket takes of the frame."""
        cdef posix.iovec parts[2]
        cdef posix.msghdr message
        cdef ssize_t sent
        cdef uint64_t taken, room = self.room() if self.far and self.entered and not self.job.op.small else <uint64_t> -1
        if room == 0:
            return self.await_others()
        memset(&message, 0, sizeof(message))
        parts[0].iov_base = <char *> &self.header + (HEADER_BYTES - self.header_left)
        parts[0].iov_len = self.header_left
        parts[1].iov_base = <void *> self.payload
        parts[1].iov_len = self.payload_left if self.payload_left < room else room
        message.msg_iov = parts
        message.msg_iovlen = 2
        sent = posix.sendmsg(self.connection, &message, posix.MSG_NOSIGNAL | posix.MSG_DONTWAIT)
        if sent < 0:
            if errno == posix.EAGAIN:
                return self.await_room()
            return GO_ON if errno == posix.EINTR else self.end(errno, b"")
        check(<uint64_t> sent <= self.header_left + self.payload_left, "no more is sent than the frame has")
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
        if self.blocked:
            self.set_blocked(False)
        if self.length == 0:
            return GO_ON  # notices
        self.count.payload_bytes += self.length
        self.count.frames += 1
        if self.by_host_read:
            lend(&self.loans, self.header.sequence, self.length)
        if self.entered:
            if not op.small:
                self.measure()
            self.entered = False
            if self.by_host_read:
                posix.atomic_count_u64(&op.moved, self.length)
            else:
                posix.atomic_count_u64(&op.sent_bytes, self.length)
                self.board.account(op)
            self.board.leave(op)
        self.by_host_read = False
        return self.visit()

    # ------------------------------------------------------------------------------------------ host reads

    cdef bint may_be_read_there(self) noexcept nogil:
        """Whether the neighbour reads this block where it lies."""
        return self.host_read and self.mapped != NULL and self.mapped.accepted and self.length >= HOST_READ_BYTES_MIN

    cdef int offer(self) noexcept nogil:
        """Offer the segment of the block to the neighbour, the first time that one is worth it."""
        cdef MappedSegment *mapped = self.mapped
        cdef Offer offer
        if not self.host_read or mapped == NULL or mapped.serial or self.length < HOST_READ_BYTES_MIN:
            return GO_ON
        self.offers += 1
        mapped.serial = self.offers
        offer.nbytes, offer.inode, offer.device = mapped.nbytes, mapped.inode, mapped.device
        offer.segment, offer.serial = mapped.segment, mapped.serial
        offer.pid, offer.descriptor = self.pid, mapped.descriptor
        return self.notify(OFFER, mapped.segment, &offer, sizeof(offer))

    cdef int notify(self, uint16_t kind, uint32_t segment, const void *body, uint32_t nbytes) noexcept nogil:
        """Have a frame about us or our memory go out before the next block."""
        cdef uint64_t needed = self.notices_length + HEADER_BYTES + nbytes
        cdef char *grown
        if needed > self.notices_size:
            grown = <char *> realloc(self.notices, needed)
            if grown == NULL:
                return self.end(posix.ENOMEM, b"")
            self.notices, self.notices_size = grown, needed
        write_notice(self.notices + self.notices_length, kind, segment, body, nbytes)
        self.notices_length = needed
        return GO_ON

    cdef void send_notices(self) noexcept nogil:
        """Begin to send what was to be said about memory. It is in memory of our own, which is free between two blocks."""
        if self.reserve(self.notices_length) == 0:
            memcpy(self.own, self.notices, self.notices_length)
            self.payload, self.payload_left, self.length = self.own, self.notices_length, 0
        self.notices_length = 0

    cdef int hear(self) noexcept nogil:
        """Read what the neighbour says about blocks and memory."""
        cdef char *room = <char *> self.notes + self.notes_length
        cdef ssize_t count
        cdef uint64_t index, whole
        cdef int code
        count = posix.recv(self.connection, room, sizeof(self.notes) - self.notes_length, posix.MSG_DONTWAIT)
        if count == 0:
            return self.end(0, b"closed by the other side")
        if count < 0:
            self.heard = errno != posix.EAGAIN
            return GO_ON if errno in (posix.EAGAIN, posix.EINTR) else self.end(errno, b"")
        self.notes_length += count
        check(self.notes_length <= sizeof(self.notes), "answers fit the room for them")
        whole = self.notes_length // sizeof(Note)
        for index in range(whole):
            code = self.obey(&self.notes[index])
            if code:
                return code
        self.notes_length -= whole * sizeof(Note)
        memmove(self.notes, &self.notes[whole], self.notes_length)
        return GO_ON

    cdef int obey(self, const Note *note) noexcept nogil:
        """What was given back is sent; what was accepted is lent from now on."""
        cdef uint32_t index
        cdef Loan loan
        cdef Op *op
        if note.magic != NOTE_MAGIC or note.returned > self.loans.count:
            return self.end(0, b"the other side gave back what it was never lent")
        for index in range(note.returned):
            loan = take_back(&self.loans)
            op = self.board.enter(loan.sequence)
            if op != NULL:
                posix.atomic_count_u64(&op.sent_bytes, loan.nbytes)
                self.board.account(op)
                self.board.leave(op)
        if note.serial == INTRODUCED and note.accepted:
            self.same_host_verified = True
            posix.atomic_store_u32(&self.board.shared.same_host_verified, 1)
        elif note.serial:
            self.segments.answer(note.serial, note.accepted)
        return GO_ON

    cdef void await_return(self) noexcept nogil:
        """Enough is lent. If nothing comes back for long, another lane may take what waits."""
        cdef int64_t began = now_ns()
        if not self.sleep(RECRUIT_MS):
            self.set_blocked(True)
            if self.board.has_work():
                self.board.wake_sender()
            self.sleep(-1)
            self.set_blocked(False)
        self.count.network_ns += now_ns() - began

    # ------------------------------------------------------------------------------------------ waiting

    cdef void measure(self) noexcept nogil:
        """How long a large block takes, once the buffer of the socket says nothing about it any more."""
        self.streak += self.streak <= STREAK
        if self.streak == 1 or self.streak > STREAK:
            self.count.frame_ns += (now_ns() - self.taken_ns - <int64_t> self.count.frame_ns) // 4

    cdef uint64_t room(self) noexcept nogil:
        """Bytes of a large operation that this lane may give to the kernel now, on a far link."""
        cdef InflightBudget *budget = &self.board.shared.budget
        cdef LinkCount total
        cdef uint64_t most, under_way
        cdef int lane
        if not refresh(&self.report, self.connection):
            return <uint64_t> -1  # sending will tell why
        if not self.reporting:
            look_anew(budget)
        self.count.counted = self.report.counted
        if not self.reporting:
            look_anew(budget)  # again: one that began in between may have missed what this lane brings
            self.reporting = True
        memset(&total, 0, sizeof(total))
        for lane in range(self.board.lanes):
            add(&total, &self.board.shared.lanes[1][lane].counted)
        learn(budget, &total, &self.report, now_ns())
        most = allowed(budget, &self.report)
        under_way = total.in_flight + total.unsent
        return most - under_way if under_way < most else 0

    cdef void cease_to_report(self) noexcept nogil:
        """What is under way now arrives without this lane's saying so."""
        self.reporting = False
        self.count.counted.in_flight = self.count.counted.unsent = 0
        look_anew(&self.board.shared.budget)

    cdef int await_others(self) noexcept nogil:
        """Enough is under way. Nobody is called, unless for a small operation, which is not to wait behind this one."""
        cdef int64_t began = now_ns()
        self.set_blocked(self.board.has_work_of(1))
        if self.blocked:
            self.board.wake_sender()
        self.sleep(1 + <int> (self.report.shortest_us // AWAIT_PART))
        return self.wake_up(began)

    cdef int await_room(self) noexcept nogil:
        """The socket is full. If a frame takes long, another lane may take what waits."""
        cdef int64_t began = now_ns(), left_ms
        left_ms = self.patience_ms if self.blocked else RECRUIT_MS - (began - self.taken_ns) // 1_000_000
        if self.far and left_ms > REPORT_MS:
            left_ms = REPORT_MS
        if left_ms <= 0 or not self.sleep(<int> left_ms):
            self.patience_ms = min(2 * self.patience_ms, RECRUIT_MS_MAX) if self.blocked else RECRUIT_MS
            self.set_blocked(True)
            if self.board.has_work():
                self.board.wake_sender()
        return self.wake_up(began)

    cdef int wake_up(self, int64_t began) noexcept nogil:
        """Count the time that the network took, and see whether the operation is still wanted."""
        cdef int64_t waited = now_ns() - began
        self.streak = 0
        self.count.network_ns += waited
        if self.entered:
            posix.atomic_count_u64(&self.job.op.network_ns, waited)
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
        """The operation was aborted in the middle of its frame, which goes on from memory of our own."""
        if self.payload_left and not self.own <= self.payload < self.own + self.own_size:
            if self.reserve(self.payload_left) != 0:
                return self.end(posix.ENOMEM, b"")
            memcpy(self.own, self.payload, self.payload_left)
            self.payload = self.own
        self.entered = False
        self.board.leave(self.job.op)
        return GO_ON
