# cython: language_level=3
"""The master's machine: who is in, in which ring, and which calls are agreed. Events in, actions out.

**Phases.** A peer that came through the door is *registered*; it becomes *accepted* in a topology round. `TRANSITIONS`
says which message is legal in which phase; anything else costs the sender its connection, with the reason sent first.

**A topology round** is unanimous over all accepted peers of all groups. When the last vote is in and no ring is being
wired, the round closes: every registered peer is put into its group's ring, the changed rings are ordered, and when all
their members have reported, the newcomers are accepted and everybody gets the same numbers. A run without members
admits whoever registers at once. Votes that wait for a larger group keep the round open while nobody new is there.

**A lost member** (closed connection, silence, goodbye, kick) leaves its votes and its ring; its group is ordered anew at
once, without a vote and without any other group. The same happens to an edge that breaks between two living peers. A
pair that cannot connect is routed around; if no ring exists, a newcomer is refused, and only without one a veteran.

**After every event** `_settle` carries everything as far as it can go: it orders changed rings, completes a closed round,
closes a unanimous one. The work of an event does not grow with the number of peers, except where everybody is told.

No socket, clock, file, thread or random source in here: time is an argument, the run's name is given.
"""

from collections import deque

from pccl.options import EDGE_LOSSES_MAX, GROUPS_MAX, STORY_EVENTS_MAX, nanoseconds
from pccl.outcomes import INVALID_USAGE, RANK_CONNECTION_FAILED, RANK_CONNECTION_LOST

from .roster cimport Peer
from .ballots import Ballots, Vote
from .deadlock import name_peers
from .events import INFO, PENDING, TOPOLOGY, WARNING, Dismiss, Log, PeerCame, PeerSaid, PeerWent, SendTo, Tick
from .group import Group
from .messages import (
    Accepted, Beat, CallFailed, EdgeLost, Kick, Leave, Notice, PendingAnswer, Registered, TopologyDone, VotePending,
    VoteTopology, WireFailed, Wired, Withdraw,
)
from .roster import ACCEPTED, REGISTERED
from .story import attach


