# cython: language_level=3
"""One peer group: its ring (members, order, edges, members that have yet to report), its collectives and its consensus.

A ring is ordered by the master and wired by its members. Every order has an *epoch*; an edge keeps the epoch in which
it was ordered for as long as it exists. A member that already has an ordered edge, by peer and epoch, leaves it alone:
so only changed edges are rewired, and both ends of an edge always agree on which connection is meant. A pair that
cannot connect is marked until the mark expires, and rings avoid marked pairs; a pair whose edge breaks repeatedly
before the ring is whole is marked too.

The group has its collectives, its consensus on the shared state, and the bandwidths of its edges; each is an object of
its own. `group_dispatch` passes messages to them. Part of the master's machine; pure, and knows nothing of votes.
"""

from pccl._core.protocol.messages import RingOrder

from .collectives cimport Collectives
from .state_consensus cimport StateConsensus
from .ring import choose_victim, find_ring, steps_of


cdef class Group:
    """The ring of one peer group, as the master sees it."""

    def __init__(self, number, bandwidths):
        self.number = number
        self.bandwidths = bandwidths
        self.ring = []
        self.newcomers = set()
        self.epoch = 0
        self.edges = {}
        self.waiting = set()
        self.losses = {}
        self.marks = {}
        self.ordered_ns = 0
        self.collectives = Collectives(number)
        self.consensus = StateConsensus(number)

    def add(self, ring, newcomers):
        """Change the ring to this one, with newcomers; an optimisation may find better ranks for them."""
        assert set(ring) == {*self.ring, *newcomers}, f"{ring} are not the members {self.ring} and {newcomers}"
        self.ring = ring
        self.newcomers.update(newcomers)
        for peer in newcomers:
            self.bandwidths.add(peer)

    def accept(self, peer):
        """The newcomer is a member."""
        self.newcomers.discard(peer)

    def remove(self, peer):
        """Remove a member that is gone, and its edges."""
        self.ring.remove(peer)
        self.collectives.remove(peer)
        self.consensus.remove(peer)
        self.bandwidths.drop(peer)
        self.newcomers.discard(peer)
        self.waiting.discard(peer)
        self.edges = {pair: epoch for pair, epoch in self.edges.items() if peer not in pair}
        self.marks = {pair: mark for pair, mark in self.marks.items() if peer not in pair}
        self.losses = {pair: count for pair, count in self.losses.items() if peer not in pair}

    def members(self):
        """Ids of the accepted members."""
        return set(self.ring) - self.newcomers

    cpdef int size(self) except -1:
        """How many members it has; newcomers do not count."""
        return len(self.ring) - len(self.newcomers)

    def lose_edge(self, source, target, epoch):
        """Remove an edge that broke. Return how often it broke since the ring was whole; 0 if it no longer exists."""
        pair = source, target
        if self.edges.get(pair) != epoch:
            return 0
        del self.edges[pair]
        self.losses[pair] = self.losses.get(pair, 0) + 1
        return self.losses[pair]

    def mark(self, source, target, reason, expiry_ns):
        """Mark a pair that cannot connect: rings avoid it until the mark expires."""
        self.marks[(source, target)] = (expiry_ns, reason)

    def forbidden(self, now_ns):
        """Return the pairs whose marks have not expired."""
        return {pair for pair, mark in self.marks.items() if mark[0] > now_ns}

    def adopt(self, ring):
        """Change the ring to another order of the same members; it is wired next."""
        assert set(ring) == set(self.ring) and len(ring) == len(self.ring), f"{ring} are not the members {self.ring}"
        self.ring = list(ring)

    def solve(self, now_ns):
        """Put the ring into a legal order. False if there is none."""
        self.marks = {pair: mark for pair, mark in self.marks.items() if mark[0] > now_ns}
        order = find_ring(self.ring, set(self.marks))
        if order is None:
            return False
        self.ring = order
        return True

    def victim(self, suspects):
        """Return the peer to kick if there is no legal order, and why. `suspects` have been silent lately."""
        victim = choose_victim(self.ring, self.newcomers, set(self.marks), suspects)
        members = set(self.ring)
        reasons = [
            f"peer {pair[0]} cannot reach peer {pair[1]} ({mark[1]})"
            for pair, mark in sorted(self.marks.items())
            if victim in pair and pair[0] in members and pair[1] in members
        ]
        return victim, (
            f"no ring is possible with peer {victim}: {'; '.join(reasons[:4]) or 'too many pairs cannot connect'}. "
            "Check that peers can dial each other's one port (firewall, Options.advertise)."
        )

    def order(self, dict peers, long long now_ns):
        """Begin a new epoch. Return a list of (peer id, RingOrder) for its members."""
        cdef list orders = []
        cdef Py_ssize_t count = len(self.ring)
        self.epoch += 1
        self.ordered_ns = now_ns
        self.waiting = set(self.ring)
        standing = self.edges
        self.edges = {step: standing.get(step, self.epoch) for step in steps_of(self.ring)}
        for index, peer_id in enumerate(self.ring):
            if count < 2:
                orders.append((peer_id, RingOrder(self.epoch, 0, 1, 0, 0, 0, 0, 0, 0, 0, "")))
                break
            here = peers[peer_id]
            previous_id, next_id = self.ring[index - 1], self.ring[(index + 1) % count]
            previous, following = peers[previous_id], peers[next_id]
            orders.append((peer_id, RingOrder(
                self.epoch, index, count,
                next_id, self.edges[(peer_id, next_id)], min(here.lanes, following.lanes),
                previous_id, self.edges[(previous_id, peer_id)], min(previous.lanes, here.lanes),
                following.port, following.host,
            )))
        return orders

    def reported(self, peer, epoch):
        """Both edges of a member are up. Return True if it was the last member of this epoch."""
        if epoch != self.epoch or peer not in self.waiting:
            return False
        self.waiting.discard(peer)
        if self.waiting:
            return False
        self.losses.clear()
        return True

    def check(self):
        """Invariants of a ring between two events."""
        members = set(self.ring)
        assert len(members) == len(self.ring), f"group {self.number}: a member twice in {self.ring}"
        assert self.newcomers <= members, f"group {self.number}: newcomers {self.newcomers} not in {self.ring}"
        assert self.waiting <= members, f"group {self.number}: waits for {self.waiting}, not in {self.ring}"
        assert set(self.edges) == set(steps_of(self.ring)), f"group {self.number}: edges {self.edges} of {self.ring}"
        self.bandwidths.check()
        assert all(epoch <= self.epoch for epoch in self.edges.values()), f"group {self.number}: edge epoch too large"
