# cython: language_level=3, auto_pickle=False
"""A lane: what its two workers, `sender` and `receiver`, have in common, and the frame that travels between two lanes.

Both are loops that run without the GIL until there is something for Python: mail, the end of the connection, a segment to
map or to unmap. Then `serve` returns a code and is called again; a frame that was under way goes on where it was. They sleep on three
things at once, mailbox, bell and connection, so whatever happens reaches them at once, and they never poll in a circle.

**A frame** is a header and a block. It describes itself, so receivers keep no other state, and it carries two checksums:
a flipped bit is the end of the connection, never a wrong sum. Nothing is resynchronised by guessing. Between peers of one
host a frame may be the header alone: the block is read where it lies (`lending`).

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

# Python's view of the codes.
LANE_MAIL = <int> MAIL
LANE_ENDED = <int> ENDED
LANE_UNMAPPED = <int> UNMAPPED
LANE_FAULT = <int> FAULT
LANE_NOTICE = <int> NOTICE

# What an epoll event belongs to.
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
        self.epoll = posix.epoll_create1(posix.EPOLL_CLOEXEC)
        if self.epoll < 0:
            raise_errno(errno, "creating an epoll")
        self._watch(mailbox, posix.EPOLLIN, FROM_MAILBOX)
        self._watch(bell, posix.EPOLLIN | posix.EPOLLET, FROM_BELL)

    def __dealloc__(self):
        if self.epoll > 0:  # 0: it was never created, and that descriptor is somebody else's
            posix.close(self.epoll)

    def _watch(self, int fd, uint32_t events, uint32_t whose):
        cdef posix.epoll_event event
        event.events = events
        event.data.u64 = whose
        if posix.epoll_ctl(self.epoll, posix.EPOLL_CTL_ADD, fd, &event) != 0:
            raise_errno(errno, f"watching descriptor {fd}")

    def attach(self, int fd, *, bytes whereabouts=b"", bint lends=False):
        """Serve this connection, which stays the caller's to close.

        `whereabouts` if its other end seems to be on this host; then it also `lends`, if it may.
        """
        self.broken = self.heard = False
        self.local = len(whereabouts) == WHEREABOUTS_BYTES
        if self.local:
            memcpy(self.whereabouts, <char *> whereabouts, WHEREABOUTS_BYTES)
        self.lends = self.local and lends
        self._watch(fd, posix.EPOLLIN | posix.EPOLLOUT | posix.EPOLLRDHUP | posix.EPOLLET, FROM_CONNECTION)
        self.connection = fd

    def detach(self):
        """Serve no connection; whatever frame was under way is given up."""
        if self.connection >= 0:
            posix.epoll_ctl(self.epoll, posix.EPOLL_CTL_DEL, self.connection, NULL)
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
        cdef posix.epoll_event events[4]
        cdef int count, index
        count = posix.epoll_wait(self.epoll, events, 4, timeout_ms)
        for index in range(count):
            if events[index].data.u64 == FROM_MAILBOX:
                self.mail = True
            elif events[index].data.u64 == FROM_CONNECTION:
                if events[index].events & posix.EPOLLIN:
                    self.heard = True
                if events[index].events & (posix.EPOLLRDHUP | posix.EPOLLHUP | posix.EPOLLERR):
                    self.broken = True
        return 0 if count == 0 else 1


cdef void write_notice(char *room, uint16_t kind, uint32_t segment, const void *body, uint32_t nbytes) noexcept nogil:
    cdef Header header
    memset(&header, 0, HEADER_BYTES)
    header.magic, header.kind, header.segment, header.length = FRAME_MAGIC, kind, segment, nbytes
    header.crc = crc32c(0, body, nbytes)
    header.header_crc = crc32c(0, &header, HEADER_BYTES - 4)
    memcpy(room, &header, HEADER_BYTES)
    memcpy(room + HEADER_BYTES, body, nbytes)