cdef class MasterState:
    """`handle(event, now_ns) -> actions`, and nothing else changes it."""

    def __init__(self, bytes run, options, now_ns=0):
        self.run = run
        self.options = options
        self.peers = {}
        self.conns = {}
        self.groups = {}
        self.accepted = set()
        self.registered = set()
        self.admitting = set()
        self.admission = False
        self.ballots = Ballots(TOPOLOGY, PENDING)
        self.votes = self.ballots.votes
        self.next_id = 1
        self.round = 0
        self.story = deque(maxlen=STORY_EVENTS_MAX)
        self.counters = {"admitted": 0, "lost": 0, "left": 0, "kicked": 0, "rewired": 0, "deadlocks": 0}
        self.interval_ns = nanoseconds(options.heartbeat_interval)
        self.silence_ns = nanoseconds(options.heartbeat_timeout)
        self.checking = options.check
        self.beat_ns = self.now_ns = now_ns
        self.next_deadline_ns = now_ns + self.interval_ns
        self.actions = []
        self.wiring, self.changed = set(), set()
        self.held = self.stopped = False

    def handle(self, event, long long now_ns):
        """The one way in. An error in here is a bug; it carries the story."""
        try:
            return self._handle(event, now_ns)
        except BaseException as error:
            attach(error, self, event)
            raise

    cdef list _handle(self, event, long long now_ns):
        cdef Peer peer
        self.now_ns = now_ns
        self.actions = actions = []
        kind = type(event)
        if kind is PeerSaid:
            peer = self.conns.get(event.conn)
            if peer is not None:  # else: a last word of somebody already dismissed
                peer.heard_ns = now_ns
                handler = TRANSITIONS.get((peer.phase, type(event.message)))
                if handler is None:
                    self._kick(peer, INVALID_USAGE, f"{type(event.message).__name__} is not legal while {peer.phase}")
                else:
                    handler(self, peer, event.message)
        elif kind is PeerCame:
            self._register(event)
        elif kind is PeerWent:
            peer = self.conns.get(event.conn)
            if peer is not None:
                self._remove(peer, "lost", event.reason)
        elif kind is Tick:
            if now_ns >= self.next_deadline_ns:
                self._sweep()
        else:
            raise TypeError(f"the master's machine knows no event {event!r}")
        self._settle()
        self.story.append((now_ns, event, actions))
        if self.checking:
            self.check()
        return actions

    # ------------------------------------------------------------------------------------------ membership

    def _register(self, event):
        register = event.register
        if register.group not in self.groups and len(self.groups) + len(self.registered) >= GROUPS_MAX:
            self.actions.append(SendTo(event.conn, Kick(INVALID_USAGE, f"there are {GROUPS_MAX} peer groups already")))
            self.actions.append(Dismiss(event.conn))
            return
        peer = Peer(self.next_id, event.conn, register, event.host, self.now_ns)
        self.next_id += 1
        self.peers[peer.id] = self.conns[event.conn] = peer
        self.registered.add(peer.id)
        self._send(peer, Registered(peer.id, self.run, self.interval_ns // 1_000_000, self.silence_ns // 1_000_000))
        self._log(INFO, f"peer={peer.id} registered group={peer.group} lanes={peer.lanes} at={peer.host}:{peer.port}")

    def _remove(self, Peer peer, str how, str reason):
        """Take a peer out of everything. `how` is lost, left or kicked, and one of the counters."""
        group = self._ring_of(peer)
        del self.peers[peer.id], self.conns[peer.conn]
        self.accepted.discard(peer.id)
        self.registered.discard(peer.id)
        self.admitting.discard(peer.id)
        self.ballots.drop(peer.id)
        if group is not None:
            group.remove(peer.id)
            self.changed.add(peer.group)
            if not group.ring:
                self._forget_ring(group)
        self.counters[how] += 1
        self._log(INFO if how == "left" else WARNING, f"peer={peer.id} {how} group={peer.group} reason={reason!r}")

    def _forget_ring(self, group):
        """The last member is gone. What was agreed stays known; a group that never agreed on anything leaves no trace."""
        self.changed.discard(group.number)
        self.wiring.discard(group.number)
        if group.revision < 0:
            del self.groups[group.number]

    def _kick(self, Peer peer, int result, str reason):
        self._send(peer, Kick(result, reason))
        self.actions.append(Dismiss(peer.conn))
        self._remove(peer, "kicked", reason)

    def _on_leave(self, Peer peer, message):
        self.actions.append(Dismiss(peer.conn))
        self._remove(peer, "left", message.reason or "goodbye")

    def _on_beat(self, Peer peer, message):
        pass  # hearing of it was the point

    # ------------------------------------------------------------------------------------------ votes

    def _on_vote_topology(self, Peer peer, message):
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

    # ------------------------------------------------------------------------------------------ rings

    def _ring_of(self, Peer peer):
        """The ring this peer was ordered into, if any: exactly members and those being admitted are in one."""
        if peer.id in self.accepted or peer.id in self.admitting:
            return self.groups[peer.group]
        return None

    def _ring_reported_by(self, Peer peer):
        """A peer that was ordered into no ring has nothing to report about one."""
        group = self._ring_of(peer)
        if group is None:
            self._kick(peer, INVALID_USAGE, "reported on a ring that it was never ordered into")
        return group

    def _on_wired(self, Peer peer, message):
        group = self._ring_reported_by(peer)
        if group is not None and group.reported(peer.id, message.epoch):
            self.wiring.discard(peer.group)

    def _on_wire_failed(self, Peer peer, message):
        group = self._ring_reported_by(peer)
        if group is not None and group.lose_edge(peer.id, message.target, message.epoch):
            self._avoid(group, peer.id, message.target, message.reason)

    def _on_edge_lost(self, Peer peer, message):
        group = self._ring_reported_by(peer)
        if group is None:
            return
        if peer.id not in (message.source, message.target):
            self._kick(peer, INVALID_USAGE, f"reported an edge {message.source}-{message.target} that is not its own")
            return
        losses = group.lose_edge(message.source, message.target, message.epoch)
        if losses:
            self.changed.add(peer.group)
            edge = f"{message.source}->{message.target}"
            self._log(WARNING, f"edge={edge} group={peer.group} broken by={peer.id} reason={message.reason!r}")
        if losses >= EDGE_LOSSES_MAX:
            self._avoid(group, message.source, message.target, f"broke {losses} times: {message.reason}")

    def _avoid(self, group, source, target, str reason):
        """Find a ring around this pair, for a while."""
        group.mark(source, target, reason, self.now_ns + nanoseconds(self.options.unreachable_expiry))
        self.changed.add(group.number)
        self._log(WARNING, f"peer={source} cannot reach peer={target} reason={reason!r}")

    # ------------------------------------------------------------------------------------------ settling

    def _settle(self):
        """Carry everything as far as it can go. Each turn consumes something, so the loop ends by itself."""
        while self._order_changed_rings() or self._close_round():
            pass
        self._answer_pending()

    def _order_changed_rings(self):
        """Give every changed ring a legal order and its members their neighbours. True if there was one."""
        if not self.changed:
            return False
        for number in sorted(self.changed):
            group = self.groups[number]
            while not group.solve(self.now_ns):
                victim, reason = group.victim(self._suspects(group))
                self._kick(self.peers[victim], RANK_CONNECTION_FAILED, reason)
            for peer_id, wire in group.order(self.peers, self.now_ns):
                self._send(self.peers[peer_id], wire)
            self.counters["rewired"] += 1
            self.wiring.add(number)
            ring = group.ring if len(group.ring) <= 16 else f"of {len(group.ring)}"
            self._log(INFO, f"group={number} epoch={group.epoch} ring={ring}")
        self.changed.clear()
        return True

    def _suspects(self, group):
        """Who has missed two heartbeats: together with a dead pair that is no coincidence."""
        oldest_ns = self.now_ns - 5 * self.interval_ns // 2
        return {peer_id for peer_id in group.ring if self.peers[peer_id].heard_ns < oldest_ns}

    def _close_round(self):
        """Open or complete an admission. True if something changed."""
        if self.wiring:
            return False
        if self.admission:
            self._complete_round()
            return True
        if not self._round_is_ripe():
            return False
        self.admission = True
        self.held = False
        self.admitting = set(self.registered)
        self.registered.clear()
        for peer_id in sorted(self.admitting):
            number = self.peers[peer_id].group
            if number not in self.groups:
                self.groups[number] = Group(number)
            self.groups[number].add(peer_id)
            self.changed.add(number)
        return True

    def _round_is_ripe(self):
        votes = self.votes[TOPOLOGY]
        if not self.accepted:
            return bool(self.registered)
        if len(votes) < len(self.accepted):
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
        self.accepted |= self.admitting
        for peer in [self.peers[peer_id] for peer_id in self.admitting]:
            peer.phase, peer.phase_ns = ACCEPTED, self.now_ns
            self.groups[peer.group].accept(peer.id)
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
        if call is None:
            self._send(peer, Accepted(self.round, group.epoch, world, len(group.ring), groups, largest))
        else:
            self._send(peer, TopologyDone(call, self.round, group.epoch, world, len(group.ring), groups, largest))

    def _answer_pending(self):
        votes = self.votes[PENDING]
        if not votes or len(votes) < len(self.accepted):
            return
        pending = bool(self.registered or self.admitting)
        for peer_id, vote in self.ballots.close(PENDING).items():
            self._send(self.peers[peer_id], PendingAnswer(vote.call, pending))

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
            for name in self._open_calls():
                self._watch_votes(name)
            self._warn_newcomers()
            self._break_deadlocks()
        soonest = self.now_ns + self.interval_ns
        for peer in self.peers.values():
            soonest = min(soonest, peer.heard_ns + self.silence_ns)
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

    def _watch_votes(self, str name):
        votes = self.votes[name]
        waited_ns = self.ballots.waited_ns(name, self.accepted, self.now_ns)
        limit_ns = nanoseconds(self.options.vote_timeout)
        if limit_ns and waited_ns >= limit_ns:
            for peer_id in sorted(self.accepted - set(votes)):
                if self.now_ns - self.peers[peer_id].phase_ns < limit_ns:
                    continue  # a vote that is older than a membership is not held against it
                reason = f"straggler: {name_peers(sorted(votes))} waited {waited_ns / 1e9:.1f} s for it in {name} (vote_timeout)"
                self._kick(self.peers[peer_id], RANK_CONNECTION_LOST, reason)
        elif waited_ns and waited_ns >= nanoseconds(self.options.vote_warning) and self.ballots.is_news(name):
            line = f"{name} waits since {waited_ns / 1e9:.0f} s for {self.ballots.missing(name, self.accepted)}"
            self._log(WARNING, line)
            for peer_id in votes:
                self._send(self.peers[peer_id], Notice(WARNING, line))

    def _warn_newcomers(self):
        limit_ns = nanoseconds(self.options.vote_warning)
        for peer_id in self.registered:
            peer = self.peers[peer_id]
            if not peer.warned and self.now_ns - peer.phase_ns >= limit_ns:
                peer.warned = True
                missing = self.ballots.missing(TOPOLOGY, self.accepted)
                why = "a ring is being wired" if self.wiring else f"update_topology waits for {missing}"
                self._send(peer, Notice(WARNING, f"not admitted yet: {why}"))

    def _break_deadlocks(self):
        oldest_ns = self.now_ns - nanoseconds(self.options.deadlock_timeout)
        reason, stuck = self.ballots.take_stuck(self._open_calls(), self.accepted, oldest_ns)
        if stuck:
            self.counters["deadlocks"] += 1
            self._log(WARNING, reason)
        for peer_id, call in stuck:
            self._send(self.peers[peer_id], CallFailed(call, INVALID_USAGE, reason))

    def _open_calls(self):
        """Calls that wait for votes; a closed round only waits for its rings."""
        return [name for name in self.votes if not (self.admission and name == TOPOLOGY)]

    # ------------------------------------------------------------------------------------------ reports

    def snapshot(self):
        """The durable part: what a master that starts again must know."""
        groups = {
            number: {"epoch": group.epoch, "revision": group.revision, "digest": group.digest.hex()}
            for number, group in sorted(self.groups.items())
        }
        return {"run": self.run.hex(), "next_id": self.next_id, "round": self.round, "groups": groups}

    @classmethod
    def restore(cls, snapshot, options, now_ns=0):
        """A master that goes on with a run whose peers are all gone."""
        cdef MasterState state = cls(bytes.fromhex(snapshot["run"]), options, now_ns)
        state.next_id = snapshot["next_id"]
        state.round = snapshot["round"]
        for number, saved in snapshot["groups"].items():
            group = state.groups[int(number)] = Group(int(number))
            group.epoch = saved["epoch"]
            group.revision = saved["revision"]
            group.digest = bytes.fromhex(saved["digest"])
        return state

    def check(self):
        """Invariants between two events; run after every one in all tests."""
        ids = set(self.peers)
        assert {peer.id for peer in self.conns.values()} == ids, "a connection without its peer, or the reverse"
        assert self.accepted | self.registered | self.admitting == ids, "a peer in no phase"
        assert len(self.accepted) + len(self.registered) + len(self.admitting) == len(ids), "a peer in two phases"
        assert self.admission or not self.admitting, "admitting outside a round"
        assert not self.changed, f"groups {self.changed} changed, but were not ordered anew"
        assert self.accepted or not self.registered or self.admission, "newcomers wait in a run without members"
        in_rings = {peer_id for group in self.groups.values() for peer_id in group.ring}
        assert in_rings == self.accepted | self.admitting, f"rings hold {in_rings}"
        for number, group in self.groups.items():
            group.check()
            assert bool(group.waiting) == (number in self.wiring), f"group {number}: waiting {group.waiting}"
            assert group.newcomers == self.admitting & set(group.ring), f"group {number}: strangers in the ring"
            assert all(self.peers[peer_id].group == number for peer_id in group.ring), f"group {number}: wrong member"
        for name, votes in self.votes.items():
            assert set(votes) <= self.accepted, f"{name}: a vote of somebody who is no member"
        assert not self.votes[PENDING] or len(self.votes[PENDING]) < len(self.accepted), "an answer was forgotten"
        assert not self.held or not self._is_somebody_content(), "a round is held though somebody is content"
        assert self.wiring or self.admission or not self._round_is_ripe(), "a unanimous round was left open"
        assert not (self.admission and not self.wiring), "a wired round was left open"

    cdef _send(self, Peer peer, message):
        self.actions.append(SendTo(peer.conn, message))

    cdef _log(self, int level, str line):
        self.actions.append(Log(level, line))


# Which message is legal in which phase, and what it does. What is not here costs the sender its connection.
TRANSITIONS = {
    (REGISTERED, Wired): MasterState._on_wired,
    (REGISTERED, WireFailed): MasterState._on_wire_failed,
    (REGISTERED, EdgeLost): MasterState._on_edge_lost,
    (REGISTERED, Beat): MasterState._on_beat,
    (REGISTERED, Leave): MasterState._on_leave,
    (ACCEPTED, VoteTopology): MasterState._on_vote_topology,
    (ACCEPTED, VotePending): MasterState._on_vote_pending,
    (ACCEPTED, Withdraw): MasterState._on_withdraw,
    (ACCEPTED, Wired): MasterState._on_wired,
    (ACCEPTED, WireFailed): MasterState._on_wire_failed,
    (ACCEPTED, EdgeLost): MasterState._on_edge_lost,
    (ACCEPTED, Beat): MasterState._on_beat,
    (ACCEPTED, Leave): MasterState._on_leave,
}
