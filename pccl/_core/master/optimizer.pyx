# cython: language_level=3
"""optimize_topology at the master: from the unanimous vote to rings that suit the rates of the edges.

    voted by all ──▶ measuring ──▶ solved ──▶ wiring, if another ring is better ──▶ answered, when all groups are done
                     (each group, beside the others)

**Measuring** takes several rounds (see `probe_rounds`): a source is told its target, and reports what arrived. Only
edges whose rate is missing or stale are measured, except pairs that rings avoid. Passive rates come with the
heartbeats, and keep the edges of the present ring fresh. **Solving** (see `ring_choice`) takes well under a second and
is done within the event that completes the last round. **Wiring** is the same as for every changed ring.

**A loss** in any of these phases is handled as at other times: the ring is ordered anew at once, and the group measures
the edges that are left. No peer waits for the lost one. A peer that gives the call up is not answered, but takes part
in the probes until the others are answered; if no peer waits any more, the optimisation is over.

**A moonshot** continues the search for a large group after the answer. The ring that it finds is a ring candidate of
the next optimisation, as long as the group has the same members.

Part of the master's machine; knows nothing of admissions, which are decided in `master_state`.
"""

from pccl._core.protocol.events import DEBUG, INFO, OPTIMIZE, SYNC, TOPOLOGY
from pccl._core.protocol.messages import CallFailed, OptimizeDone, Probe
from pccl._core.protocol.outcomes import INVALID_USAGE
from pccl._core.solver.solver import EXACT_MAX, MEMBERS_MAX
from pccl.options import nanoseconds

from .group cimport Group
from .membership cimport Membership, Peer
from .events import BeginMoonshot, CancelMoonshot
from .ballots import OpenCall, Vote
from .bandwidths import is_rate
from .probe_rounds import Measurement
from .ring_choice import choose_ring

PROBE_MARGIN = 1.0  # seconds beyond dialling and sending: for two handshakes, and for machines that are busy


