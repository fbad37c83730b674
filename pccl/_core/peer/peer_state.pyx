# cython: language_level=3
"""The peer's machine: one membership, from connect() to the end.

    NEW ──connect──▶ DIALLING ──▶ JOINING ──accepted──▶ MEMBER ──▶ GONE
                        ▲  └─ retry ─┘ │                  (left, kicked, master lost, training process gone)
                        └──────────────┘

What a member takes part in (its ring, votes, reduces, the shared state) is in `participation`. Here is how a membership
begins and ends, what is understood in which phase, and the passing of time.

**The end** aborts what runs. A slot whose memory workers still hold completes when they have let go, and close() is
answered after that: no thread that waits for a reduce is left behind. Without a training process nobody waits.

**Silence** of the master beyond the agreed time ends the membership. A process that was itself stopped heard nobody,
which says nothing about the master; it notices because its Tick comes late, and does not count that time.

No socket, clock, process or random source in here.
"""

from collections import deque

from pccl._core.protocol.events import OPTIMIZE, TOPOLOGY, Tick
from pccl._core.protocol.mailbox import (
    CallAwait, CallCancel, CallConnect, CallManifest, CallLeave, CallOptimize, CallPending, CallReduce, CallSync,
    CallTopology,
)
from pccl._core.protocol.messages import (
    AbortReduce, Accepted, AskSchema, Beat, CallFailed, Commence, Fetch, Kick, Leave, MoreSources, Notice, OptimizeDone,
    PendingAnswer, Probe, ReduceDone, ReduceFailed, Registered, RingOrder, Serve, SourceGone, SyncDone, TopologyDone,
    World,
)
from pccl._core.protocol.outcomes import (
    INVALID_USAGE, KIND_CANCELLED, KIND_KICKED, KIND_MASTER_LOST, KIND_PLAIN, MASTER_CONNECTION_FAILED, SUCCESS,
)
from pccl._core.story import attach
from pccl.options import STORY_EVENTS_MAX, nanoseconds

from .member cimport Participation
from .events import (
    AnswerLink, AppGone, Called, Complete, DialMaster, HangUp, LinkCame, LinkDown, LinkUp, MasterDown, MasterSaid,
    MasterUp, ProbeDone, ReduceBroken, ReduceEnded, ReduceProgress, ReduceQuiet, SendMaster, StateFetched, StateUnfetched,
    Stop, Tell, Traffic, TransferEnded, WorkerDied,
)
from .calls import Call

LATE_NS = 100_000_000  # a tick that is later than this was held up by the machine or by a stop, not by work

NEW = "new"
DIALLING = "dialling"
JOINING = "joining"
MEMBER = "member"
GONE = "gone"


