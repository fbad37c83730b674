# cython: language_level=3
"""The master's machine: it decides which calls complete and which peers are admitted. Events in, actions out.

`MasterState` has the parts and joins them: peers and rings (`membership`), newcomers (`admission`), votes of all
members (`ballots`), topology rounds (`topology_round`), the optimisation of the rings (`optimizer`), the begin and the
end of runs (`runs`), and what members say to their own group (`group_dispatch`).

**Phases.** A peer that passed the handshake is *registered*; it becomes *accepted* in a topology round, and is *gone*
when it is lost, leaves, or is kicked. `TRANSITIONS` says which message is legal in which phase, which part handles it,
and in which phases its sender may be afterwards; docs/architecture.md shows it as a diagram. The sender of an illegal
message is kicked with a reason. The topology round, the optimisation, and the consensus and the tags of every group
have phases and tables of their own.

**A lost member** (closed connection, silence, goodbye, kick) loses its votes and is removed from its ring. The ring is
ordered anew at once, without a vote; other groups are not affected. The same happens when an edge breaks between two
living peers. Rings avoid a pair that cannot connect; if no ring is possible, the peer that most others cannot reach is
kicked.

**Collectives** belong to one group. A ring that changes ends all collectives of its group; a member that has one
without a verdict cannot vote on the topology, so no round closes during a collective. **The shared state** belongs to
one group too: a member in a sync can neither vote on the topology nor reduce meanwhile. A change of the ring does not
affect the sync. An **optimisation** of the rings is a vote of all members, like a topology round; neither closes while
the other is under way.

**Odd peers.** Where more than half of the peers concerned agree on a signature, a call or a schema, the others are
kicked with both sides in the reason, and the majority goes on. Without a majority all of them get the explanation.

**After every event** `_settle` does everything that follows: it orders changed rings, and lets the topology round, the
optimisation and the groups go on as far as they can. The work of an event does not grow with the number of peers,
except where all get a message.

No socket, clock, file, thread or random source in here: time is an argument, the id of the first run is given.
"""

from collections import deque

from pccl._core.protocol.events import FINISH, OPTIMIZE, PENDING, TOPOLOGY, WARNING, Tick
from pccl._core.protocol.messages import (
    Awaiting, Beat, CallFailed, EdgeLost, Fetched, Finished, Initiate, Schema, Leave, Notice, PendingAnswer, Probed,
    Threads, Tried, VoteFinish, VoteOptimize, VotePending, VoteSync, VoteTopology, WireFailed, Wired, Withdraw,
    WithdrawReduce,
)
from pccl._core.protocol.outcomes import INVALID_USAGE, RANK_CONNECTION_FAILED, RANK_CONNECTION_LOST
from pccl._core.story import attach, show
from pccl.options import STORY_EVENTS_MAX, nanoseconds

from .admission cimport Admission
from .group_dispatch cimport GroupDispatch
from .membership cimport Membership, Peer
from .optimizer cimport Optimizer
from .runs cimport Runs
from .topology_round cimport TopologyRound
from .events import DialledBack, MoonshotFound, PeerCame, PeerSaid, PeerWent
from .ballots import Ballots, Vote, find_deadlock
from .deadlock import name_peers
from .master_check import check_master, check_transitions, observe
from .membership import ACCEPTED, GONE, REGISTERED
from .topology_round import CLOSED
from .wait_watch import WaitWatch, find_waits


