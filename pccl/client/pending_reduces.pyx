# cython: language_level=3, auto_pickle=False
"""The pending reduces of one membership: launch, wait, retry.

A reduce is *pending* from its launch until its outcome was returned. A reduce whose caller was interrupted is
*abandoned*: no caller will wait for it, but its memory is held until no worker can use it. A reduce that failed is an
outcome here, not an exception.
"""

cimport cython
from _thread import RLock
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

from pccl._core.protocol.operations cimport PackedNumbers
from pccl._core.system.futex cimport now_ns
from pccl.memory.completion_slots cimport Slot
from pccl._core.protocol.mailbox import CallAwait, CallReduce
from pccl._core.protocol.operations import OPERATIONS_MAX
from pccl._core.protocol.outcomes import KIND_FINISHED, KIND_KICKED, KIND_MASTER_LOST, KIND_PLAIN
from pccl.errors import MasterLostError, PCCLError, TooFewPeersError, UsageError, error_from_outcome
from pccl.memory.arena import default
from pccl.values import ReduceInfo, Result

from .call_slots cimport SLICE_NS, CallSlots
from .reduce_request cimport PendingReduce, ReduceRequest
from .reduce_request import NOTHING, read_failure

NOT_A_MEMBER = "this peer is not a member yet, or no longer: wait for connect() to return, or call it again"

cdef int64_t AWAIT_NS = 500_000_000  # then a waiting caller tells the actor, so that the master can explain a deadlock


@cython.final
@cython.freelist(4)
cdef class Outcome:
    """How a reduce ended."""

    cdef readonly int32_t result    # the number of a Result
    cdef readonly int32_t kind      # one of the KIND_ constants in `outcomes`
    cdef readonly object info       # a ReduceInfo
    cdef readonly str reason

    def error(self, name):
        """The exception for this outcome."""
        return error_from_outcome(self.result, self.kind, name, self.reason)


cdef Outcome outcome_of(int32_t result, int32_t kind, info, str reason):
    cdef Outcome outcome = Outcome.__new__(Outcome)
    outcome.result = result
    outcome.kind = kind
    outcome.info = info
    outcome.reason = reason
    return outcome


