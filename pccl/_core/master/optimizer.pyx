# cython: language_level=3
"""optimize_topology at the master: from the unanimous vote to rings that suit the rates of the edges.

The table `TRANSITIONS` at the end says what may happen in which phase, and what may follow; docs/architecture.md shows
it as a diagram. Some of its events are inner ones, which `settle` finds after every event of the master.

**Measuring** takes several rounds (see `probe_rounds`): a source is told its target, and reports what arrived. Only
edges whose rate is missing or stale are measured, except pairs that rings avoid. Passive rates come with the
heartbeats, and keep the edges of the present ring fresh. **Solving** (see `ring_choice`) takes well under a second and
is done within the event that completes the last round. **Wiring** is the same as for every changed ring. Groups do not
wait for each other: one may already be wired while another one measures.

**A loss** in any of these phases is handled as at other times: the ring is ordered anew at once, and the group measures
the edges that are left. No peer waits for the lost one. A peer that gives the call up is not answered, but takes part
in the probes until the others are answered; if no peer waits any more, the optimisation is over.

**A moonshot** continues the search for a large group after the answer. The ring that it finds is a ring candidate of
the next optimisation, as long as the group has the same members.

Part of the master's machine; knows nothing of admissions, which are decided in `topology_round`.
"""

from pccl._core.protocol.events import DEBUG, FINISH, INFO, OPTIMIZE, SYNC, TOPOLOGY, Tick
from pccl._core.protocol.messages import CallFailed, OptimizeDone, Probe, Probed
from pccl._core.protocol.outcomes import INVALID_USAGE
from pccl._core.solver.solver import EXACT_MAX, MEMBERS_MAX
from pccl.options import nanoseconds

from .group cimport Group
from .membership cimport Membership, Peer
from .events import BeginMoonshot, CallersGone, CancelMoonshot, PeerWent, ProbesOver, RingsWired, VoteComplete
from .ballots import OpenCall, Vote
from .bandwidths import is_rate
from .probe_rounds import Measurement
from .ring_choice import choose_ring

IDLE = "idle"  # no optimisation is under way; members may have voted for one
MEASURING = "measuring"  # the vote is closed, and some group measures its edges
WIRING = "wiring"  # every group has chosen its ring, and not all of them are wired

# The same, without a look-up by name: every event of the master needs them.
cdef str idle = IDLE, optimize = OPTIMIZE

PROBE_MARGIN = 1.0  # seconds beyond dialling and sending: for two handshakes, and for machines that are busy