cdef class PeerState(Participation):
    """`handle(event, now_ns) -> actions`, and nothing else changes it."""

    def __init__(self, options, now_ns=0):
        super().__init__(options, now_ns)
        self.phase = NEW
        self.leaving = []
        self.connecting = None
        self.attempts_left = 0
        self.attempt = -1
        self.ending = (INVALID_USAGE, KIND_PLAIN, "not connected: call connect() first")
        self.story = deque(maxlen=STORY_EVENTS_MAX)
        self.heard_ns = self.beat_ns = self.ticked_ns = now_ns
        self.retry_ns = 0
        self.interval_ns = nanoseconds(options.heartbeat_interval)
        self.silence_ns = nanoseconds(options.heartbeat_timeout)
        self.checking = options.check
        self.next_deadline_ns = now_ns + self.interval_ns

    def new_link(self):
        """A number for a connection; dialled and accepted ones share one count."""
        return self.wiring.new_link()

    @property
    def id(self):
        """This peer's name; 0 while it has none."""
        return self.wiring.id

    def owes(self, slot, sequence):
        """Whether somebody waits for the end of that call."""
        calls = (*self.calls.open.values(), *self.leaving, self.connecting)
        return (
            self.reductions.owes(slot, sequence) or self.syncing.owes(slot, sequence)
            or any(call is not None and call.slot == slot and call.sequence == sequence for call in calls)
        )

    cpdef list handle(self, event, long long now_ns):
        """The one way in. An error in here is a bug; it carries the story."""
        try:
            return self._handle(event, now_ns)
        except BaseException as error:
            attach(error, self, event)
            raise

    cdef list _handle(self, event, long long now_ns):
        cdef list actions = self._begin(now_ns)
        kind = type(event)
        if kind is MasterSaid:
            self.heard_ns = now_ns
            subject, argument = type(event.message), event.message
        elif kind is Called:
            subject, argument = type(event.call), event.call
        else:
            subject, argument = kind, event
        handler = TRANSITIONS.get((self.phase, subject))
        if handler is not None:
            handler(self, argument)
        elif kind is MasterSaid:
            if self.phase is JOINING or self.phase is MEMBER:  # else: a last word on a connection that was hung up
                self._lose_master(f"the master broke the protocol: {subject.__name__} while {self.phase}")
        elif kind is Called:
            self._refuse_call(argument)
        elif subject not in IGNORED:
            raise TypeError(f"the peer's machine knows no {event!r} while {self.phase}")
        self._set_deadline()
        self.story.append((now_ns, event, actions))
        if self.checking:
            self.check()
        return actions

    # ------------------------------------------------------------------------------------------ joining

    def _on_connect(self, call):
        self.connecting = Call(call.slot, call.sequence, 0)
        self.attempts_left = call.attempts
        self.wiring.join(call.lanes)
        self._dial_master()

    def _dial_master(self):
        self.phase = DIALLING
        self.attempts_left -= 1
        self.attempt += 1
        self.retry_ns = 0
        self.actions.append(DialMaster(self.attempt))

    def _on_master_up(self, event):
        self.phase = JOINING
        self.heard_ns = self.beat_ns = self.now_ns

    def _on_master_unreached(self, event):
        """An attempt failed, or the master went away before this peer was a member."""
        self.wiring.forget()
        if self.attempts_left > 0 and not event.final:
            self.phase = DIALLING
            self.retry_ns = self.now_ns + nanoseconds(self.options.retry_interval)
        else:
            self._end(MASTER_CONNECTION_FAILED, KIND_PLAIN, event.reason)

    def _on_registered(self, message):
        self.wiring.name(message.peer, message.run)
        self.interval_ns = max(message.beat_ms, 1) * 1_000_000
        self.silence_ns = max(message.silence_ms, 2) * 1_000_000

    def _on_accepted(self, message):
        self.phase = MEMBER
        call, self.connecting = self.connecting, None
        self.actions.append(Complete(call.slot, call.sequence, SUCCESS, KIND_PLAIN, self._on_world(message)))

    def _on_cancel(self, cancel):
        self.reductions.cancel(cancel.slot, cancel.sequence)
        self.syncing.cancel(cancel.slot, cancel.sequence)
        self.calls.cancel(cancel.slot, cancel.sequence)
        call = self.connecting
        if call is not None and call.slot == cancel.slot and call.sequence == cancel.sequence:
            self._leave("connect() was given up")

    def _refuse_call(self, call):
        """A call that makes no sense in this phase. A cancel that came too late has nobody to answer to."""
        if type(call) is CallReduce:
            self.reductions.refuse(call.operations, *self.ending)
        elif type(call) is CallConnect and self.phase in (DIALLING, JOINING, MEMBER):
            self._complete(call, INVALID_USAGE, KIND_PLAIN, "connect() was already called on this communicator")
        elif type(call) is not CallCancel and type(call) is not CallAwait:
            self._complete(call, *self.ending)

    # ------------------------------------------------------------------------------------------ the end

    def _end(self, int result, int kind, str text):
        """The membership is over: whoever waits learns why, and so does everyone who calls later."""
        self.phase = GONE
        self.ending = (result, kind, text)
        self.reductions.end(result, kind, text)
        self.syncing.end(result, kind, text)
        self._end_probe()
        self.wiring.forget()
        self.wiring.kill_workers()
        self.actions.append(HangUp())
        self.calls.end(result, kind, text)
        if self.connecting is not None:
            self._complete(self.connecting, result, kind, text)
            self.connecting = None

    def _lose_master(self, str reason):
        self._end(MASTER_CONNECTION_FAILED, KIND_MASTER_LOST, reason)

    def _on_master_lost(self, event):
        self._lose_master(f"the master is gone: {event.reason}")

    def _on_kick(self, message):
        self._end(message.result, KIND_KICKED, message.reason)

    def _leave(self, str reason):
        if self.phase in (JOINING, MEMBER):
            self.actions.append(SendMaster(Leave(reason)))
        if self.phase != GONE:
            self._end(INVALID_USAGE, KIND_CANCELLED, "this communicator is closed")

    def _on_leave(self, call):
        self._leave("close")
        self.leaving.append(call)
        self._stop_if_left()

    def _stop_if_left(self):
        """Answer close() once the workers have let go of everything that ran."""
        if self.leaving and not self.reductions.tags and self.syncing.sync is None:
            for call in self.leaving:
                self._complete(call, SUCCESS, KIND_PLAIN, "")
            self.leaving = []
            self.actions.append(Stop())

    def _on_stranger_came(self, event):
        self.actions.append(AnswerLink(event.link, self.ending[2]))

    def _on_app_gone(self, event):
        self._leave(event.reason)
        self.actions.append(Stop())

    def _on_notice(self, message):
        self.actions.append(Tell(message.level, message.line))

    def _on_beat(self, message):
        pass  # hearing of it was the point

    # ------------------------------------------------------------------------------------------ time

    def _on_tick(self, event):
        late_ns = self.now_ns - self.next_deadline_ns
        if late_ns > 0:  # this process was stopped: what it could not hear was no silence
            self.heard_ns = min(self.now_ns, self.heard_ns + late_ns)
            self.reductions.forgive(late_ns)
        self.ticked_ns = self.now_ns
        if late_ns > LATE_NS:
            self.wiring.forgive()
        self.wiring.watch()
        # Without a whole ring a new order is on its way, which ends every reduce.
        if self.wiring.is_whole() and (reason := self.reductions.find_stall()):
            self.wiring.worker_died(reason)
        if self.phase is DIALLING and self.retry_ns and self.now_ns >= self.retry_ns:
            self._dial_master()
        if self.phase is not JOINING and self.phase is not MEMBER:
            return
        if self.now_ns - self.heard_ns >= self.silence_ns:
            reason = f"nothing heard from the master for {self.silence_ns / 1e9:g} s (heartbeat_timeout)"
            if self.phase is MEMBER:
                self._lose_master(reason)
            else:
                self.actions.append(HangUp())
                self._on_master_unreached(MasterDown(reason))
            return
        if self.now_ns - self.beat_ns >= self.interval_ns and self.wiring.id:
            self.beat_ns = self.now_ns
            self._beat()

    cdef _set_deadline(self):
        cdef long long soonest = self.wiring.soonest(self.ticked_ns + self.interval_ns)
        if self.phase is DIALLING and self.retry_ns:
            soonest = min(soonest, self.retry_ns)
        elif self.phase is MEMBER or self.phase is JOINING:
            soonest = min(soonest, self.heard_ns + self.silence_ns)
            if self.wiring.id:  # who has no name yet has nothing to say
                soonest = min(soonest, self.beat_ns + self.interval_ns)
        self.next_deadline_ns = soonest

    # ------------------------------------------------------------------------------------------ invariants

    def check(self):
        """Invariants between two events; run after every one in all tests."""
        wiring, syncing = self.wiring, self.syncing.sync is not None
        wiring.check()
        assert self.phase in (JOINING, MEMBER) or not wiring.links, f"lanes while {self.phase}"
        assert self.phase in (DIALLING, JOINING, MEMBER) or not wiring.early, f"early lanes while {self.phase}"
        assert self.phase in (JOINING, MEMBER) or not wiring.id, f"peer {wiring.id} while {self.phase}"
        assert self.phase is not MEMBER or wiring.id, "a member without a name"
        self.reductions.check(self.phase is MEMBER)
        self.syncing.check(self.phase is MEMBER)
        busy = bool(self.reductions.tags) or syncing
        assert self.phase in (MEMBER, GONE) or not busy, f"reduces or a sync while {self.phase}"
        votes = (TOPOLOGY in self.calls.open) + (OPTIMIZE in self.calls.open)
        assert not votes or not busy, "a vote on the topology with reduces or a sync under way"
        assert votes < 2, f"in {TOPOLOGY} and {OPTIMIZE} at once"
        assert self.phase is MEMBER or self.probe is None, f"measures an edge while {self.phase}"
        assert not self.reductions.tags or not syncing, "a sync beside reduces"
        assert not self.leaving or self.phase is GONE and busy, "close() was not answered"
        self.calls.check()
        assert self.phase is MEMBER or not self.calls.open, f"calls {self.calls.open} while {self.phase}"
        assert (self.connecting is not None) == (self.phase in (DIALLING, JOINING)), f"connect() lost while {self.phase}"