@cython.final
cdef class PendingReduces:
    """The reduces of one membership, and the numbers of the world from its last topology round or collective."""

    cdef object actor               # the ActorClient of this membership
    cdef CallSlots calls            # the compiled part of the actor client
    cdef PackedNumbers world        # the numbers of the last round or collective; all zero: this peer is not a member
    cdef dict pending               # tag -> the reduce that was launched and not awaited
    cdef list abandoned             # reduces whose callers were interrupted and that are still running
    cdef Outcome ended              # the first failure that ended the membership, or None
    cdef object lock                # held while a reduce ends: another thread may close the membership

    def __init__(self, actor):
        self.actor = actor
        self.calls = actor.calls
        self.pending = {}
        self.abandoned = []
        self.lock = RLock()
        default().watch(actor.unshare)

    # ------------------------------------------------------------------------------------------ the world

    def learn(self, bytes numbers not None) -> None:
        """Take the numbers of a round or a collective, packed as `events.NUMBERS`."""
        if PyBytes_GET_SIZE(numbers) != sizeof(PackedNumbers):
            given = PyBytes_GET_SIZE(numbers)
            raise ValueError(f"the numbers of the world have {sizeof(PackedNumbers)} bytes, not {given}")
        memcpy(&self.world, PyBytes_AS_STRING(numbers), sizeof(PackedNumbers))

    @property
    def numbers(self) -> bytes | None:
        """The latest numbers, packed; None if this peer is not a member."""
        if self.world.group_world == 0:
            return None
        return (<const char *> &self.world)[:sizeof(PackedNumbers)]

    # ------------------------------------------------------------------------------------------ one reduce

    cpdef PendingReduce launch(self, str name, ReduceRequest request):
        """Post a reduce."""
        cdef uint32_t world = self.require_ready(name)
        self.require_unused(name, request)
        cdef PendingReduce one = self.prepare(name, request, world)
        self.pending[one.tag] = one
        try:
            one.post(self.calls, name)
        except BaseException:
            self.abandon(one)
            raise
        return one

    def launch_all(self, str name, requests) -> list:
        """Post several reduces in one message."""
        cdef uint32_t world = self.require_ready(name)
        cdef ReduceRequest request
        cdef PendingReduce one
        cdef list launched = []
        for request in requests:
            self.require_unused(name, request)
        try:
            for request in requests:
                launched.append(self.prepare(name, request, world))
        except BaseException:
            for one in launched:
                one.release()
                self.actor.put_back(one.slot)
            raise
        for one in launched:
            self.pending[one.tag] = one
        try:
            self.calls.post(name, CallReduce(b"".join([one.operation() for one in launched])))
        except BaseException:
            for one in launched:
                self.abandon(one)
            raise
        return launched

    cdef uint32_t require_ready(self, str name) except 0:
        """Return the number of members. Raises an error that says why no reduce can be launched."""
        if self.ended is not None:
            # A caller that retries must learn that no retry can succeed.
            raise self.ended.error(name)
        cdef uint32_t world = self.world.group_world
        if world == 0:
            raise UsageError(Result.INVALID_USAGE, name, NOT_A_MEMBER)
        if world < 2:
            message = "this peer is alone in its group: call wait_for_world_size(2) first, which waits for others"
            raise TooFewPeersError(Result.TOO_FEW_PEERS, name, message)
        if self.abandoned:
            self.sort_abandoned()
        return world

    cdef int require_unused(self, str name, ReduceRequest request) except -1:
        if request.tag in self.pending:
            message = f"tag {request.tag} is in use by a reduce that was not awaited; wait() for it or use another"
            raise UsageError(Result.INVALID_ARGUMENT, name, message)
        return 0

    cdef PendingReduce prepare(self, str name, ReduceRequest request, uint32_t world):
        """Take a slot and memory, and make the memory known to the actor; the message comes later."""
        cdef Slot slot = self.calls.slot_for(name)
        cdef PendingReduce one
        try:
            one = PendingReduce.__new__(PendingReduce)
            one.prepare(slot, request, world)
            one.share(self.calls, name)
        except BaseException:
            self.actor.put_back(slot)
            raise
        return one

    cpdef Outcome finish(self, str name, PendingReduce one, deadline_ns=None):
        """Wait for a reduce; returns its outcome, or None after the deadline."""
        cdef bint bounded = deadline_ns is not None, told = False
        cdef int64_t began_ns = now_ns(), present_ns = began_ns, slice_ns = SLICE_NS
        cdef int64_t until_ns = deadline_ns if bounded else 0
        try:
            while True:
                if bounded:
                    slice_ns = max(min(<int64_t> SLICE_NS, until_ns - present_ns), <int64_t> 0)
                if self.calls.sleep(name, one.slot, slice_ns):
                    break
                present_ns = now_ns()
                if bounded and present_ns >= until_ns and not one.slot.is_done():
                    return None
                if not bounded and not told and present_ns - began_ns > AWAIT_NS:
                    told = True
                    self.calls.post(name, CallAwait(one.slot.index, one.slot.generation))
        except PCCLError as error:
            # The actor is dead and its workers die with it; the memory is free when the last of them has ended.
            self.actor.wait_for_exit()
            self.forget(one)
            self.fail(one)
            kind = KIND_MASTER_LOST if isinstance(error, MasterLostError) else KIND_PLAIN
            return outcome_of(error.result.value, kind, NOTHING, error.message)
        self.forget(one)
        return self.settle(one)

    cdef Outcome settle(self, PendingReduce one):
        cdef int32_t number = 0
        cdef bytes payload
        self.calls.collect_notices()
        # Success without staging runs in C without a break: no other thread can interfere, so it needs no lock.
        if not one.over and one._staging is None and one.slot.is_done() and one.slot.entry.result == 0:
            return outcome_of(0, 0, one.hand_over(self.calls.outcome(one.slot, &number), &self.world), "")
        with self.lock:
            payload = self.calls.outcome(one.slot, &number)
            if one.over:
                reason = "another thread closed this communicator"
                return outcome_of(Result.INVALID_USAGE.value, KIND_PLAIN, NOTHING, reason)
            if number == 0:
                return outcome_of(0, 0, one.hand_over(payload, &self.world), "")
            one.fail()
        result, kind, numbers, reason = read_failure(number, payload)
        if numbers:
            self.learn(numbers)
        ended = outcome_of(result, kind, NOTHING, reason)
        if self.ended is None and kind in (KIND_KICKED, KIND_MASTER_LOST, KIND_FINISHED):
            self.ended = ended
        return ended

    cdef fail(self, PendingReduce one):
        with self.lock:
            one.fail()

    cdef int forget(self, PendingReduce one) except -1:
        if self.pending.get(one.tag) is one:
            del self.pending[one.tag]
        return 0

    cdef abandon(self, PendingReduce one):
        """The caller was interrupted: cancel the reduce, and hold its memory until it has ended."""
        self.forget(one)
        if one.over:
            return  # it had ended before: the slot and the memory are free
        self.abandoned.append(one)
        self.actor.cancel(one.slot)

    cdef sort_abandoned(self):
        cdef PendingReduce one
        with self.lock:
            for one in list(self.abandoned):
                if one.slot.is_done():
                    self.abandoned.remove(one)
                    self.settle(one)

    def require_none(self, str name) -> None:
        """Raise UsageError if a reduce is pending; wait until abandoned reduces have ended."""
        if self.pending:
            tags = ", ".join(str(tag) for tag in sorted(self.pending)[:8])
            message = f"reduces were launched and not awaited (tags {tags}); wait() for them first"
            raise UsageError(Result.PENDING_ASYNC_OPS, name, message)
        while self.abandoned:
            self.calls.wait(name, self.abandoned[-1].slot)
            self.sort_abandoned()

    def run_finished(self, str reason) -> None:
        """The membership has ended with its run: no reduce can be launched any more."""
        self.ended = outcome_of(Result.INVALID_USAGE.value, KIND_FINISHED, NOTHING, reason)

    def close(self) -> None:
        """The membership has ended and no worker is left: all pending reduces have failed."""
        default().unwatch(self.actor.unshare)
        self.world.group_world = 0
        for one in [*self.pending.values(), *self.abandoned]:
            self.fail(one)
        self.pending.clear()
        self.abandoned.clear()

    # ------------------------------------------------------------------------------------------ several reduces

    cpdef Outcome run(self, str name, ReduceRequest request):
        """Launch a reduce and wait for it."""
        return self.complete(name, self.launch(name, request))

    cdef Outcome complete(self, str name, PendingReduce one):
        """Wait for a reduce that no handle refers to."""
        try:
            return self.finish(name, one)
        except BaseException:
            self.abandon(one)
            raise

    def run_all(self, str name, requests, in_flight) -> ReduceInfo:
        """Run all requests, `in_flight` at a time, and repeat those that fail because a peer was lost."""
        if in_flight > 1:
            _require_distinct_tags(name, requests)
        waiting = list(enumerate(requests))
        flying = []
        infos = []
        cdef Outcome failure = None, outcome
        try:
            while waiting or flying:
                if failure is None and waiting and len(flying) < in_flight:
                    flying += self._launch_next(name, waiting, min(in_flight - len(flying), OPERATIONS_MAX))
                    continue
                if not flying:
                    break
                index, one = flying.pop(0)
                outcome = self.complete(name, one)
                if outcome.result == 0:
                    infos.append(outcome.info)
                elif outcome.result == Result.RANK_CONNECTION_LOST.value:
                    waiting.append((index, requests[index]))
                    waiting.sort(key=lambda item: item[0])
                else:
                    failure = failure or outcome
        except BaseException:
            for _, one in flying:
                self.abandon(one)
            raise
        if failure is not None:
            raise failure.error(name)
        return _summed(infos)

    def _launch_next(self, str name, list waiting, count) -> list:
        batch = waiting[:count]
        launched = self.launch_all(name, [request for _, request in batch])
        del waiting[:count]
        return [(index, one) for (index, _), one in zip(batch, launched, strict=True)]


def _require_distinct_tags(str name, requests) -> None:
    """Raise UsageError if a tag is used twice: after a retry, any two reduces of a list may be in flight."""
    seen = set()
    for request in requests:
        if request.tag in seen:
            message = f"tag {request.tag} is used twice in one list; use one tag for each, or max_in_flight=1"
            raise UsageError(Result.INVALID_ARGUMENT, name, message)
        seen.add(request.tag)


def _summed(list infos) -> ReduceInfo:
    return ReduceInfo(
        infos[-1].local_world_size if infos else 0,
        sum(info.tx_bytes for info in infos),
        sum(info.rx_bytes for info in infos),
        sum(info.network_seconds for info in infos),
        sum(info.neighbour_seconds for info in infos),
        sum(info.reduce_seconds for info in infos),
    )
