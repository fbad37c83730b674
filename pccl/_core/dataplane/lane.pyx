# cython: language_level=3, auto_pickle=False
"""What the two workers of a lane, `sender` and `receiver`, have in common, and the frame that travels between them.

Both are loops that run without the GIL until there is something for Python: mail, the end of the connection, a segment
to map or to unmap. Then its `serve` returns a code. The caller acts on it and calls `serve` again; an incomplete frame
continues where it stopped. A worker sleeps on its mailbox, its bell and its connection together, so every event wakes
it at once and it never polls.

**A frame** is a header and a block. It describes itself, so a receiver keeps no other state. It carries two CRCs: a
flipped bit ends the connection and never makes a wrong sum. A receiver does not try to find the next frame after an
error. Between peers of one host a frame may be the header alone: the block is read where it lies (`host_read`).

**Plain.** Inside one host nothing can damage a block on its way, and the kernel computes no checksum for TCP either.
Our CRC took a sixth of the time of 256 MiB between two peers. But an address does not prove that the other end is on
this host: 127.0.0.1 may be a tunnel to another machine. So a sender introduces itself by its whereabouts, which name
the machine, the namespace and its own end of the connection. A receiver that sees the same end answers that both are on
one host; from then on blocks are plain.

**Abort.** The worker is between two blocks, or asleep on its socket. A receiver then reads the rest of the frame into
scratch memory. A sender copies the rest of its frame and sends the copy, because half a frame would end the connection.
Both release the tensor at once.
"""

import os
from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pccl._core.system cimport posix
from pccl._core.system.check cimport check
from pccl._core.system.futex cimport raise_errno
from pccl._core.system.wait_set cimport (
    IS_OVER, IS_READABLE, WAITED_MAX, Happened, open_wait_set, sleep_on, stop_waiting_for, wait_for_bell,
    wait_for_changes, wait_for_input
)

# The codes as Python sees them.
LANE_MAIL = <int> MAIL
LANE_ENDED = <int> ENDED
LANE_UNMAPPED = <int> UNMAPPED
LANE_FAULT = <int> FAULT
LANE_HOST_FRAME = <int> HOST_FRAME

# The descriptors that a worker sleeps on.
cdef enum:
    FROM_MAILBOX = 0
    FROM_BELL = 1
    FROM_CONNECTION = 2


cdef class LaneEnd:
    """What a sender and a receiver have in common."""

    def __cinit__(self, Board board not None, int lane, bint sends, int mailbox, int bell):
        self.board = board
        self.lane = lane
        self.connection = -1
        self.reason = b""
        self.segments = SegmentTable()
        if not 0 <= lane < board.lanes:
            raise ValueError(f"a board of {board.lanes} lanes has no lane {lane}")
        self.count = &board.shared.lanes[sends][lane]
        memset(self.count, 0, sizeof(LaneCount))
        self.wait_set = open_wait_set()
        if self.wait_set < 0:
            raise_errno(errno, "opening a set of descriptors to wait for")
        if (
            wait_for_input(self.wait_set, mailbox, FROM_MAILBOX) != 0
            or wait_for_bell(self.wait_set, bell, FROM_BELL) != 0
        ):
            raise_errno(errno, f"watching descriptors {mailbox} and {bell}")

    def __dealloc__(self):
        if self.wait_set > 0:  # 0: it was never opened, and descriptor 0 is not ours
            posix.close(self.wait_set)

    def attach(self, int fd, *, bytes whereabouts=b"", bint host_read=False):
        """Serve this connection; the caller keeps it open and closes it.

        `whereabouts` is given if the other end seems to be on this host.
        `host_read` allows reads of the sender's memory.
        """
        self.closed = self.readable = False
        self.same_host_suspected = len(whereabouts) == WHEREABOUTS_BYTES
        if self.same_host_suspected:
            memcpy(self.whereabouts, <char *> whereabouts, WHEREABOUTS_BYTES)
        self.host_read = self.same_host_suspected and host_read
        if wait_for_changes(self.wait_set, fd, FROM_CONNECTION) != 0:
            raise_errno(errno, f"watching descriptor {fd}")
        self.connection = fd

    def detach(self):
        """Stop serving the connection; an incomplete frame is dropped."""
        if self.connection >= 0:
            stop_waiting_for(self.wait_set, self.connection)
            self.connection = -1

    @property
    def problem(self):
        """Why the connection ended."""
        return os.strerror(self.error) if self.error else (<bytes> self.reason).decode()

    cdef int end(self, int error, const char *reason) noexcept nogil:
        """Record why the connection ends: an errno, or 0 and a reason."""
        self.error = error
        self.reason = reason
        return ENDED

    cdef int count_to_fault(self) noexcept nogil:
        """A frame is complete and not yet accounted for: the worst moment for a fault, so tests plan one here."""
        check(self.connection >= 0, "a frame is moved over a connection")
        if self.frames_until_fault:
            self.frames_until_fault -= 1
            if self.frames_until_fault == 0:
                return FAULT
        return GO_ON

    cdef bint has_mail(self) noexcept nogil:
        """Whether there is mail: seen during a sleep, or announced by the actor while this worker was busy."""
        if posix.atomic_load_u32(&self.count.attention):
            posix.atomic_store_u32(&self.count.attention, 0)
            self.mail = True
        if self.mail:
            self.mail = False
            return True
        return False

    cdef int sleep(self, int timeout_ms) noexcept nogil:
        """Sleep until an event or the timeout; returns 0 after the timeout."""
        cdef Happened happened[WAITED_MAX]
        cdef int count, index
        count = sleep_on(self.wait_set, happened, timeout_ms)
        for index in range(count):
            if happened[index].whose == FROM_MAILBOX:
                self.mail = True
            elif happened[index].whose == FROM_CONNECTION:
                if happened[index].what & IS_READABLE:
                    self.readable = True
                if happened[index].what & IS_OVER:
                    self.closed = True
        return 0 if count == 0 else 1


cdef int reserve(Scratch *scratch, uint64_t nbytes) noexcept nogil:
    if nbytes > scratch.size:
        free(scratch.bytes)
        scratch.size = 0
        scratch.bytes = <char *> malloc(nbytes)
        if scratch.bytes == NULL:
            return -1
        scratch.size = nbytes
    return 0
