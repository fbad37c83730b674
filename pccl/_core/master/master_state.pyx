# cython: language_level=3
"""The master's machine: which calls are agreed, and who may come in. Events in, actions out.

Rings are kept in `membership` and improved in `optimizing`; what a group does among itself is in `affairs`.

**Phases.** A peer that came through the door is *registered*; it becomes *accepted* in a topology round. `TRANSITIONS`
says which message is legal in which phase; anything else costs the sender its connection, with the reason sent first.

**A topology round** is unanimous over all accepted peers of all groups. When the last vote is in and no ring is being
wired, the round closes: every registered peer is put into its group's ring, the changed rings are ordered, and when all
their members have reported, the newcomers are accepted and everybody gets the same numbers. A run without members
admits whoever registers at once. Votes that wait for a larger group keep the round open while nobody new is there.

**A lost member** (closed connection, silence, goodbye, kick) leaves its votes and its ring; its group is ordered anew at
once, without a vote and without any other group. The same happens to an edge that breaks between two living peers. A
pair that cannot connect is routed around; if no ring exists, a newcomer is refused, and only without one a veteran.

**Collectives** are a group's own affair. A ring that changes ends all of its group; while a member has one without a
verdict it cannot vote on the topology, so no round closes over it. **The shared state** is so too: who synchronises it
can neither vote on the topology nor reduce meanwhile. A ring that changes leaves it alone.
An **optimisation** of the rings is a vote of all like a topology round; neither closes while the other is under way.

**After every event** `_settle` carries everything as far as it can go: it orders changed rings, completes a closed round,
closes a unanimous one. The work of an event does not grow with the number of peers, except where everybody is told.

No socket, clock, file, thread or random source in here: time is an argument, the run's name is given.
"""

from collections import deque

from pccl._core.protocol.events import INFO, OPTIMIZE, PENDING, SYNC, TOPOLOGY, WARNING, Tick
from pccl._core.protocol.messages import (
    Accepted, Awaiting, Beat, CallFailed, EdgeLost, Fetched, Finished, Initiate, Schema, Leave, Notice, PendingAnswer,
    Probed, TopologyDone, VoteOptimize, VotePending, VoteSync, VoteTopology, WireFailed, Wired, Withdraw, WithdrawReduce,
)
from pccl._core.protocol.outcomes import INVALID_USAGE, RANK_CONNECTION_FAILED, RANK_CONNECTION_LOST
from pccl._core.story import attach
from pccl.options import STORY_EVENTS_MAX, nanoseconds

from .group_affairs cimport Affairs
from .roster cimport Peer
from .events import MoonshotFound, PeerCame, PeerSaid, PeerWent
from .ballots import Ballots, Vote, find_deadlock, name_missing
from .deadlock import name_peers
from .election import NEVER
from .master_check import check_master
from .membership import IDS_AT_ONCE
from .roster import ACCEPTED, REGISTERED


