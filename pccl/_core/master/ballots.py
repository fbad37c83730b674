"""The votes of a run: which peer is in which blocking call, and since when.

A call is known by the name its users know it by. It is open from its first vote until the master closes it; a vote may
be withdrawn until then. Here is what follows from the votes alone: which peers are missing, how long the others have
waited, and which calls can never meet. Collectives and the state consensus keep their own votes and show them as open
calls too. The master decides what follows from all of it. Part of the master's machine; pure.
"""

from __future__ import annotations

from pccl._core.records import record

from .deadlock import BlockingCall, describe_missing, explain_stuck, find_stuck

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .collectives import OpenReduce
    from .state_consensus import StateConsensus


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
    missing: frozenset[int]  # peers that have yet to make it
    waiting: dict[int, int]  # peers that block in it, since when; a peer that made it without blocking is in neither
    tag: OpenReduce | None = None  # the collective's own votes
    consensus: StateConsensus | None = None  # the shared state's; neither: a call of all members of the run

    def waited_ns(self, now_ns: int) -> int:
        """How long the first peer has waited for a missing one; 0 if no peer waits or none is missing."""
        return now_ns - min(self.waiting.values()) if self.missing and self.waiting else 0


class Ballots:
    """All calls under way that concern every member of the run."""

    __slots__ = ("_warned", "votes")

    def __init__(self, *names: str) -> None:
        self.votes: dict[str, dict[int, Vote]] = {name: {} for name in names}
        self._warned: set[str] = set()  # calls whose long wait was reported

    def cast(self, name: str, peer: int, vote: Vote) -> str:
        """Take a peer's vote in this call. Returns what is wrong with it, or nothing."""
        votes = self.votes[name]
        if peer in votes:
            return f"voted twice in {name} (calls {votes[peer].call} and {vote.call})"
        votes[peer] = vote
        return ""

    def withdraw(self, peer: int, call: int) -> None:
        """Too late is no error: then the answer is already on its way, and its call number says that it is stale."""
        for votes in self.votes.values():
            vote = votes.get(peer)
            if vote is not None and vote.call == call:
                del votes[peer]

    def drop(self, peer: int) -> None:
        """The peer is gone, and its votes with it."""
        for votes in self.votes.values():
            votes.pop(peer, None)

    def close(self, name: str) -> dict[int, Vote]:
        """The call is answered: returns the votes of all that made it."""
        closed = self.votes[name]
        self.votes[name] = {}
        self._warned.discard(name)
        return closed

    def open_calls(self, electorate: set[int]) -> list[OpenCall]:
        """Every call that has a vote."""
        calls = []
        for name, votes in self.votes.items():
            missing = frozenset(electorate - votes.keys()) if votes else frozenset()
            if not missing:
                self._warned.discard(name)
            if votes:
                calls.append(OpenCall(name, missing, {peer: vote.since_ns for peer, vote in votes.items()}))
        return calls

    def is_news(self, call: OpenCall) -> bool:
        """Whether this call's long wait is reported for the first time."""
        votes = call.tag or call.consensus
        if votes is not None:
            news = not votes.warned
            votes.warned = True
        else:
            news = call.name not in self._warned
            self._warned.add(call.name)
        return news


def name_missing(missing: frozenset[int] | set[int], calls: list[OpenCall]) -> str:
    """Name the missing peers, and the calls that they are in instead."""
    present: dict[str, dict[int, int]] = {}
    for call in calls:
        present.setdefault(call.name, {}).update(call.waiting)
    return describe_missing(present, sorted(missing))


def find_deadlock(calls: list[OpenCall], oldest_ns: int) -> tuple[str, list[tuple[OpenCall, int]]]:
    """Find calls that can never meet, if all of them are that old. Returns why, and which peer is in which call."""
    waits = [BlockingCall(call.name, call.missing | call.waiting.keys(), frozenset(call.waiting)) for call in calls]
    stuck = find_stuck(waits) if len(waits) > 1 else set()
    involved = [(call, peer) for call in calls for peer in sorted(call.waiting.keys() & stuck)]
    if not stuck or any(call.waiting[peer] > oldest_ns for call, peer in involved):
        return "", []
    return explain_stuck(waits, stuck), involved