# What each phase understands. A mailbox call that is not here gets the reason why there is no membership; a message of
# the master that is not here ends the membership; late echoes of what was dropped are in IGNORED.
TRANSITIONS = {
    (NEW, CallConnect): PeerState._on_connect,
    (NEW, CallLeave): PeerState._on_leave,
    (NEW, AppGone): PeerState._on_app_gone,
    (NEW, Tick): PeerState._on_tick,
    (DIALLING, MasterUp): PeerState._on_master_up,
    (DIALLING, MasterDown): PeerState._on_master_unreached,
    (DIALLING, LinkCame): PeerState._on_link_came,
    (DIALLING, LinkDown): PeerState._on_link_down,
    (DIALLING, WorkerDied): PeerState._on_worker_died,
    (DIALLING, CallCancel): PeerState._on_cancel,
    (DIALLING, CallLeave): PeerState._on_leave,
    (DIALLING, AppGone): PeerState._on_app_gone,
    (DIALLING, Tick): PeerState._on_tick,
    (JOINING, Registered): PeerState._on_registered,
    (JOINING, RingOrder): PeerState._on_wire,
    (JOINING, Accepted): PeerState._on_accepted,
    (JOINING, Kick): PeerState._on_kick,
    (JOINING, Notice): PeerState._on_notice,
    (JOINING, Beat): PeerState._on_beat,
    (JOINING, MasterDown): PeerState._on_master_unreached,
    (JOINING, LinkCame): PeerState._on_link_came,
    (JOINING, LinkUp): PeerState._on_link_up,
    (JOINING, LinkDown): PeerState._on_link_down,
    (JOINING, WorkerDied): PeerState._on_worker_died,
    (JOINING, CallCancel): PeerState._on_cancel,
    (JOINING, CallLeave): PeerState._on_leave,
    (JOINING, AppGone): PeerState._on_app_gone,
    (JOINING, Tick): PeerState._on_tick,
    (MEMBER, CallTopology): PeerState._on_call_topology,
    (MEMBER, CallPending): PeerState._on_call_pending,
    (MEMBER, CallOptimize): PeerState._on_call_optimize,
    (MEMBER, CallReduce): PeerState._on_call_reduce,
    (MEMBER, CallSync): PeerState._on_call_sync,
    (MEMBER, CallManifest): PeerState._on_call_manifest,
    (MEMBER, CallAwait): PeerState._on_call_await,
    (MEMBER, CallCancel): PeerState._on_cancel,
    (MEMBER, CallLeave): PeerState._on_leave,
    (MEMBER, TopologyDone): PeerState._on_topology_done,
    (MEMBER, OptimizeDone): PeerState._on_topology_done,
    (MEMBER, PendingAnswer): PeerState._on_pending_answer,
    (MEMBER, CallFailed): PeerState._on_call_failed,
    (MEMBER, Commence): PeerState._on_commence,
    (MEMBER, AbortReduce): PeerState._on_abort_reduce,
    (MEMBER, ReduceDone): PeerState._on_reduce_done,
    (MEMBER, ReduceFailed): PeerState._on_reduce_failed,
    (MEMBER, World): PeerState._on_world,
    (MEMBER, AskSchema): PeerState._on_ask_schema,
    (MEMBER, Serve): PeerState._on_transfer_order,
    (MEMBER, Fetch): PeerState._on_transfer_order,
    (MEMBER, MoreSources): PeerState._on_more_sources,
    (MEMBER, SourceGone): PeerState._on_source_gone,
    (MEMBER, SyncDone): PeerState._on_sync_done,
    (MEMBER, StateFetched): PeerState._on_state_fetched,
    (MEMBER, StateUnfetched): PeerState._on_state_unfetched,
    (MEMBER, TransferEnded): PeerState._on_transfer_ended,
    (MEMBER, ReduceEnded): PeerState._on_reduce_ended,
    (MEMBER, ReduceBroken): PeerState._on_reduce_broken,
    (MEMBER, ReduceQuiet): PeerState._on_reduce_quiet,
    (MEMBER, ReduceProgress): PeerState._on_reduce_progress,
    (MEMBER, Probe): PeerState._on_probe,
    (MEMBER, ProbeDone): PeerState._on_probe_done,
    (MEMBER, Traffic): PeerState._on_traffic,
    (MEMBER, RingOrder): PeerState._on_wire,
    (MEMBER, Kick): PeerState._on_kick,
    (MEMBER, Notice): PeerState._on_notice,
    (MEMBER, Beat): PeerState._on_beat,
    (MEMBER, MasterDown): PeerState._on_master_lost,
    (MEMBER, LinkCame): PeerState._on_link_came,
    (MEMBER, LinkUp): PeerState._on_link_up,
    (MEMBER, LinkDown): PeerState._on_link_down,
    (MEMBER, WorkerDied): PeerState._on_worker_died,
    (MEMBER, AppGone): PeerState._on_app_gone,
    (MEMBER, Tick): PeerState._on_tick,
    (GONE, LinkCame): PeerState._on_stranger_came,
    (GONE, ReduceQuiet): PeerState._on_reduce_quiet,
    (GONE, TransferEnded): PeerState._on_transfer_ended,
    (GONE, CallLeave): PeerState._on_leave,
    (GONE, AppGone): PeerState._on_app_gone,
    (GONE, Tick): PeerState._on_tick,
}

# Echoes of connections and processes that the machine has already let go of.
IGNORED = frozenset({
    LinkUp, LinkDown, MasterUp, MasterDown, WorkerDied, ReduceEnded, ReduceBroken, ReduceQuiet, ReduceProgress, Traffic,
    StateFetched, StateUnfetched, TransferEnded, ProbeDone,
})
