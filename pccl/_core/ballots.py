"""Who is in which blocking call, and since when: the votes of a run.

A call is known by the name its users know it by. It is open from its first vote until the master closes it; a vote may
be withdrawn until then. What can be read off the votes alone is here: who is missing, how long the others have waited,
and which calls can never meet. What follows from it is the master's decision. Part of the master's machine; pure.
"""

from __future__ import annotations

from pccl.records import record

from .deadlock import Waiting, describe_missing, explain_stuck, find_stuck


@record
class Vote:
    """One peer's part in a call."""

    call: int  # the peer's own number for it
    wanted: int  # members of its group that are worth waiting for; 0: does not wait
    since_ns: int


class Ballots:
    """All calls under way."""

    __slots__ = ("_warned", "votes")

    def __init__(self, *names: str) -> None:
        self.votes: dict[str, dict[int, Vote]] = {name: {} for name in names}
        self._warned: set[str] = set()  # calls whose long wait was reported

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
        """The call is answered: everybody who made it."""
        closed = self.votes[name]
        self.votes[name] = {}
        self._warned.discard(name)
        return closed

    def waited_ns(self, name: str, electorate: set[int], now_ns: int) -> int:
        """How long the first voter has waited for somebody who is missing; 0 if nobody waits or nobody is missing."""
        votes = self.votes[name]
        if not votes or len(votes) >= len(electorate):
            self._warned.discard(name)
            return 0
        return now_ns - min(vote.since_ns for vote in votes.values())

    def is_news(self, name: str) -> bool:
        """Whether this call's long wait is reported for the first time."""
        if name in self._warned:
            return False
        self._warned.add(name)
        return True

    def missing(self, name: str, electorate: set[int]) -> str:
        """Who has not made that call, and what they do instead."""
        return describe_missing(self.votes, sorted(electorate - set(self.votes[name])))

    def take_stuck(self, names: list[str], electorate: set[int], oldest_ns: int) -> tuple[str, list[tuple[int, int]]]:
        """End the calls among these that can never meet, if all of them are that old: why, and (peer, call) of each."""
        everybody = frozenset(electorate)
        calls = [Waiting(name, everybody, frozenset(self.votes[name])) for name in names if self.votes[name]]
        stuck = find_stuck(calls) if len(calls) > 1 else set()
        involved = [(call.name, peer) for call in calls for peer in sorted(call.present & stuck)]
        if not stuck or any(self.votes[name][peer].since_ns > oldest_ns for name, peer in involved):
            return "", []
        return explain_stuck(calls, stuck), [(peer, self.votes[name].pop(peer).call) for name, peer in involved]
