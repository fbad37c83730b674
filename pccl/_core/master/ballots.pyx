# cython: language_level=3
"""The votes of a run: which peer is in which blocking call, and since when.

A call has the name of its public function. It is open from its first vote until the master closes it; a vote may be
withdrawn until then. This file computes what follows from the votes alone: which peers are missing, how long the others
have waited, and which calls are in a deadlock. Collectives and the state consensus keep their own votes and show them
as open calls too. The master decides what it does about them. Part of the master's machine; pure. Compiled, because
every peer casts a vote in every step of its training loop.
"""

from collections import Counter

from pccl._core.records import record

from .deadlock import BlockingCall, describe_missing, explain_stuck, find_knots, find_odd, find_stuck


@record
class Vote:
    """One peer's part in a call."""

    call: int  # the peer's own number for it
    wanted: int  # members of its group that are worth waiting for; 0: does not wait
    since_ns: int


@record
class OpenCall:
    """A call under way, as the peers that wait in it see it."""

    name: str
    missing: frozenset  # peers that have yet to make it
    waiting: dict  # peers that block in it, since when; a peer that voted without blocking is in neither
    tag: object = None  # OpenReduce: the collective's own votes
    consensus: object = None  # StateConsensus: the shared state's; neither: a call of all members of the run

    def waited_ns(self, now_ns):
        """How long the first peer has waited for a missing one; 0 if no peer waits or none is missing."""
        return now_ns - min(self.waiting.values()) if self.missing and self.waiting else 0


@record
class Deadlock:
    """Peers that wait for each other, and what the master does: it kicks the odd ones, or explains it to all."""

    reason: str  # for all peers in it
    involved: list  # (OpenCall, peer) for each peer, and each call that it waits in
    odd: dict  # peer -> why it is kicked: a majority waits for it in another call; empty: there is no majority


cdef class Ballots:
    """All calls under way that concern every member of the run."""

    def __init__(self, *names):
        self.votes = {name: {} for name in names}

    cpdef str cast(self, str name, peer, vote):
        """Take a peer's vote in this call. Returns what is wrong with it, or nothing."""
        cdef dict votes = self.votes[name]
        if peer in votes:
            return f"voted twice in {name} (calls {votes[peer].call} and {vote.call})"
        votes[peer] = vote
        return ""

    def withdraw(self, peer, call):
        """Remove the vote of this call, unless it is closed: then the answer is on its way, and the peer drops it.

        Return whether it was removed.
        """
        for votes in self.votes.values():
            vote = votes.get(peer)
            if vote is not None and vote.call == call:
                del votes[peer]
                return True
        return False

    def drop(self, peer):
        """Remove the votes of a peer that is gone."""
        for votes in self.votes.values():
            votes.pop(peer, None)

    cpdef dict close(self, str name):
        """Close the call. Return its votes, which the master answers."""
        cdef dict closed = self.votes[name]
        self.votes[name] = {}
        return closed

    def open_calls(self, electorate):
        """Return every call that has a vote; `electorate` are the peers that must make it."""
        calls = []
        for name, votes in self.votes.items():
            missing = frozenset(electorate - votes.keys()) if votes else frozenset()
            if votes:
                calls.append(OpenCall(name, missing, {peer: vote.since_ns for peer, vote in votes.items()}))
        return calls


def name_missing(missing, calls):
    """Name the missing peers, and the calls that they are in instead."""
    present = {}
    for call in calls:
        present.setdefault(call.name, {}).update(call.waiting)
    return describe_missing(present, sorted(missing))


def find_deadlock(calls, oldest_ns, threads):
    """Return a deadlock in which all peers have waited since `oldest_ns`; None if there is none.

    `threads` has the peers of which several threads make calls, and how many: while one of them is in no call, it may
    still make any call.
    """
    if len(calls) < 2:
        return None
    busy = Counter([peer for call in calls for peer in call.waiting if peer in threads])
    free = {peer for peer, count in busy.items() if count < threads[peer]}
    waits = [BlockingCall(call.name, call.missing | call.waiting.keys(), frozenset(call.waiting)) for call in calls]
    for knot in find_knots(waits, find_stuck(waits, free)):
        involved = [(call, peer) for call in calls for peer in sorted(call.waiting.keys() & knot)]
        if all([call.waiting[peer] <= oldest_ns for call, peer in involved]):
            return Deadlock(explain_stuck(waits, knot), involved, find_odd(waits, knot))
    return None
