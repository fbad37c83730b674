# cython: language_level=3
"""optimize_topology at the master: from the unanimous vote to the rings that follow from what edges carry.

    voted by all ──▶ measuring ──▶ solved ──▶ wiring, if another ring is better ──▶ answered, when all groups are there
                     (of each group, beside the others)

**Measuring** goes round by round (see `measuring`): a source is told whom to send to, and reports what arrived. Only
edges that are missing or stale are measured, and none that is avoided anyway. What operations carry comes with the
heartbeats, and keeps the edges of the present ring fresh. **Solving** (see `choosing`) takes well under a second and is
done within the event that completes the last round. **RingLinks** is what every changed ring goes through.

**A loss** in any of these phases is a loss as ever: the group is wired anew, at once, and measures what is left. Nobody
waits for the lost one. Whoever gives the call up is not answered, but measures with the others until they are; if
nobody waits any more, the optimisation is over.

**A moonshot** goes on searching for a large group after the answer. What it finds is a candidate of the next
optimisation, for as long as the group has the same members.

Part of the master's machine; knows nothing of admissions, which are decided above this, in `master_state`.
"""

from pccl._core.protocol.events import DEBUG, INFO, OPTIMIZE, SYNC, TOPOLOGY
from pccl._core.protocol.messages import CallFailed, OptimizeDone, Probe
from pccl._core.protocol.outcomes import INVALID_USAGE
from pccl._core.solver.solver import EXACT_MAX, MEMBERS_MAX, RATE_MAX
from pccl.options import nanoseconds

from .membership cimport Membership
from .roster cimport Peer
from .events import BeginMoonshot, CancelMoonshot
from .ballots import OpenCall, Vote
from .probe_rounds import Measurement
from .ring_choice import choose_ring

PROBE_MARGIN = 1.0  # seconds beyond dialling and sending: for two handshakes, and for machines that are busy


