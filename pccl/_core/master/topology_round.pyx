# cython: language_level=3
"""A topology round at the master: from the unanimous vote to the newcomers that are members.

A round is unanimous over all accepted peers of all groups. When the last vote is in and no ring is being wired, the
vote is closed: every newcomer that fits (see `admission`) is put into its group's ring, and the changed rings
are ordered. When all their members have reported, the newcomers are accepted and all voters get the same numbers. A run
without members admits newcomers as soon as one fits. Votes that wait for a larger group hold the round while none does.

The table `TRANSITIONS` at the end says what may happen in which phase, and what may follow; docs/architecture.md shows
it as a diagram. Its events are inner ones, which `settle` finds after every event of the master.

Part of the master's machine. No round closes while an optimisation is under way, or the other way round.
"""

from pccl._core.protocol.events import FINISH, INFO, OPTIMIZE, SYNC, TOPOLOGY
from pccl._core.protocol.messages import Accepted, TopologyDone
from pccl._core.protocol.outcomes import INVALID_USAGE

from .admission cimport Admission
from .group cimport Group
from .membership cimport Membership, Peer
from .optimizer cimport Optimizer
from .ballots import Vote
from .deadlock import name_peers
from .events import NewcomerWaits, RingsWired, VoteComplete, VoteReopened
from .optimizer import IDLE

VOTING = "voting"  # members vote, or no member does
HELD = "held"  # all have voted, and every voter waits for a larger group
CLOSED = "closed"  # the vote is closed, and the rings with the newcomers are being wired

# The same, without a look-up by name: every event of the master needs them.
cdef str voting = VOTING, idle = IDLE, topology = TOPOLOGY