cdef class MasterState(Affairs):
    """`handle(event, now_ns) -> actions`, and nothing else changes it."""

    def __init__(self, bytes run, options, now_ns=0):
        super().__init__(run, options, Ballots(TOPOLOGY, PENDING, OPTIMIZE), now_ns)
        self.story = deque(maxlen=STORY_EVENTS_MAX)
        self.append_story = self.story.append
        self.checking = options.check
        self.beat_ns = now_ns
        self.next_deadline_ns = now_ns + self.interval_ns
        self.held = self.stopped = False

    cpdef list handle(self, event, long long now_ns):
        """The one way in. An error in here is a bug; it carries the story."""
        try:
            return self._handle(event, now_ns)
        except BaseException as error:
            attach(error, self, event)
            raise

    cdef list _handle(self, event, long long now_ns):
        cdef Peer peer
        cdef list actions = []
        self.now_ns = now_ns
        self.actions = actions
        kind = type(event)
        if kind is PeerSaid:
            peer = self.conns.get(event.conn)
            if peer is not None:  # else: a last word of somebody already dismissed
                peer.heard_ns = now_ns
                self._hear(peer, event.message)
        elif kind is PeerCame:
            self._register(event)
        elif kind is PeerWent:
            peer = self.conns.get(event.conn)
            if peer is not None:
                self._remove(peer, "lost", event.reason)
        elif kind is Tick:
            if now_ns >= self.next_deadline_ns:
                self._sweep()
        elif kind is MoonshotFound:
            self._on_moonshot_found(event)
        else:
            raise TypeError(f"the master's machine knows no event {event!r}")
        self._settle()
        self.append_story((now_ns, event, actions))
        if self.checking:
            self.check()
        return actions

    cdef int _hear(self, Peer peer, message) except -1:
        cdef dict legal = by_phase[peer.phase]
        handler = legal.get(type(message))
        if handler is None:
            self._kick(peer, INVALID_USAGE, f"{type(message).__name__} is not legal while {peer.phase}")
        else:
            handler(self, peer, message)
        return 0

    # ------------------------------------------------------------------------------------------ votes

    def _on_vote_topology(self, Peer peer, message):
        group = self.groups[peer.group]
        if group.collectives.holds(peer.id):
            self._kick(peer, INVALID_USAGE, "voted on the topology while a reduce of its own has no verdict")
        elif group.agreement.holds(peer.id):
            self._kick(peer, INVALID_USAGE, f"voted on the topology while it is in {SYNC}")
        elif self._optimizes(peer):
            self._kick(peer, INVALID_USAGE, f"voted on the topology while it is in {OPTIMIZE}")
        else:
            self._vote(TOPOLOGY, peer, Vote(message.call, message.wanted, self.now_ns))

    def _on_vote_pending(self, Peer peer, message):
        self._vote(PENDING, peer, Vote(message.call, 0, self.now_ns))

    def _vote(self, str name, Peer peer, vote):
        votes = self.votes[name]
        if peer.id in votes:
            self._kick(peer, INVALID_USAGE, f"voted twice in {name} (calls {votes[peer.id].call} and {vote.call})")
        else:
            votes[peer.id] = vote
            self.held = False

    def _on_withdraw(self, Peer peer, message):
        self.ballots.withdraw(peer.id, message.call)
        self._stir(peer).agreement.withdraw(peer.id, message.call)
        self._withdraw_optimize(peer, message.call)

    # ------------------------------------------------------------------------------------------ settling

    cdef int _settle(self) except -1:
        """Carry everything as far as it can go. Each turn consumes something, so the loop ends by itself."""
        while (
            self._order_changed_rings() or self._close_round() or self._settle_optimization() or self._settle_groups()
        ):
            pass
        self._answer_pending()
        return 0

    cdef bint _close_round(self) except -1:
        """Open or complete an admission. True if something changed."""
        if self.wiring:
            return False
        if self.admission:
            self._complete_round()
            return True
        if not self._round_is_ripe():
            return False
        self._open_round()
        return True

    cdef int _open_round(self) except -1:
        """Put every newcomer into its group's ring."""
        self.admission = True
        self.held = False
        if self.checking:
            assert all(group.collectives.is_idle() for group in self.groups.values()), "a round closed over a reduce"
            assert all(group.agreement.is_idle() for group in self.groups.values()), f"a round closed over {SYNC}"
        self.admitting = set(self.registered)
        self.registered.clear()
        for peer_id in sorted(self.admitting):
            number = self.peers[peer_id].group
            group = self.groups.get(number) or self._new_group(number)
            group.add(peer_id)
            self.changed.add(number)
            self._cancel_moonshot(number)
        return 0

    cpdef bint _round_is_ripe(self) except -1:
        votes = self.votes[TOPOLOGY]
        if not self.accepted:
            return len(self.registered) > 0
        if len(votes) < len(self.accepted) or self.optimizing:
            return False
        if self.registered:
            return True
        # Nobody new: the round closes unless every voter would rather wait for a larger group. That is found out once,
        # not with every heartbeat: only another vote can change it, because without newcomers groups do not grow.
        if not self.held:
            self.held = not self._is_somebody_content()
        return not self.held

    def _is_somebody_content(self):
        for peer_id, vote in self.votes[TOPOLOGY].items():
            if vote.wanted <= len(self.groups[self.peers[peer_id].group].ring):
                return True
        return False

    def _complete_round(self):
        self.round += 1
        self.world_changes += 1
        self.accepted |= self.admitting
        for peer in [self.peers[peer_id] for peer_id in self.admitting]:
            peer.phase, peer.phase_ns = ACCEPTED, self.now_ns
            self.groups[peer.group].accept(peer.id)
            self.stirred.add(peer.group)
        sizes = {number: len(group.ring) for number, group in self.groups.items() if group.ring}
        common = len(self.accepted), len(sizes), max(sizes.values(), default=0)
        for peer_id in sorted(self.admitting):
            self._tell_numbers(self.peers[peer_id], None, common)
        for peer_id, vote in self.ballots.close(TOPOLOGY).items():
            self._tell_numbers(self.peers[peer_id], vote.call, common)
        self.counters["admitted"] += len(self.admitting)
        if self.admitting:
            self._log(INFO, f"admitted {name_peers(sorted(self.admitting))} world={len(self.accepted)} groups={sizes}")
        self.admission = False
        self.admitting = set()

    def _tell_numbers(self, Peer peer, call, common):
        group = self.groups[peer.group]
        world, groups, largest = common
        peer.told_world = self.world_changes
        if call is None:
            self._send(peer, Accepted(self.round, group.epoch, world, len(group.ring), groups, largest))
        else:
            self._send(peer, TopologyDone(call, self.round, group.epoch, world, len(group.ring), groups, largest))

    cdef int _answer_pending(self) except -1:
        cdef dict votes = self.votes[PENDING]
        if not votes or len(votes) < len(self.accepted):
            return 0
        pending = bool(self.registered or self.admitting)
        for peer_id, vote in self.ballots.close(PENDING).items():
            self._send(self.peers[peer_id], PendingAnswer(vote.call, pending))
        return 0

    # ------------------------------------------------------------------------------------------ time

    def _sweep(self):
        """Heartbeats, silence, slow wiring, long waits, deadlocks: once an interval, over everybody."""
        self._forgive_own_pause()
        if self.now_ns - self.beat_ns >= self.interval_ns:
            self.beat_ns = self.now_ns
            beat = Beat(self.now_ns)
            for peer in self.peers.values():
                self._send(peer, beat)
        if not self.stopped:
            self._end_the_silent()
            self._end_slow_wiring()
            self._end_late_probes()
            self._watch_calls()
            self._warn_newcomers()
            self._break_deadlocks()
        soonest = self.now_ns + self.interval_ns
        for peer in self.peers.values():
            soonest = min(soonest, peer.heard_ns + self.silence_ns)
        for measurement in self.measurements.values():
            soonest = min(soonest, measurement.deadline_ns)
        self.next_deadline_ns = max(soonest, self.now_ns + 1_000_000)

    def _forgive_own_pause(self):
        """The time in which the master was itself stopped does not count as anybody's silence."""
        # After a long pause nobody is judged before what arrived meanwhile is read; but never twice in a row.
        late_ns = self.now_ns - self.next_deadline_ns
        if late_ns > 0:
            for peer in self.peers.values():
                peer.heard_ns = min(self.now_ns, peer.heard_ns + late_ns)
        self.stopped = late_ns > self.interval_ns and not self.stopped

    def _end_the_silent(self):
        for peer in [peer for peer in self.peers.values() if self.now_ns - peer.heard_ns >= self.silence_ns]:
            self._kick(peer, RANK_CONNECTION_LOST, f"nothing heard for {self.silence_ns / 1e9:g} s (heartbeat_timeout)")

    def _end_slow_wiring(self):
        """Who has not reported in time goes: the newcomers among them first, veterans only if there are none."""
        limit_ns = nanoseconds(self.options.wire_timeout)
        for number in sorted(self.wiring):
            group = self.groups[number]
            if self.now_ns - group.ordered_ns < limit_ns:
                continue
            late = sorted(group.waiting & group.newcomers) or sorted(group.waiting)
            for peer_id in late:
                reason = f"its lanes were not up {limit_ns / 1e9:g} s after the ring was ordered (wire_timeout)"
                self._kick(self.peers[peer_id], RANK_CONNECTION_FAILED, reason)

    def _watch_calls(self):
        """Name the missing once, and let them go where there is a limit."""
        limit_ns, warning_ns = nanoseconds(self.options.vote_timeout), nanoseconds(self.options.vote_warning)
        calls = self._open_calls()
        for call in calls:
            waited_ns = call.waited_ns(self.now_ns)
            if limit_ns and waited_ns >= limit_ns:
                self._kick_stragglers(call, waited_ns, self.now_ns - limit_ns)
            elif waited_ns and waited_ns >= warning_ns and self.ballots.is_news(call):
                line = f"{call.name} waits since {waited_ns / 1e9:.0f} s for {name_missing(call.missing, calls)}"
                self._log(WARNING, line)
                for peer_id in call.waiting.keys() & self.accepted:
                    self._send(self.peers[peer_id], Notice(WARNING, line))

    def _kick_stragglers(self, call, waited_ns, oldest_ns):
        who = name_peers(sorted(call.waiting))
        reason = f"straggler: {who} waited {waited_ns / 1e9:.1f} s for it in {call.name} (vote_timeout)"
        for peer_id in sorted(call.missing & self.accepted):
            if self.peers[peer_id].phase_ns <= oldest_ns:  # a vote that is older than a membership does not concern it
                self._kick(self.peers[peer_id], RANK_CONNECTION_LOST, reason)

    def _warn_newcomers(self):
        """Tell those who have waited long, and the members that keep them waiting, what it takes; once for each."""
        oldest_ns = self.now_ns - nanoseconds(self.options.vote_warning)
        newcomers = [self.peers[peer_id] for peer_id in sorted(self.registered)]
        late = [peer for peer in newcomers if not peer.warned and peer.phase_ns <= oldest_ns]
        if not late:
            return
        missing = self.accepted - self.votes[TOPOLOGY].keys()
        why = f"update_topology waits for {name_missing(missing, self._open_calls())}"
        if self.wiring:
            why = "a ring is being wired"
        for peer in late:
            peer.warned = True
            self._send(peer, Notice(WARNING, f"not admitted yet: {why}. Members let newcomers in by update_topology()"))
        line = f"{name_peers([peer.id for peer in late])} cannot join: {why}. Call update_topology() on every member"
        self._log(WARNING, line)
        for peer_id in sorted(missing):
            self._send(self.peers[peer_id], Notice(WARNING, line))

    def _break_deadlocks(self):
        oldest_ns = self.now_ns - nanoseconds(self.options.deadlock_timeout)
        reason, stuck = find_deadlock(self._open_calls(), oldest_ns)
        if stuck:
            self.counters["deadlocks"] += 1
            self._log(WARNING, reason)
        for call, peer_id in stuck:
            if call.tally is not None:
                self._stir(self.peers[peer_id]).collectives.fail(peer_id, call.tally.tag, reason)
            elif call.agreement is not None:
                self._stir(self.peers[peer_id]).agreement.fail(peer_id, reason)
            else:
                vote = self.votes[call.name].pop(peer_id)
                self._send(self.peers[peer_id], CallFailed(vote.call, INVALID_USAGE, reason))

    def _open_calls(self):
        """Calls that wait for votes; a closed round only waits for its rings."""
        calls = self.ballots.open_calls(self.accepted)
        if self.admission:
            calls = [call for call in calls if call.name != TOPOLOGY]
        calls += self._open_optimizations()
        for group in self.groups.values():
            calls += group.collectives.open_calls(group.ring)
            if not group.agreement.is_idle():
                calls += group.agreement.open_calls(group.members())
        return calls

    # ------------------------------------------------------------------------------------------ reports

    def snapshot(self):
        """The durable part: what a master that starts again must know."""
        groups = {}
        for number, group in sorted(self.groups.items()):
            agreement = group.agreement
            if agreement.revision != NEVER:
                content, layout = agreement.content.hex(), agreement.layout.hex()
                groups[number] = {
                    "epoch": group.epoch, "revision": agreement.revision, "content": content, "layout": layout,
                }
        return {"run": self.run.hex(), "next_id": self.reserved_id, "round": self.round, "groups": groups}

    @classmethod
    def restore(cls, snapshot, options, now_ns=0):
        """A master that goes on with a run whose peers are all gone."""
        cdef MasterState state = cls(bytes.fromhex(snapshot["run"]), options, now_ns)
        state.next_id = snapshot["next_id"]
        state.reserved_id = state.next_id + IDS_AT_ONCE
        state.round = snapshot["round"]
        for number, saved in snapshot["groups"].items():
            group = state._new_group(int(number))
            group.epoch = saved["epoch"]
            group.agreement.revision = saved["revision"]
            group.agreement.content = bytes.fromhex(saved["content"])
            group.agreement.layout = bytes.fromhex(saved["layout"])
        return state

    def check(self):
        """Invariants between two events; run after every one in all tests."""
        check_master(self)
        self._check_optimization()


