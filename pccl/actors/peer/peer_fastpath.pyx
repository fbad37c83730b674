# cython: language_level=3, auto_pickle=False
"""The short way through a peer actor, which every reduce takes four times.

The training process's call, the order to commence, the end on the board and the verdict come in here, go through the
machine, and become a message to the master, an operation on the board, or a completed slot. Every other action is
performed by `peer_actor`, which is built on this and says who is watched and what is meant.

Compiled, and apart from the rest, because an actor wakes up with cold caches: what a reduce costs it is how much code and
how many objects lie on this way, not how often they are used.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy, memset

from pccl._core.peer.peer_state cimport PeerState
from pccl._core.protocol.codec cimport unpack
from pccl._core.system cimport posix
from pccl._core.system.futex cimport now_ns
from pccl.actors.io.connection cimport Connection
from pccl.actors.io.loop cimport Loop, Watcher
from pccl.memory.completion_slots cimport SlotTable
from pccl._core.peer.events import BeginOperation, Called, Complete, EndOperation, MasterSaid, SendMaster
from pccl._core.protocol.mailbox import CallReduce
from pccl._core.protocol.outcomes import join

from .op_runner cimport OpRunner

cdef enum:
    MAIL_BYTES_MAX = 1 << 16            # larger than any message between a training process and its actor
    ANCILLARY_BYTES = 64                # room for the one descriptor that a message may bring along

# What is performed here; everything else is in the table of `peer_actor`.
PERFORMED_HERE = (SendMaster, Complete, BeginOperation, EndOperation)


cdef class Feeding(Watcher):
    """The machine of an actor and what it talks to most. Watches the mailbox of the training process.

    Whoever builds on it has `_mail(call, descriptor)` for every other call, with the descriptor that came along or -1,
    `_app_gone(reason)`, and `_perform(action)` for every other action.
    """

    cdef readonly Loop loop
    cdef readonly SlotTable slots       # where calls are completed
    cdef readonly object mailbox        # to the training process
    cdef int mailbox_fd
    cdef public PeerState state         # made by the first call, which brings the options
    cdef public Connection master       # None while there is none
    cdef public OpRunner reducing       # operations that have commenced
    cdef public dict windows            # (slot, generation) -> the window that looks up when that call has ended
    cdef public object door             # who turns strangers away, or None before there is a port
    cdef public long long rhythm_ns     # how often the caller wants to see a beat
    cdef object fault                   # the planned mishap, normally None
    cdef char mail[MAIL_BYTES_MAX]
    cdef char ancillary[ANCILLARY_BYTES]

    def __init__(self, mailbox, slots, fault):
        self.mailbox = mailbox
        self.mailbox_fd = mailbox.fileno()
        self.slots = slots
        self.fault = fault
        self.loop = Loop()
        self.windows = {}

    cpdef feed(self, event):
        """Tell the machine, and perform what it decides."""
        for action in self.state.handle(event, now_ns()):
            kind = type(action)
            if self.fault is not None:
                self.visit(action)
            if kind is SendMaster:
                if self.master is not None:
                    self.master.send(action.message)
            elif kind is Complete:
                self.complete(action)
            elif kind is BeginOperation:
                self.reducing.begin(action)
            elif kind is EndOperation:
                self.reducing.end(action.sequence)
            else:
                self._perform(action)
        if self.state.is_busy():
            self.loop.expect()

    cdef visit(self, action):
        self.fault.visit(f"peer.{type(action).__name__}")
        if type(action) is SendMaster:
            self.fault.visit(f"peer.send.{type(action.message).__name__}")

    cdef complete(self, action):
        self.slots.complete(action.slot, action.generation, join(action.result, action.kind), action.payload)
        if self.windows:
            window = self.windows.pop((action.slot, action.generation), None)
            if window is not None:
                window.ring()

    def hear(self, number, message):
        """The master said something."""
        self.feed(MasterSaid(message))

    def deadline(self):
        """When to tick next: the caller watches our beats, the machine has deadlines, and the oldest stranger too."""
        cdef int64_t due = self.slots.beaten_ns() + self.rhythm_ns
        if self.state is not None:
            due = min(due, self.state.next_deadline_ns)
        if self.door is not None and self.door.strangers:
            due = min(due, <int64_t> self.door.next_deadline_ns)
        return due

    cdef int ready(self, uint32_t events) except -1:
        # One call from the mailbox; what else is there wakes us again.
        cdef posix.iovec part
        cdef posix.msghdr message
        cdef ssize_t count
        part.iov_base, part.iov_len = self.mail, sizeof(self.mail)
        memset(&message, 0, sizeof(message))
        message.msg_iov, message.msg_iovlen = &part, 1
        message.msg_control, message.msg_controllen = self.ancillary, sizeof(self.ancillary)
        count = posix.recvmsg(self.mailbox_fd, &message, posix.MSG_DONTWAIT | posix.MSG_CMSG_CLOEXEC)
        if count < 0 and posix.errno in (posix.EAGAIN, posix.EINTR):
            return 0
        if count <= 0:
            self._app_gone("the training process closed its mailbox")
            return 0
        call = unpack(PyBytes_FromStringAndSize(self.mail, count))
        if type(call) is CallReduce and self.state is not None:
            self.feed(Called(call))
        else:
            self._mail(call, descriptor_of(&message))
        return 0


cdef int descriptor_of(posix.msghdr *message) noexcept:
    # The one descriptor that a message may bring along, or -1.
    cdef posix.cmsghdr *header = posix.CMSG_FIRSTHDR(message)
    cdef int fd
    if header == NULL or header.cmsg_level != posix.SOL_SOCKET or header.cmsg_type != posix.SCM_RIGHTS:
        return -1
    memcpy(&fd, posix.CMSG_DATA(header), sizeof(fd))
    return fd