cdef class TopologyRound:
    """The round under way; its number is that of the rounds that were completed."""

    def __init__(self, Membership members not None, ballots, Optimizer optimizer not None, Admission admission not None):
        self.members = members
        self.admission = admission
        self.ballots = ballots
        self.optimizer = optimizer
        self.votes = ballots.votes
        self.phase = VOTING
        self.wanting = {}
        self.checking = members.options.check

    def on_vote(self, Peer peer, message):
        """A member calls update_topology."""
        cdef Group group = self.members.groups[peer.group]
        if group.collectives.holds(peer.id):
            wrong = "voted on the topology while a reduce of its own has no verdict"
        elif group.consensus.holds(peer.id):
            wrong = f"voted on the topology while it is in {SYNC}"
        elif self.optimizer.involves(peer.id):
            wrong = f"voted on the topology while it is in {OPTIMIZE}"
        elif peer.id in self.votes[FINISH]:
            wrong = f"voted on the topology while it is in {FINISH}"
        else:
            wrong = self.ballots.cast(TOPOLOGY, peer.id, Vote(message.call, message.wanted, self.members.now_ns))
        if wrong:
            self.members.kick(peer, INVALID_USAGE, wrong)
        elif message.wanted > len(group.ring):
            since_ns, _ = self.wanting.get(peer.id, (self.members.now_ns, 0))
            self.wanting[peer.id] = since_ns, message.wanted
        else:
            self.stop_wanting(peer.id)

    cdef int stop_wanting(self, peer_id) except -1:
        """A member waits no more until its group is larger."""
        self.wanting.pop(peer_id, None)
        return 0

    # ------------------------------------------------------------------------------------------ settling

    cdef bint settle(self) except -1:
        """Handle the inner event that is due. Return False if there is none."""
        cdef dict votes = <dict> self.votes[topology]
        if self.phase is voting and len(votes) < len(self.members.accepted):  # at nearly every event
            return False
        event = self._due()
        if event is None:
            return False
        self._step(event)
        return True

    cpdef int _step(self, subject) except -1:
        """Take the round through the table. A handler returns the next phase."""
        entry = TRANSITIONS.get((self.phase, subject))
        assert entry is not None, f"{subject.__name__} is not in the table of a topology round that is {self.phase}"
        handler, next_phases = <tuple> entry
        phase = handler(self)
        if self.checking:
            assert phase in next_phases, f"{subject.__name__} while {self.phase} led the topology round to {phase}"
        self.phase = phase
        return 0

    cdef _due(self):
        """Return the inner event that is due, or None."""
        if self.phase is voting:
            ready = self._is_complete() and not self.members.wiring and self.optimizer.phase is idle
            return VoteComplete if ready else None
        if self.phase is CLOSED:
            return None if self.members.wiring else RingsWired
        if not self.members.accepted or not self._is_complete():
            return VoteReopened
        # Only another vote can change what a held round waits for, because groups do not grow without newcomers. So it
        # is not computed at every heartbeat.
        return NewcomerWaits if self.admission.fitting and not self.members.wiring else None

    cdef bint _is_complete(self) except -1:
        """Whether all members have voted; without members: whether a newcomer fits."""
        cdef dict votes = <dict> self.votes[topology]
        if len(votes) < len(self.members.accepted):
            return False
        return len(votes) > 0 or len(self.admission.fitting) > 0

    def _close_or_hold(self):
        """Close the vote, unless no newcomer fits and every voter waits for a larger group."""
        if not self.admission.fitting and not self._is_a_voter_content():
            return HELD
        return self._close()

    def _is_a_voter_content(self):
        """Whether the group of one voter is as large as it wants."""
        for peer_id, vote in self.votes[TOPOLOGY].items():
            if vote.wanted <= len(self.members.groups[self.members.peers[peer_id].group].ring):
                return True
        return False

    def _close(self):
        """Close the vote: put every newcomer that fits into its group's ring."""
        cdef Group group
        if self.checking:
            for group in self.members.groups.values():
                assert group.collectives.is_idle(), f"a round closed over a reduce of group {group.number}"
                assert group.consensus.is_idle(), f"a round closed over {SYNC} of group {group.number}"
        for number in sorted(self.admission.admit()):
            self.optimizer.cancel_moonshot(number)
        return CLOSED

    def _reopen(self):
        """Wait for votes again."""
        return VOTING

    def _complete(self):
        """All rings are wired: the newcomers are members, and all voters get the same numbers."""
        cdef Membership members = self.members
        cdef Peer peer
        admitted = members.accept_admitted()
        world = members.world()
        for peer_id in sorted(admitted):
            peer = members.peers[peer_id]
            members.send(peer, Accepted(members.round, *self._numbers(peer, world)))
        for peer_id, vote in self.ballots.close(TOPOLOGY).items():
            peer = members.peers[peer_id]
            if vote.wanted <= members.groups[peer.group].size():
                self.stop_wanting(peer_id)
            members.send(peer, TopologyDone(vote.call, members.round, *self._numbers(peer, world)))
        if admitted:
            sizes = {number: len(group.ring) for number, group in members.groups.items() if group.ring}
            members.log(INFO, f"admitted {name_peers(sorted(admitted))} world={len(members.accepted)} groups={sizes}")
        return VOTING

    cdef tuple _numbers(self, Peer peer, tuple world):
        """Return the numbers of the world for a member, and note that it knows them from now on."""
        peer.told_world = self.members.world_changes
        return self.members.numbers(self.members.groups[peer.group], world)

    def check(self):
        """Invariants between two events."""
        members, event = self.members, self._due()
        assert event is None, f"{event.__name__} while {self.phase}, and the topology round did not go on"
        assert self.phase is CLOSED or not members.admitting, f"newcomers are admitted while {self.phase}"
        assert self.phase is not HELD or not self._is_a_voter_content(), "a topology round is held without a reason"
        assert members.accepted or not self.admission.fitting or self.phase is CLOSED, "newcomers wait without members"


# (phase, event) -> (handler, phases that may follow). A pair that is not here is an error.
TRANSITIONS = {
    (VOTING, VoteComplete): (TopologyRound._close_or_hold, (CLOSED, HELD)),
    (HELD, VoteReopened): (TopologyRound._reopen, (VOTING,)),
    (HELD, NewcomerWaits): (TopologyRound._close, (CLOSED,)),
    (CLOSED, RingsWired): (TopologyRound._complete, (VOTING,)),
}
