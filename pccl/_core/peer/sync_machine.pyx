# cython: language_level=3
"""A peer's sync_shared_state, from the call to the completion of its last slot.

The table `TRANSITIONS` at the end says what may happen in which phase, and what may follow; docs/architecture.md shows
it as a diagram.

**The manifest** of a state is made only when it is needed. The first order completes the caller's slot with
KIND_DESCRIBE; the caller makes the manifest and waits in another slot. Orders that come before that wait for it too,
and so does an answer: it goes to the slot in which the caller waits next.

**A fetch** that finds no source left is reported to the master, which knows whether other peers have finished: then it
continues from those. A peer that has finished may become a source itself, in the same round.

**The memory** belongs to the actor from ServeState or FetchState until TransferEnded. So every end (agreed, failed,
cancelled, the membership over) begins with EndTransfer, and the slot completes when the actor has answered.

**A torn state**: if a transfer ends after something was received and before all of it was, the memory is neither the
old state nor the new. The training process finds that out by its digest, whatever the reason was, and says so when it
calls again; then that state cannot be elected.

Part of the peer's machine, which passes on what concerns the shared state; pure, and knows nothing of links.
"""

from pccl._core.protocol.events import SYNC, SYNCED
from pccl._core.protocol.mailbox import CallCancel, CallManifest
from pccl._core.protocol.messages import (
    AskSchema, CallFailed, Fetch, Fetched, MoreSources, Serve, SourceGone, SyncDone, VoteSync, Withdraw,
)
from pccl._core.protocol.outcomes import (
    INVALID_USAGE, KIND_CANCELLED, KIND_COLLECTIVE, KIND_DESCRIBE, KIND_PLAIN, SUCCESS,
)
from pccl._core.protocol.sources import unpack_sources

from .outbox cimport Outbox
from .events import (
    AddSources, Complete, DropSource, EndTransfer, FetchState, MembershipEnded, ProtocolViolationError, SendMaster,
    SendSchema, ServeFetched, ServeState, StateFetched, StateUnfetched, TransferEnded,
)

VOTED = "voted"  # the master has the vote, and the caller waits
DESCRIBING = "describing"  # the caller makes the manifest, because the master asked for the schema
ORDERED = "ordered"  # the same, and an order of the master waits for the manifest
ANSWERED = "answered"  # the same, and the answer waits for the caller
DESCRIBED = "described"  # the manifest is there, and the caller waits
SERVING = "serving"  # others fetch this peer's state
FETCHING = "fetching"  # the elected state comes in
STARVED = "starved"  # no source is left, and the master knows
FETCHED = "fetched"  # this peer's memory holds the elected state, and the master knows
RELAYING = "relaying"  # the same, and others fetch it from here
ENDING = "ending"  # the answer is known; workers still let go of the memory
COMPLETED = "completed"  # the slot is the caller's again


cdef class Sync:
    """One sync_shared_state under way."""

    def __init__(self, call, number):
        self.call = number
        self.slot = call.slot
        self.generation = call.generation
        self.phase = VOTED
        self.schema_wanted = False
        self.described = self.order = self.ending = None
        self.sources = ()
        self.tx_bytes = self.rx_bytes = 0