cdef class Optimizer(Membership):
    """Votes on the rings, measurements, and what is adopted."""

    def __init__(self, bytes run, options, ballots, now_ns):
        super().__init__(run, options, ballots, now_ns)
        self.optimizing = False
        self.optimizers, self.measurements = {}, {}
        self.probe_round = 0
        self.searched = None
        self.found = ()

    # ------------------------------------------------------------------------------------------ votes

    cdef bint _optimizes(self, Peer peer) except -1:
        """Whether it is in optimize_topology, and can make no other call."""
        cdef dict votes = self.votes[OPTIMIZE]
        return peer.id in votes or peer.id in self.optimizers

    def _on_vote_optimize(self, Peer peer, message):
        group = self.groups[peer.group]
        if group.collectives.holds(peer.id):
            self._kick(peer, INVALID_USAGE, f"voted in {OPTIMIZE} while a reduce of its own has no verdict")
        elif group.agreement.holds(peer.id):
            self._kick(peer, INVALID_USAGE, f"voted in {OPTIMIZE} while it is in {SYNC}")
        elif peer.id in self.votes[TOPOLOGY] or peer.id in self.optimizers:
            self._kick(peer, INVALID_USAGE, f"voted in {OPTIMIZE} while it votes on the topology")
        else:
            self._vote(OPTIMIZE, peer, Vote(message.call, 0, self.now_ns))

    def _withdraw_optimize(self, Peer peer, call):
        """Its caller gave up: nobody waits for that answer."""
        vote = self.optimizers.get(peer.id)
        if vote is not None and vote.call == call:
            del self.optimizers[peer.id]

    cdef bint _optimize_is_ripe(self) except -1:
        """Whether everybody has voted, and no ring is on the move."""
        cdef dict votes = self.votes[OPTIMIZE]
        if not votes or len(votes) != len(self.accepted):
            return False
        return not (self.wiring or self.admission or self.optimizing)

    def _remove(self, Peer peer, str how, str reason):
        in_ring = self._ring_of(peer) is not None
        Membership._remove(self, peer, how, reason)
        self.optimizers.pop(peer.id, None)
        if in_ring and peer.group in self.measurements:
            self.measurements[peer.group].drop(peer.id)
        if in_ring:
            self._cancel_moonshot(peer.group)

    def _open_optimizations(self):
        """The call that is under way, for those who wonder where the others are."""
        waiting = {peer_id: vote.since_ns for peer_id, vote in self.optimizers.items()}
        return [OpenCall(OPTIMIZE, frozenset(), waiting)] if waiting else []

    # ------------------------------------------------------------------------------------------ settling

    cdef bint _settle_optimization(self) except -1:
        """Carry an optimisation as far as it can go. True if something changed."""
        if self.optimizing:
            return self._carry_on()
        return self._optimize_is_ripe() and self._begin_optimization()

    cdef bint _carry_on(self) except -1:
        """The same, with one under way."""
        if not self.optimizers:
            self._end_optimization()
            return True
        for number, measurement in sorted(self.measurements.items()):
            group = self.groups.get(number)
            if group is None or not group.ring:
                del self.measurements[number]
            elif measurement.is_over():
                if number not in self.wiring:
                    del self.measurements[number]
                    self._adopt(group)
            elif not measurement.pending:
                self._begin_probes(group, measurement)
        if self.changed:
            return True
        if self.measurements or self.wiring:
            return False
        self._answer_optimize()
        return True

    def _begin_optimization(self):
        votes = self.ballots.close(OPTIMIZE)
        if len(votes) < 2:
            for peer_id, vote in votes.items():
                reason = f"{OPTIMIZE} needs at least 2 peers in the run, and there is 1: let others join first"
                self._send(self.peers[peer_id], CallFailed(vote.call, INVALID_USAGE, reason))
            return True
        self.optimizing = True
        self.optimizers = votes
        for number, group in self.groups.items():
            if len(group.ring) > 1:
                missing = set(group.bandwidths.missing(group.ring, self.now_ns)) - group.forbidden(self.now_ns)
                self.measurements[number] = Measurement(group.ring, missing, self.options.probe_rounds)
        return True

    def _begin_probes(self, group, measurement):
        """The next round: tell every source whom to send to."""
        cdef Peer source, target
        self.probe_round += 1
        limit_ns = nanoseconds(self.options.probe_time + self.options.connect_timeout + PROBE_MARGIN)
        milliseconds = max(1, nanoseconds(self.options.probe_time) // 1_000_000)
        probes = measurement.begin_round(self.probe_round, self.now_ns + limit_ns)
        for source_id, target_id in probes:
            source, target = self.peers[source_id], self.peers[target_id]
            lanes = min(source.lanes, target.lanes)
            self._send(source, Probe(self.probe_round, target.id, lanes, milliseconds, target.port, target.host))
        self._log(DEBUG, f"group={group.number} measures round={self.probe_round} edges={len(probes)}")

    def _on_probed(self, Peer peer, message):
        if message.bytes_per_second > RATE_MAX:
            self._kick(peer, INVALID_USAGE, f"measured {message.bytes_per_second} bytes/s, which nothing can carry")
            return
        measurement = self.measurements.get(peer.group)
        if measurement is not None and measurement.take(message.round, (peer.id, message.target)):
            self._learn_rate(self.groups[peer.group], peer.id, message.target, message.bytes_per_second, message.reason)

    def _learn_rate(self, group, source, target, rate, str reason):
        group.bandwidths.put(source, target, rate, self.now_ns)
        if not rate:
            self._log(INFO, f"edge={source}->{target} group={group.number} not measured reason={reason!r}")

    def _end_late_probes(self):
        """Rounds that last too long go on without their last reports."""
        for number, measurement in sorted(self.measurements.items()):
            if measurement.pending and self.now_ns >= measurement.deadline_ns:
                for source, target in measurement.give_up():
                    self._learn_rate(self.groups[number], source, target, 0, "no report in time")

    def _adopt(self, group):
        """Everything is measured that could be: change to another ring if it is better."""
        rates = group.bandwidths.matrix(group.ring, group.forbidden(self.now_ns))
        found = self.found if self.searched == group.number else None
        ring, reason = choose_ring(group.ring, rates, group.epoch, found or None)
        if ring is None:
            self._log(INFO, f"group={group.number} keeps its ring: {reason}")
            return
        group.adopt(ring)
        self.counters["optimized"] += 1
        self._disturb(group, "the ring was optimised")
        self._log(INFO, f"group={group.number} takes another ring: {reason}")

    def _answer_optimize(self):
        """All rings are as they should be."""
        sizes = [size for size in [group.size() for group in self.groups.values()] if size]
        for peer_id, vote in self.optimizers.items():
            group = self.groups[self.peers[peer_id].group]
            world = len(self.accepted), group.size(), len(sizes), max(sizes)
            self._send(self.peers[peer_id], OptimizeDone(vote.call, self.round, group.epoch, *world))
            self.peers[peer_id].told_world = self.world_changes
        self._begin_moonshot()
        self._end_optimization()

    def _end_optimization(self):
        self.optimizing = False
        self.optimizers, self.measurements = {}, {}

    # ------------------------------------------------------------------------------------------ moonshots

    def _begin_moonshot(self):
        """Search on for the largest group, unless its ring is proven to be the best, or its question is too large."""
        group = max(self.groups.values(), key=lambda group: (len(group.ring), -group.number))
        if not EXACT_MAX < len(group.ring) <= MEMBERS_MAX or not self.options.moonshot_time:
            return
        rates = group.bandwidths.matrix(group.ring, group.forbidden(self.now_ns))
        self.searched, self.found = group.number, ()
        self.actions.append(BeginMoonshot(group.number, tuple(group.ring), rates, group.epoch))

    def _on_moonshot_found(self, event):
        """A ring to compare with the next time. What is about other members comes too late."""
        group = self.groups.get(event.group)
        if event.group == self.searched and group is not None and set(group.ring) == set(event.ring):
            self.found = event.ring
            self._log(DEBUG, f"group={event.group} has a better ring for the next {OPTIMIZE}")

    def _cancel_moonshot(self, number):
        """The group has other members."""
        if self.searched == number:
            self.searched, self.found = None, ()
            self.actions.append(CancelMoonshot(number))

    def _check_optimization(self):
        """Invariants between two events."""
        assert not self._optimize_is_ripe(), f"a unanimous {OPTIMIZE} was left open"
        assert self.optimizing or not (self.optimizers or self.measurements), "half an optimisation"
        assert not self.optimizing or self.optimizers, "an optimisation that nobody waits for"
        assert not self.optimizing or self.measurements or self.wiring, f"{OPTIMIZE} was not answered"
        assert self.optimizers.keys() <= self.accepted, "a stranger waits for an optimisation"
        assert not self.optimizers.keys() & self.votes[TOPOLOGY].keys(), "somebody is in two calls"
        assert not self.votes[OPTIMIZE].keys() & self.votes[TOPOLOGY].keys(), "somebody is in two calls"
        assert not self.found or set(self.found) == set(self.groups[self.searched].ring), "found for other members"
        for number, measurement in self.measurements.items():
            if not measurement.is_over():
                measurement.check(set(self.groups[number].ring))
            else:
                assert number in self.wiring, f"group {number}: measured, and nothing followed"
