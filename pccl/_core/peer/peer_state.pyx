# cython: language_level=3
"""The peer's machine: one membership, from connect() to the end.

What a member takes part in (its ring, votes, reduces, the shared state) is in `member`: PeerState owns one Member for
its whole life. This file holds the begin and the end of a membership, the events that are legal in each phase, and all
that depends on time. The table `TRANSITIONS` at the end names a handler, here or in Member, and the phases that may
follow; docs/architecture.md shows it as a diagram.

**The end** aborts what runs. A slot whose memory workers still hold completes when that memory is drained, and close()
is answered after that: every thread that waits for a reduce gets its answer first. If the training process is gone, no
thread waits.

**Silence** of the master beyond the agreed time ends the membership. Time in which this process itself was stopped does
not count, because it could hear nothing then; the process notices such a time because its Tick comes late.

No socket, clock, process or random source in here.
"""

from collections import deque

from libc.limits cimport LLONG_MAX

from pccl._core.protocol.events import WARNING, Tick
from pccl._core.protocol.mailbox import (
    CallAwait, CallCancel, CallConnect, CallFinish, CallManifest, CallLeave, CallOptimize, CallPending, CallReduce,
    CallSync, CallThreads, CallTopology,
)
from pccl._core.protocol.messages import (
    AbortReduce, Accepted, AskSchema, Beat, CallFailed, Commence, Fetch, Kick, Leave, MoreSources, Notice, OptimizeDone,
    PendingAnswer, Probe, ReduceDone, ReduceFailed, Registered, RingOrder, RunFinished, Serve, SourceGone, SyncDone,
    Threads, TopologyDone, Try, World,
)
from pccl._core.protocol.outcomes import (
    INVALID_USAGE, KIND_CANCELLED, KIND_FINISHED, KIND_KICKED, KIND_MASTER_LOST, KIND_PLAIN,
    MASTER_CONNECTION_FAILED, RANK_CONNECTION_LOST, SUCCESS,
)
from pccl._core.story import attach
from pccl.options import STORY_EVENTS_MAX, nanoseconds

from .member cimport Member
from .outbox cimport Outbox
from .calls import Call
from .events import (
    AnswerLink, AppGone, AppStopped, Called, Complete, DialMaster, HangUp, LinkCame, LinkDown, LinkUp, MasterDown,
    MasterSaid, MasterUp, ProbeDone, ProtocolViolationError, ReduceDrained, ReduceEnded, ReduceProgress, SendMaster,
    StateFetched, StateUnfetched, Stop, Tell, Traffic, TransferEnded, TrialEnded, UseTiming, WorkerDied,
)
from .progress import is_reported, name_addresses

LATE_NS = 100_000_000  # a tick that is later than this was delayed by the host or by a stop, not by work

NEW = "new"
DIALLING = "dialling"
JOINING = "joining"
MEMBER = "member"
GONE = "gone"


