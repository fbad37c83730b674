# cython: language_level=3
"""What the members of a group do among themselves: their collectives, and the shared state they agree on.

Each is a machine of its own, in `collectives` and in `agreement`. Here is what the master adds to them: who may say what
beside its other calls, and who is told what follows. A group in which somebody said something is *stirred*, and settled
once, when the event is over; the others are not looked at. One where nobody synchronises is asked just that.

Part of the master's machine. A small reduce takes as long as its way through here, which it goes twice for each member:
whatever lies on that way is typed, and is not found by name.
"""

from pccl._core.protocol.events import DEBUG, SYNC, TOPOLOGY
from pccl._core.protocol.messages import ReduceFailed, World
from pccl._core.protocol.outcomes import INVALID_USAGE

from .collectives cimport Collectives
from .group cimport Group
from .optimizer cimport Optimizer
from .roster cimport Peer
from .state_consensus cimport StateConsensus
from .events import Save


cdef class Affairs(Optimizer):
    """Collectives and agreements of all groups."""

    cdef Group _stir(self, Peer peer):
        """The group of whoever said something: something may follow in it when this event is over."""
        self.stirred.add(peer.group)
        return self.groups[peer.group]

    # ------------------------------------------------------------------------------------------ shared state

    def _on_vote_sync(self, Peer peer, message):
        if peer.id in self.votes[TOPOLOGY] or self._optimizes(peer):
            self._kick(peer, INVALID_USAGE, f"voted in {SYNC} while it votes on the topology")
        elif self.groups[peer.group].collectives.holds(peer.id):
            self._kick(peer, INVALID_USAGE, f"voted in {SYNC} while a reduce of its own has no verdict")
        else:
            self._kick_if(peer, self._stir(peer).agreement.vote(peer.id, message, self.now_ns))

    def _on_schema(self, Peer peer, message):
        self._kick_if(peer, self._stir(peer).agreement.give_schema(peer.id, message))

    def _on_fetched(self, Peer peer, message):
        self._kick_if(peer, self._stir(peer).agreement.fetched(peer.id, message))

    # ------------------------------------------------------------------------------------------ collectives

    def _on_initiate(self, Peer peer, message):
        cdef Group group = self._stir(peer)
        if peer.id in self.votes[TOPOLOGY] or self._optimizes(peer):
            self._kick(peer, INVALID_USAGE, "initiated a reduce while it votes on the topology")
        elif group.agreement.holds(peer.id):
            self._kick(peer, INVALID_USAGE, f"initiated a reduce while it is in {SYNC}")
        else:
            self._kick_if(peer, group.collectives.initiate(peer.id, message.shapes, self.now_ns))

    def _on_finished(self, Peer peer, message):
        self._kick_if(peer, self._stir(peer).collectives.finished(peer.id, message.sequence, message.ok, message.reason))

    def _on_awaiting(self, Peer peer, message):
        self._stir(peer).collectives.awaits(peer.id, message.tag, self.now_ns)

    def _on_withdraw_reduce(self, Peer peer, message):
        self._stir(peer).collectives.withdraw(peer.id, message.tag)

    cdef int _kick_if(self, Peer peer, str wrong) except -1:
        if wrong:
            self._kick(peer, INVALID_USAGE, wrong)
        return 0

    # ------------------------------------------------------------------------------------------ settling

    cdef bint _settle_groups(self) except -1:
        """Tell the members of stirred groups what follows. True if somebody had to go, which changes rings."""
        cdef Py_ssize_t count = len(self.stirred)
        if count == 0:
            return False
        if count == 1:
            self._settle_group(self.stirred.pop())
        else:
            numbers = sorted(self.stirred)
            self.stirred.clear()
            for number in numbers:
                self._settle_group(number)
        return len(self.changed) > 0 or len(self.stirred) > 0

    cdef int _settle_group(self, number) except -1:
        cdef Group group = self.groups.get(number)
        if group is not None:
            self._settle_collectives(group)
            self._settle_consensus(group)
        return 0

    cdef int _settle_collectives(self, Group group) except -1:
        """Tell the members what became of their collectives."""
        cdef Collectives collectives = group.collectives
        cdef bint wired = group.number not in self.wiring
        cdef tuple numbers = None
        if collectives.decide(group.ring, wired, wired and not group.newcomers):
            numbers = self._numbers(group)
        for peers, message in collectives.tell(group.ring, group.epoch, numbers):
            for peer_id in peers:
                self._tell(self.peers[peer_id], group, message)
        return 0

    cdef int _tell(self, Peer peer, Group group, message) except -1:
        """Send a member what concerns a collective, and ahead of it the numbers of the world if they have changed."""
        if peer.told_world != self.world_changes:
            peer.told_world = self.world_changes
            if type(message) is not ReduceFailed:  # which carries them itself
                self._send(peer, World(*self._numbers(group)))
        return self._send(peer, message)

    def _numbers(self, group):
        """The numbers of the world as this group sees it now. Pending peers never count."""
        sizes = [size for size in [one.size() for one in self.groups.values()] if size]
        return group.epoch, len(self.accepted), group.size(), len(sizes), max(sizes), self.round

    cdef int _settle_consensus(self, Group group) except -1:
        """Tell the members what became of their vote; what was agreed is kept before anybody relies on it."""
        cdef StateConsensus agreement = group.agreement
        if agreement.is_idle() and not agreement.outbox:
            return 0
        told, kicks, agreed = agreement.settle(group.size(), self.peers)
        if agreed:
            self.actions.append(Save())
            self.counters["agreed"] += 1
            self._log(DEBUG, f"group={group.number} agreed revision={agreement.revision} digest={agreement.content.hex()}")
        for peer_id, message in told:
            self._tell(self.peers[peer_id], group, message)
        for peer_id, (result, reason) in sorted(kicks.items()):
            self._kick(self.peers[peer_id], result, reason)
        return 0
