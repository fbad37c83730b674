# cython: language_level=3
"""The peer's machine: one membership, from connect() to the end. Its edges are in `wiring`, reduces in `reductions`.

    NEW ──connect──▶ DIALLING ──▶ JOINING ──accepted──▶ MEMBER ──▶ GONE
                        ▲  └─ retry ─┘ │                  (left, kicked, master lost, training process gone)
                        └──────────────┘

**Calls** of the training process become votes; each carries a number, and an answer to a number that nobody waits for
any more is dropped: so a call that was given up can never be mistaken for the one that came after it.

**The end** aborts what runs. A slot whose memory the lanes still hold completes when they have let go, and close() is
answered after that: no thread that waits for a reduce is left behind. Without a training process nobody waits.

**Silence** of the master beyond the agreed time ends the membership. A process that was itself stopped heard nobody,
which says nothing about the master; it notices because its Tick comes late, and does not count that time.

No socket, clock, process or random source in here.
"""

from collections import deque

from pccl.options import STORY_EVENTS_MAX, nanoseconds
from pccl.outcomes import (
    INVALID_USAGE, KIND_CANCELLED, KIND_KICKED, KIND_MASTER_LOST, KIND_PLAIN, MASTER_CONNECTION_FAILED, PENDING_ASYNC_OPS,
    SUCCESS,
)
from pccl.records import record

from .reductions cimport Reductions
from .wiring cimport Wiring
from .events import (
    NUMBERS, PENDING, TOPOLOGY, AnswerLink, AppGone, Called, Complete, DialMaster, HangUp, LinkCame, LinkDown, LinkUp, MasterDown,
    MasterSaid, MasterUp, ReduceBroken, ReduceEnded, ReduceProgress, ReduceQuiet, SendMaster, Stop, Tell, Tick, Traffic, WorkerDied,
)
from .mailbox import CallAwait, CallCancel, CallConnect, CallLeave, CallPending, CallReduce, CallTopology
from .messages import (
    AbortReduce, Accepted, Beat, CallFailed, Commence, Kick, Leave, Notice, PendingAnswer, ReduceDone, ReduceFailed,
    Registered, TopologyDone, VotePending, VoteTopology, Wire, Withdraw,
)
from .story import attach

LATE_NS = 100_000_000  # a tick that is later than this was held up by the machine or by a stop, not by work

NEW = "new"
DIALLING = "dialling"
JOINING = "joining"
MEMBER = "member"
GONE = "gone"


@record
class Call:
    """A call of the training process that is under way."""

    slot: int
    sequence: int
    number: int


