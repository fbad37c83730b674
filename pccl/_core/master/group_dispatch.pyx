# cython: language_level=3
"""Passes messages of members to their group's collectives and consensus, and sends what follows to the members.

Both are machines of their own, in `collectives` and in `state_consensus`. The master adds here which calls a member may
make at the same time, and which members are told what follows. A group in which a member said something is *unsettled*,
and is settled once, when the event is over; the other groups are not visited.

Part of the master's machine. Every reduce passes through here twice for each member, and a small one takes as long as
that: this path is typed and has no look-ups by name.
"""

from pccl._core.protocol.events import DEBUG, FINISH, SYNC, TOPOLOGY, WARNING
from pccl._core.protocol.messages import ReduceFailed, World
from pccl._core.protocol.outcomes import INVALID_ARGUMENT, INVALID_USAGE

from .collectives cimport Collectives
from .group cimport Group
from .membership cimport Membership, Peer
from .optimizer cimport Optimizer
from .state_consensus cimport StateConsensus
from .events import Save


cdef class GroupDispatch:
    """What members say to their group, and what they are told."""

    def __init__(self, Membership members not None, Optimizer optimizer not None, ballots):
        self.members = members
        self.optimizer = optimizer
        self.votes = ballots.votes

    cdef bint _votes_elsewhere(self, Peer peer) except -1:
        """Whether this member is in a call of the whole run, which excludes calls of its group."""
        cdef dict topology = self.votes[TOPOLOGY], finish = self.votes[FINISH]
        return peer.id in topology or peer.id in finish or self.optimizer.involves(peer.id)

    cdef str _where(self, Peer peer):
        """Say what it does there."""
        return f"is in {FINISH}" if peer.id in self.votes[FINISH] else "votes on the topology"

    cdef int _kick_if(self, Peer peer, str wrong) except -1:
        if wrong:
            self.members.kick(peer, INVALID_USAGE, wrong)
        return 0

    # ------------------------------------------------------------------------------------------ shared state

    def on_vote_sync(self, Peer peer, message):
        """A member calls sync_shared_state."""
        cdef Group group = self.members.group_to_settle(peer)
        if self._votes_elsewhere(peer):
            self._kick_if(peer, f"voted in {SYNC} while it {self._where(peer)}")
        elif group.collectives.holds(peer.id):
            self._kick_if(peer, f"voted in {SYNC} while a reduce of its own has no verdict")
        else:
            self._kick_if(peer, group.consensus.vote(peer.id, message, self.members.now_ns))

    def on_schema(self, Peer peer, message):
        """A page of a schema that was asked for."""
        self._kick_if(peer, self.members.group_to_settle(peer).consensus.give_schema(peer.id, message))

    def on_fetched(self, Peer peer, message):
        """A receiver has the shared state, or no source left."""
        self._kick_if(peer, self.members.group_to_settle(peer).consensus.fetched(peer.id, message))

    # ------------------------------------------------------------------------------------------ collectives

    def on_initiate(self, Peer peer, message):
        """A member initiates reduces."""
        cdef Group group = self.members.group_to_settle(peer)
        if self._votes_elsewhere(peer):
            self._kick_if(peer, f"initiated a reduce while it {self._where(peer)}")
        elif group.consensus.holds(peer.id):
            self._kick_if(peer, f"initiated a reduce while it is in {SYNC}")
        else:
            self._kick_if(peer, group.collectives.initiate(peer.id, message.signatures, self.members.now_ns))

    def on_finished(self, Peer peer, message):
        """A member ended its part of a reduce."""
        cdef Collectives collectives = self.members.group_to_settle(peer).collectives
        self._kick_if(peer, collectives.finished(peer.id, message.sequence, message.ok, message.reason))

    def on_awaiting(self, Peer peer, message):
        """A caller blocks on a tag."""
        self.members.group_to_settle(peer).collectives.awaits(peer.id, message.tag, self.members.now_ns)

    def on_withdraw_reduce(self, Peer peer, message):
        """A caller gave a tag up."""
        self.members.group_to_settle(peer).collectives.withdraw(peer.id, message.tag)

    # ------------------------------------------------------------------------------------------ settling

    cdef bint settle(self) except -1:
        """Tell the members of unsettled groups what follows. Return True if a kick has changed rings."""
        cdef set unsettled = self.members.unsettled
        cdef Py_ssize_t count = len(unsettled)
        if count == 0:
            return False
        if count == 1:
            self._settle_group(unsettled.pop())
        else:
            numbers = sorted(unsettled)
            unsettled.clear()
            for number in numbers:
                self._settle_group(number)
        return len(self.members.changed) > 0 or len(unsettled) > 0

    cdef int _settle_group(self, number) except -1:
        cdef Group group = self.members.groups.get(number)
        if group is not None:
            self._settle_collectives(group)
            self._settle_consensus(group)
        return 0

    cdef int _settle_collectives(self, Group group) except -1:
        """Tell the members what became of their collectives, and kick those that disagree with a majority."""
        cdef Collectives collectives = group.collectives
        cdef bint wired = group.number not in self.members.wiring
        cdef tuple numbers = None
        cdef dict peers = self.members.peers
        if collectives.decide(group.ring, wired, wired and not group.newcomers):
            numbers = self._numbers(group)
        for told, message in collectives.tell(group.ring, group.epoch, numbers):
            for peer_id in told:
                self._tell(peers[peer_id], group, message)
        if collectives.odd is not None:
            for peer_id, reason in sorted(collectives.take_odd().items()):
                self.members.kick(peers[peer_id], INVALID_ARGUMENT, reason)
        return 0

    cdef int _tell(self, Peer peer, Group group, message) except -1:
        """Send a member a message, and ahead of it the numbers of the world if they have changed."""
        if peer.told_world != self.members.world_changes:
            peer.told_world = self.members.world_changes
            if type(message) is not ReduceFailed:  # that one carries them itself
                self.members.send(peer, World(*self._numbers(group)))
        return self.members.send(peer, message)

    cdef tuple _numbers(self, Group group):
        """The numbers of the world as this group sees it now, in the order of World and ReduceFailed."""
        return *self.members.numbers(group, self.members.world()), self.members.round

    cdef int _note_overwrite(self, Peer peer, revision, agreed) except -1:
        """Count a sync that overwrote a divergent member. Its own log names the tensors."""
        peer.overwritten += 1
        self.members.count("overwritten")
        level = WARNING if peer.overwritten == 1 else DEBUG
        line = f"peer={peer.id} overwritten by a sync group={peer.group} times={peer.overwritten}"
        self.members.log(level, f"{line} revision={revision} agreed={agreed}")
        return 0

    cdef int _settle_consensus(self, Group group) except -1:
        """Tell the members what became of their vote; what was agreed is saved before any member relies on it."""
        cdef StateConsensus consensus = group.consensus
        cdef Membership members = self.members
        if consensus.is_idle() and not consensus.outbox:
            return 0
        told, kicks, agreed = consensus.settle(group.size(), members.peers, members.run_name)
        if agreed:
            members.act(Save())
            members.count("agreed")
            digest = consensus.content.hex()
            members.log(DEBUG, f"group={group.number} agreed revision={consensus.revision} digest={digest}")
        for peer_id, message in told:
            self._tell(members.peers[peer_id], group, message)
        for peer_id, revision, agreed_revision in consensus.overwritten:
            self._note_overwrite(members.peers[peer_id], revision, agreed_revision)
        for peer_id, (result, reason) in sorted(kicks.items()):
            members.kick(members.peers[peer_id], result, reason)
        return 0