cdef class PeerState:
    """`handle(event, now_ns) -> actions`, and nothing else changes it."""

    def __init__(self, options, now_ns=0):
        self.options = options
        self.outbox = Outbox()
        self.member = Member(self.outbox, options)
        self.ring_links = self.member.ring_links
        self.phase = NEW
        self.leaving = []
        self.connecting = None
        self.attempts_left = 0
        self.threads = 1
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
        """Return a number for a connection; dialled and accepted ones share one count."""
        return self.ring_links.new_link()

    @property
    def id(self):
        """This peer's id; 0 while it has none."""
        return self.ring_links.id

    cpdef bint is_busy(self):
        """Whether the training process is in a call, so that the next event will come soon."""
        return self.member.is_busy()

    def owes(self, slot, generation):
        """Whether a caller waits for the end of that call."""
        return self.member.owes(slot, generation) or any(
            call is not None and call.slot == slot and call.generation == generation
            for call in (*self.leaving, self.connecting)
        )

    cpdef list handle(self, event, long long now_ns):
        """Handle one event. Return the actions. An error in here is a bug of pccl; it carries the story."""
        try:
            return self._handle(event, now_ns)
        except BaseException as error:
            attach(error, self, event)
            raise

    cdef list _handle(self, event, long long now_ns):
        cdef list actions = self.outbox.open(now_ns)
        kind = type(event)
        if kind is MasterSaid:
            self.heard_ns = now_ns
            subject, argument = type(event.message), event.message
        elif kind is Called:
            subject, argument = type(event.call), event.call
        else:
            subject, argument = kind, event
        entry = dispatch.get((self.phase, subject))
        if entry is not None:
            self._dispatch(<tuple> entry, kind, argument)
        elif kind is MasterSaid:
            if self.phase is JOINING or self.phase is MEMBER:  # else: the last message of a connection that was hung up
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

    cdef _dispatch(self, tuple entry, kind, argument):
        # Call the handler that the table names: a method of the member, or of this class.
        cdef str before = self.phase
        handler, next_phases, is_member = entry
        try:
            handler(self.member if is_member else self, argument)
        except ProtocolViolationError as error:
            if kind is not MasterSaid:
                raise
            self._lose_master(f"the master broke the protocol: {error}")
        if self.checking:
            assert self.phase in next_phases, f"{type(argument).__name__} while {before} led to {self.phase}"

    # ------------------------------------------------------------------------------------------ joining

    def _on_connect(self, call):
        self.connecting = Call(call.slot, call.generation, 0)
        self.attempts_left = call.attempts
        self.master_at = name_addresses(call.addresses)
        self.ring_links.join(call.lanes)
        self._dial_master()

    def _dial_master(self):
        self.phase = DIALLING
        self.attempts_left -= 1
        self.attempt += 1
        self.retry_ns = 0
        self.dialled_ns = self.outbox.now_ns
        self.outbox.actions.append(DialMaster(self.attempt))

    def _on_master_up(self, event):
        self.phase = JOINING
        self.heard_ns = self.beat_ns = self.outbox.now_ns

    def _on_master_unreached(self, event):
        """An attempt failed, or the master was lost before this peer was a member."""
        self.ring_links.forget()
        if self.attempts_left > 0 and not event.final:
            self.phase = DIALLING
            self.retry_ns = self.outbox.now_ns + nanoseconds(self.options.retry_interval)
            self._report_attempt(event.reason)
        else:
            self._end(MASTER_CONNECTION_FAILED, KIND_PLAIN, event.reason)

    def _report_attempt(self, str reason):
        """Say what happened to an attempt, and when the next one comes; many attempts are reported more rarely."""
        count = self.attempt + 1
        if is_reported(count):
            line = f"attempt {count} of {count + self.attempts_left} to reach the master at {self.master_at} failed"
            self.outbox.actions.append(
                Tell(WARNING, f"{line}: {reason}. The next one is in {self.options.retry_interval:g} s")
            )

    def _report_silence(self):
        """Say that the first attempt takes long: nothing answers there, not even with a refusal."""
        limit_ns = nanoseconds(self.options.vote_warning)
        if self.attempt == 0 and limit_ns and self.outbox.now_ns - self.dialled_ns >= limit_ns and not self.retry_ns:
            self.dialled_ns = LLONG_MAX
            line = f"the master at {self.master_at} has not answered for {limit_ns / 1e9:g} s"
            self.outbox.actions.append(Tell(WARNING, f"{line} (attempt 1 of {1 + self.attempts_left})"))

    def _on_registered(self, message):
        self.ring_links.name(message.peer, message.run)
        self.interval_ns = max(message.beat_ms, 1) * 1_000_000
        self.silence_ns = max(message.silence_ms, 2) * 1_000_000
        if message.timing:
            self._follow(message.timing)

    def _follow(self, str timing):
        """Take over the options that the master decides, and warn about values that were set here."""
        try:
            followed, ignored = self.options.following(timing)
        except ValueError as error:
            raise ProtocolViolationError(f"Registered with wrong options: {error}")
        self.ring_links.options = followed
        self.outbox.actions.append(UseTiming(self.interval_ns, self.silence_ns))
        self.outbox.actions.extend([Tell(WARNING, line) for line in ignored])

    def _on_accepted(self, message):
        self.phase = MEMBER
        call, self.connecting = self.connecting, None
        numbers = self.member.on_world(message)
        self.outbox.actions.append(Complete(call.slot, call.generation, SUCCESS, KIND_PLAIN, numbers))
        if self.threads > 1:
            self.outbox.actions.append(SendMaster(Threads(self.threads)))

    def _on_threads(self, call):
        self.threads = call.count
        if self.phase is MEMBER:
            self.outbox.actions.append(SendMaster(Threads(self.threads)))

    def _on_cancel(self, cancel):
        call = self.connecting
        if call is not None and call.slot == cancel.slot and call.generation == cancel.generation:
            self._leave("connect() was given up")

    def _refuse_call(self, call):
        """Answer a call that is not legal in this phase. Late cancels, awaits and threads have no slot to complete."""
        if type(call) is CallReduce:
            self.member.reduces.refuse(call.operations, *self.ending)
        elif type(call) is CallConnect and self.phase in (DIALLING, JOINING, MEMBER):
            reason = "connect() was already called on this communicator"
            self.member.calls.complete(call, INVALID_USAGE, KIND_PLAIN, reason)
        elif type(call) not in (CallCancel, CallAwait, CallThreads):
            self.member.calls.complete(call, *self.ending)

    # ------------------------------------------------------------------------------------------ the end

    def _end(self, int result, int kind, str text):
        """End the membership: every waiting caller gets the reason, and so does every later call."""
        self.phase = GONE
        self.ending = (result, kind, text)
        self.member.end(result, kind, text)
        self.outbox.actions.append(HangUp())
        self.member.calls.end(result, kind, text)
        if self.connecting is not None:
            self.member.calls.complete(self.connecting, result, kind, text)
            self.connecting = None

    def _lose_master(self, str reason):
        self._end(MASTER_CONNECTION_FAILED, KIND_MASTER_LOST, reason)

    def _on_master_lost(self, event):
        self._lose_master(f"the master is gone: {event.reason}")

    def _on_kick(self, message):
        self._end(message.result, KIND_KICKED, message.reason)

    def _on_run_finished(self, message):
        self.member.on_run_finished(message)
        self._end(INVALID_USAGE, KIND_FINISHED, message.reason)

    def _leave(self, str reason):
        if self.phase in (JOINING, MEMBER):
            self.outbox.actions.append(SendMaster(Leave(reason)))
        if self.phase != GONE:
            self._end(INVALID_USAGE, KIND_CANCELLED, "this communicator is closed")

    def _on_leave(self, call):
        self._leave("close")
        self.leaving.append(call)
        self._stop_if_left()

    def _stop_if_left(self):
        """Answer close() once no worker holds memory of a call."""
        if self.leaving and self.member.has_drained():
            for call in self.leaving:
                self.member.calls.complete(call, SUCCESS, KIND_PLAIN, "")
            self.leaving = []
            self.outbox.actions.append(Stop())

    def _on_reduce_drained(self, event):
        self.member.reduces.drained(event)
        self._stop_if_left()

    def _on_transfer_ended(self, event):
        self.member.syncs.report(event)
        self._stop_if_left()

    def _refuse_link(self, event):
        self.outbox.actions.append(AnswerLink(event.link, self.ending[2]))

    def _on_app_gone(self, event):
        self._leave(event.reason)
        self.outbox.actions.append(Stop())

    def _on_app_stopped(self, event):
        """The others need not wait for a process that does not run. It learns why when it runs again."""
        if self.phase in (JOINING, MEMBER):
            self.outbox.actions.append(SendMaster(Leave(event.reason)))
        reason = f"{event.reason}, so its peer left the run; call connect() again"
        self._end(RANK_CONNECTION_LOST, KIND_KICKED, reason)

    def _on_notice(self, message):
        self.outbox.actions.append(Tell(message.level, message.line))

    def _on_beat(self, message):
        pass  # heard_ns is set by every message

    # ------------------------------------------------------------------------------------------ time

    def _on_reduce_progress(self, event):
        self.member.reduces.progress(event, self.outbox.now_ns - self.next_deadline_ns)

    def _on_tick(self, event):
        late_ns = self.outbox.now_ns - self.next_deadline_ns
        if late_ns > 0:  # this process was stopped: that time was no silence of the master
            self.heard_ns = min(self.outbox.now_ns, self.heard_ns + late_ns)
            self.member.reduces.forgive(late_ns)
        self.ticked_ns = self.outbox.now_ns
        if late_ns > LATE_NS:
            self.ring_links.forgive()
        self.ring_links.watch()
        # Without a whole ring a new order is on its way, which ends every reduce.
        if self.ring_links.is_whole() and (reason := self.member.reduces.find_stall()):
            self.ring_links.worker_died(reason)
        if self.phase is DIALLING:
            self._report_silence()
            if self.retry_ns and self.outbox.now_ns >= self.retry_ns:
                self._dial_master()
        elif self.phase is MEMBER and self.ring_links.is_whole():
            self._report_slow_reduce()
        if self.phase is not JOINING and self.phase is not MEMBER:
            return
        if self.outbox.now_ns - self.heard_ns >= self.silence_ns:
            reason = f"nothing heard from the master for {self.silence_ns / 1e9:g} s (heartbeat_timeout)"
            if self.phase is MEMBER:
                self._lose_master(reason)
            else:
                self.outbox.actions.append(HangUp())
                self._on_master_unreached(MasterDown(reason))
            return
        if self.outbox.now_ns - self.beat_ns >= self.interval_ns and self.ring_links.id:
            self.beat_ns = self.outbox.now_ns
            self.member.beat()

    def _report_slow_reduce(self):
        """Tell how far a reduce is that takes long, as the master decides how long that is."""
        report = self.member.reduces.report_slow(nanoseconds(self.ring_links.options.vote_warning))
        if report is not None:
            self.outbox.actions.append(Tell(*report))

    cdef _set_deadline(self):
        cdef long long soonest = self.ring_links.soonest(self.ticked_ns + self.interval_ns)
        if self.phase is DIALLING and self.retry_ns:
            soonest = min(soonest, self.retry_ns)
        elif self.phase is MEMBER or self.phase is JOINING:
            soonest = min(soonest, self.heard_ns + self.silence_ns)
            if self.ring_links.id:  # a peer without an id sends no heartbeat
                soonest = min(soonest, self.beat_ns + self.interval_ns)
        self.next_deadline_ns = soonest

    # ------------------------------------------------------------------------------------------ invariants

    def check(self):
        """Invariants between two events; run after every one in all tests."""
        links, member = self.ring_links, self.phase is MEMBER
        self.member.check(member)
        assert self.phase in (JOINING, MEMBER) or not links.links, f"lanes while {self.phase}"
        assert self.phase in (DIALLING, JOINING, MEMBER) or not links.early, f"early lanes while {self.phase}"
        assert self.phase in (JOINING, MEMBER) or not links.id, f"peer {links.id} while {self.phase}"
        assert not member or links.id, "a member without an id"
        drained = self.member.has_drained()
        assert self.phase in (MEMBER, GONE) or drained, f"reduces or a sync while {self.phase}"
        assert not self.leaving or self.phase is GONE and not drained, "close() was not answered"
        connecting = self.phase in (DIALLING, JOINING)
        assert (self.connecting is not None) == connecting, f"connect() does not fit {self.phase}"


