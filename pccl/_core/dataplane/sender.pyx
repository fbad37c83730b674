# cython: language_level=3, cdivision=True, auto_pickle=False
"""The sender of a lane: sends ready blocks as frames to the next peer.

It takes the next block from the board whenever its socket has room. If the socket stays full for a while, the link is
slow: the sender marks itself as blocked and wakes another lane to help. On a far link it also waits while all lanes
together use up the in-flight budget (`inflight`), and wakes no lane: more lanes would not be faster.

A neighbour on the same host reads blocks in our memory (`host_read`): such a block counts as sent after the neighbour
has returned it.
"""

import os
cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from pccl._core.kernels.arithmetic cimport coded_bytes, crc32c
from pccl._core.system cimport posix
from pccl._core.system.check cimport check
from pccl._core.system.futex cimport now_ns

from .backup cimport save_block
from .block_reduce cimport encode_pieces
from .board cimport ABORTED, BACKED_UP, Job, Op, lane_bit
from .host_read cimport (
    HOST_READ_BYTES_MIN, INTRODUCED, LOANS_MAX, NOTE_MAGIC, HostFrames, Loan, Loans, Note, NoteBuffer, add_host_frame,
    add_offer, lend, receive_notes, remove_notes, take_back
)
from .inflight cimport (
    InflightBudget, LinkCount, LinkReport, add, begin as begin_report, free_bytes, is_far, learn, refresh,
    restart_sample
)
from .lane cimport (
    BLOCK, FRAME_MAGIC, GO_ON, HEADER_BYTES, HOST_READ, INTRODUCTION, MAIL, PLAIN, UNMAPPED, WHEREABOUTS_BYTES,
    WITHDRAWAL, Header, LaneEnd, Scratch, reserve
)
from .plan cimport block_range, chunk_sent
from .quantization cimport coded_offset
from .segment_table cimport MappedSegment

cdef enum:
    RECRUIT_MS = 4                  # a socket that is full for this long is slow: another lane is woken
    RECRUIT_MS_MAX = 1024           # while the socket stays full, the wait for the next lane doubles up to this
    SLOW_NS = 1_000_000             # a lane whose frames take longer may be the last one at the end of an operation
    SLOW_TIMES = 4                  # a lane is slow if another one is this many times faster
    STREAK = 8                      # frames without a full socket; fewer measure the socket's buffer, not the link
    REPORT_MS = 5                   # how often the sender of a far link reports while its socket is full
    BUDGET_WAIT_PART = 32_000       # the wait for budget: a 32nd of the round trip, from microseconds to milliseconds
    BACKLOG_FRAMES = 3              # frames of a slow lane that are in the kernel when it takes one more