cdef class SyncMachine:
    """The syncs of one membership, one at a time."""

    def __init__(self, Outbox outbox, options):
        self.outbox = outbox
        self.checking = options.check
        self.sync = None
        self.numbers = b""

    cdef int _step(self, subject, argument) except -1:
        """Take the sync through the table. A handler returns the next phase."""
        cdef Sync sync = self.sync
        entry = steps.get((sync.phase, subject))
        if entry is None:
            raise ProtocolViolationError(f"{subject.__name__} while {sync.phase}")
        handler, next_phases = <tuple> entry
        phase = handler(self, argument)
        if self.checking:
            assert phase in next_phases, f"{subject.__name__} while {sync.phase} led to {phase}"
        sync.phase = phase
        if phase is COMPLETED:
            self.sync = None
        return 0

    # ------------------------------------------------------------------------------------------ calls

    def call(self, call, number):
        """The training process calls sync_shared_state: send one vote."""
        if self.sync is not None:
            self._refuse(call, f"another thread of this process is already in {SYNC}")
            return
        self.sync = Sync(call, number)
        vote = VoteSync(number, call.revision, call.strategy, call.torn, call.keys, call.schema, call.content)
        self.outbox.actions.append(SendMaster(vote))

    def describe(self, call):
        """The caller has made the manifest of its state, and waits again."""
        cdef Sync sync = self.sync
        if sync is None or sync.phase not in UNDESCRIBED:
            self._refuse(call, f"no manifest was asked for: it belongs to {SYNC}")
            return
        sync.described = call
        sync.slot, sync.generation = call.slot, call.generation
        self._step(CallManifest, call)

    def cancel(self, call):
        """The caller of that slot gave up. A sync whose answer is known ends without that."""
        cdef Sync sync = self.sync
        if sync is not None and sync.slot == call.slot and sync.generation == call.generation:
            self._step(CallCancel, call)

    def owes(self, slot, generation):
        """Whether the caller waits for that slot."""
        cdef Sync sync = self.sync
        if sync is None or sync.phase in UNDESCRIBED:
            return False
        return sync.slot == slot and sync.generation == generation

    def _withdraw(self, call):
        """Withdraw the vote. The caller makes its manifest and waits in no slot, so none is completed."""
        self.outbox.actions.append(SendMaster(Withdraw(self.sync.call)))
        return COMPLETED

    def _drop(self, argument):
        """Drop the sync. No caller waits, and the master needs no message."""
        return COMPLETED

    def _cancel(self, call):
        self.outbox.actions.append(SendMaster(Withdraw(self.sync.call)))
        self._finish((INVALID_USAGE, KIND_CANCELLED, b"given up by its caller"))
        return COMPLETED

    def _cancel_transfer(self, call):
        self.outbox.actions.append(SendMaster(Withdraw(self.sync.call)))
        return self._end_transfer((INVALID_USAGE, KIND_CANCELLED, b"given up by its caller"))

    def _refuse(self, call, str reason):
        self.outbox.actions.append(Complete(call.slot, call.generation, INVALID_USAGE, KIND_PLAIN, reason.encode()))

    def _ignore(self, argument):
        """Nothing to do: the event was on its way while the phase changed."""
        return self.sync.phase

    # ------------------------------------------------------------------------------------------ messages of the master

    def hear(self, message):
        """A message about the sync; ignored if that sync was given up meanwhile."""
        if self.sync is not None and self.sync.call == message.call:
            self._step(type(message), message)

    def _ask_schema(self, message):
        if self.sync.phase is VOTED:
            self._ask_caller()
        self.sync.schema_wanted = True
        return DESCRIBING

    def _send_schema(self, message):
        cdef Sync sync = self.sync
        self.outbox.actions.append(SendSchema(sync.call, sync.described.manifest, sync.described.nbytes))
        return DESCRIBED

    cdef _ask_caller(self):
        # Completes the caller's slot with the request for a manifest.
        self.outbox.actions.append(Complete(self.sync.slot, self.sync.generation, SUCCESS, KIND_DESCRIBE, b""))

    def _take_order(self, message):
        """Serve or Fetch, before the manifest is there."""
        self._keep_order(message)
        if self.sync.phase is VOTED:
            self._ask_caller()
        return ORDERED

    def _follow_order(self, message):
        """Serve or Fetch, with the manifest at hand."""
        self._keep_order(message)
        return self._begin_transfer()

    def _keep_order(self, message):
        if type(message) is Fetch:
            self.sync.sources = unpacked(message)
        self.sync.order = message

    def _relay(self, message):
        """Serve after Fetch: this peer has finished, and others have no other source."""
        self._check_round(message)
        self.outbox.actions.append(ServeFetched(message.round))
        return RELAYING

    def _add_sources(self, message):
        self._check_round(message)
        self.outbox.actions.append(AddSources(message.round, unpacked(message)))
        return FETCHING

    def _drop_source(self, message):
        """A source is gone; the transfer may have noticed."""
        self._check_round(message)
        self.outbox.actions.append(DropSource(message.round, message.peer))
        return FETCHING

    def _drop_source_early(self, message):
        """A source is gone before the transfer begins: it is never dialled."""
        cdef Sync sync = self.sync
        if type(sync.order) is not Fetch:
            raise ProtocolViolationError(f"SourceGone of transfer {message.round}, in which this peer fetches nothing")
        self._check_round(message)
        sync.sources = tuple([source for source in sync.sources if source.peer != message.peer])
        return ORDERED

    def _ignore_source(self, message):
        self._check_round(message)
        return self.sync.phase

    def _check_round(self, message):
        if message.round != self.sync.order.round:
            name = type(message).__name__
            raise ProtocolViolationError(f"{name} of transfer {message.round} in transfer {self.sync.order.round}")

    def _agree(self, message):
        self._finish((SUCCESS, KIND_PLAIN, message.revision))
        return COMPLETED

    def _agree_later(self, message):
        """The caller learns it when it has described its state."""
        if type(self.sync.order) is Fetch:
            number = self.sync.order.round
            raise ProtocolViolationError(f"SyncDone in transfer {number}, in which this peer still fetches")
        self.sync.ending = (SUCCESS, KIND_PLAIN, message.revision)
        return ANSWERED

    def _agree_in_transfer(self, message):
        return self._end_transfer((SUCCESS, KIND_PLAIN, message.revision))

    def _fail(self, message):
        self._finish((message.result, KIND_COLLECTIVE, self.numbers + message.reason.encode()))
        return COMPLETED

    def _fail_later(self, message):
        """The caller learns it when it has described its state."""
        self.sync.ending = (message.result, KIND_COLLECTIVE, self.numbers + message.reason.encode())
        return ANSWERED

    def _fail_in_transfer(self, message):
        return self._end_transfer((message.result, KIND_COLLECTIVE, self.numbers + message.reason.encode()))

    # ------------------------------------------------------------------------------------------ events of the actor

    def report(self, event):
        """An event of the transfer; ignored if it is of another one."""
        cdef Sync sync = self.sync
        if sync is not None and sync.order is not None and sync.order.round == event.round:
            self._step(type(event), event)

    def _report_fetched(self, event):
        """The state is here, verified."""
        self.outbox.actions.append(SendMaster(Fetched(self.sync.call, event.round, True, "")))
        return FETCHED

    def _report_unfetched(self, event):
        """No source is left. The master answers."""
        self.outbox.actions.append(SendMaster(Fetched(self.sync.call, event.round, False, event.reason)))
        return STARVED

    def _transfer_ended(self, event):
        """No worker touches the memory any more: the caller gets its answer."""
        cdef Sync sync = self.sync
        sync.tx_bytes, sync.rx_bytes = event.tx_bytes, event.rx_bytes
        self._finish(sync.ending)
        return COMPLETED

    # ------------------------------------------------------------------------------------------ steps

    def _describe(self, call):
        self.sync.schema_wanted = False
        return self._send_schema(call)

    def _describe_and_begin(self, call):
        if self.sync.schema_wanted:
            self._describe(call)
        return self._begin_transfer()

    def _describe_and_finish(self, call):
        self._finish(self.sync.ending)
        return COMPLETED

    cdef str _begin_transfer(self):
        cdef Sync sync = self.sync
        order, where = sync.order, sync.described
        if type(order) is Serve:
            self.outbox.actions.append(ServeState(order.round, where.manifest, where.nbytes, where.window))
            return SERVING
        self.outbox.actions.append(FetchState(
            order.round, where.manifest, where.nbytes, where.window, order.whole, order.content, sync.sources,
        ))
        return FETCHING

    def _end_transfer(self, tuple ending):
        """The answer is known. The caller gets it when no worker uses its memory any more."""
        self.sync.ending = ending
        self.outbox.actions.append(EndTransfer(self.sync.order.round))
        return ENDING

    cdef _finish(self, tuple ending):
        cdef Sync sync = self.sync
        result, kind, payload = ending
        if result == SUCCESS:
            payload = SYNCED.pack(payload, sync.tx_bytes, sync.rx_bytes) + self.numbers
        self.outbox.actions.append(Complete(sync.slot, sync.generation, result, kind, payload))

    def end(self, int result, int kind, str text):
        """The membership is over. A caller that makes its manifest gets the reason when it has made it."""
        if self.sync is not None:
            self._step(MembershipEnded, (result, kind, text.encode()))

    def _end(self, tuple ending):
        self._finish(ending)
        return COMPLETED

    # ------------------------------------------------------------------------------------------ invariants

    def check(self, bint member):
        """Invariants between two events; `member`: the membership goes on."""
        cdef Sync sync = self.sync
        if sync is None:
            return
        phase = sync.phase
        described = phase not in (VOTED, *UNDESCRIBED)
        assert described == (sync.described is not None), f"{phase} with the manifest {sync.described!r}"
        assert phase in UNDESCRIBED or not sync.schema_wanted, f"a schema was not sent while {phase}"
        assert (sync.ending is not None) == (phase in (ANSWERED, ENDING)), f"{phase} with the answer {sync.ending!r}"
        if phase in (VOTED, DESCRIBING, DESCRIBED):
            assert sync.order is None, f"{phase} with {sync.order!r}"
        elif phase is not ANSWERED:
            assert sync.order is not None, f"{phase} without an order"
        assert phase is not SERVING or type(sync.order) is Serve, f"serves {sync.order!r}"
        assert phase not in FETCH_PHASES or type(sync.order) is Fetch, f"fetches {sync.order!r}"
        assert member or phase is ENDING, f"a sync is {phase} after the end"


