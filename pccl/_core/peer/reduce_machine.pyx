# cython: language_level=3
"""A peer's reduces, from the call to the completion of its slot: one part of each collective of its group.

The table `TRANSITIONS` at the end says what may happen in which phase, and what may follow; docs/architecture.md shows
it as a diagram.

**The memory** of a reduce belongs to the lanes until its slot completes. So a slot completes only when no worker
touches the memory any more: at once if the reduce was never begun, with the success verdict, or after an abort when the
actor has said that the memory is drained *and* the master, or the end of the membership, has given the verdict. The
training process then restores the old bytes.

**Aborts** come from the lanes (the master is told when the memory is drained, and aborts the others), from the master
(another member failed: answered when drained), from a new ring order (the master waits for no answer and must get
none), from a stall, and from the end of the membership.

**A tag** stays taken until its slot completes, also when its caller gave up: a withdrawal that comes too late finds the
reduce commenced, and the reduce then runs like any other. So a retry is never taken for the attempt before it.

Part of the peer's machine, which passes on what concerns reduces; pure, and knows nothing of lanes.
"""

from pccl._core.protocol.operations cimport pack_signatures, unpack_operations, unpack_pairs
from pccl._core.protocol.events import INFO, NUMBERS, REDUCED, Tick
from pccl._core.protocol.mailbox import CallAwait, CallCancel
from pccl._core.protocol.messages import (
    AbortReduce, Awaiting, Commence, Finished, Initiate, ReduceDone, ReduceFailed, RingOrder, WithdrawReduce,
)
from pccl._core.protocol.outcomes import (
    INVALID_ARGUMENT, INVALID_USAGE, KIND_CANCELLED, KIND_COLLECTIVE, KIND_PLAIN, SUCCESS,
)
from pccl.options import nanoseconds

from .outbox cimport Outbox
from .events import (
    AbortOperation, BeginOperation, Complete, EndOperation, MembershipEnded, ProtocolViolationError,
    ReduceDrained, ReduceEnded, ReduceProgress, SendMaster,
)
from .progress import Progress

INITIATED = "initiated"  # the master knows that this peer is ready; other members may not be
AWAITED = "awaited"  # the same, and the master knows that the caller blocks
WITHDRAWN = "withdrawn"  # the caller gave up; the master was asked to take the vote back
SKIPPED = "skipped"  # commenced while the ring was broken: never begun, and waits for its verdict
RUNNING = "running"  # lanes move its blocks
VOTED = "voted"  # this peer's part is done, and the master knows
ABORTING = "aborting"  # workers let go of the memory; the master waits to hear when they have
ABANDONED = "abandoned"  # workers let go of the memory; the ring changed, so the master waits for nothing
DRAINED = "drained"  # no worker touches the memory any more; the verdict is still to come
FAILED = "failed"  # the verdict is known; workers still let go of the memory
COMPLETED = "completed"  # the slot is the caller's again

PAUSES = 8  # a stall is at least so many times the longest pause of the reduce: a slow reduce is not aborted


cdef class Reduce:
    """One reduce under way."""

    def __init__(self, operation):
        self.operation = operation
        self.tag = operation.tag
        self.sequence = 0
        self.phase = INITIATED
        self.reason = ""
        self.ending = None
        self.payload = self.numbers = b""
        self.world = 0
        self.moved = 0
        self.moved_ns = self.pause_ns = 0


