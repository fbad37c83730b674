# cython: language_level=3
"""A peer's reduces, from the call to the completion of its slot: one part of each collective of its group.

    INITIATED ──commence──▶ RUNNING ──everything moved──▶ VOTED ──done──▶ completed
        │                      └───── abort ─────┬───────────┘
        └──failed──▶ completed                   ▼
                                              ABORTING ──quiet, and failed──▶ completed

**The memory** of a reduce belongs to the lanes until its slot completes. So a slot completes only when no worker touches
the memory any more: at once while it was never begun, with the success verdict, or after an abort when the shell has
said that it is quiet (everything restored) *and* the master, or the end of the membership, has given the verdict.

**Aborts** come from the lanes (the master is told when it is quiet, and aborts the others), from the master (another
member failed: answered when quiet), from a new order for the ring (the master waits for no answer and must get none),
from a stall, and from the end of the membership.

**A tag** stays taken until its slot completes, also when its caller gave up: a withdrawal that comes too late finds the
reduce commenced, and then it runs like any other. So a retry can never be mistaken for the attempt before it.

Part of the peer's machine, which passes on what concerns reduces; pure, and knows nothing of lanes.
"""

from pccl._core.protocol.operations cimport pack_signatures, unpack_operations, unpack_pairs
from pccl._core.protocol.events import NUMBERS, REDUCED
from pccl._core.protocol.messages import Awaiting, Finished, Initiate, WithdrawReduce
from pccl._core.protocol.outcomes import INVALID_ARGUMENT, INVALID_USAGE, KIND_CANCELLED, KIND_COLLECTIVE, KIND_PLAIN, SUCCESS
from pccl.options import nanoseconds

from .events import AbortOperation, BeginOperation, Complete, EndOperation, SendMaster

INITIATED = "initiated"  # the master knows; others may not
RUNNING = "running"  # lanes move its blocks
VOTED = "voted"  # this peer's part is done
ABORTING = "aborting"  # it will fail: as soon as it is quiet and judged

PAUSES = 8  # a reduce is given up after so many times its own longest pause: who is slow but moves is not stopped


cdef class Reduction:
    """One reduce under way."""

    def __init__(self, operation):
        self.operation = operation
        self.tag = operation.tag
        self.sequence = 0
        self.phase = INITIATED
        self.begun = self.quiet = self.answers = self.cancelled = self.awaited = False
        self.reason = ""
        self.ending = None
        self.payload = self.numbers = b""
        self.world = 0
        self.moved = 0
        self.moved_ns = self.pause_ns = 0