cdef class Optimizer:
    """The optimisation under way, its measurements, and the rings that it adopts."""

    def __init__(self, Membership members not None, ballots):
        self.members = members
        self.ballots = ballots
        self.votes = ballots.votes
        self.phase = IDLE
        self.checking = members.options.check
        self.waiting, self.measurements = {}, {}
        self.probe_round = 0
        self.searched = None
        self.found = ()

    # ------------------------------------------------------------------------------------------ votes

    cdef bint involves(self, peer_id) except -1:
        """Whether this member is in optimize_topology, and can make no other call."""
        cdef dict votes = <dict> self.votes[optimize]
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
        elif peer.id in self.votes[FINISH]:
            wrong = f"voted in {OPTIMIZE} while it is in {FINISH}"
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
        """Whether all members have voted, and no ring is being wired: so no topology round is closed either."""
        cdef dict votes = <dict> self.votes[optimize]
        return len(votes) > 0 and len(votes) == len(self.members.accepted) and not self.members.wiring

    cdef int remove(self, Peer peer, bint in_ring) except -1:
        """Remove a peer that is gone from the callers, and its edges from the measurement."""
        self.waiting.pop(peer.id, None)
        if in_ring:
            self._step(PeerWent, peer)
            self.cancel_moonshot(peer.group)
        return 0

    def _drop_edges(self, Peer peer):
        """Measure no edge of a peer that is gone."""
        if peer.group in self.measurements:
            self.measurements[peer.group].drop(peer.id)
        return MEASURING

    def open_calls(self):
        """Return the optimisation under way as an open call, so that notices can say where its callers are."""
        waiting = {peer_id: vote.since_ns for peer_id, vote in self.waiting.items()}
        return [OpenCall(OPTIMIZE, frozenset(), waiting)] if waiting else []

    # ------------------------------------------------------------------------------------------ settling

    cdef bint settle(self) except -1:
        """Handle the inner event that is due. Return False if there is none."""
        if self.phase is idle:  # at nearly every event
            if not self._is_ripe():
                return False
            event, argument = VoteComplete, None
        else:
            event, argument = self._due()
            if event is None:
                return False
        self._step(event, argument)
        return True

    cpdef int _step(self, subject, argument) except -1:
        """Take the optimisation through the table. A handler returns the next phase."""
        entry = TRANSITIONS.get((self.phase, subject))
        assert entry is not None, f"{subject.__name__} is not in the table of an optimisation that is {self.phase}"
        handler, next_phases = <tuple> entry
        phase = handler(self, argument)
        if self.checking:
            assert phase in next_phases, f"{subject.__name__} while {self.phase} led the optimisation to {phase}"
        self.phase = phase
        return 0

    cdef tuple _due(self):
        """Return the inner event of an optimisation under way, and its argument; (None, None) if none is due."""
        if not self.waiting:
            return CallersGone, None
        if self.phase is WIRING:
            return (None, None) if self.members.wiring else (RingsWired, None)
        for number, measurement in sorted(self.measurements.items()):
            # A ring that is being wired, because it lost a member, is not changed before it is whole.
            if not measurement.pending and not (measurement.is_over() and number in self.members.wiring):
                return ProbesOver, number
        return None, None

    def _begin(self, argument):
        """Close the vote, and plan which edges each group measures."""
        votes = self.ballots.close(OPTIMIZE)
        if len(votes) < 2:
            for peer_id, vote in votes.items():
                reason = f"{OPTIMIZE} needs at least 2 peers in the run, and there is 1: let others join first"
                self.members.send(self.members.peers[peer_id], CallFailed(vote.call, INVALID_USAGE, reason))
            return IDLE
        self.waiting = votes
        now_ns = self.members.now_ns
        for number, group in self.members.groups.items():
            if len(group.ring) > 1:
                missing = set(group.bandwidths.missing(group.ring, now_ns)) - group.forbidden(now_ns)
                self.measurements[number] = Measurement(group.ring, missing, self.members.options.probe_rounds)
        return MEASURING if self.measurements else WIRING

    def _go_on(self, number):
        """Begin the next round of a group; after its last one, choose its ring."""
        cdef Group group = self.members.groups.get(number)
        measurement = self.measurements[number]
        if not measurement.is_over():
            self._begin_probes(group, measurement)
            return MEASURING
        del self.measurements[number]
        if group is not None and group.ring:  # else: all its members are gone
            self._adopt(group)
        return MEASURING if self.measurements else WIRING

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
        self._step(Probed, (peer, message))

    def _take_rate(self, tuple report):
        """Keep the rate of an edge, unless its round is over."""
        cdef Peer peer
        peer, message = report
        measurement = self.measurements.get(peer.group)
        if measurement is not None and measurement.take(message.round, (peer.id, message.target)):
            group, rate = self.members.groups[peer.group], message.bytes_per_second
            self._learn_rate(group, peer.id, message.target, rate, message.reason)
        return MEASURING

    def _ignore(self, argument):
        """Nothing is measured: a report comes too late, a peer that is gone has no edge to drop, no probe is late."""
        return self.phase

    def _learn_rate(self, Group group, source, target, rate, str reason):
        group.bandwidths.put(source, target, rate, self.members.now_ns)
        if not rate:
            self.members.log(INFO, f"edge={source}->{target} group={group.number} not measured reason={reason!r}")

    cdef int sweep(self, tick) except -1:
        """Time has passed."""
        return self._step(Tick, tick)

    def _end_late_probes(self, tick):
        """End the rounds that last too long: their missing probes count as failed."""
        for number, measurement in sorted(self.measurements.items()):
            if measurement.pending and self.members.now_ns >= measurement.deadline_ns:
                for source, target in measurement.give_up():
                    self._learn_rate(self.members.groups[number], source, target, 0, "no report in time")
        return MEASURING

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

    def _answer(self, argument):
        """Answer all callers: every ring is chosen and wired."""
        cdef Membership members = self.members
        cdef Peer peer
        world = members.world()
        for peer_id, vote in self.waiting.items():
            peer = members.peers[peer_id]
            numbers = members.numbers(members.groups[peer.group], world)
            members.send(peer, OptimizeDone(vote.call, members.round, *numbers))
            peer.told_world = members.world_changes
        self._begin_moonshot()
        return self._end(argument)

    def _end(self, argument):
        """Drop what is left of the optimisation."""
        self.waiting, self.measurements = {}, {}
        return IDLE

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
        assert self.phase is not IDLE or not self._is_ripe(), f"a unanimous {OPTIMIZE} was left open"
        assert self.phase is not IDLE or not self.waiting, "a peer waits for an optimisation that is over"
        assert (self.phase is MEASURING) == bool(self.measurements), f"{self.phase}, and measures {self.measurements}"
        if self.phase is not IDLE:
            event, _ = self._due()
            assert event is None, f"{event.__name__} while {self.phase}, and the optimisation did not go on"
        assert self.waiting.keys() <= members.accepted, "a peer that is no member waits for an optimisation"
        assert not self.waiting.keys() & votes[TOPOLOGY].keys(), "a member is in two calls"
        assert not votes[OPTIMIZE].keys() & votes[TOPOLOGY].keys(), "a member is in two calls"
        assert not self.found or set(self.found) == set(members.groups[self.searched].ring), "found for other peers"
        for number, measurement in self.measurements.items():
            if not measurement.is_over():
                measurement.check(set(members.groups[number].ring))
            else:
                assert number in members.wiring, f"group {number}: measured, and nothing followed"


# (phase, event) -> (handler, phases that may follow). A pair that is not here is an error.
TRANSITIONS = {
    (IDLE, VoteComplete): (Optimizer._begin, (MEASURING, WIRING, IDLE)),
    (MEASURING, Probed): (Optimizer._take_rate, (MEASURING,)),
    (MEASURING, Tick): (Optimizer._end_late_probes, (MEASURING,)),
    (MEASURING, PeerWent): (Optimizer._drop_edges, (MEASURING,)),
    (MEASURING, ProbesOver): (Optimizer._go_on, (MEASURING, WIRING)),
    (MEASURING, CallersGone): (Optimizer._end, (IDLE,)),
    (WIRING, RingsWired): (Optimizer._answer, (IDLE,)),
    (WIRING, CallersGone): (Optimizer._end, (IDLE,)),
    **{
        (phase, event): (Optimizer._ignore, (phase,))
        for phase in (IDLE, WIRING)
        for event in (Probed, Tick, PeerWent)
    },
}