cdef class ReduceMachine:
    """All reduces of one membership."""

    def __init__(self, Outbox outbox, options):
        self.outbox = outbox
        self.stall_ns = nanoseconds(options.stall_timeout)
        self.checking = options.check
        self.tags = {}
        self.sequences = {}
        self.latest = 0
        self.slow = Progress()
        self.numbers = bytes(NUMBERS.size)

    cdef int _step(self, Reduce reduce, subject, argument) except -1:
        """Take one reduce through the table. A handler returns the next phase."""
        entry = steps.get((reduce.phase, subject))
        if entry is None:
            raise ProtocolViolationError(f"{subject.__name__} of tag {reduce.tag} while {reduce.phase}")
        handler, next_phases = <tuple> entry
        phase = handler(self, reduce, argument)
        if self.checking:
            assert phase in next_phases, f"{subject.__name__} while {reduce.phase} led to {phase}"
        reduce.phase = phase
        return 0

    # ------------------------------------------------------------------------------------------ calls

    cpdef call(self, bytes operations):
        """The training process reduces: send one vote for all operations whose tags are free."""
        initiated = []
        for operation in unpack_operations(operations):
            if operation.tag in self.tags:
                reason = f"tag {operation.tag} is already in use: wait for that reduce first, or take another tag"
                self._complete(operation, INVALID_ARGUMENT, KIND_PLAIN, reason.encode())
            else:
                self.tags[operation.tag] = Reduce(operation)
                initiated.append(operation)
        if initiated:
            self.outbox.actions.append(SendMaster(Initiate(pack_signatures(initiated))))

    def refuse(self, bytes operations, int result, int kind, str reason):
        """Complete the slots of these operations with a reason why none of them can begin."""
        for operation in unpack_operations(operations):
            self._complete(operation, result, kind, reason.encode())

    def cancel(self, call):
        """The caller of that slot gave up. A reduce that has commenced gets its verdict: other members need it."""
        cdef Reduce reduce = self._find(call.slot, call.generation)
        if reduce is not None:
            self._step(reduce, CallCancel, call)

    def awaits(self, call):
        """The caller of that slot blocks. That matters only while other members are missing."""
        cdef Reduce reduce = self._find(call.slot, call.generation)
        if reduce is not None:
            self._step(reduce, CallAwait, call)

    def owes(self, slot, generation):
        """Whether that slot belongs to a reduce that is under way."""
        return self._find(slot, generation) is not None

    cdef Reduce _find(self, slot, generation):
        cdef Reduce reduce
        for reduce in self.tags.values():
            if reduce.operation.slot == slot and reduce.operation.generation == generation:
                return reduce
        return None

    def _withdraw(self, Reduce reduce, call):
        self.outbox.actions.append(SendMaster(WithdrawReduce(reduce.tag)))
        return WITHDRAWN

    def _await(self, Reduce reduce, call):
        self.outbox.actions.append(SendMaster(Awaiting(reduce.tag)))
        return AWAITED

    def _ignore(self, Reduce reduce, argument):
        """Nothing to do: the event was on its way while the phase changed."""
        return reduce.phase

    # ------------------------------------------------------------------------------------------ messages of the master

    cpdef commence(self, message, order):
        """All members are ready: begin.

        `order` is the latest ring order, or None if the ring is broken: then nothing is begun, because a new order is
        on its way, which would abort it.
        """
        cdef Reduce reduce
        try:
            pairs = unpack_pairs(message.pairs)
        except ValueError as error:
            raise ProtocolViolationError(f"Commence cannot be read: {error}") from None
        for tag, sequence in pairs:
            reduce = self.tags.get(tag)
            if reduce is None or sequence <= self.latest:
                raise ProtocolViolationError(f"Commence of tag {tag} as collective {sequence} after {self.latest}")
            self._step(reduce, Commence, (sequence, order))

    def _commence(self, Reduce reduce, tuple argument):
        sequence, order = argument
        self.latest = reduce.sequence = sequence
        self.sequences[sequence] = reduce
        if order is None:
            return SKIPPED
        reduce.world = order.world
        reduce.numbers = self.numbers
        reduce.moved_ns = self.outbox.now_ns
        self.outbox.actions.append(BeginOperation(sequence, reduce.operation, order.rank, order.world))
        return RUNNING

    cpdef done(self, message):
        """The success verdict."""
        cdef Reduce reduce = self.sequences.get(message.sequence)
        if reduce is None:
            raise ProtocolViolationError(f"ReduceDone of collective {message.sequence}, which is unknown")
        self._step(reduce, ReduceDone, message)

    def _succeed(self, Reduce reduce, message):
        reduce.ending = (SUCCESS, KIND_PLAIN, reduce.payload)
        self._finish(reduce, True)
        return COMPLETED

    def failed(self, message):
        """The failure verdict."""
        cdef Reduce reduce
        reduce = self.sequences.get(message.sequence) if message.sequence else self.tags.get(message.tag)
        if reduce is None or reduce.sequence != message.sequence:
            reason = f"ReduceFailed of tag {message.tag} as collective {message.sequence}, which is unknown"
            raise ProtocolViolationError(reason)
        self._step(reduce, ReduceFailed, message)

    def _fail_before_commence(self, Reduce reduce, message):
        if reduce.phase is WITHDRAWN:
            reduce.ending = (INVALID_USAGE, KIND_CANCELLED, message.reason.encode())
        else:
            self._record_failure(reduce, message)
        self._finish(reduce, False)
        return COMPLETED

    def _fail_skipped(self, Reduce reduce, message):
        self._record_failure(reduce, message)
        self._finish(reduce, False)
        return COMPLETED

    def _fail_drained(self, Reduce reduce, message):
        self._record_failure(reduce, message)
        self._finish(reduce, True)
        return COMPLETED

    def _fail_undrained(self, Reduce reduce, message):
        self._record_failure(reduce, message)
        return FAILED

    def _record_failure(self, Reduce reduce, message):
        reduce.ending = (message.result, KIND_COLLECTIVE, self.numbers + message.reason.encode())

    def abort(self, message):
        """Another member failed."""
        cdef Reduce reduce = self.sequences.get(message.sequence)
        if reduce is None:
            raise ProtocolViolationError(f"AbortReduce of collective {message.sequence}, which is unknown")
        self._step(reduce, AbortReduce, "aborted by the master")

    def abort_all(self):
        """The ring changes: the master waits for no answer to anything that was under way."""
        for reduce in self.sequences.values():
            self._step(reduce, RingOrder, "")

    def _abort(self, Reduce reduce, str reason):
        reduce.reason = reason
        self.outbox.actions.append(AbortOperation(reduce.sequence))
        return ABORTING

    def _abandon(self, Reduce reduce, str reason):
        if reduce.phase is not ABORTING:
            self._abort(reduce, reason)
        return ABANDONED

    # ------------------------------------------------------------------------------------------ events of the lanes

    cpdef ended(self, event):
        """This peer's part is done. The master is not told if the reduce was aborted meanwhile."""
        cdef Reduce reduce = self.sequences.get(event.sequence)
        if reduce is not None:
            self._step(reduce, ReduceEnded, event)

    def _vote(self, Reduce reduce, event):
        reduce.payload = REDUCED.pack(
            reduce.world, event.tx_bytes, event.rx_bytes, event.network_ns, event.neighbour_ns, event.reduce_ns
        ) + reduce.numbers
        self.outbox.actions.append(SendMaster(Finished(event.sequence, True, "")))
        return VOTED

    def drained(self, event):
        """No worker touches the memory of an aborted reduce any more."""
        cdef Reduce reduce = self.sequences.get(event.sequence)
        if reduce is not None:
            self._step(reduce, ReduceDrained, event)

    def _answer_drained(self, Reduce reduce, event):
        self.outbox.actions.append(SendMaster(Finished(reduce.sequence, False, reduce.reason)))
        return DRAINED

    def _drain(self, Reduce reduce, event):
        return DRAINED

    def _finish_failed(self, Reduce reduce, event):
        self._finish(reduce, True)
        return COMPLETED

    def progress(self, event, long long late_ns):
        """Note how many bytes have moved. This process itself was stopped for `late_ns` since the last such event."""
        cdef Reduce reduce = self.sequences.get(event.sequence)
        if reduce is not None:
            self._step(reduce, ReduceProgress, (event.moved, late_ns))

    def _move(self, Reduce reduce, tuple argument):
        moved, late_ns = argument
        cdef long long now_ns = self.outbox.now_ns
        if moved != reduce.moved:
            reduce.moved = moved
            reduce.pause_ns = max(reduce.pause_ns, now_ns - reduce.moved_ns - max(late_ns, 0))
            reduce.moved_ns = now_ns
        return RUNNING

    # ------------------------------------------------------------------------------------------ time

    def find_stall(self):
        """Abort reduces that stall. Return the reason, or an empty text.

        A stopped worker looks the same as a link that loses everything: the caller drops both.
        """
        cdef Reduce reduce
        cdef str reason = ""
        for reduce in self.sequences.values():
            if reduce.phase is RUNNING:
                self._step(reduce, Tick, None)
                reason = reduce.reason or reason
        return reason

    def _watch(self, Reduce reduce, argument):
        cdef long long still_ns = self.outbox.now_ns - reduce.moved_ns
        if still_ns < max(self.stall_ns, PAUSES * reduce.pause_ns):
            return RUNNING
        return self._abort(reduce, f"no byte of tag {reduce.tag} moved for {still_ns / 1e9:.1f} s (stall_timeout)")

    def report_slow(self, long long first_ns):
        """Return the level and the line of a report on a reduce that takes long, or None. Called at every tick."""
        cdef Reduce reduce
        for reduce in self.sequences.values():
            if reduce.phase is RUNNING or reduce.phase is VOTED:
                break
        else:
            return None
        report = self.slow.look(reduce.sequence, reduce.moved, self.outbox.now_ns, first_ns)
        if report is None:
            return None
        level, words = report
        more = f" and {len(self.sequences) - 1} more" if len(self.sequences) > 1 else ""
        if reduce.phase is VOTED:
            return INFO, f"all_reduce (tag {reduce.tag}){more} runs for {words}; this peer is done, others are not"
        return level, f"all_reduce (tag {reduce.tag}){more} runs for {words}"

    def forgive(self, long long late_ns):
        """This process was stopped for `late_ns`: that time counts as a pause of no reduce."""
        cdef Reduce reduce
        for reduce in self.sequences.values():
            reduce.moved_ns = min(self.outbox.now_ns, reduce.moved_ns + late_ns)

    # ------------------------------------------------------------------------------------------ the end

    def end(self, int result, int kind, str text):
        """The membership is over: this outcome is the verdict of every reduce that has none."""
        self.abort_all()
        for reduce in list(self.tags.values()):
            self._step(reduce, MembershipEnded, (result, kind, text.encode()))

    def _end_unbegun(self, Reduce reduce, tuple ending):
        reduce.ending = ending
        self._finish(reduce, False)
        return COMPLETED

    def _end_drained(self, Reduce reduce, tuple ending):
        reduce.ending = ending
        self._finish(reduce, True)
        return COMPLETED

    def _end_undrained(self, Reduce reduce, tuple ending):
        reduce.ending = ending
        return FAILED

    cdef _finish(self, Reduce reduce, bint begun):
        result, kind, payload = reduce.ending
        del self.tags[reduce.tag]
        if reduce.sequence:
            del self.sequences[reduce.sequence]
        if begun:
            self.outbox.actions.append(EndOperation(reduce.sequence))
        self._complete(reduce.operation, result, kind, payload)

    cdef _complete(self, operation, int result, int kind, bytes payload):
        self.outbox.actions.append(Complete(operation.slot, operation.generation, result, kind, payload))

    # ------------------------------------------------------------------------------------------ invariants

    def check(self, bint member):
        """Invariants between two events; `member`: the membership goes on."""
        cdef Reduce reduce
        commenced = {}
        for tag, reduce in self.tags.items():
            assert tag == reduce.tag == reduce.operation.tag, f"tag {tag} names {reduce.tag}"
            assert (reduce.phase in UNCOMMENCED) == (reduce.sequence == 0), f"tag {tag} is {reduce.phase}"
            assert (reduce.phase is FAILED) == (reduce.ending is not None), f"tag {tag} has an end while {reduce.phase}"
            assert member or reduce.phase is FAILED, f"tag {tag} is {reduce.phase} after the end"
            if reduce.sequence:
                commenced[reduce.sequence] = reduce
        assert commenced == self.sequences, f"{sorted(commenced)} commenced, {sorted(self.sequences)} known"
        assert all(sequence <= self.latest for sequence in commenced), f"not yet commenced: {sorted(commenced)}"
        assert list(self.sequences) == sorted(self.sequences), f"commenced out of order: {list(self.sequences)}"