@cython.final
cdef class Sender(LaneEnd):
    """Sends ready blocks as frames to the next peer."""

    cdef Job job                    # the block being sent
    cdef bint pending               # `job` was taken, but its frame has not begun
    cdef bint entered               # the operation of `job` is held
    cdef Header header
    cdef uint64_t header_left       # bytes of the header still to send
    cdef MappedSegment *mapped      # the segment in which the payload lies; NULL: it lies in `own`
    cdef const char *payload
    cdef uint64_t payload_left
    cdef uint64_t length
    cdef Scratch own                # a block that was encoded here, the rest of an aborted one, or host frames
    cdef bint blocked               # the socket has been full for a while, and the board says so
    cdef int patience_ms            # until another lane is woken again
    cdef int streak                 # frames since the socket was last full
    cdef int64_t taken_ns           # when `job` was taken
    cdef int64_t declining_ns       # since when blocks are left to faster lanes; 0: they are not
    cdef bint far                   # the link has long round trips: bytes in flight are counted
    cdef LinkReport report          # of the connection
    cdef bint reporting             # the board has this report
    cdef readonly bint same_host_verified  # the next peer has said that it is on this host
    cdef uint32_t pid               # of this process
    cdef uint32_t offers            # made on this connection
    cdef bint by_host_read          # the frame being sent is only a header: its block is on loan
    cdef Loans loans
    cdef HostFrames host_frames
    cdef NoteBuffer notes

    def __dealloc__(self):
        free(self.own.bytes)
        free(self.host_frames.frames)

    def attach(self, int fd, *, bytes whereabouts=b"", bint host_read=False):
        """Serve this connection; see LaneEnd."""
        LaneEnd.attach(self, fd, whereabouts=whereabouts, host_read=host_read)
        self.pid = os.getpid()
        self.offers = 0
        self.segments.forget_offers()
        self.same_host_verified = False
        posix.atomic_store_u32(&self.board.shared.same_host_verified, 0)
        if self.same_host_suspected:
            if add_host_frame(&self.host_frames, INTRODUCTION, 0, self.whereabouts, WHEREABOUTS_BYTES) != 0:
                raise MemoryError
        begin_report(&self.report, fd)
        self.far = is_far(&self.report)
        memset(&self.board.shared.budget, 0, sizeof(InflightBudget))  # another edge, another link
        posix.atomic_set_bits_u64(&self.board.shared.present[self.lane // 64], lane_bit(self.lane))

    def detach(self):
        """Stop serving the connection."""
        posix.atomic_clear_bits_u64(&self.board.shared.present[self.lane // 64], lane_bit(self.lane))
        self.set_blocked(False)
        self.stop_reporting()
        if self.entered:
            self.board.leave(self.job.op)
        self.entered = self.pending = False
        self.header_left = self.payload_left = 0
        self.loans.count = self.host_frames.nbytes = self.notes.nbytes = 0
        self.by_host_read = False
        LaneEnd.detach(self)
        if self.board.has_work():
            self.board.wake_sender()  # for the blocks that this lane would have taken

    def withdraw(self, uint32_t segment):
        """Tell the neighbour to unmap a segment, if it was offered."""
        cdef MappedSegment *mapped = self.segments.find(segment)
        if mapped != NULL and mapped.serial and add_host_frame(&self.host_frames, WITHDRAWAL, segment, NULL, 0):
            raise MemoryError

    def serve(self):
        """Move frames until there is something for Python to do; returns its code."""
        cdef int code
        with nogil:
            code = self.run()
        return code

    cdef int run(self) noexcept nogil:
        cdef int code = GO_ON
        while code == GO_ON:
            if self.has_mail():
                return MAIL
            if self.connection < 0:
                self.sleep(-1)
            elif self.closed:
                code = self.end(0, b"closed by the other side")
            elif self.readable and self.same_host_suspected:
                code = self.read_notes()
            elif self.header_left or self.payload_left:
                code = self.transmit()
            elif self.host_frames.nbytes:
                code = self.send_host_frames()
            elif self.loans.count == LOANS_MAX:
                self.wait_for_return()
            elif self.pending:
                code = self.prepare()
            elif not self.board.take(&self.job):
                self.wait_for_work()
            else:
                self.taken_ns = now_ns()
                code = self.put_back() if self.would_be_last() else self.prepare()
        return code

    cdef void wait_for_work(self) noexcept nogil:
        """Sleep until there is work. The idle bit is set before the last check, so no wake-up can be missed."""
        cdef uint64_t *word = &self.board.shared.idle[self.lane // 64]
        if self.reporting:
            self.stop_reporting()
        posix.atomic_set_bits_u64(word, lane_bit(self.lane))
        if not self.board.has_work() and not posix.atomic_load_u32(&self.count.attention):
            self.sleep(-1)
        posix.atomic_clear_bits_u64(word, lane_bit(self.lane))

    cdef bint would_be_last(self) noexcept nogil:
        """Whether faster lanes would send all remaining blocks before this lane has sent the block that it took.

        Then the operation would wait for this lane. True for a limited time only, because fast lanes may be stuck.
        """
        cdef Op *op = self.job.op
        cdef uint64_t mine = self.count.frame_ns, best = 0, fast
        if op.small or mine < SLOW_NS:
            return False
        fast = self.board.count_senders_below(mine // SLOW_TIMES, &best)
        # Half of what remains is to be sent, half to be received.
        if fast == 0 or BACKLOG_FRAMES * mine <= posix.atomic_load_u64(&op.remaining) // 2 * best // fast:
            self.declining_ns = 0
            return False
        if self.declining_ns == 0:
            self.declining_ns = self.taken_ns
        return <uint64_t> (self.taken_ns - self.declining_ns) < BACKLOG_FRAMES * mine

    cdef int put_back(self) noexcept nogil:
        """Leave the block to faster lanes. This lane is marked as blocked, not as idle, so it is not woken for it."""
        cdef bint has_room
        self.set_blocked(True)
        has_room = self.board.push(self.job.op, self.job.hop, self.job.block, self.job.crc, self.job.has_crc)
        self.board.leave(self.job.op)
        if not has_room:
            return self.end(0, b"the queue of ready blocks is full")
        self.sleep(RECRUIT_MS)
        self.set_blocked(False)
        return GO_ON

    cdef int prepare(self) noexcept nogil:
        """Begin the frame of the block in `job`."""
        cdef Op *op = self.job.op
        cdef uint32_t chunk = chunk_sent(&op.plan, op.rank, self.job.hop)
        cdef int code
        check(self.payload_left == 0, "a frame begins when the last one is complete")
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
        """Find the bytes to send. Of a quantized operation they lie in its area; the own chunk is encoded now."""
        cdef Op *op = self.job.op
        cdef bint coded = op.quantizer.bits and self.job.hop
        cdef uint32_t segment = op.asked.send_segment
        cdef uint64_t begin, end
        cdef char *base
        if self.job.hop:
            segment = op.asked.area_segment if coded else op.asked.recv_segment
        self.mapped = self.segments.find(segment)
        if self.mapped == NULL:
            self.wanted = segment
            return UNMAPPED
        base = self.mapped.base
        block_range(&op.plan, chunk, self.job.block, &begin, &end)
        check(end <= op.plan.count, "a block that is sent lies within its tensor")
        if coded:
            self.payload = base + op.asked.area_offset + coded_offset(&op.quantizer, &op.plan, chunk, self.job.block)
            self.length = self.payload_left = coded_bytes(&op.quantizer, end - begin)
            return GO_ON
        self.payload = base + (op.asked.recv_offset if self.job.hop else op.asked.send_offset) + begin * op.itemsize
        if op.quantizer.bits:
            return self.encode(self.payload, end - begin)
        self.length = self.payload_left = (end - begin) * op.itemsize
        return GO_ON

    cdef int save_payload(self, uint32_t chunk) noexcept nogil:
        """Save the own chunk, which the result will overwrite. It is read now anyway, which saves 5 % of the time."""
        cdef Op *op = self.job.op
        cdef char *backup
        if self.job.hop or self.by_host_read or op.quantizer.bits or not op.asked.flags & BACKED_UP:
            return GO_ON
        backup = self.segments.base_of(op.asked.backup_segment)
        if backup == NULL:
            self.wanted, self.payload_left = op.asked.backup_segment, 0
            return UNMAPPED
        save_block(&op.plan, op.itemsize, chunk, self.job.block, self.payload, backup + op.asked.backup_offset)
        return GO_ON

    cdef int encode(self, const char *values, uint64_t count) noexcept nogil:
        """Encode a block into memory of this process."""
        cdef Op *op = self.job.op
        self.length = self.payload_left = coded_bytes(&op.quantizer, count)
        if reserve(&self.own, self.length) != 0:
            return self.end(posix.ENOMEM, b"")
        self.job.crc = encode_pieces(op, self.own.bytes, values, count, not self.same_host_verified)
        self.job.has_crc = True
        self.payload = self.own.bytes
        self.mapped = NULL
        return GO_ON

    cdef void write_header(self, uint32_t chunk) noexcept nogil:
        self.header.magic, self.header.hop = FRAME_MAGIC, self.job.hop
        self.header.kind = HOST_READ if self.by_host_read else PLAIN if self.same_host_verified else BLOCK
        self.header.sequence = self.job.op.sequence
        self.header.segment = self.mapped.segment if self.by_host_read else 0
        self.header.offset = self.payload - self.mapped.base if self.by_host_read else 0
        self.header.chunk, self.header.block = chunk, self.job.block
        self.header.length = self.length
        self.header.crc = self.job.crc if self.header.kind == BLOCK else 0
        self.header.header_crc = crc32c(0, &self.header, HEADER_BYTES - 4)
        self.header_left = HEADER_BYTES
        if self.by_host_read:
            self.payload_left = 0

    cdef int transmit(self) noexcept nogil:
        """Write as much of the frame as the socket takes."""
        cdef posix.iovec parts[2]
        cdef posix.msghdr message
        cdef ssize_t sent
        cdef bint is_limited = self.far and self.entered and not self.job.op.small
        cdef uint64_t taken, room = self.room() if is_limited else <uint64_t> -1
        if room == 0:
            return self.wait_for_budget()
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
                return self.wait_for_socket()
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
        """Account for a frame that the kernel has taken completely."""
        cdef Op *op = self.job.op
        if self.blocked:
            self.set_blocked(False)
        if self.length == 0:
            return GO_ON  # the frame was a host frame
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
        return self.count_to_fault()

    # ------------------------------------------------------------------------------------------ host reads

    cdef bint may_be_read_there(self) noexcept nogil:
        """Whether the neighbour reads this block in our memory."""
        return self.host_read and self.mapped != NULL and self.mapped.accepted and self.length >= HOST_READ_BYTES_MIN

    cdef int offer(self) noexcept nogil:
        """Offer the segment of this block to the neighbour, if it was not offered and the block is large enough."""
        if not self.host_read or self.mapped == NULL or self.mapped.serial or self.length < HOST_READ_BYTES_MIN:
            return GO_ON
        self.offers += 1
        if add_offer(&self.host_frames, self.mapped, self.offers, self.pid) != 0:
            return self.end(posix.ENOMEM, b"")
        return GO_ON

    cdef int send_host_frames(self) noexcept nogil:
        """Begin to send the host_frames, from memory of this process, which is free between two blocks."""
        if reserve(&self.own, self.host_frames.nbytes) != 0:
            return self.end(posix.ENOMEM, b"")
        memcpy(self.own.bytes, self.host_frames.frames, self.host_frames.nbytes)
        self.payload, self.payload_left, self.length = self.own.bytes, self.host_frames.nbytes, 0
        self.host_frames.nbytes = 0
        return GO_ON

    cdef int read_notes(self) noexcept nogil:
        """Read what the neighbour says about blocks and memory."""
        cdef ssize_t count = receive_notes(&self.notes, self.connection)
        cdef uint64_t index, complete
        cdef int code
        if count == 0:
            return self.end(0, b"closed by the other side")
        if count < 0:
            self.readable = errno != posix.EAGAIN
            return GO_ON if errno in (posix.EAGAIN, posix.EINTR) else self.end(errno, b"")
        complete = self.notes.nbytes // sizeof(Note)
        for index in range(complete):
            code = self.apply_note(&self.notes.notes[index])
            if code:
                return code
        remove_notes(&self.notes, complete)
        return GO_ON

    cdef int apply_note(self, const Note *note) noexcept nogil:
        """Count returned blocks as sent, and lend from now on what was accepted."""
        cdef uint32_t _index
        cdef Loan loan
        cdef Op *op
        if note.magic != NOTE_MAGIC or note.returned > self.loans.count:
            return self.end(0, b"the other side returned a block that was not lent to it")
        for _index in range(note.returned):
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

    cdef void wait_for_return(self) noexcept nogil:
        """Wait while LOANS_MAX blocks are on loan. After a while, another lane may take the next blocks."""
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
        """Update the time that a large block takes, unless the socket's buffer hides it."""
        self.streak += self.streak <= STREAK
        if self.streak == 1 or self.streak > STREAK:
            self.count.frame_ns += (now_ns() - self.taken_ns - <int64_t> self.count.frame_ns) // 4

    cdef uint64_t room(self) noexcept nogil:
        """Bytes of a large operation that this lane may give to the kernel now, on a far link."""
        cdef InflightBudget *budget = &self.board.shared.budget
        cdef LinkCount total
        cdef int lane
        if not refresh(&self.report, self.connection):
            return <uint64_t> -1  # the next send reports why
        if not self.reporting:
            restart_sample(budget)
        self.count.counted = self.report.counted
        if not self.reporting:
            restart_sample(budget)  # again: a sample that began meanwhile may lack this lane's counts
            self.reporting = True
        memset(&total, 0, sizeof(total))
        for lane in range(self.board.lanes):
            add(&total, &self.board.shared.lanes[1][lane].counted)
        learn(budget, &total, &self.report, now_ns())
        return free_bytes(budget, &total, &self.report)

    cdef void stop_reporting(self) noexcept nogil:
        """Remove this lane from the counts: its bytes that are in flight now will arrive uncounted."""
        self.reporting = False
        self.count.counted.in_flight = self.count.counted.unsent = 0
        restart_sample(&self.board.shared.budget)

    cdef int wait_for_budget(self) noexcept nogil:
        """Wait while the budget is used up. Wake another lane only for a small operation, which must not wait too."""
        cdef int64_t began = now_ns()
        self.set_blocked(self.board.has_work_of(1))
        if self.blocked:
            self.board.wake_sender()
        self.sleep(1 + <int> (self.report.shortest_us // BUDGET_WAIT_PART))
        return self.wake_up(began)

    cdef int wait_for_socket(self) noexcept nogil:
        """Wait while the socket is full. If a frame takes long, another lane may take the next blocks."""
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
        """Count the time as spent in the network, and check whether the operation was aborted."""
        cdef int64_t waited = now_ns() - began
        self.streak = 0
        self.count.network_ns += waited
        if self.entered:
            posix.atomic_count_u64(&self.job.op.network_ns, waited)
        if self.entered and posix.atomic_load_u32(&self.job.op.state) == ABORTED:
            return self.release_operation()
        return GO_ON

    cdef void set_blocked(self, bint blocked) noexcept nogil:
        """Record on the board whether this lane is blocked. If it is, other lanes may be woken."""
        self.blocked = blocked
        if blocked:
            posix.atomic_set_bits_u64(&self.board.shared.blocked[self.lane // 64], lane_bit(self.lane))
        else:
            posix.atomic_clear_bits_u64(&self.board.shared.blocked[self.lane // 64], lane_bit(self.lane))

    cdef int release_operation(self) noexcept nogil:
        """Leave an operation that was aborted in the middle of a frame; send the rest from memory of this process."""
        if self.payload_left and not self.own.bytes <= self.payload < self.own.bytes + self.own.size:
            if reserve(&self.own, self.payload_left) != 0:
                return self.end(posix.ENOMEM, b"")
            memcpy(self.own.bytes, self.payload, self.payload_left)
            self.payload = self.own.bytes
        self.entered = False
        self.board.leave(self.job.op)
        return GO_ON