# (phase, event) -> (handler, phases that may follow); the same phase: it stays. A command that is not here gets the
# reason why there is no membership; a message of the master that is not here, or that is wrong, ends the
# membership; late events of what was dropped are in IGNORED.
TRANSITIONS = {
    (NEW, CallConnect): (PeerState._on_connect, (DIALLING,)),
    (NEW, CallLeave): (PeerState._on_leave, (GONE,)),
    (NEW, AppGone): (PeerState._on_app_gone, (GONE,)),
    (NEW, Tick): (PeerState._on_tick, (NEW,)),
    (DIALLING, MasterUp): (PeerState._on_master_up, (JOINING,)),
    (DIALLING, MasterDown): (PeerState._on_master_unreached, (DIALLING, GONE)),
    (DIALLING, LinkCame): (Member.on_link_came, (DIALLING,)),
    (DIALLING, LinkDown): (Member.on_link_down, (DIALLING,)),
    (DIALLING, WorkerDied): (Member.on_worker_died, (DIALLING,)),
    (DIALLING, CallCancel): (PeerState._on_cancel, (DIALLING, GONE)),
    (DIALLING, CallLeave): (PeerState._on_leave, (GONE,)),
    (DIALLING, AppGone): (PeerState._on_app_gone, (GONE,)),
    (DIALLING, AppStopped): (PeerState._on_app_stopped, (GONE,)),
    (DIALLING, CallThreads): (PeerState._on_threads, (DIALLING,)),
    (DIALLING, Tick): (PeerState._on_tick, (DIALLING,)),
    (JOINING, Registered): (PeerState._on_registered, (JOINING, GONE)),
    (JOINING, RingOrder): (Member.on_ring_order, (JOINING, GONE)),
    (JOINING, Accepted): (PeerState._on_accepted, (MEMBER,)),
    (JOINING, CallThreads): (PeerState._on_threads, (JOINING,)),
    (JOINING, Try): (Member.on_try, (JOINING,)),
    (JOINING, TrialEnded): (Member.on_trial_ended, (JOINING,)),
    (JOINING, Kick): (PeerState._on_kick, (GONE,)),
    (JOINING, RunFinished): (PeerState._on_run_finished, (GONE,)),
    (JOINING, Notice): (PeerState._on_notice, (JOINING,)),
    (JOINING, Beat): (PeerState._on_beat, (JOINING,)),
    (JOINING, MasterDown): (PeerState._on_master_unreached, (DIALLING, GONE)),
    (JOINING, LinkCame): (Member.on_link_came, (JOINING,)),
    (JOINING, LinkUp): (Member.on_link_up, (JOINING,)),
    (JOINING, LinkDown): (Member.on_link_down, (JOINING,)),
    (JOINING, WorkerDied): (Member.on_worker_died, (JOINING,)),
    (JOINING, CallCancel): (PeerState._on_cancel, (JOINING, GONE)),
    (JOINING, CallLeave): (PeerState._on_leave, (GONE,)),
    (JOINING, AppGone): (PeerState._on_app_gone, (GONE,)),
    (JOINING, AppStopped): (PeerState._on_app_stopped, (GONE,)),
    (JOINING, Tick): (PeerState._on_tick, (JOINING, DIALLING, GONE)),
    (MEMBER, CallTopology): (Member.on_call_topology, (MEMBER,)),
    (MEMBER, CallPending): (Member.on_call_pending, (MEMBER,)),
    (MEMBER, CallOptimize): (Member.on_call_optimize, (MEMBER,)),
    (MEMBER, CallFinish): (Member.on_call_finish, (MEMBER,)),
    (MEMBER, CallReduce): (Member.on_call_reduce, (MEMBER,)),
    (MEMBER, CallSync): (Member.on_call_sync, (MEMBER,)),
    (MEMBER, CallManifest): (Member.on_call_manifest, (MEMBER,)),
    (MEMBER, CallAwait): (Member.on_call_await, (MEMBER,)),
    (MEMBER, CallThreads): (PeerState._on_threads, (MEMBER,)),
    (MEMBER, CallCancel): (Member.on_cancel, (MEMBER,)),
    (MEMBER, CallLeave): (PeerState._on_leave, (GONE,)),
    (MEMBER, TopologyDone): (Member.on_topology_done, (MEMBER,)),
    (MEMBER, OptimizeDone): (Member.on_topology_done, (MEMBER,)),
    (MEMBER, PendingAnswer): (Member.on_pending_answer, (MEMBER,)),
    (MEMBER, CallFailed): (Member.on_call_failed, (MEMBER, GONE)),
    (MEMBER, Commence): (Member.on_commence, (MEMBER, GONE)),
    (MEMBER, AbortReduce): (Member.on_abort_reduce, (MEMBER, GONE)),
    (MEMBER, ReduceDone): (Member.on_reduce_done, (MEMBER, GONE)),
    (MEMBER, ReduceFailed): (Member.on_reduce_failed, (MEMBER, GONE)),
    (MEMBER, World): (Member.on_world, (MEMBER,)),
    (MEMBER, AskSchema): (Member.on_sync_message, (MEMBER, GONE)),
    (MEMBER, Serve): (Member.on_sync_message, (MEMBER, GONE)),
    (MEMBER, Fetch): (Member.on_sync_message, (MEMBER, GONE)),
    (MEMBER, MoreSources): (Member.on_sync_message, (MEMBER, GONE)),
    (MEMBER, SourceGone): (Member.on_sync_message, (MEMBER, GONE)),
    (MEMBER, SyncDone): (Member.on_sync_message, (MEMBER, GONE)),
    (MEMBER, StateFetched): (Member.on_transfer_event, (MEMBER,)),
    (MEMBER, StateUnfetched): (Member.on_transfer_event, (MEMBER,)),
    (MEMBER, TransferEnded): (PeerState._on_transfer_ended, (MEMBER,)),
    (MEMBER, ReduceEnded): (Member.on_reduce_ended, (MEMBER,)),
    (MEMBER, ReduceDrained): (PeerState._on_reduce_drained, (MEMBER,)),
    (MEMBER, ReduceProgress): (PeerState._on_reduce_progress, (MEMBER,)),
    (MEMBER, Probe): (Member.on_probe, (MEMBER, GONE)),
    (MEMBER, ProbeDone): (Member.on_probe_done, (MEMBER,)),
    (MEMBER, Try): (Member.on_try, (MEMBER,)),
    (MEMBER, TrialEnded): (Member.on_trial_ended, (MEMBER,)),
    (MEMBER, Traffic): (Member.on_traffic, (MEMBER,)),
    (MEMBER, RingOrder): (Member.on_ring_order, (MEMBER, GONE)),
    (MEMBER, Kick): (PeerState._on_kick, (GONE,)),
    (MEMBER, RunFinished): (PeerState._on_run_finished, (GONE,)),
    (MEMBER, Notice): (PeerState._on_notice, (MEMBER,)),
    (MEMBER, Beat): (PeerState._on_beat, (MEMBER,)),
    (MEMBER, MasterDown): (PeerState._on_master_lost, (GONE,)),
    (MEMBER, LinkCame): (Member.on_link_came, (MEMBER,)),
    (MEMBER, LinkUp): (Member.on_link_up, (MEMBER,)),
    (MEMBER, LinkDown): (Member.on_link_down, (MEMBER,)),
    (MEMBER, WorkerDied): (Member.on_worker_died, (MEMBER,)),
    (MEMBER, AppGone): (PeerState._on_app_gone, (GONE,)),
    (MEMBER, AppStopped): (PeerState._on_app_stopped, (GONE,)),
    (MEMBER, Tick): (PeerState._on_tick, (MEMBER, GONE)),
    (GONE, LinkCame): (PeerState._refuse_link, (GONE,)),
    (GONE, ReduceDrained): (PeerState._on_reduce_drained, (GONE,)),
    (GONE, TransferEnded): (PeerState._on_transfer_ended, (GONE,)),
    (GONE, CallLeave): (PeerState._on_leave, (GONE,)),
    (GONE, AppGone): (PeerState._on_app_gone, (GONE,)),
    (GONE, Tick): (PeerState._on_tick, (GONE,)),
}
# The same for the dispatch, and whether the handler is a method of Member.
cdef dict dispatch = {
    key: (handler, next_phases, handler in vars(Member).values()) for key, (handler, next_phases) in TRANSITIONS.items()
}

# Late events of connections and processes that the machine has already dropped.
IGNORED = frozenset({
    LinkUp, LinkDown, MasterUp, MasterDown, WorkerDied, ReduceEnded, ReduceDrained, ReduceProgress,
    StateFetched, StateUnfetched, Traffic, TransferEnded, ProbeDone, TrialEnded, AppStopped,
})
