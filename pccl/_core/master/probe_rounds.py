"""The rounds in which one group measures its missing edges, from the plan to the last report.

A round is a set of probes that do not disturb each other: no peer sends two, or receives two (see `tournament`). A
round also never has both directions between two peers, because the acknowledgements of one would wait behind the data
of the other: with 200 Mbit/s one way and 20 Mbit/s the other, two thirds of the faster rate were measured. So all edges
among n peers take n - 1 rounds, and about one more.

A round ends when all its probes are reported, or at its deadline: then probes without a report count as failed. The
steps of the present ring come first, because without them no other ring can be compared with it. A call measures a
bounded number of rounds; edges that are left are still missing at the next call. When a peer is lost, its edges are
removed and the rest is planned anew. Part of the master's machine; pure.
"""

from __future__ import annotations

from .ring import steps_of
from .tournament import schedule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .ring import Pair


def plan_rounds(ring: list[int], missing: Iterable[Pair]) -> list[list[Pair]]:
    """Return the rounds for these edges; the steps of the ring come first."""
    wanted = set(missing)
    first = sorted(wanted & set(steps_of(ring)))
    rest = schedule(wanted.difference(first))
    return _part_opposites([first, *rest] if first else rest)


def _part_opposites(rounds: list[list[Pair]]) -> list[list[Pair]]:
    """Return the same edges, never both directions of a pair in one round; edges that were moved come last."""
    parted: list[list[Pair]] = []
    later: list[Pair] = []
    for probes in rounds:
        crowded = {(source, target) for source, target in probes if source > target and (target, source) in probes}
        parted.append([pair for pair in probes if pair not in crowded])
        later += crowded
    # `later` has only one direction of a pair, so its rounds have no opposites.
    return parted + schedule(later)


class Measurement:
    """What one group has yet to measure in one optimisation."""

    __slots__ = ("_plan", "deadline_ns", "number", "pending")

    def __init__(self, ring: list[int], missing: Iterable[Pair], rounds_max: int) -> None:
        self._plan = plan_rounds(ring, missing)[:rounds_max]
        self.pending: set[Pair] = set()  # probes of this round without a report
        self.number = 0  # of this round, among all probe rounds of the run
        self.deadline_ns = 0  # of this round

    def is_over(self) -> bool:
        """Whether no probe is under way, and no round is left."""
        return not self.pending and not self._plan

    @property
    def rounds_left(self) -> int:
        """How many rounds follow the present one."""
        return len(self._plan)

    def begin_round(self, number: int, deadline_ns: int) -> list[Pair]:
        """Begin the next round. Return its probes."""
        probes = self._plan.pop(0)
        self.pending = set(probes)
        self.number = number
        self.deadline_ns = deadline_ns
        return probes

    def take(self, number: int, pair: Pair) -> bool:
        """Note that a probe is reported. Return False if it is not awaited: its round is over."""
        if number != self.number or pair not in self.pending:
            return False
        self.pending.discard(pair)
        return True

    def give_up(self) -> list[Pair]:
        """End a round that has lasted too long. Return the probes without a report."""
        late, self.pending = sorted(self.pending), set()
        return late

    def drop(self, peer: int) -> None:
        """Remove the edges of a peer that is gone."""
        self.pending = {pair for pair in self.pending if peer not in pair}
        if any(peer in pair for probes in self._plan for pair in probes):
            self._plan = plan_rounds([], (pair for probes in self._plan for pair in probes if peer not in pair))

    def check(self, members: set[int]) -> None:
        """Invariants between two events."""
        assert not self.is_over(), "a measurement with nothing to do"
        assert self.pending, "a round was not begun"
        for probes in (self.pending, *self._plan):
            sources, targets = {source for source, _ in probes}, {target for _, target in probes}
            assert len(sources) == len(targets) == len(probes), f"two probes at one peer: {sorted(probes)}"
            assert not any((target, source) in probes for source, target in probes), f"opposites in {sorted(probes)}"
            assert sources | targets <= members, f"probes of non-members: {sorted((sources | targets) - members)}"
