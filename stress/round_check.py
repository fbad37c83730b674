"""The law of agreement over topology rounds, checked over the steps that peers report. Pure.

Every topology round has a number, which all its members receive. Members that received the same number also received
the same world size; members of one group also the same epoch and group size. A member takes part in every round, so the
numbers of its rounds have no gap, unless it gave up a call that was answered later. Epochs never decrease. The numbers
of an optimisation are the same on all members too; an optimisation is not a topology round.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .records import CONNECT, OPTIMIZE, Numbers, Step, Violation


@dataclass(slots=True)
class Round:
    """What was reported about one topology round, or about the optimisation at its end."""

    first_return_ns: int
    last_start_ns: int = 0
    common: tuple[Numbers, int] | None = None  # the numbers of the first report, and its life
    groups: dict[int, tuple[Numbers, int]] = field(default_factory=dict)
    lives: set[int] = field(default_factory=set)
    optimizes: bool = False


class RoundCheck:
    """Sorts steps into rounds and compares them. `add` takes the steps of each life in order; `settle` ends rounds."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self.finished: deque[Round] = deque()  # complete; the owner takes them from here
        self.count = 0
        self._rounds: dict[tuple[int, bool], Round] = {}  # by number, and whether it is the optimisation
        self._last: dict[int, Step] = {}  # life -> its previous round, unless a call failed since

    def add(self, step: Step) -> None:
        """Take a connect, a topology round or an optimisation of one peer."""
        previous = self._last.pop(step.life, None)
        if step.numbers is None:
            return  # given up or failed: it is unknown whether the round took place
        self._last[step.life] = step
        key = step.numbers.round, step.call == OPTIMIZE
        if key not in self._rounds:
            self._rounds[key] = Round(step.end_ns, optimizes=key[1])
            self.count += not key[1]
        found = self._rounds[key]
        found.first_return_ns = min(found.first_return_ns, step.end_ns)
        found.lives.add(step.life)
        if step.call != CONNECT:  # a newcomer may have called long before the round
            found.last_start_ns = max(found.last_start_ns, step.start_ns)
        self._compare(found, step)
        self._check_order(previous, step)

    def settle(self, until_ns: int) -> None:
        """End the rounds that ended before this time: no report of them can follow."""
        for key in [key for key, found in self._rounds.items() if found.first_return_ns < until_ns]:
            self.finished.append(self._rounds.pop(key))

    def forget(self, life: int) -> None:
        """Forget a life that has ended; its number is never used again."""
        self._last.pop(life, None)

    def _compare(self, found: Round, step: Step) -> None:
        assert step.numbers is not None
        mine = (step.numbers, step.life)
        found.common = found.common or mine
        found.groups.setdefault(step.group, mine)
        self._expect_same(step, found.common, whole=False)
        self._expect_same(step, found.groups[step.group], whole=True)

    def _expect_same(self, step: Step, other: tuple[Numbers, int], *, whole: bool) -> None:
        mine, theirs = step.numbers, other[0]
        assert mine is not None
        if mine.common != theirs.common or (whole and mine.of_group != theirs.of_group):
            text = f"in one round life {step.life} was told {mine}, life {other[1]} {theirs}"
            self.found.append(Violation(step.end_ns, "agreement", text))

    def _check_order(self, previous: Step | None, step: Step) -> None:
        if previous is None or previous.numbers is None or step.numbers is None:
            return
        before, after = previous.numbers, step.numbers
        number = before.round + (step.call != OPTIMIZE)
        if before.peer == after.peer and (after.epoch < before.epoch or after.round != number):
            text = f"life {step.life} went from {before} to {after}"
            self.found.append(Violation(step.end_ns, "order", text))


def judge_round(found: Round, living: int) -> list[str]:
    """The contradictions within one finished round; `living` is how many training processes could be in it."""
    if found.common is None:
        return []
    wrong = []
    world, groups, largest = found.common[0].common
    if world > living:
        wrong.append(f"a world of {world}, but only {living} lived")
    if len(found.lives) > world:
        wrong.append(f"{len(found.lives)} took part in a world of {world}")
    sizes = [numbers.group_world for numbers, _ in found.groups.values()]
    if len(sizes) == groups and (sum(sizes) != world or max(sizes) != largest):
        wrong.append(f"groups of {sizes} in a world of {world} whose largest group is {largest}")
    if len(sizes) > groups:
        wrong.append(f"{len(sizes)} groups took part, but there were said to be {groups}")
    return wrong