cdef class MasterState:
    """`handle(event, now_ns) -> actions`, and nothing else changes it."""

    def __init__(self, bytes run, options, now_ns=0):
        self.members = Membership(run, options, now_ns)
        self.ballots = Ballots(TOPOLOGY, PENDING, OPTIMIZE, FINISH)
        self.votes = self.ballots.votes
        self.optimizer = Optimizer(self.members, self.ballots)
        self.admission = Admission(self.members)
        self.topology_round = TopologyRound(self.members, self.ballots, self.optimizer, self.admission)
        self.dispatch = GroupDispatch(self.members, self.optimizer, self.ballots)
        self.runs = Runs(self.members, self.ballots, self.optimizer, self.topology_round)
        self.members.on_removed = self._removed
        self.handlers = self._bind_handlers()
        self.wait_watch = WaitWatch(nanoseconds(options.vote_warning))
        self.options = options
        self.story = deque(maxlen=STORY_EVENTS_MAX)
        self.append_story = self.story.append
        self.checking = options.check
        self.beat_ns = now_ns
        self.next_deadline_ns = now_ns + self.members.interval_ns
        self.stopped = False

    def _bind_handlers(self):
        """Return phase -> type of a message or event -> bound handler, so that a look-up needs no tuple."""
        parts = (
            self, self.members, self.admission, self.topology_round, self.optimizer, self.dispatch, self.runs,
        )
        bound = {REGISTERED: {}, ACCEPTED: {}}
        for (phase, kind), (handler, _) in TRANSITIONS.items():
            [part] = [part for part in parts if getattr(type(part), handler.__name__, None) is handler]
            bound[phase][kind] = getattr(part, handler.__name__)
        return bound

    cpdef list handle(self, event, long long now_ns):
        """Handle one event. Return the actions. An error in here is a bug of pccl; it carries the story."""
        try:
            return self._handle(event, now_ns)
        except BaseException as error:
            attach(error, self, event)
            raise

    cdef list _handle(self, event, long long now_ns):
        cdef Peer peer
        cdef list actions = self.members.begin(now_ns)
        before = observe(self, event) if self.checking else None
        kind = type(event)
        if kind is PeerSaid:
            peer = self.members.conns.get(event.conn)
            if peer is not None:  # else: the last message of a peer that is already dismissed
                peer.heard_ns = now_ns
                self._hear(peer, event.message)
        elif kind is PeerCame:
            peer = self.members.register(event) if self.runs.admits(event) else None
            if peer is not None:
                self.admission.register(peer)
        elif kind is PeerWent:
            peer = self.members.conns.get(event.conn)
            if peer is not None:
                self.handlers[peer.phase][PeerWent](peer, event)
        elif kind is Tick:
            if now_ns >= self.next_deadline_ns:
                self._sweep(event)
        elif kind is DialledBack:
            self.admission.on_dialled_back(event)
        elif kind is MoonshotFound:
            self.optimizer.take_moonshot(event)
        else:
            raise TypeError(f"the master's machine knows no event {show(event)}")
        self._settle()
        self.append_story((now_ns, event, actions))
        if self.checking:
            self.check()
            check_transitions(self, before, event, TRANSITIONS)
        return actions

    cdef int _hear(self, Peer peer, message) except -1:
        cdef dict legal = self.handlers[peer.phase]
        handler = legal.get(type(message))
        if handler is None:
            self.members.kick(peer, INVALID_USAGE, f"{type(message).__name__} is not legal while {peer.phase}")
        else:
            handler(peer, message)
        return 0

    def _removed(self, Peer peer, bint in_ring):
        """Remove the votes of a peer that is gone, its trials, and its part in an optimisation."""
        self.ballots.drop(peer.id)
        self.admission.remove(peer)
        self.topology_round.stop_wanting(peer.id)
        self.optimizer.remove(peer, in_ring)

    # ------------------------------------------------------------------------------------------ votes

    def on_vote_pending(self, Peer peer, message):
        """A member calls are_peers_pending."""
        wrong = self.ballots.cast(PENDING, peer.id, Vote(message.call, 0, self.members.now_ns))
        if wrong:
            self.members.kick(peer, INVALID_USAGE, wrong)

    def on_withdraw(self, Peer peer, message):
        """A caller gave up one of its calls."""
        if self.ballots.withdraw(peer.id, message.call):
            self.topology_round.stop_wanting(peer.id)
        self.members.group_to_settle(peer).consensus.withdraw(peer.id, message.call)
        self.optimizer.withdraw(peer, message.call)

    # ------------------------------------------------------------------------------------------ settling

    cdef int _settle(self) except -1:
        """Do everything that follows. Each turn of the loop consumes something, so the loop ends."""
        while (
            self.members.order_changed_rings()
            or self.admission.settle()
            or self.topology_round.settle()
            or self.optimizer.settle()
            or self.dispatch.settle()
            or self.runs.settle()
        ):
            pass
        self._answer_pending()
        return 0

    cdef int _answer_pending(self) except -1:
        cdef Membership members = self.members
        cdef dict votes = self.votes[PENDING]
        if not votes or len(votes) < len(members.accepted):
            return 0
        pending = bool(self.admission.fitting or members.admitting)
        for peer_id, vote in self.ballots.close(PENDING).items():
            members.send(members.peers[peer_id], PendingAnswer(vote.call, pending))
        return 0

    # ------------------------------------------------------------------------------------------ time

    def _sweep(self, tick):
        """Heartbeats, silence, slow wiring, long waits, deadlocks: once an interval, over all peers."""
        cdef Membership members = self.members
        self._forgive_own_pause()
        if members.now_ns - self.beat_ns >= members.interval_ns:
            self.beat_ns = members.now_ns
            beat = Beat(members.now_ns)
            for peer in members.peers.values():
                members.send(peer, beat)
        if not self.stopped:
            for peer in list(members.peers.values()):
                self.handlers[peer.phase][Tick](peer, tick)
            self._end_slow_wiring()
            self.admission.sweep()
            self.optimizer.sweep(tick)
            self._watch_calls()
            self._break_deadlocks()
        soonest = members.now_ns + members.interval_ns
        for peer in members.peers.values():
            soonest = min(soonest, peer.heard_ns + members.silence_ns)
        soonest = self.optimizer.next_deadline_ns(soonest)
        self.next_deadline_ns = max(soonest, members.now_ns + 1_000_000)

    def _forgive_own_pause(self):
        """The time in which the master itself was stopped does not count as a peer's silence."""
        cdef Membership members = self.members
        # After a long pause no peer is kicked before the messages that arrived meanwhile are read. This never happens
        # twice in a row: a second late sweep kicks.
        late_ns = members.now_ns - self.next_deadline_ns
        if late_ns > 0:
            for peer in members.peers.values():
                peer.heard_ns = min(members.now_ns, peer.heard_ns + late_ns)
        self.stopped = late_ns > members.interval_ns and not self.stopped

    def _end_slow_wiring(self):
        """Kick peers that have not reported in time: the newcomers among them, and members only if there are none."""
        cdef Membership members = self.members
        limit_ns = nanoseconds(members.options.wire_timeout)
        for number in sorted(members.wiring):
            group = members.groups[number]
            if members.now_ns - group.ordered_ns < limit_ns:
                continue
            late = sorted(group.waiting & group.newcomers) or sorted(group.waiting)
            for peer_id in late:
                reason = f"its lanes were not up {limit_ns / 1e9:g} s after the ring was ordered (wire_timeout)"
                members.kick(members.peers[peer_id], RANK_CONNECTION_FAILED, reason)

    def _watch_calls(self):
        """Report every long wait to the peers that wait; kick the missing peers of a vote if there is a limit."""
        cdef Membership members = self.members
        limit_ns = nanoseconds(members.options.vote_timeout)
        calls = self._open_calls()
        if limit_ns:
            for call in calls:
                waited_ns = call.waited_ns(members.now_ns)
                if waited_ns >= limit_ns:
                    self._kick_stragglers(call, waited_ns, members.now_ns - limit_ns)
        waits = find_waits(self, calls)
        for wait, line in self.wait_watch.due(waits, members.now_ns):
            if wait.logged:
                members.log(wait.level, line)
            for peer_id in sorted(members.peers.keys() & wait.told):
                members.send(members.peers[peer_id], Notice(wait.level, line))

    def _kick_stragglers(self, call, waited_ns, oldest_ns):
        cdef Membership members = self.members
        others = name_peers(sorted(call.waiting))
        reason = f"straggler: {others} waited {waited_ns / 1e9:.1f} s for it in {call.name} (vote_timeout)"
        for peer_id in sorted(call.missing & members.accepted):
            if members.peers[peer_id].phase_ns <= oldest_ns:  # a younger member was not waited for that long
                members.kick(members.peers[peer_id], RANK_CONNECTION_LOST, reason)

    def _break_deadlocks(self):
        """Kick the minority of every deadlock, and so free the majority; explain it to all if there is no majority."""
        cdef Membership members = self.members
        oldest_ns = members.now_ns - nanoseconds(members.options.deadlock_timeout)
        threads = {peer_id: peer.threads for peer_id, peer in members.peers.items() if peer.threads > 1}
        while (deadlock := find_deadlock(self._open_calls(), oldest_ns, threads)) is not None:
            members.count("deadlocks")
            members.log(WARNING, deadlock.reason)
            for peer_id, reason in deadlock.odd.items():
                members.kick(members.peers[peer_id], INVALID_USAGE, reason)
            if not deadlock.odd:
                self._explain_deadlock(deadlock)

    def _explain_deadlock(self, deadlock):
        cdef Membership members = self.members
        reason = deadlock.reason
        for call, peer_id in deadlock.involved:
            peer = members.peers[peer_id]
            if call.tag is not None:
                members.group_to_settle(peer).collectives.fail(peer_id, call.tag.tag, reason)
            elif call.consensus is not None:
                members.group_to_settle(peer).consensus.fail(peer_id, reason)
            else:
                vote = self.votes[call.name].pop(peer_id)
                members.send(peer, CallFailed(vote.call, INVALID_USAGE, reason))

    def _open_calls(self):
        """Return the calls that wait for votes; a closed round only waits for its rings."""
        cdef Membership members = self.members
        calls = self.ballots.open_calls(members.accepted)
        if self.topology_round.phase is CLOSED:
            calls = [call for call in calls if call.name != TOPOLOGY]
        calls += self.optimizer.open_calls()
        for group in members.groups.values():
            calls += group.collectives.open_calls(group.ring)
            if not group.consensus.is_idle():
                calls += group.consensus.open_calls(group.members())
        return calls

    # ------------------------------------------------------------------------------------------ reports

    def snapshot(self):
        """Return what the state file keeps: what a restarted master must know."""
        return self.runs.snapshot()

    @classmethod
    def restore(cls, snapshot, options, now_ns=0):
        """Return a master that continues with a snapshot; all former peers are gone."""
        cdef MasterState state = cls(bytes.fromhex(snapshot["run"]), options, now_ns)
        state.runs.resume(snapshot)
        return state

    def check(self):
        """Invariants between two events; run after every one in all tests."""
        check_master(self)
        self.admission.check()
        self.topology_round.check()
        self.optimizer.check()
        self.runs.check()