UNCOMMENCED = (INITIATED, AWAITED, WITHDRAWN)
ABORTED = (SKIPPED, ABORTING, ABANDONED, DRAINED, FAILED)

# (phase, event) -> (handler, phases that may follow). A pair that is not here is an error, and changes nothing.
TRANSITIONS = {
    (INITIATED, CallAwait): (ReduceMachine._await, (AWAITED,)),
    (INITIATED, CallCancel): (ReduceMachine._withdraw, (WITHDRAWN,)),
    (AWAITED, CallCancel): (ReduceMachine._withdraw, (WITHDRAWN,)),
    **{(phase, Commence): (ReduceMachine._commence, (RUNNING, SKIPPED)) for phase in UNCOMMENCED},
    **{(phase, ReduceFailed): (ReduceMachine._fail_before_commence, (COMPLETED,)) for phase in UNCOMMENCED},
    **{(phase, MembershipEnded): (ReduceMachine._end_unbegun, (COMPLETED,)) for phase in UNCOMMENCED},
    (SKIPPED, ReduceFailed): (ReduceMachine._fail_skipped, (COMPLETED,)),
    (SKIPPED, MembershipEnded): (ReduceMachine._end_unbegun, (COMPLETED,)),
    (RUNNING, ReduceEnded): (ReduceMachine._vote, (VOTED,)),
    (RUNNING, ReduceProgress): (ReduceMachine._move, (RUNNING,)),
    (RUNNING, Tick): (ReduceMachine._watch, (RUNNING, ABORTING)),
    (RUNNING, AbortReduce): (ReduceMachine._abort, (ABORTING,)),
    (RUNNING, RingOrder): (ReduceMachine._abandon, (ABANDONED,)),
    (VOTED, ReduceDone): (ReduceMachine._succeed, (COMPLETED,)),
    (VOTED, AbortReduce): (ReduceMachine._abort, (ABORTING,)),
    (VOTED, RingOrder): (ReduceMachine._abandon, (ABANDONED,)),
    (ABORTING, ReduceDrained): (ReduceMachine._answer_drained, (DRAINED,)),
    (ABORTING, ReduceFailed): (ReduceMachine._fail_undrained, (FAILED,)),
    (ABORTING, RingOrder): (ReduceMachine._abandon, (ABANDONED,)),
    (ABANDONED, ReduceDrained): (ReduceMachine._drain, (DRAINED,)),
    (ABANDONED, ReduceFailed): (ReduceMachine._fail_undrained, (FAILED,)),
    (ABANDONED, MembershipEnded): (ReduceMachine._end_undrained, (FAILED,)),
    (DRAINED, ReduceFailed): (ReduceMachine._fail_drained, (COMPLETED,)),
    (DRAINED, MembershipEnded): (ReduceMachine._end_drained, (COMPLETED,)),
    (FAILED, ReduceDrained): (ReduceMachine._finish_failed, (COMPLETED,)),
}
# Events that were on their way while the phase changed, and calls that say nothing new.
TRANSITIONS.update({
    (phase, event): (ReduceMachine._ignore, (phase,))
    for phases, events in (
        ((AWAITED, WITHDRAWN, RUNNING, VOTED, *ABORTED), (CallAwait,)),
        ((WITHDRAWN, RUNNING, VOTED, *ABORTED), (CallCancel,)),
        ((VOTED, *ABORTED), (ReduceEnded, ReduceProgress)),
        (ABORTED, (AbortReduce,)),
        ((SKIPPED, ABANDONED, DRAINED, FAILED), (RingOrder,)),
        ((RUNNING, VOTED, SKIPPED, DRAINED), (ReduceDrained,)),
        ((FAILED,), (MembershipEnded,)),
    )
    for phase in phases
    for event in events
})
cdef dict steps = TRANSITIONS  # the same, without a look-up by name