def unpacked(message):
    """The sources in a message."""
    try:
        return unpack_sources(message.sources)
    except ValueError:
        name = type(message).__name__
        raise ProtocolViolationError(f"{name} with sources that cannot be read: {message!r}") from None


UNDESCRIBED = (DESCRIBING, ORDERED, ANSWERED)  # the caller makes its manifest, and waits in no slot
FETCH_PHASES = (FETCHING, STARVED, FETCHED, RELAYING)

# (phase, event) -> (handler, phases that may follow). A pair that is not here is an error, and changes nothing.
TRANSITIONS = {
    (VOTED, AskSchema): (SyncMachine._ask_schema, (DESCRIBING,)),
    (VOTED, Serve): (SyncMachine._take_order, (ORDERED,)),
    (VOTED, Fetch): (SyncMachine._take_order, (ORDERED,)),
    (VOTED, SyncDone): (SyncMachine._agree, (COMPLETED,)),
    (VOTED, CallFailed): (SyncMachine._fail, (COMPLETED,)),
    (VOTED, CallCancel): (SyncMachine._cancel, (COMPLETED,)),
    (VOTED, MembershipEnded): (SyncMachine._end, (COMPLETED,)),
    (DESCRIBING, AskSchema): (SyncMachine._ask_schema, (DESCRIBING,)),
    (DESCRIBING, CallManifest): (SyncMachine._describe, (DESCRIBED,)),
    (DESCRIBING, Serve): (SyncMachine._take_order, (ORDERED,)),
    (DESCRIBING, Fetch): (SyncMachine._take_order, (ORDERED,)),
    (DESCRIBING, SyncDone): (SyncMachine._agree_later, (ANSWERED,)),
    (DESCRIBING, CallFailed): (SyncMachine._fail_later, (ANSWERED,)),
    (DESCRIBING, CallCancel): (SyncMachine._withdraw, (COMPLETED,)),
    (DESCRIBING, MembershipEnded): (SyncMachine._drop, (COMPLETED,)),
    (ORDERED, CallManifest): (SyncMachine._describe_and_begin, (SERVING, FETCHING)),
    (ORDERED, SourceGone): (SyncMachine._drop_source_early, (ORDERED,)),
    (ORDERED, SyncDone): (SyncMachine._agree_later, (ANSWERED,)),
    (ORDERED, CallFailed): (SyncMachine._fail_later, (ANSWERED,)),
    (ORDERED, CallCancel): (SyncMachine._withdraw, (COMPLETED,)),
    (ORDERED, MembershipEnded): (SyncMachine._drop, (COMPLETED,)),
    (ANSWERED, CallManifest): (SyncMachine._describe_and_finish, (COMPLETED,)),
    (ANSWERED, CallCancel): (SyncMachine._drop, (COMPLETED,)),
    (ANSWERED, MembershipEnded): (SyncMachine._drop, (COMPLETED,)),
    (DESCRIBED, AskSchema): (SyncMachine._send_schema, (DESCRIBED,)),
    (DESCRIBED, Serve): (SyncMachine._follow_order, (SERVING,)),
    (DESCRIBED, Fetch): (SyncMachine._follow_order, (FETCHING,)),
    (DESCRIBED, SyncDone): (SyncMachine._agree, (COMPLETED,)),
    (DESCRIBED, CallFailed): (SyncMachine._fail, (COMPLETED,)),
    (DESCRIBED, CallCancel): (SyncMachine._cancel, (COMPLETED,)),
    (DESCRIBED, MembershipEnded): (SyncMachine._end, (COMPLETED,)),
    (FETCHING, StateFetched): (SyncMachine._report_fetched, (FETCHED,)),
    (FETCHING, StateUnfetched): (SyncMachine._report_unfetched, (STARVED,)),
    (FETCHING, SourceGone): (SyncMachine._drop_source, (FETCHING,)),
    (STARVED, MoreSources): (SyncMachine._add_sources, (FETCHING,)),
    (FETCHED, Serve): (SyncMachine._relay, (RELAYING,)),
    **{(phase, SourceGone): (SyncMachine._ignore_source, (phase,)) for phase in (STARVED, FETCHED, RELAYING)},
    **{(phase, SyncDone): (SyncMachine._agree_in_transfer, (ENDING,)) for phase in (SERVING, FETCHED, RELAYING)},
    **{(phase, CallFailed): (SyncMachine._fail_in_transfer, (ENDING,)) for phase in (SERVING, *FETCH_PHASES)},
    **{(phase, CallCancel): (SyncMachine._cancel_transfer, (ENDING,)) for phase in (SERVING, *FETCH_PHASES)},
    **{(phase, MembershipEnded): (SyncMachine._end_transfer, (ENDING,)) for phase in (SERVING, *FETCH_PHASES)},
    (ENDING, TransferEnded): (SyncMachine._transfer_ended, (COMPLETED,)),
}
# Events that were on their way while the phase changed.
TRANSITIONS.update({
    (phase, event): (SyncMachine._ignore, (phase,))
    for phases, events in (
        ((ANSWERED, ENDING), (AskSchema, Serve, Fetch, MoreSources, SourceGone, SyncDone, CallFailed)),
        ((ENDING,), (CallCancel, MembershipEnded)),
        ((STARVED, FETCHED, RELAYING, ENDING), (StateFetched, StateUnfetched)),
    )
    for phase in phases
    for event in events
})
cdef dict steps = TRANSITIONS  # the same, without a look-up by name