cdef class Optimizer:
    """The optimisation under way, its measurements, and the rings that it adopts."""

    def __init__(self, Membership members not None, ballots):
        self.members = members
        self.ballots = ballots
        self.votes = ballots.votes
        self.running = False
        self.waiting, self.measurements = {}, {}
        self.probe_round = 0
        self.searched = None
        self.found = ()

    # ------------------------------------------------------------------------------------------ votes

    cdef bint involves(self, peer_id) except -1:
        """Whether this member is in optimize_topology, and can make no other call."""
        cdef dict votes = self.votes[OPTIMIZE]
        return peer_id in votes or peer_id in self.waiting

    def on_vote(self, Peer peer, message):
        """A member calls optimize_topology."""
        cdef Group group = self.members.groups[peer.group]
        if group.collectives.holds(peer.id):
            wrong = f"voted in {OPTIMIZE} while a reduce of its own has no verdict"
        elif group.consensus.holds(peer.id):
            wrong = f"voted in {OPTIMIZE} while it is in {SYNC}"
        elif peer.id in self.votes[TOPOLOGY]:
            wrong = f"voted in {OPTIMIZE} while it votes on the topology"
        elif peer.id in self.waiting:
            wrong = f"voted in {OPTIMIZE} while it is in {OPTIMIZE}"
        else:
            wrong = self.ballots.cast(OPTIMIZE, peer.id, Vote(message.call, 0, self.members.now_ns))
        if wrong:
            self.members.kick(peer, INVALID_USAGE, wrong)

    cdef int withdraw(self, Peer peer, call) except -1:
        """Do not answer this peer: its caller gave up."""
        vote = self.waiting.get(peer.id)
        if vote is not None and vote.call == call:
            del self.waiting[peer.id]
        return 0

    cdef bint _is_ripe(self) except -1:
        """Whether all members have voted, and no ring is being wired or optimised."""
        cdef dict votes = self.votes[OPTIMIZE]
        if not votes or len(votes) != len(self.members.accepted):
            return False
        return not (self.members.wiring or self.members.admission or self.running)

    cdef int remove(self, Peer peer, bint in_ring) except -1:
        """Remove a peer that is gone from the callers, and its edges from the measurement."""
        self.waiting.pop(peer.id, None)
        if in_ring and peer.group in self.measurements:
            self.measurements[peer.group].drop(peer.id)
        if in_ring:
            self.cancel_moonshot(peer.group)
        return 0

    def open_calls(self):
        """Return the optimisation under way as an open call, so that notices can say where its callers are."""
        waiting = {peer_id: vote.since_ns for peer_id, vote in self.waiting.items()}
        return [OpenCall(OPTIMIZE, frozenset(), waiting)] if waiting else []

    # ------------------------------------------------------------------------------------------ settling

    cdef bint settle(self) except -1:
        """Begin or continue an optimisation. Return True if something changed."""
        if self.running:
            return self._carry_on()
        return self._is_ripe() and self._begin()

    cdef bint _carry_on(self) except -1:
        """Continue the optimisation under way. Return True if something changed."""
        cdef Group group
        if not self.waiting:
            self._end()
            return True
        for number, measurement in sorted(self.measurements.items()):
            group = self.members.groups.get(number)
            if group is None or not group.ring:
                del self.measurements[number]
            elif measurement.is_over():
                if number not in self.members.wiring:
                    del self.measurements[number]
                    self._adopt(group)
            elif not measurement.pending:
                self._begin_probes(group, measurement)
        if self.members.changed:
            return True
        if self.measurements or self.members.wiring:
            return False
        self._answer()
        return True

    def _begin(self):
        votes = self.ballots.close(OPTIMIZE)
        if len(votes) < 2:
            for peer_id, vote in votes.items():
                reason = f"{OPTIMIZE} needs at least 2 peers in the run, and there is 1: let others join first"
                self.members.send(self.members.peers[peer_id], CallFailed(vote.call, INVALID_USAGE, reason))
            return True
        self.running = True
        self.waiting = votes
        now_ns = self.members.now_ns
        for number, group in self.members.groups.items():
            if len(group.ring) > 1:
                missing = set(group.bandwidths.missing(group.ring, now_ns)) - group.forbidden(now_ns)
                self.measurements[number] = Measurement(group.ring, missing, self.members.options.probe_rounds)
        return True

    def _begin_probes(self, Group group, measurement):
        """Begin the next round: tell every source its target."""
        cdef Peer source, target
        options = self.members.options
        self.probe_round += 1
        limit_ns = nanoseconds(options.probe_time + options.connect_timeout + PROBE_MARGIN)
        milliseconds = max(1, nanoseconds(options.probe_time) // 1_000_000)
        probes = measurement.begin_round(self.probe_round, self.members.now_ns + limit_ns)
        for source_id, target_id in probes:
            source, target = self.members.peers[source_id], self.members.peers[target_id]
            lanes = min(source.lanes, target.lanes)
            probe = Probe(self.probe_round, target.id, lanes, milliseconds, target.port, target.host)
            self.members.send(source, probe)
        self.members.log(DEBUG, f"group={group.number} measures round={self.probe_round} edges={len(probes)}")

    def on_probed(self, Peer peer, message):
        """Take the result of one probe."""
        rate = message.bytes_per_second
        if not is_rate(rate):
            self.members.kick(peer, INVALID_USAGE, f"measured {rate} bytes/s, which is impossible")
            return
        measurement = self.measurements.get(peer.group)
        if measurement is not None and measurement.take(message.round, (peer.id, message.target)):
            self._learn_rate(self.members.groups[peer.group], peer.id, message.target, rate, message.reason)

    def _learn_rate(self, Group group, source, target, rate, str reason):
        group.bandwidths.put(source, target, rate, self.members.now_ns)
        if not rate:
            self.members.log(INFO, f"edge={source}->{target} group={group.number} not measured reason={reason!r}")

    cdef int end_late_probes(self) except -1:
        """End the rounds that last too long: their missing probes count as failed."""
        for number, measurement in sorted(self.measurements.items()):
            if measurement.pending and self.members.now_ns >= measurement.deadline_ns:
                for source, target in measurement.give_up():
                    self._learn_rate(self.members.groups[number], source, target, 0, "no report in time")
        return 0

    cdef long long next_deadline_ns(self, long long latest_ns) except? -1:
        """Return the earliest deadline of a round, or the given time if that is earlier."""
        for measurement in self.measurements.values():
            latest_ns = min(latest_ns, measurement.deadline_ns)
        return latest_ns

    def _adopt(self, Group group):
        """Change to another ring if it is better. All edges that could be measured were."""
        rates = group.bandwidths.matrix(group.ring, group.forbidden(self.members.now_ns))
        found = self.found if self.searched == group.number else None
        ring, reason = choose_ring(group.ring, rates, group.epoch, found or None)
        if ring is None:
            self.members.log(INFO, f"group={group.number} keeps its ring: {reason}")
            return
        group.adopt(ring)
        self.members.count("optimized")
        self.members.disturb(group, "the ring was optimised")
        self.members.log(INFO, f"group={group.number} takes another ring: {reason}")

    def _answer(self):
        """Answer all callers: every ring is chosen and wired."""
        cdef Peer peer
        cdef Group group
        world, groups, largest = self.members.world()
        for peer_id, vote in self.waiting.items():
            peer = self.members.peers[peer_id]
            group = self.members.groups[peer.group]
            numbers = self.members.round, group.epoch, world, group.size(), groups, largest
            self.members.send(peer, OptimizeDone(vote.call, *numbers))
            peer.told_world = self.members.world_changes
        self._begin_moonshot()
        self._end()

    def _end(self):
        self.running = False
        self.waiting, self.measurements = {}, {}

    # ------------------------------------------------------------------------------------------ moonshots

    def _begin_moonshot(self):
        """Continue the search for the largest group, unless its ring is proven to be the best or it is too large."""
        group = max(self.members.groups.values(), key=lambda group: (len(group.ring), -group.number))
        if not EXACT_MAX < len(group.ring) <= MEMBERS_MAX or not self.members.options.moonshot_time:
            return
        rates = group.bandwidths.matrix(group.ring, group.forbidden(self.members.now_ns))
        self.searched, self.found = group.number, ()
        self.members.act(BeginMoonshot(group.number, tuple(group.ring), rates, group.epoch))

    cdef int take_moonshot(self, event) except -1:
        """Keep a ring for the next optimisation. A ring of other members comes too late and is dropped."""
        group = self.members.groups.get(event.group)
        if event.group == self.searched and group is not None and set(group.ring) == set(event.ring):
            self.found = event.ring
            self.members.log(DEBUG, f"group={event.group} has a better ring for the next {OPTIMIZE}")
        return 0

    cdef int cancel_moonshot(self, number) except -1:
        """End the search for a group whose members changed."""
        if self.searched == number:
            self.searched, self.found = None, ()
            self.members.act(CancelMoonshot(number))
        return 0

    def check(self):
        """Invariants between two events."""
        members, votes = self.members, self.votes
        assert not self._is_ripe(), f"a unanimous {OPTIMIZE} was left open"
        assert self.running or not (self.waiting or self.measurements), "something is left of an optimisation"
        assert not self.running or self.waiting, "an optimisation that no peer waits for"
        assert not self.running or self.measurements or members.wiring, f"{OPTIMIZE} was not answered"
        assert self.waiting.keys() <= members.accepted, "a peer that is no member waits for an optimisation"
        assert not self.waiting.keys() & votes[TOPOLOGY].keys(), "a member is in two calls"
        assert not votes[OPTIMIZE].keys() & votes[TOPOLOGY].keys(), "a member is in two calls"
        assert not self.found or set(self.found) == set(members.groups[self.searched].ring), "found for other peers"
        for number, measurement in self.measurements.items():
            if not measurement.is_over():
                measurement.check(set(members.groups[number].ring))
            else:
                assert number in members.wiring, f"group {number}: measured, and nothing followed"
