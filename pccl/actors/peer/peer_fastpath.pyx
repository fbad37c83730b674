# cython: language_level=3, auto_pickle=False
"""The fast path of a peer actor, which every reduce takes four times.

The training process's call, the order to commence, the end on the board and the verdict arrive here, go through the
machine, and become a message to the master, an operation on the board, or a completed slot. The actor owns this object;
every other call and every other action goes to the callbacks that the actor gave. This module decides nothing.

It is compiled and separate, because an actor wakes up with cold caches: the cost of a reduce in the actor is the amount
of code and the number of objects on this path.
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
from pccl.actors.io.loop import IDLE_NS

from .op_runner cimport OpRunner

cdef enum:
    MAIL_BYTES_MAX = 1 << 16            # larger than any message between a training process and its actor
    ANCILLARY_BYTES = 64                # room for the one descriptor that a message may carry

# The actions that are performed here; all others are in the table of `peer_actor`.
PERFORMED_HERE = (SendMaster, Complete, BeginOperation, EndOperation)


cdef class PeerFastpath(Watcher):
    """The machine of a peer actor and the objects that it uses most. Watches the mailbox of the training process.

    `perform(action)` is called with every action that is not in PERFORMED_HERE, `receive(call, descriptor)` with every
    call that is not a reduce and its descriptor or -1, and `app_gone(reason)` when the training process has closed its
    end. `fault` is a planned fault or None.
    """

    cdef Loop loop                      # wakes the actor
    cdef SlotTable slots                # in which calls are completed
    cdef int mailbox_fd                 # to the training process
    cdef object fault                   # the planned fault, normally None
    cdef object perform                 # called with every action that is not performed here
    cdef object receive                 # called with every call that is not a reduce, and its descriptor
    cdef object app_gone                # called with the reason when the training process closed its mailbox
    cdef public PeerState state         # created by the first call, which has the options
    cdef public Connection master       # None while there is none
    cdef public OpRunner op_runner      # operations that have commenced; the actor sets it
    cdef public dict windows            # (slot, generation) -> the window to ring when that call has ended
    cdef public object trace            # called with every event and its actions, or None; the actor sets it
    cdef public object pending          # the PendingConnections of the listener; the actor sets it
    cdef public long long rhythm_ns     # how often the training process wants to see a beat
    cdef char mail[MAIL_BYTES_MAX]
    cdef char ancillary[ANCILLARY_BYTES]

    def __init__(self, Loop loop not None, mailbox, SlotTable slots not None, fault, *, perform, receive, app_gone):
        self.loop = loop
        self.mailbox_fd = mailbox.fileno()
        self.slots = slots
        self.fault = fault
        self.perform = perform
        self.receive = receive
        self.app_gone = app_gone
        self.windows = {}
        self.rhythm_ns = IDLE_NS

    cpdef feed(self, event):
        """Give the machine an event, and perform the actions that it returns."""
        cdef list actions = self.state.handle(event, now_ns())
        if self.trace is not None:
            self.trace(event, actions)
        for action in actions:
            kind = type(action)
            if self.fault is not None:
                self.visit(action)
            if kind is SendMaster:
                if self.master is not None:
                    self.master.send(action.message)
            elif kind is Complete:
                self.complete(action)
            elif kind is BeginOperation:
                self.op_runner.begin(action)
            elif kind is EndOperation:
                self.op_runner.end(action.sequence)
            else:
                self.perform(action)
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

    def heard(self, number, message):
        """Take a message of the master."""
        self.feed(MasterSaid(message))

    def deadline(self):
        """Return when to tick next: for a beat, for the machine, or because the oldest handshake times out."""
        cdef int64_t due = self.slots.beaten_ns() + self.rhythm_ns
        if self.state is not None:
            due = min(due, self.state.next_deadline_ns)
        if self.pending is not None and self.pending.connections:
            due = min(due, <int64_t> self.pending.next_deadline_ns)
        return due

    cdef int ready(self, uint32_t events) except -1:
        # One call from the mailbox; if there are more, the loop wakes this object again.
        cdef posix.iovec part
        cdef posix.msghdr message
        cdef ssize_t count
        part.iov_base, part.iov_len = self.mail, sizeof(self.mail)
        memset(&message, 0, sizeof(message))
        message.msg_iov, message.msg_iovlen = &part, 1
        message.msg_control, message.msg_controllen = self.ancillary, sizeof(self.ancillary)
        count = posix.recvmsg(self.mailbox_fd, &message, posix.MSG_DONTWAIT | posix.CLOSED_ON_EXEC)
        if count < 0 and posix.errno in (posix.EAGAIN, posix.EINTR):
            return 0
        if count <= 0:
            self.app_gone("the training process closed its mailbox")
            return 0
        call = unpack(PyBytes_FromStringAndSize(self.mail, count))
        if type(call) is CallReduce and self.state is not None:
            self.feed(Called(call))
        else:
            self.receive(call, descriptor_of(&message))
        return 0


cdef int descriptor_of(posix.msghdr *message) noexcept:
    # The one descriptor that a message may carry, or -1.
    cdef posix.cmsghdr *header = posix.CMSG_FIRSTHDR(message)
    cdef int fd
    if header == NULL or header.cmsg_level != posix.SOL_SOCKET or header.cmsg_type != posix.SCM_RIGHTS:
        return -1
    memcpy(&fd, posix.CMSG_DATA(header), sizeof(fd))
    return fd