# (phase of the sender, message) -> the handler, and the phases that the sender may be in when the event is over; GONE
# where the handler kicks a sender that breaks a rule. The sender of a message that is not here is kicked. PeerWent is
# the end of its connection. A Tick concerns every peer: it may end a peer, and so complete the round of another one.
TRANSITIONS = {
    (REGISTERED, Wired): (Membership.on_wired, (REGISTERED, ACCEPTED, GONE)),
    (REGISTERED, WireFailed): (Membership.on_wire_failed, (REGISTERED, GONE)),
    (REGISTERED, EdgeLost): (Membership.on_edge_lost, (REGISTERED, GONE)),
    (REGISTERED, Tried): (Admission.on_tried, (REGISTERED, ACCEPTED, GONE)),
    (REGISTERED, Beat): (Membership.on_beat, (REGISTERED, GONE)),
    (REGISTERED, Leave): (Membership.on_leave, (GONE,)),
    (REGISTERED, PeerWent): (Membership.on_went, (GONE,)),
    (REGISTERED, Tick): (Membership.on_tick, (REGISTERED, ACCEPTED, GONE)),
    (ACCEPTED, VoteTopology): (TopologyRound.on_vote, (ACCEPTED, GONE)),
    (ACCEPTED, VotePending): (MasterState.on_vote_pending, (ACCEPTED, GONE)),
    (ACCEPTED, VoteOptimize): (Optimizer.on_vote, (ACCEPTED, GONE)),
    (ACCEPTED, VoteFinish): (Runs.on_vote, (ACCEPTED, GONE)),
    (ACCEPTED, Probed): (Optimizer.on_probed, (ACCEPTED, GONE)),
    (ACCEPTED, Withdraw): (MasterState.on_withdraw, (ACCEPTED,)),
    (ACCEPTED, Threads): (Membership.on_threads, (ACCEPTED,)),
    (ACCEPTED, Initiate): (GroupDispatch.on_initiate, (ACCEPTED, GONE)),
    (ACCEPTED, Finished): (GroupDispatch.on_finished, (ACCEPTED, GONE)),
    (ACCEPTED, Awaiting): (GroupDispatch.on_awaiting, (ACCEPTED,)),
    (ACCEPTED, WithdrawReduce): (GroupDispatch.on_withdraw_reduce, (ACCEPTED,)),
    (ACCEPTED, VoteSync): (GroupDispatch.on_vote_sync, (ACCEPTED, GONE)),
    (ACCEPTED, Schema): (GroupDispatch.on_schema, (ACCEPTED, GONE)),
    (ACCEPTED, Fetched): (GroupDispatch.on_fetched, (ACCEPTED, GONE)),
    (ACCEPTED, Wired): (Membership.on_wired, (ACCEPTED, GONE)),
    (ACCEPTED, WireFailed): (Membership.on_wire_failed, (ACCEPTED, GONE)),
    (ACCEPTED, EdgeLost): (Membership.on_edge_lost, (ACCEPTED, GONE)),
    (ACCEPTED, Tried): (Admission.on_tried, (ACCEPTED, GONE)),
    (ACCEPTED, Beat): (Membership.on_beat, (ACCEPTED, GONE)),
    (ACCEPTED, Leave): (Membership.on_leave, (GONE,)),
    (ACCEPTED, PeerWent): (Membership.on_went, (GONE,)),
    (ACCEPTED, Tick): (Membership.on_tick, (ACCEPTED, GONE)),
}