# Which message is legal in which phase, and what it does. What is not here costs the sender its connection.
TRANSITIONS = {
    (REGISTERED, Wired): MasterState._on_wired,
    (REGISTERED, WireFailed): MasterState._on_wire_failed,
    (REGISTERED, EdgeLost): MasterState._on_edge_lost,
    (REGISTERED, Beat): MasterState._on_beat,
    (REGISTERED, Leave): MasterState._on_leave,
    (ACCEPTED, VoteTopology): MasterState._on_vote_topology,
    (ACCEPTED, VotePending): MasterState._on_vote_pending,
    (ACCEPTED, VoteOptimize): MasterState._on_vote_optimize,
    (ACCEPTED, Probed): MasterState._on_probed,
    (ACCEPTED, Withdraw): MasterState._on_withdraw,
    (ACCEPTED, Initiate): MasterState._on_initiate,
    (ACCEPTED, Finished): MasterState._on_finished,
    (ACCEPTED, Awaiting): MasterState._on_awaiting,
    (ACCEPTED, WithdrawReduce): MasterState._on_withdraw_reduce,
    (ACCEPTED, VoteSync): MasterState._on_vote_sync,
    (ACCEPTED, Schema): MasterState._on_schema,
    (ACCEPTED, Fetched): MasterState._on_fetched,
    (ACCEPTED, Wired): MasterState._on_wired,
    (ACCEPTED, WireFailed): MasterState._on_wire_failed,
    (ACCEPTED, EdgeLost): MasterState._on_edge_lost,
    (ACCEPTED, Beat): MasterState._on_beat,
    (ACCEPTED, Leave): MasterState._on_leave,
}
# The same, so that what a message means is found without a tuple to look it up by.
cdef dict by_phase = {
    phase: {kind: handler for (its_phase, kind), handler in TRANSITIONS.items() if its_phase == phase}
    for phase in (REGISTERED, ACCEPTED)
}