cdef class ReduceMachine:
    """All reduces of one membership."""

    def __init__(self, options):
        self.stall_ns = nanoseconds(options.stall_timeout)
        self.tags = {}
        self.sequences = {}
        self.latest = 0
        self.numbers = bytes(NUMBERS.size)
        self.now_ns = 0
        self.actions = []

    cdef begin(self, list actions, long long now_ns):
        """An event is being handled: where its actions go, and when it happened."""
        self.actions = actions
        self.now_ns = now_ns

    # ------------------------------------------------------------------------------------------ calls

    cpdef call(self, bytes operations):
        """The training process reduces: one vote for all that can be voted on."""
        initiated = []
        for operation in unpack_operations(operations):
            if operation.tag in self.tags:
                reason = f"tag {operation.tag} is already in use: wait for that reduce first, or take another tag"
                self._complete(operation, INVALID_ARGUMENT, KIND_PLAIN, reason.encode())
            else:
                self.tags[operation.tag] = Reduction(operation)
                initiated.append(operation)
        if initiated:
            self.actions.append(SendMaster(Initiate(pack_signatures(initiated))))

    def refuse(self, bytes operations, int result, int kind, str reason):
        """None of these can be begun here and now."""
        for operation in unpack_operations(operations):
            self._complete(operation, result, kind, reason.encode())

    def cancel(self, slot, sequence):
        """The caller gave up. What has commenced goes on to its verdict: others count on it."""
        cdef Reduction reduction = self._find(slot, sequence)
        if reduction is not None and reduction.phase is INITIATED and not reduction.cancelled:
            reduction.cancelled = True
            self.actions.append(SendMaster(WithdrawReduce(reduction.tag)))

    def awaits(self, slot, sequence):
        """The caller blocks. That matters only while others are missing."""
        cdef Reduction reduction = self._find(slot, sequence)
        if reduction is not None and reduction.phase is INITIATED and not reduction.awaited:
            reduction.awaited = True
            self.actions.append(SendMaster(Awaiting(reduction.tag)))

    def owes(self, slot, sequence):
        """Whether that reduce is under way."""
        return self._find(slot, sequence) is not None

    cdef Reduction _find(self, slot, sequence):
        cdef Reduction reduction
        for reduction in self.tags.values():
            if reduction.operation.slot == slot and reduction.operation.sequence == sequence:
                return reduction
        return None

    # ------------------------------------------------------------------------------------------ what the master says

    cpdef str commence(self, message, order, bint whole):
        """All members are in: begin. Returns what is wrong with a message that no honest master would send.

        `order` is the latest one for the ring; unless both edges stand (`whole`) a new one is on its way, which ends
        everything: then nothing is begun in the first place.
        """
        cdef Reduction reduction
        try:
            pairs = unpack_pairs(message.pairs)
        except ValueError as error:
            return f"Commence of nonsense: {error}"
        if order is None or message.epoch != order.epoch:
            return f"Commence at another epoch than {order!r}"
        for tag, sequence in pairs:
            reduction = self.tags.get(tag)
            if reduction is None or reduction.phase is not INITIATED or sequence <= self.latest:
                return f"Commence of tag {tag} as collective {sequence} after {self.latest}"
            self.latest = reduction.sequence = sequence
            self.sequences[sequence] = reduction
            if whole:
                reduction.phase = RUNNING
                reduction.begun = True
                reduction.world = order.world
                reduction.numbers = self.numbers
                reduction.moved_ns = self.now_ns
                self.actions.append(BeginOperation(sequence, reduction.operation, order.rank, order.world))
            else:
                reduction.phase = ABORTING
                reduction.quiet = True
        return ""

    cpdef str done(self, sequence):
        """The success verdict. Returns what is wrong with it, or nothing."""
        cdef Reduction reduction = self.sequences.get(sequence)
        if reduction is None or reduction.phase is not VOTED:
            return f"ReduceDone of collective {sequence}, which is not waiting for it"
        reduction.ending = (SUCCESS, KIND_PLAIN, reduction.payload)
        self._finish(reduction)
        return ""

    def failed(self, message):
        """The failure verdict. Returns what is wrong with it, or nothing."""
        cdef Reduction reduction
        if message.sequence:
            reduction = self.sequences.get(message.sequence)
            expected = reduction is not None and reduction.phase is ABORTING and reduction.ending is None
        else:
            reduction = self.tags.get(message.tag)
            expected = reduction is not None and reduction.phase is INITIATED
        if not expected:
            return f"ReduceFailed of tag {message.tag} as collective {message.sequence}, which is not waiting for it"
        reason = message.reason.encode()
        if reduction.cancelled and not message.sequence:
            reduction.ending = (INVALID_USAGE, KIND_CANCELLED, reason)
        else:
            reduction.ending = (message.result, KIND_COLLECTIVE, self.numbers + reason)
        if reduction.phase is INITIATED or reduction.quiet:
            self._finish(reduction)
        return ""

    def abort(self, sequence):
        """Another member failed. Returns what is wrong with the message, or nothing."""
        cdef Reduction reduction = self.sequences.get(sequence)
        if reduction is None:
            return f"AbortReduce of collective {sequence}, which is unknown"
        if reduction.phase is not ABORTING:  # else this peer has said, or will say, that it failed
            self._abort(reduction, "aborted by the master")
        return ""

    def abort_all(self):
        """The ring changes: the master waits for no answer to anything that was under way."""
        cdef Reduction reduction
        for reduction in self.sequences.values():
            if reduction.phase is not ABORTING:
                self._abort(reduction, "")
            reduction.answers = False

    cdef _abort(self, Reduction reduction, str reason):
        reduction.phase = ABORTING
        reduction.answers = True
        reduction.reason = reason
        self.actions.append(AbortOperation(reduction.sequence))

    # ------------------------------------------------------------------------------------------ what the lanes say

    cpdef ended(self, event):
        """This peer's part is done; nothing to say if it was given up meanwhile."""
        cdef Reduction reduction = self.sequences.get(event.sequence)
        if reduction is not None and reduction.phase is RUNNING:
            reduction.phase = VOTED
            reduction.payload = REDUCED.pack(
                reduction.world, event.tx_bytes, event.rx_bytes, event.network_ns, event.neighbour_ns, event.reduce_ns
            ) + reduction.numbers
            self.actions.append(SendMaster(Finished(event.sequence, True, "")))

    def broken(self, sequence, str reason):
        """This peer cannot go on with its part; nothing to say if that was given up meanwhile."""
        cdef Reduction reduction = self.sequences.get(sequence)
        if reduction is not None and reduction.phase is RUNNING:
            self._abort(reduction, reason)

    def hushed(self, sequence):
        """No worker touches the memory any more, and it is what it was before."""
        cdef Reduction reduction = self.sequences.get(sequence)
        if reduction is None or reduction.phase is not ABORTING or reduction.quiet:
            return
        reduction.quiet = True
        if reduction.answers:
            self.actions.append(SendMaster(Finished(sequence, False, reduction.reason)))
        if reduction.ending is not None:
            self._finish(reduction)

    def progress(self, sequence, moved, long long late_ns):
        """So many bytes have moved; `late_ns` of the time since then this process was itself stopped."""
        cdef Reduction reduction = self.sequences.get(sequence)
        if reduction is not None and reduction.phase is RUNNING and moved != reduction.moved:
            reduction.moved = moved
            reduction.pause_ns = max(reduction.pause_ns, self.now_ns - reduction.moved_ns - max(late_ns, 0))
            reduction.moved_ns = self.now_ns

    def find_stall(self):
        """Give up what has not moved for too long. Returns why, if there was such a thing.

        A stopped worker cannot be told apart from a link that swallows everything: the caller lets go of both.
        """
        cdef Reduction reduction
        cdef str reason = ""
        for reduction in self.sequences.values():
            if reduction.phase is not RUNNING:
                continue
            still_ns = self.now_ns - reduction.moved_ns
            if still_ns >= max(self.stall_ns, PAUSES * reduction.pause_ns):
                reason = f"no byte of tag {reduction.tag} moved for {still_ns / 1e9:.1f} s (stall_timeout)"
                self._abort(reduction, reason)
        return reason

    def forgive(self, long long late_ns):
        """This process was stopped for so long: that time is nobody's pause."""
        cdef Reduction reduction
        for reduction in self.sequences.values():
            reduction.moved_ns = min(self.now_ns, reduction.moved_ns + late_ns)

    # ------------------------------------------------------------------------------------------ the end

    def end(self, int result, int kind, str text):
        """The membership is over, and that is the verdict of everything that has none."""
        cdef Reduction reduction
        self.abort_all()
        for reduction in list(self.tags.values()):
            if reduction.ending is None:
                reduction.ending = (result, kind, text.encode())
            if reduction.phase is INITIATED or reduction.quiet:
                self._finish(reduction)

    cdef _finish(self, Reduction reduction):
        result, kind, payload = reduction.ending
        del self.tags[reduction.tag]
        if reduction.sequence:
            del self.sequences[reduction.sequence]
        if reduction.begun:
            self.actions.append(EndOperation(reduction.sequence))
        self._complete(reduction.operation, result, kind, payload)

    cdef _complete(self, operation, int result, int kind, bytes payload):
        self.actions.append(Complete(operation.slot, operation.sequence, result, kind, payload))

    # ------------------------------------------------------------------------------------------ invariants

    def check(self, bint member):
        """Invariants between two events; `member`: the membership goes on."""
        cdef Reduction reduction
        commenced = {}
        for tag, reduction in self.tags.items():
            assert tag == reduction.tag == reduction.operation.tag, f"tag {tag} names {reduction.tag}"
            assert (reduction.phase is INITIATED) == (reduction.sequence == 0), f"tag {tag} is {reduction.phase}"
            assert reduction.begun or reduction.phase in (INITIATED, ABORTING), f"tag {tag} was never begun"
            assert reduction.phase is ABORTING or not reduction.quiet, f"tag {tag} is quiet while {reduction.phase}"
            assert reduction.phase is ABORTING or reduction.ending is None, f"tag {tag} has an end while {reduction.phase}"
            assert not (reduction.quiet and reduction.ending is not None), f"tag {tag} is over and was not completed"
            assert member or reduction.phase is ABORTING, f"tag {tag} is {reduction.phase} after the end"
            assert member or not reduction.answers, f"tag {tag} has something to say after the end"
            if reduction.sequence:
                commenced[reduction.sequence] = reduction
        assert commenced == self.sequences, f"{sorted(commenced)} commenced, {sorted(self.sequences)} known"
        assert all(sequence <= self.latest for sequence in commenced), f"a collective of the future: {sorted(commenced)}"
        assert list(self.sequences) == sorted(self.sequences), f"commenced out of order: {list(self.sequences)}"
