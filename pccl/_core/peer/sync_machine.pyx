# cython: language_level=3
"""A peer's sync_shared_state, from the call to the completion of its last slot.

    voted ──done──▶ completed
      └──its layout is wanted, or its part in a transfer──▶ describing ──▶ serving or fetching ──▶ ending ──▶ completed

**The description** of a state is made only when somebody needs it. The first order completes the caller's slot with
KIND_DESCRIBE; the caller describes its state and waits in another slot. Orders that come before that wait for it too,
and so does an answer: it is given to whichever slot the caller waits in.

**A fetch** that finds no source left is told to the master, which knows whether others have finished: then it goes on with
those. Who has finished may be made a source in its turn, in the same round.

**The memory** belongs to the shell from ServeState or FetchState until TransferEnded. So whatever the end is (agreed,
failed, given up, the membership over) it is EndTransfer first, and the slot completes when the shell has answered.

**A torn state**: if a transfer ends after something was received and before all of it was, the memory is neither the old
state nor the new. The training process finds that out by its digest, whatever the reason was, and says so when it calls
again; then nobody takes that state over.

Part of the peer's machine, which passes on what concerns the shared state; pure, and knows nothing of links.
"""

from pccl._core.protocol.events import SYNC, SYNCED
from pccl._core.protocol.messages import Fetch, Fetched, Serve, VoteSync, Withdraw
from pccl._core.protocol.outcomes import INVALID_USAGE, KIND_CANCELLED, KIND_COLLECTIVE, KIND_DESCRIBE, KIND_PLAIN, SUCCESS
from pccl._core.protocol.sources import unpack_sources

from .events import (
    AddSources, Complete, DropSource, EndTransfer, FetchState, SendMaster, SendSchema, ServeFetched, ServeState,
)


cdef class Sync:
    """One sync_shared_state under way."""

    def __init__(self, call, number):
        self.call = number
        self.slot = call.slot
        self.sequence = call.sequence
        self.waiting = True
        self.describing = self.schema_wanted = self.moving = self.ended = self.fetched = self.failed = self.inherits = False
        self.described = self.order = self.ending = None
        self.sources = ()
        self.tx_bytes = self.rx_bytes = 0


