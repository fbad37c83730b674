# cython: language_level=3, auto_pickle=False
"""The fast path of a call: a slot, a message into the mailbox, a wait, an outcome. Every launch uses it.

Rare cases are handled by callbacks of `ActorClient`: a mailbox that is full or closed, descriptors that go with a
message, log lines to pass on, an actor that does not answer. Nothing here knows what a call means.

The GIL is held while a message is sent: that takes microseconds and never waits. So no other thread can close the
mailbox meanwhile, after which its descriptor might be another file.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint32_t

from pccl._core.system cimport posix
from pccl._core.system.futex cimport now_ns
from pccl.memory.arena cimport Arena
from pccl.memory.completion_slots cimport Slot, SlotTable
from pccl._core.protocol.codec import pack
from pccl._core.protocol.mailbox import CallThreads
from pccl._core.protocol.outcomes import KIND_FINISHED, KIND_KICKED, KIND_MASTER_LOST, join
from pccl._core.records import record
from pccl.errors import UsageError
from pccl.memory.completion_slots import SlotsExhaustedError
from pccl.values import Result

WAIT_SLICE_NS = <int> SLICE_NS

# The constants of `outcomes`, as C numbers.
cdef int32_t KICKED = KIND_KICKED
cdef int32_t MASTER_LOST = KIND_MASTER_LOST
cdef int32_t FINISHED = KIND_FINISHED
cdef int KIND_SHIFT = join(0, 1).bit_length() - 1


@record
class Callbacks:
    """What `CallSlots` calls in rare cases."""

    gone: object  # (name) -> the exception to raise: the actor or the mailbox is gone
    full: object  # (name): the mailbox is full; return when it may have room
    check: object  # (name, slot): a sleep ended without a result; raise if the actor cannot end the call any more
    catch_up: object  # (): pass on log lines of the actor, and send it what had no room in the mailbox
    send_descriptors: object  # (name, data, fds): post a message with descriptors
    share: object  # (name, segments, descriptor): make segments known to the actor


@cython.final
cdef class CallSlots:
    """The completion slots and the mailbox of a peer actor, as the training process holds them."""

    def __init__(self, SlotTable table not None, fault, callbacks, *, int64_t look_ns, int64_t notice_ns):
        self.table = table
        self.callbacks = callbacks
        self.fd = -1
        self.sleepers, self.threads = 0, 1
        self.shared = set()
        self.fault = fault
        self.look_ns = look_ns
        self.notice_ns = notice_ns
        self.looked_ns = self.noticed_ns = now_ns()

    # ------------------------------------------------------------------------------------------ to the actor

    def acquire(self, str name) -> Slot:
        """Return a slot for one call. Raises UsageError if all are in use."""
        return self.slot_for(name)

    cdef Slot slot_for(self, str name):
        try:
            return self.table.acquire()
        except SlotsExhaustedError as error:
            raise UsageError(Result.INVALID_USAGE, name, str(error)) from None
        except ValueError:
            raise self.callbacks.gone(name) from None

    def post(self, str name, message, tuple fds=()) -> None:
        """Put a message into the actor's mailbox; wait for room if it is full."""
        if self.fault is not None:
            self.visit(f"training.{type(message).__name__}")
        cdef bytes data = pack(message)
        if fds:
            self.callbacks.send_descriptors(name, data, fds)
        else:
            self.send(name, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    cdef int visit(self, str point) except -1:
        """A fault point: a test may have planned a fault here."""
        if self.fault is not None:
            self.fault.visit(point)
        return 0

    cdef int send(self, str name, const char *data, size_t length) except -1:
        cdef int code
        self.looked_ns = now_ns()
        while posix.send(self.fd, data, length, posix.MSG_DONTWAIT | posix.MSG_NOSIGNAL) < 0:
            code = posix.errno
            if code == posix.EINTR:
                PyErr_CheckSignals()
            elif code == posix.EAGAIN:
                self.callbacks.full(name)
            else:
                raise self.callbacks.gone(name)
        return 0

    cdef int make_known(self, str name, uint32_t segment, Arena arena) except -1:
        """Make a segment known to the actor, unless it is known; 0 means no segment."""
        if segment and segment not in self.shared:
            self.callbacks.share(name, (segment,), arena.descriptor)
        return 0

    # ------------------------------------------------------------------------------------------ from the actor

    def wait(self, str name, Slot slot not None, int64_t slice_ns=SLICE_NS) -> bool:
        """Sleep for a while; return whether the call has ended. Raises if the actor cannot end it any more."""
        return self.sleep(name, slot, slice_ns)

    cdef bint sleep(self, str name, Slot slot, int64_t slice_ns) except -1:
        cdef bint done
        self.sleepers += 1
        try:
            if self.sleepers > self.threads:
                self.tell_threads(name)
            done = slot.sleep(slice_ns, self.look_ns)
        finally:
            self.sleepers -= 1
        if done:
            return True
        # Callers loop; Ctrl-C must end them.
        PyErr_CheckSignals()
        self.callbacks.check(name, slot)
        return slot.is_done()

    cdef int tell_threads(self, str name) except -1:
        """More threads than ever are in calls: a peer with a thread that computes is in no deadlock."""
        self.threads = self.sleepers
        self.post(name, CallThreads(self.threads))
        return 0

    def take(self, Slot slot not None) -> tuple:
        """Return how a call ended, its outcome and payload, and free its slot."""
        cdef int32_t result
        self.collect_notices()
        cdef bytes payload = self.outcome(slot, &result)
        return result, payload

    cdef int collect_notices(self) except -1:
        """Catch up with the actor from time to time. Runs Python code, so it comes before a result is taken."""
        if now_ns() - self.noticed_ns > self.notice_ns:
            self.callbacks.catch_up()
        return 0

    cdef bytes outcome(self, Slot slot, int32_t *result):
        # No Python code runs here, so Ctrl-C comes before the slot is read or after the caller has its outcome.
        slot.require_done()
        cdef bytes payload = PyBytes_FromStringAndSize(slot.entry.payload, slot.entry.length)
        result[0] = slot.entry.result
        slot.release()
        if result[0] >> KIND_SHIFT in (KICKED, MASTER_LOST, FINISHED):
            self.over = True
        return payload
