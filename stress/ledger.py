"""The laws of content, checked over the steps of peers: the results of reduces, and the states of groups.

Pure. The ledger trusts no peer: it computes all contents from the participants.

**Sums.** All members report the same result of an operation, and an exact result is what the participants must have
made. **Restoration.** A failed reduce leaves its tensor as it was; so does every reduce that is not in place.
**Agreement.** All members that return from one sync hold the same revision and the same content. **Revisions** grow by
one with every sync, or repeat the last one where a group resumes from it. **State.** The content of a group is the
previous content, updated with the results of the round between: a function of the revision and of the participants.
**Economy.** No peer receives what it already has.

Facts arrive through pipes, in any order among peers. The ledger keeps them until no earlier fact can arrive, and then
takes them in the order of their times.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import (
    NOTES,
    OPERATIONS_MAX,
    WEIGHTS,
    Array,
    PlannedReduce,
    checksum,
    contribution,
    draw_operations,
    expected,
    span_allowed,
    update_state,
)
from .paths import Path
from .records import Applied, Reduced, Step, Synced, Violation

if TYPE_CHECKING:
    from .records import Fact

STATES_KEPT = 256  # contents of a group that are kept: those of the last rounds
OPERATIONS_KEPT = 4096  # operations that may still be reported
SPREADING = 1.25  # complete chunks: more than the one that a peer owns; chunks differ in size
SAMPLED = 8  # one of so many unchanged contributions is checked


@dataclass(slots=True)
class Sum:
    """One operation of one round, as its members report it."""

    fact: Reduced
    first: int  # the life that reported it first
    reporters: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Content:
    """The content of a state, computed here."""

    weights: Array
    notes: Array
    followers: set[int] = field(default_factory=set)  # checksums of the contents that followed it


class Ledger:
    """All facts of a run. `add` takes a fact, `settle` checks facts, `found` has the violations."""

    def __init__(self, seed: int, places: int) -> None:
        self.found: list[Violation] = []
        self.paths: list[Path] = []
        self.revisions = 0
        self._seed = seed
        self._places = places
        self._homes: dict[int, tuple[int, int]] = {}  # life -> group and place
        self._waiting: list[tuple[int, int, Step]] = []
        self._count = 0
        self._sums: OrderedDict[tuple[int, int, int], Sum] = OrderedDict()
        self._members: dict[int, set[int]] = {}  # group -> lives that returned from its last sync
        self._syncs: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()  # group and round -> what was agreed
        self._agreed: dict[int, tuple[int, int, int]] = {}  # group -> round, revision and content of its last sync
        self._contents: defaultdict[int, OrderedDict[int, Content]] = defaultdict(OrderedDict)
        self._moves: OrderedDict[tuple[int, int, int], tuple[Applied, int]] = OrderedDict()
        self._alone: set[int] = set()  # groups whose last round reduced nothing

    def born(self, life: int, group: int, place: int) -> None:
        """Add a life that has begun."""
        self._homes[life] = group, place

    def add(self, step: Step) -> None:
        """Take a step with a fact."""
        self._count += 1
        heapq.heappush(self._waiting, (step.end_ns, self._count, step))

    def settle(self, until_ns: int) -> None:
        """Check the facts that ended before this time: no earlier one can arrive."""
        while self._waiting and self._waiting[0][0] < until_ns:
            self._judge(heapq.heappop(self._waiting)[2])

    def _judge(self, step: Step) -> None:
        fact: Fact | None = step.fact
        if isinstance(fact, Reduced):
            operation = self._operation(step.group, fact.round, fact.index)
            if fact.ok:
                self._judge_sum(step, fact, operation)
            else:
                self._judge_restored(step, fact, operation)
        elif isinstance(fact, Synced):
            self._judge_sync(step, fact)
        elif isinstance(fact, Applied):
            self._judge_move(step, fact)

    def _operation(self, group: int, number: int, index: int) -> PlannedReduce:
        return draw_operations(self._seed, group, number, self._places)[index]

    def _add_violation(self, step: Step, law: str, text: str) -> None:
        self.found.append(Violation(step.end_ns, law, f"life {step.life} of group {step.group}: {text}"))

    # ------------------------------------------------------------------------------------------ reduces

    def _judge_sum(self, step: Step, fact: Reduced, operation: PlannedReduce) -> None:
        key = step.group, fact.round, fact.index
        where = f"operation {fact.index} of round {fact.round}"
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = Sum(fact, step.life)
            if not operation.quantized:
                self._judge_exact(step, fact, operation, where)
            while len(self._sums) > OPERATIONS_KEPT:
                self._sums.popitem(last=False)
        elif (known.fact.after, known.fact.members) != (fact.after, fact.members):
            told = f"{fact.after:08x} of {list(fact.members)}"
            other = f"{known.fact.after:08x} of {list(known.fact.members)} that life {known.first} has"
            self._add_violation(step, "sums", f"{where}: its result is {told}, not {other}")
        known.reporters.add(step.life)
        if operation.quantized:
            low, high = span_allowed(operation, fact.round, known.reporters, max(fact.world, len(known.reporters)))
            if fact.world and not low <= fact.span[0] <= fact.span[1] <= high:
                self._add_violation(step, "sums", f"{where}: quantized results from {fact.span}, allowed {(low, high)}")
        if not operation.in_place and self._count % SAMPLED == 0:
            self._judge_untouched(step, fact, where)
        self._mark_retries(step, fact)

    def _judge_exact(self, step: Step, fact: Reduced, operation: PlannedReduce, where: str) -> None:
        if fact.world and fact.world != len(fact.members):
            self._add_violation(step, "sums", f"{where}: a world of {fact.world}, but {list(fact.members)} took part")
        others = [life for place, life in fact.members if self._homes.get(life) != (step.group, place)]
        if others or step.life not in {life for _, life in fact.members}:
            self._add_violation(step, "sums", f"{where}: {list(fact.members)} took part")
        wanted = checksum(expected(operation, fact.round, self._places, fact.members))
        if wanted != fact.after:
            text = f"{where}: {list(fact.members)} make {wanted:08x}, the result is {fact.after:08x}"
            self._add_violation(step, "sums", text)

    def _judge_restored(self, step: Step, fact: Reduced, operation: PlannedReduce) -> None:
        where = f"attempt {fact.attempt} at operation {fact.index} of round {fact.round}"
        if fact.after != fact.before:
            self._add_violation(
                step, "restoration", f"{where} failed and left {fact.after:08x}, it was {fact.before:08x}"
            )
        self._judge_untouched(step, fact, where)
        if operation.quantized:
            self.paths.append(Path.UNDONE_QUANTIZED)
        if fact.attempt > 1:
            self.paths.append(Path.FAILED_TWICE)
        # While a peer still reduces, the part with the most contributions is one chunk, of as many chunks or more.
        most, share = fact.progress
        if share * most > SPREADING:
            self.paths.append(Path.UNDONE_SPREADING if share < 1.0 else Path.UNDONE_COMPLETE)

    def contribution_of(self, step: Step) -> int:
        """The checksum of the contribution of a life to the reduce that it reports."""
        fact = step.fact
        assert isinstance(fact, Reduced)
        operation = self._operation(step.group, fact.round, fact.index)
        place = self._homes[step.life][1]
        return checksum(contribution(operation, fact.round, place, self._places, step.life))

    def _judge_untouched(self, step: Step, fact: Reduced, where: str) -> None:
        wanted = self.contribution_of(step)
        if wanted != fact.before:
            text = f"{where}: its contribution is {fact.before:08x}, expected {wanted:08x}"
            self._add_violation(step, "restoration", text)

    def _mark_retries(self, step: Step, fact: Reduced) -> None:
        if fact.attempt > 1:
            self.paths.append(Path.MADE_AGAIN)
            if 0 < len(fact.members) <= len(self._members.get(step.group, ())) - 2:
                self.paths.append(Path.TWO_LOST)
        if step.group in self._alone:
            self._alone.discard(step.group)
            self.paths.append(Path.GREW_AGAIN)

    # ------------------------------------------------------------------------------------------ states

    def _judge_sync(self, step: Step, fact: Synced) -> None:
        now = fact.revision, fact.after
        if fact.rx_bytes and now == (fact.revision_before, fact.before):
            self._add_violation(step, "economy", f"received {fact.rx_bytes} bytes of a state that it had")
        if fact.resumed:
            self.paths.append(Path.RESUMED)
        elif fact.rx_bytes:
            self.paths.append(Path.RECEIVED)
        last = self._agreed.get(step.group)
        known = self._syncs.setdefault((step.group, fact.round), now)
        if known != now:
            others = f"others hold {known[0]} as {known[1]:08x}"
            self._add_violation(step, "agreement", f"in round {fact.round} it holds {now[0]} as {now[1]:08x}, {others}")
        while len(self._syncs) > OPERATIONS_KEPT:
            self._syncs.popitem(last=False)
        if last is not None and last[0] >= fact.round:
            # It may be long ago: a peer that was stopped in its call is removed, and its call returns later.
            if last[0] == fact.round:
                self._members[step.group].add(step.life)
            return
        self._judge_succession(step, fact, last)
        if last is not None:
            self._mark_deaths(step.group, last[0])
        self._members[step.group] = {step.life}
        self._agreed[step.group] = fact.round, *now
        self.revisions += 1

    def _judge_succession(self, step: Step, fact: Synced, last: tuple[int, int, int] | None) -> None:
        """Check the first report of its group in this round: its state must follow from the previous one."""
        contents = self._contents[step.group]
        if last is None:
            self._remember(contents, Content(np.zeros(WEIGHTS, np.int64), np.zeros(NOTES, np.int64)))
            if fact.revision or fact.after not in contents:
                self._add_violation(
                    step, "state", f"begins at revision {fact.revision} as {fact.after:08x}, and not with zeros"
                )
            return
        number, revision, content = last
        if (fact.revision, fact.after) == (revision, content):
            return
        if fact.revision != revision + 1:
            text = f"from revision {revision} in round {number} to {fact.revision} in round {fact.round}"
            self._add_violation(step, "revisions", text)
        if content in contents and fact.after not in contents[content].followers:
            text = f"revision {fact.revision} is {fact.after:08x}, not made of revision {revision}, {content:08x}"
            self._add_violation(step, "state", text)

    def _mark_deaths(self, group: int, number: int) -> None:
        """Mark participants of the last round that never reported it as dead; the next round has begun."""
        for index in range(OPERATIONS_MAX):
            known = self._sums.get((group, number, index))
            if known is not None and not {life for _, life in known.fact.members} <= known.reporters:
                self.paths.append(Path.DIED_AFTER_VOTE)

    def _judge_move(self, step: Step, fact: Applied) -> None:
        key = step.group, fact.round, fact.before
        known = self._moves.get(key)
        if known is not None:
            other = known[0]
            if (other.after, other.results) != (fact.after, fact.results):
                told = f"{fact.after:08x} by {fact.results}, life {known[1]} to {other.after:08x} by {other.results}"
                self._add_violation(step, "state", f"moved on to {told}")
            return
        self._moves[key] = fact, step.life
        while len(self._moves) > OPERATIONS_KEPT:
            self._moves.popitem(last=False)
        if not fact.results:
            self._alone.add(step.group)
        content = self._contents[step.group].get(fact.before)
        if content is None:
            self._add_violation(
                step, "state", f"revision {fact.revision} is made of {fact.before:08x}, which no peer ever had"
            )
            return
        made = self._make(step.group, content, fact)
        content.followers.add(fact.after)
        if made is None:
            self._add_violation(step, "state", f"revision {fact.revision} is made by results that no peer reported")
        elif self._remember(self._contents[step.group], made) != fact.after:
            self._add_violation(
                step, "state", f"revision {fact.revision} is {fact.after:08x}, which is not what it must be"
            )

    def _make(self, group: int, content: Content, fact: Applied) -> Content | None:
        weights, notes = content.weights.copy(), content.notes.copy()
        for index, result in fact.results:
            known = self._sums.get((group, fact.round, index))
            if known is None or known.fact.after != result:
                return None
            operation = self._operation(group, fact.round, index)
            exact = None if operation.quantized else expected(operation, fact.round, self._places, known.fact.members)
            update_state(weights, notes, operation, exact, result)
        notes[0] = fact.revision
        return Content(weights, notes)

    @staticmethod
    def _remember(contents: OrderedDict[int, Content], made: Content) -> int:
        key = checksum(made.weights, made.notes)
        contents.setdefault(key, made)
        contents.move_to_end(key)
        while len(contents) > STATES_KEPT:
            contents.popitem(last=False)
        return key
