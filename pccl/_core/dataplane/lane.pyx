# cython: language_level=3, auto_pickle=False
"""A lane: what its two workers, `sender` and `receiver`, have in common, and the frame that travels between two lanes.

Both are loops that run without the GIL until there is something for Python: mail, the end of the connection, a segment to
map or to unmap. Then `serve` returns a code and is called again; a frame that was under way goes on where it was. They sleep on three
things at once, mailbox, bell and connection, so whatever happens reaches them at once, and they never poll in a circle.

**A frame** is a header and a block. It describes itself, so receivers keep no other state, and it carries two checksums:
a flipped bit is the end of the connection, never a wrong sum. Nothing is resynchronised by guessing. Between peers of one
host a frame may be the header alone: the block is read where it lies (`host_read`).

**Plain.** Inside one host nothing happens to a block on its way, and the kernel computes no checksum for TCP either. Ours
took a sixth of the time of 256 MiB between two peers. But an address says little: behind 127.0.0.1 may be a tunnel
to anywhere. So a sender introduces itself by its whereabouts, which name the machine, the namespace and its own end of the
connection. A receiver that sees the very same end takes it for a neighbour, and says so; from then on blocks are plain.

**Abort** finds a worker between two blocks, or asleep on its socket. A receiver then sends the rest of the frame to
scratch; a sender copies the rest of its frame and sends that, because half a frame would cost the connection. Both let
go of the tensor at once.
"""

import os
from libc.errno cimport errno
from libc.stdint cimport uint16_t, uint32_t
from libc.string cimport memcpy, memset

from pccl._core.kernels.arithmetic cimport crc32c
from pccl._core.system cimport posix
from pccl._core.system.check cimport check
from pccl._core.system.futex cimport raise_errno
from pccl._core.system.wait_set cimport (
    IS_OVER, IS_READABLE, WAITED_MAX, Happened, open_wait_set, sleep_on, stop_waiting_for, wait_for_bell, wait_for_changes,
    wait_for_input
)

# Python's view of the codes.
LANE_MAIL = <int> MAIL
LANE_ENDED = <int> ENDED
LANE_UNMAPPED = <int> UNMAPPED
LANE_FAULT = <int> FAULT
LANE_NOTICE = <int> NOTICE

# The descriptors that a lane sleeps on.
cdef enum:
    FROM_MAILBOX = 0
    FROM_BELL = 1
    FROM_CONNECTION = 2


cdef class Lane:
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
        if wait_for_input(self.wait_set, mailbox, FROM_MAILBOX) != 0 or wait_for_bell(self.wait_set, bell, FROM_BELL) != 0:
            raise_errno(errno, f"watching descriptors {mailbox} and {bell}")

    def __dealloc__(self):
        if self.wait_set > 0:  # 0: it was never opened, and that descriptor is somebody else's
            posix.close(self.wait_set)

    def attach(self, int fd, *, bytes whereabouts=b"", bint host_read=False):
        """Serve this connection, which stays the caller's to close.

        `whereabouts` if its other end seems to be on this host; then blocks may go by `host_read`, if both ends allow it.
        """
        self.broken = self.heard = False
        self.same_host_suspected = len(whereabouts) == WHEREABOUTS_BYTES
        if self.same_host_suspected:
            memcpy(self.whereabouts, <char *> whereabouts, WHEREABOUTS_BYTES)
        self.host_read = self.same_host_suspected and host_read
        if wait_for_changes(self.wait_set, fd, FROM_CONNECTION) != 0:
            raise_errno(errno, f"watching descriptor {fd}")
        self.connection = fd

    def detach(self):
        """Serve no connection; whatever frame was under way is given up."""
        if self.connection >= 0:
            stop_waiting_for(self.wait_set, self.connection)
            self.connection = -1

    def serve(self):
        """Work until there is something for Python; returns its code."""
        cdef int code
        with nogil:
            code = self.run()
        return code

    cdef int run(self) noexcept nogil:
        """The loop of whoever this is: a sender's or a receiver's."""
        return self.end(0, b"a lane by itself moves nothing")

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
        check(self.connection >= 0, "a frame is moved over a connection")
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
        cdef Happened happened[WAITED_MAX]
        cdef int count, index
        count = sleep_on(self.wait_set, happened, timeout_ms)
        for index in range(count):
            if happened[index].whose == FROM_MAILBOX:
                self.mail = True
            elif happened[index].whose == FROM_CONNECTION:
                if happened[index].what & IS_READABLE:
                    self.heard = True
                if happened[index].what & IS_OVER:
                    self.broken = True
        return 0 if count == 0 else 1


cdef void write_notice(char *room, uint16_t kind, uint32_t segment, const void *body, uint32_t nbytes) noexcept nogil:
    cdef Header header
    memset(&header, 0, HEADER_BYTES)
    header.magic, header.kind, header.segment, header.length = FRAME_MAGIC, kind, segment, nbytes
    header.crc = crc32c(0, body, nbytes)
    header.header_crc = crc32c(0, &header, HEADER_BYTES - 4)
    memcpy(room, &header, HEADER_BYTES)
    if nbytes:  # C forbids to copy even nothing from nowhere
        memcpy(room + HEADER_BYTES, body, nbytes)