cdef class PeerState:
    """`handle(event, now_ns) -> actions`, and nothing else changes it."""

    def __init__(self, options, now_ns=0):
        self.options = options
        self.phase = NEW
        self.wiring = Wiring(options)
        self.reductions = Reductions(options)
        self.calls = {}
        self.leaving = []
        self.tx_bytes = self.rx_bytes = 0
        self.connecting = None
        self.attempts_left = 0
        self.attempt = -1
        self.ending = (INVALID_USAGE, KIND_PLAIN, "not connected: call connect() first")
        self.story = deque(maxlen=STORY_EVENTS_MAX)
        self.next_call = 1
        self.heard_ns = self.beat_ns = self.ticked_ns = self.now_ns = now_ns
        self.retry_ns = 0
        self.interval_ns = nanoseconds(options.heartbeat_interval)
        self.silence_ns = nanoseconds(options.heartbeat_timeout)
        self.checking = options.check
        self.next_deadline_ns = now_ns + self.interval_ns
        self.actions = []

    def new_link(self):
        """A number for a connection; dialled and accepted ones share one count."""
        return self.wiring.new_link()

    @property
    def id(self):
        """This peer's name; 0 while it has none."""
        return self.wiring.id

    def handle(self, event, long long now_ns):
        """The one way in. An error in here is a bug; it carries the story."""
        try:
            return self._handle(event, now_ns)
        except BaseException as error:
            attach(error, self, event)
            raise

    cdef list _handle(self, event, long long now_ns):
        self.now_ns = now_ns
        self.actions = actions = []
        self.wiring.begin(actions, now_ns)
        self.reductions.begin(actions, now_ns)
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
        self._complete_numbers(call, message)

    # ------------------------------------------------------------------------------------------ calls

    def _on_call_topology(self, call):
        if self.reductions.tags:
            reason = f"{len(self.reductions.tags)} reduces of this process are under way: wait for them first"
            self._complete(call, PENDING_ASYNC_OPS, KIND_PLAIN, reason)
            return
        number = self._begin(TOPOLOGY, call)
        if number:
            self.actions.append(SendMaster(VoteTopology(number, call.wanted)))

    def _on_call_pending(self, call):
        number = self._begin(PENDING, call)
        if number:
            self.actions.append(SendMaster(VotePending(number)))

    def _begin(self, str name, call):
        """The number of the vote, or 0 if another thread of this process is already in the same call."""
        if name in self.calls:
            self._complete(call, INVALID_USAGE, KIND_PLAIN, f"another thread of this process is already in {name}")
            return 0
        number = self.next_call
        self.next_call = number % 0xFFFFFFFF + 1
        self.calls[name] = Call(call.slot, call.sequence, number)
        return number

    def _on_topology_done(self, message):
        call = self._take(message.call)
        if call is not None:
            self._complete_numbers(call, message)

    def _on_pending_answer(self, message):
        call = self._take(message.call)
        if call is not None:
            self.actions.append(Complete(call.slot, call.sequence, SUCCESS, KIND_PLAIN, b"\1" if message.pending else b"\0"))

    def _on_call_failed(self, message):
        call = self._take(message.call)
        if call is not None:
            self._complete(call, message.result, KIND_PLAIN, message.reason)

    def _take(self, number):
        """The call with this number, no longer under way; None if it was given up."""
        for name, call in self.calls.items():
            if call.number == number:
                del self.calls[name]
                return call
        return None

    def _on_cancel(self, cancel):
        self.reductions.cancel(cancel.slot, cancel.sequence)
        if self.connecting is not None and self.connecting.slot == cancel.slot and self.connecting.sequence == cancel.sequence:
            self._leave("connect() was given up")
            return
        for name, call in list(self.calls.items()):
            if call.slot == cancel.slot and call.sequence == cancel.sequence:
                del self.calls[name]
                self.actions.append(SendMaster(Withdraw(call.number)))
                self._complete(call, INVALID_USAGE, KIND_CANCELLED, "given up by its caller")

    def _refuse_call(self, call):
        """A call that makes no sense in this phase. A cancel that came too late has nobody to answer to."""
        if type(call) is CallReduce:
            self.reductions.refuse(call.operations, *self.ending)
        elif type(call) is CallConnect and self.phase in (DIALLING, JOINING, MEMBER):
            self._complete(call, INVALID_USAGE, KIND_PLAIN, "connect() was already called on this communicator")
        elif type(call) is not CallCancel and type(call) is not CallAwait:
            self._complete(call, *self.ending)

    def _complete_numbers(self, call, numbers):
        payload = NUMBERS.pack(
            self.wiring.id, numbers.round, numbers.epoch,
            numbers.global_world, numbers.group_world, numbers.groups, numbers.largest_group,
        )
        self.actions.append(Complete(call.slot, call.sequence, SUCCESS, KIND_PLAIN, payload))

    def _complete(self, call, int result, int kind, str text):
        self.actions.append(Complete(call.slot, call.sequence, result, kind, text.encode()))

    # ------------------------------------------------------------------------------------------ reduces

    def _on_call_reduce(self, call):
        if TOPOLOGY in self.calls:
            reason = f"another thread of this process is in {TOPOLOGY}"
            self.reductions.refuse(call.operations, INVALID_USAGE, KIND_PLAIN, reason)
        else:
            self.reductions.call(call.operations)

    def _on_call_await(self, call):
        self.reductions.awaits(call.slot, call.sequence)

    def _on_commence(self, message):
        self._lose_master_if(self.reductions.commence(message, self.wiring.wire, self.wiring.is_whole()))

    def _on_abort_reduce(self, message):
        self._lose_master_if(self.reductions.abort(message.sequence))

    def _on_reduce_done(self, message):
        self._lose_master_if(self.reductions.done(message.sequence))

    def _on_reduce_failed(self, message):
        self._lose_master_if(self.reductions.failed(message, self.wiring.id))

    def _on_reduce_ended(self, event):
        self.reductions.ended(event)

    def _on_reduce_broken(self, event):
        self.reductions.broken(event.sequence, event.reason)

    def _on_reduce_quiet(self, event):
        self.reductions.hushed(event.sequence)
        self._stop_if_left()

    def _on_reduce_progress(self, event):
        self.reductions.progress(event.sequence, event.moved, self.now_ns - self.next_deadline_ns)

    def _on_traffic(self, event):
        self.tx_bytes, self.rx_bytes = event.tx_bytes, event.rx_bytes

    # ------------------------------------------------------------------------------------------ the end

    def _end(self, int result, int kind, str text):
        """The membership is over: whoever waits learns why, and so does everyone who calls later."""
        self.phase = GONE
        self.ending = (result, kind, text)
        self.reductions.end(result, kind, text)
        self.wiring.forget()
        self.wiring.kill_workers()
        self.actions.append(HangUp())
        calls = list(self.calls.values())
        self.calls.clear()
        if self.connecting is not None:
            calls.append(self.connecting)
            self.connecting = None
        for call in calls:
            self._complete(call, result, kind, text)

    def _lose_master(self, str reason):
        self._end(MASTER_CONNECTION_FAILED, KIND_MASTER_LOST, reason)

    def _lose_master_if(self, str wrong):
        """What no honest master would say ends the membership."""
        if wrong:
            self._lose_master(f"the master broke the protocol: {wrong}")

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
        """Answer close() once the lanes have let go of everything that ran."""
        if self.leaving and not self.reductions.tags:
            for call in self.leaving:
                self._complete(call, SUCCESS, KIND_PLAIN, "")
            self.leaving = []
            self.actions.append(Stop())

    def _on_app_gone(self, event):
        self._leave(event.reason)
        self.actions.append(Stop())

    def _on_notice(self, message):
        self.actions.append(Tell(message.level, message.line))

    def _on_beat(self, message):
        pass  # hearing of it was the point

    # ------------------------------------------------------------------------------------------ wiring

    def _on_wire(self, order):
        self.reductions.abort_all()
        self._lose_master_if(self.wiring.order(order))

    def _on_link_came(self, event):
        self.wiring.link_came(event.link, event.hello)

    def _on_stranger_came(self, event):
        self.actions.append(AnswerLink(event.link, self.ending[2]))

    def _on_link_up(self, event):
        self.wiring.link_up(event.link)

    def _on_link_down(self, event):
        self.wiring.link_down(event.link, event.reason)

    def _on_worker_died(self, event):
        self.wiring.worker_died(event.reason)

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
            self.actions.append(SendMaster(Beat(self.now_ns, self.tx_bytes, self.rx_bytes)))

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
        wiring = self.wiring
        wiring.check()
        assert self.phase in (JOINING, MEMBER) or not wiring.links, f"lanes while {self.phase}"
        assert self.phase in (DIALLING, JOINING, MEMBER) or not wiring.early, f"early lanes while {self.phase}"
        assert self.phase in (JOINING, MEMBER) or not wiring.id, f"peer {wiring.id} while {self.phase}"
        assert self.phase is not MEMBER or wiring.id, "a member without a name"
        self.reductions.check(self.phase is MEMBER)
        assert self.phase in (MEMBER, GONE) or not self.reductions.tags, f"reduces while {self.phase}"
        assert TOPOLOGY not in self.calls or not self.reductions.tags, "in update_topology with reduces under way"
        assert not self.leaving or self.phase is GONE and self.reductions.tags, "close() was not answered"
        assert self.phase is MEMBER or not self.calls, f"calls {self.calls} while {self.phase}"
        assert (self.connecting is not None) == (self.phase in (DIALLING, JOINING)), f"connect() lost while {self.phase}"
        numbers = [call.number for call in self.calls.values()]
        assert len(set(numbers)) == len(numbers), f"two calls with one number: {self.calls}"


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
    (JOINING, Wire): PeerState._on_wire,
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
    (MEMBER, CallReduce): PeerState._on_call_reduce,
    (MEMBER, CallAwait): PeerState._on_call_await,
    (MEMBER, CallCancel): PeerState._on_cancel,
    (MEMBER, CallLeave): PeerState._on_leave,
    (MEMBER, TopologyDone): PeerState._on_topology_done,
    (MEMBER, PendingAnswer): PeerState._on_pending_answer,
    (MEMBER, CallFailed): PeerState._on_call_failed,
    (MEMBER, Commence): PeerState._on_commence,
    (MEMBER, AbortReduce): PeerState._on_abort_reduce,
    (MEMBER, ReduceDone): PeerState._on_reduce_done,
    (MEMBER, ReduceFailed): PeerState._on_reduce_failed,
    (MEMBER, ReduceEnded): PeerState._on_reduce_ended,
    (MEMBER, ReduceBroken): PeerState._on_reduce_broken,
    (MEMBER, ReduceQuiet): PeerState._on_reduce_quiet,
    (MEMBER, ReduceProgress): PeerState._on_reduce_progress,
    (MEMBER, Traffic): PeerState._on_traffic,
    (MEMBER, Wire): PeerState._on_wire,
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
    (GONE, CallLeave): PeerState._on_leave,
    (GONE, AppGone): PeerState._on_app_gone,
    (GONE, Tick): PeerState._on_tick,
}

# Echoes of connections and processes that the machine has already let go of.
IGNORED = frozenset({
    LinkUp, LinkDown, MasterUp, MasterDown, WorkerDied, ReduceEnded, ReduceBroken, ReduceQuiet, ReduceProgress, Traffic,
})