cdef class SyncMachine:
    """The synchronisations of one membership, one at a time."""

    def __init__(self):
        self.sync = None
        self.numbers = b""
        self.actions = []

    cdef begin(self, list actions):
        """An event is being handled: where its actions go."""
        self.actions = actions

    # ------------------------------------------------------------------------------------------ calls

    def call(self, call, number):
        """The training process synchronises: one vote."""
        if self.sync is not None:
            reason = f"another thread of this process is already in {SYNC}"
            self._complete(call.slot, call.sequence, INVALID_USAGE, KIND_PLAIN, reason.encode())
            return
        self.sync = Sync(call, number)
        vote = VoteSync(number, call.revision, call.strategy, call.torn, call.keys, call.layout, call.content)
        self.actions.append(SendMaster(vote))

    def describe(self, call):
        """The caller has described its state, and waits again."""
        cdef Sync sync = self.sync
        if sync is None or not sync.describing:
            reason = f"nobody asked for a description: it belongs to {SYNC}"
            self._complete(call.slot, call.sequence, INVALID_USAGE, KIND_PLAIN, reason.encode())
            return
        sync.describing = False
        sync.described = call
        sync.slot, sync.sequence, sync.waiting = call.slot, call.sequence, True
        if sync.ending is not None:
            self._finish()
        else:
            self._go_on()

    def cancel(self, slot, sequence):
        """The caller gave up. What is about to end does so by itself."""
        cdef Sync sync = self.sync
        if sync is None or sync.slot != slot or sync.sequence != sequence:
            return
        if sync.describing:  # its slot is completed already, and no other will follow
            if sync.ending is None:
                self.actions.append(SendMaster(Withdraw(sync.call)))
            self.sync = None
        elif sync.ending is None:
            self.actions.append(SendMaster(Withdraw(sync.call)))
            self._conclude((INVALID_USAGE, KIND_CANCELLED, b"given up by its caller"))

    def owes(self, slot, sequence):
        """Whether the caller waits for that slot."""
        cdef Sync sync = self.sync
        return sync is not None and sync.waiting and sync.slot == slot and sync.sequence == sequence

    # ------------------------------------------------------------------------------------------ what the master says

    def ask_schema(self, message):
        """Others have another layout. Returns what is wrong with the message, or nothing."""
        cdef Sync sync = self._find(message.call)
        if sync is not None:
            if sync.order is not None:
                return "AskSchema after the election"
            sync.schema_wanted = True
            self._need_manifest()
        return ""

    def order(self, message):
        """Serve or Fetch. Returns what is wrong with it, or nothing."""
        cdef Sync sync = self._find(message.call)
        if sync is None:
            return ""
        if sync.order is not None:
            return self._inherit(message)
        if type(message) is Fetch:
            sources = _unpacked(message)
            if sources is None:
                return f"Fetch from nobody: {message!r}"
            sync.sources = sources
        sync.order = message
        self._need_manifest()
        return ""

    def _inherit(self, message):
        """Serve after Fetch: this peer has finished, others have nobody else."""
        cdef Sync sync = self.sync
        if type(message) is not Serve or not sync.fetched or sync.inherits or message.round != sync.order.round:
            return f"a second order in one call: {message!r}"
        sync.inherits = True
        self.actions.append(ServeFetched(message.round))
        return ""

    def more_sources(self, message):
        """The transfer goes on. Returns what is wrong with the message, or nothing."""
        cdef Sync sync = self._find(message.call)
        if sync is None:
            return ""
        sources = _unpacked(message)
        if not sync.failed or sync.order.round != message.round or sources is None:
            return f"MoreSources of transfer {message.round}, in which this peer waits for none, or no sources at all"
        sync.failed = False
        self.actions.append(AddSources(message.round, sources))
        return ""

    def drop_source(self, message):
        """A source is gone; the transfer may have noticed. Returns what is wrong with the message, or nothing."""
        cdef Sync sync = self._find(message.call)
        if sync is None:
            return ""
        if type(sync.order) is not Fetch or sync.order.round != message.round:
            return f"SourceGone of transfer {message.round}, in which this peer fetches nothing"
        if sync.moving:
            if not sync.fetched and not sync.failed:
                self.actions.append(DropSource(message.round, message.peer))
            return ""
        # It has not begun. Who is gone is not dialled in the first place.
        sync.sources = tuple([source for source in sync.sources if source.peer != message.peer])
        return ""

    def done(self, message):
        """All hold the same state. Returns what is wrong with the message, or nothing."""
        cdef Sync sync = self._find(message.call)
        if sync is None:
            return ""
        if type(sync.order) is Fetch and not sync.fetched:
            return f"SyncDone in transfer {sync.order.round}, in which this peer still fetches"
        self._conclude((SUCCESS, KIND_PLAIN, message.revision))
        return ""

    def fail(self, message):
        """The call cannot succeed. True if it was this one."""
        if self._find(message.call) is None:
            return False
        self._conclude((message.result, KIND_COLLECTIVE, self.numbers + message.reason.encode()))
        return True

    def _find(self, number):
        """The call of this number, unless it was given up."""
        cdef Sync sync = self.sync
        return sync if sync is not None and sync.call == number and sync.ending is None else None

    # ------------------------------------------------------------------------------------------ what the shell says

    def fetched(self, number):
        """The state is here, verified. Nothing to say if it is too late."""
        cdef Sync sync = self.sync
        if self._fetches(number):
            sync.fetched = True
            if sync.ending is None:
                self.actions.append(SendMaster(Fetched(sync.call, number, True, "")))

    def unfetched(self, number, str reason):
        """The state could not be had. The master answers the call."""
        cdef Sync sync = self.sync
        if self._fetches(number) and sync.ending is None:
            sync.failed = True
            self.actions.append(SendMaster(Fetched(sync.call, number, False, reason)))

    def _fetches(self, number):
        cdef Sync sync = self.sync
        return (
            sync is not None and sync.moving and type(sync.order) is Fetch and sync.order.round == number
            and not sync.fetched and not sync.failed
        )

    def ended(self, event):
        """No worker touches the memory any more: the caller gets its answer."""
        cdef Sync sync = self.sync
        if sync is None or not sync.ended or sync.order.round != event.round:
            return
        sync.moving = False
        sync.tx_bytes, sync.rx_bytes = event.tx_bytes, event.rx_bytes
        self._finish()

    # ------------------------------------------------------------------------------------------ what follows

    cdef _need_manifest(self):
        """Have the caller describe its state, unless it has, or is about to."""
        cdef Sync sync = self.sync
        if sync.described is not None:
            self._go_on()
        elif not sync.describing:
            sync.describing = True
            sync.waiting = False
            self._complete(sync.slot, sync.sequence, SUCCESS, KIND_DESCRIBE, b"")

    cdef _go_on(self):
        """The description is there: do what waited for it."""
        cdef Sync sync = self.sync
        where = sync.described
        if sync.schema_wanted:
            sync.schema_wanted = False
            self.actions.append(SendSchema(sync.call, where.description, where.nbytes))
        order = sync.order
        if order is None or sync.moving:
            return
        sync.moving = True
        if type(order) is Fetch:
            self.actions.append(FetchState(
                order.round, where.description, where.nbytes, where.window,
                order.whole, order.content, sync.sources,
            ))
        else:
            self.actions.append(ServeState(order.round, where.description, where.nbytes, where.window))

    cdef _conclude(self, tuple ending):
        """The end is known. It reaches the caller when the memory is its own again, and when it waits for it."""
        cdef Sync sync = self.sync
        sync.ending = ending
        if sync.moving:
            sync.ended = True
            self.actions.append(EndTransfer(sync.order.round))
        elif not sync.describing:
            self._finish()

    cdef _finish(self):
        cdef Sync sync = self.sync
        result, kind, payload = sync.ending
        if result == SUCCESS:
            payload = SYNCED.pack(payload, sync.tx_bytes, sync.rx_bytes) + self.numbers
        self.sync = None
        self._complete(sync.slot, sync.sequence, result, kind, payload)

    def end(self, int result, int kind, str text):
        """The membership is over. A caller that describes its state finds that out when it has."""
        cdef Sync sync = self.sync
        if sync is None:
            return
        if sync.describing:
            self.sync = None
        elif sync.ending is None:
            self._conclude((result, kind, text.encode()))

    def _complete(self, slot, sequence, int result, int kind, bytes payload):
        self.actions.append(Complete(slot, sequence, result, kind, payload))

    # ------------------------------------------------------------------------------------------ invariants

    def check(self, bint member):
        """Invariants between two events; `member`: the membership goes on."""
        cdef Sync sync = self.sync
        if sync is None:
            return
        assert sync.waiting != sync.describing, "the caller waits for nothing, or for two things"
        assert not (sync.describing and sync.described is not None), "described twice"
        assert not sync.moving or sync.described is not None and sync.order is not None, "moves what nobody described"
        assert sync.moving or sync.order is None or sync.describing, "an order was forgotten"
        assert not sync.ended or sync.moving, "what never began was ended"
        assert sync.ending is None or sync.ended or sync.describing, "a caller waits though its answer is known"
        assert sync.described is None or not sync.schema_wanted, "a layout was not sent"
        assert not (sync.fetched and sync.failed), "fetched and failed"
        assert member or sync.ended, "a sync goes on after the end"


def _unpacked(message):
    """The sources in a message; None if that is nonsense."""
    try:
        return unpack_sources(message.sources)
    except ValueError:
        return None

