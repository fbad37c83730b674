"""The laws of a run, checked over what its processes tell. Pure: time, steps and deeds are arguments.

**Agreement.** Every round has a number, which all its members are told. Whoever was told the same number was told the
same world; members of one group also the same epoch and size. A member takes part in every round, so its rounds follow
each other without a gap, unless it gave a call up that was answered all the same. Epochs never fall. An optimisation of
the rings is told to all alike, too, and makes no round.

**Promptness.** A call may take `Bounds.call`, counted from its beginning or from the last fault, whichever is later;
a stopped peer, or one behind a silent link, holds the others up until it goes on or its silence is noticed.

**Progress.** No reduce is attempted for ever. **Innocence.** Who was not harmed does not lose its membership. **Exits**
happen as ordered. **Memory** does not grow. What is in tensors is judged by the `Ledger`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from .faults import ENDINGS, MENDED, PAUSES, STOPS, Kind
from .ledger import Ledger
from .paths import Path
from .records import (
    APPLY,
    CONNECT,
    OPTIMIZE,
    PENDING,
    ROUNDS,
    SYNC,
    WAIT,
    Bounds,
    Numbers,
    Reduced,
    Step,
    Synced,
    Tally,
    Violation,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

SECOND = 1_000_000_000
SETTLED_NS = 8 * SECOND  # how late somebody may still tell of a round: longer than anybody is stopped
REMEMBERED_NS = 60 * SECOND  # rounds, deaths and faults older than this concern nobody any more
SAMPLES_MIN = 12  # fewer say nothing about a trend
LINK_LOSSES = frozenset({Kind.HALF_CLOSE_RING, Kind.HALF_CLOSE_MASTER, Kind.FLIP_RING, Kind.FLIP_MASTER})
ATTEMPTS_MAX = 50  # at one reduce; every one of them but the last needs a fault of its own
NO_STATE = "NO_SHARED_STATE_AVAILABLE"
CUT_OFF = "it cannot fetch the shared state"
ALONE = "needs at least 2 peers in the run"


@dataclass(slots=True)
class Round:
    """What is known about one topology round, or about the optimisation at its end."""

    first_return_ns: int
    last_start_ns: int = 0
    common: tuple[Numbers, int] | None = None  # what somebody was told, and which life
    groups: dict[int, tuple[Numbers, int]] = field(default_factory=dict)
    lives: set[int] = field(default_factory=set)
    optimizes: bool = False


class StateConsensus:
    """Sorts steps into rounds and compares. Feed with `add`, each life's steps in their order; `settle` ends rounds."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self.finished: deque[Round] = deque()  # complete, for others to look at and take
        self.count = 0
        self._rounds: dict[tuple[int, bool], Round] = {}  # by number, and whether it is the optimisation
        self._last: dict[int, Step] = {}  # life -> its previous round, unless a call failed since

    def add(self, step: Step) -> None:
        """A connect, a round or an optimisation of some peer."""
        previous = self._last.pop(step.life, None)
        if step.numbers is None:
            return  # given up or failed: whether a round took place without its answer is not known
        self._last[step.life] = step
        key = step.numbers.round, step.call == OPTIMIZE
        if key not in self._rounds:
            self._rounds[key] = Round(step.end_ns, optimizes=key[1])
            self.count += not key[1]
        found = self._rounds[key]
        found.first_return_ns = min(found.first_return_ns, step.end_ns)
        found.lives.add(step.life)
        if step.call != CONNECT:  # a newcomer may have asked long before the round began
            found.last_start_ns = max(found.last_start_ns, step.start_ns)
        self._compare(found, step)
        self._check_order(previous, step)

    def settle(self, until_ns: int) -> None:
        """Nobody will tell of rounds that ended before that time any more."""
        for key in [key for key, found in self._rounds.items() if found.first_return_ns < until_ns]:
            self.finished.append(self._rounds.pop(key))

    def forget(self, life: int) -> None:
        """It has ended; its number is never used again."""
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
    """What is wrong with a finished round by itself, when so many training processes could have been in it."""
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


@dataclass(slots=True)
class Deed:
    """A fault that was committed, as the laws see it."""

    kind: Kind
    at_ns: int
    victims: frozenset[int]
    deadline_ns: int  # survivors are held up no longer than until here
    victim_deadline_ns: int  # nor are those it was done to
    waiting: set[int] = field(default_factory=set)  # survivors who have not yet gone on
    reducing: set[int] = field(default_factory=set)  # survivors in the victims' groups who have not yet reduced
    pause_ns: int = 0
    silent: bool = False  # nobody is told of it
    cost: bool = False  # it cost a membership


@dataclass(slots=True)
class Life:
    """A training process, as the laws see it."""

    number: int
    born_ns: int
    heard_ns: int
    group: int = 0
    joined: bool = False
    joined_ns: int = 0
    synced: bool = False  # in this membership
    ended_ns: int = 0  # when it was harmed so that it ends, or was found ended
    expected: set[int] = field(default_factory=set)  # exit statuses that follow from what was done to it


class Judge:
    """All laws together, over one run."""

    def __init__(self, bounds: Bounds, slack: float, seed: int = 0, places: int = 0) -> None:
        self.bounds = bounds
        self.tally = Tally()
        self.violations: list[Violation] = []
        self.lives: dict[int, Life] = {}
        self.ledger = Ledger(seed, places)
        self._slack_ns = int(slack * SECOND)  # what the workload itself adds: pauses, waiting for more peers
        self._call_ns = int(bounds.call * SECOND)
        self._hang_ns = int(bounds.hang * SECOND)
        self._deeds: deque[Deed] = deque()
        self._joins: deque[tuple[int, int]] = deque()  # begin and end of connects
        self._agreement = StateConsensus()

    # ------------------------------------------------------------------------------------------ what happens

    def born(self, life: int, now_ns: int, group: int = 0, place: int = 0) -> None:
        """A training process was started."""
        self.lives[life] = Life(life, now_ns, now_ns, group)
        self.ledger.born(life, group, place)
        self.tally.lives += 1

    def harmed(self, kind: Kind, victims: Iterable[int], now_ns: int, pause: float, status: int | None) -> None:
        """Something is done to these lives at this moment; `status` is how they will exit, None if they go on."""
        hit = frozenset(victims)
        silence_ns = int(self.bounds.silence * SECOND)
        held_ns = victim_ns = pause_ns = 0
        if kind in PAUSES:
            pause_ns = int(pause * SECOND)
            held_ns = pause_ns if kind is Kind.STOP_TRAINING else min(pause_ns, silence_ns)
            victim_ns = pause_ns + silence_ns
        elif kind in LINK_LOSSES:
            # What a broken link swallowed is only missed when nothing moves for a while.
            held_ns = int(self.bounds.stall * SECOND)
        deadline_ns = now_ns + held_ns + self._call_ns
        survivors = {number for number, life in self.lives.items() if life.joined and not life.ended_ns} - hit
        deed = Deed(kind, now_ns, hit, deadline_ns, deadline_ns + victim_ns, survivors, pause_ns=pause_ns)
        deed.silent = held_ns > 0
        if kind in ENDINGS or kind is Kind.KILL_ACTOR:
            groups = {self.lives[number].group for number in hit}
            deed.reducing = {number for number in survivors if self.lives[number].group in groups}
        self._deeds.append(deed)
        self.tally.faults[kind.value] = self.tally.faults.get(kind.value, 0) + 1
        self._note_harm(deed, status)

    def _note_harm(self, deed: Deed, status: int | None) -> None:
        if deed.kind is Kind.MASS_DEATH:
            self._mark(Path.MASS_DEATH)
        for number in deed.victims:
            life = self.lives[number]
            if status is None:
                continue
            life.expected.add(status)
            # One that closes in its own time stays a member until then.
            if deed.kind is not Kind.CLOSE:
                life.ended_ns = deed.at_ns
                if life.joined and not life.synced:
                    self._mark(Path.SINK_LOST)

    def ended(self, life: int, status: int, now_ns: int) -> None:
        """A training process was found ended."""
        known = self.lives[life]
        known.ended_ns = known.ended_ns or now_ns
        if status not in known.expected:
            expected = sorted(known.expected) or "that it goes on"
            self._object(now_ns, "exits", f"life {life} ended with status {status}; expected: {expected}")

    def told(self, step: Step) -> None:
        """A training process told of a call."""
        life = self.lives[step.life]
        if step.call != PENDING:  # whose thread may go on while the training hangs
            life.heard_ns = max(life.heard_ns, step.end_ns)
        self.tally.steps += 1
        if step.error:
            self._judge_error(step)
        if step.call == CONNECT:
            self._judge_join(step, life)
        elif step.call != APPLY:
            self._judge_duration(step)
        if step.call in (CONNECT, OPTIMIZE) or step.call in ROUNDS:
            self._agreement.add(step)
        if step.call in ROUNDS and step.numbers is not None:
            self._note_response(step)
        if step.fact is not None:
            self.ledger.add(step)
            self._count(step, life)

    def _count(self, step: Step, life: Life) -> None:
        """What the tally and the list of rare paths want to know of a fact."""
        fact, tally = step.fact, self.tally
        if isinstance(fact, Reduced):
            tally.reduces += fact.ok
            tally.aborts += not fact.ok
            tally.retries += fact.attempt > 1
            if fact.ok:
                self._note_recovery(step)
            elif fact.attempt % ATTEMPTS_MAX == 0 and fact.attempt:
                text = f"life {step.life} failed {fact.attempt} times at one reduce"
                self._object(step.end_ns, "progress", text)
        elif isinstance(fact, Synced):
            tally.syncs += 1
            tally.received += fact.rx_bytes > 0
            life.synced = True
            if fact.rx_bytes and any(
                deed.kind in ENDINGS and step.start_ns < deed.at_ns < step.end_ns and self._is_loss(deed, life)
                for deed in self._deeds
            ):
                self._mark(Path.SOURCE_LOST)

    def _is_loss(self, deed: Deed, life: Life) -> bool:
        """Whether a deed took somebody of the same group who had the state."""
        known = [self.lives.get(number) for number in deed.victims]
        return any(other is not None and other.group == life.group and other.synced for other in known)

    def _mark(self, path: Path) -> None:
        self.tally.paths[path] = self.tally.paths.get(path, 0) + 1

    # ------------------------------------------------------------------------------------------ the laws

    def _judge_error(self, step: Step) -> None:
        kind = step.error.split(":", 1)[0]
        if kind == "TooFewPeersError" and step.call == WAIT:
            for deed in self._deeds:
                deed.waiting.discard(step.life)  # it waited for more peers, not for the answer to a fault
            return
        if step.call == OPTIMIZE and ALONE in step.error and self._was_alone(step):
            return
        if kind in ("MasterLostError", "KickedError") and self._was_harmed(step.life, step.end_ns):
            self.lives[step.life].joined = self.lives[step.life].synced = False
            return
        if step.call == SYNC and self._deeds:
            if kind == "PeerLostError" or NO_STATE in step.error:
                return  # those who had the state were lost
            if CUT_OFF in step.error:
                self.lives[step.life].joined = self.lives[step.life].synced = False
                return  # or could not be reached
        self._object(step.end_ns, "innocence", f"life {step.life} got from {step.call}: {step.error}")

    def _was_harmed(self, life: int, at_ns: int) -> bool:
        """Whether something was done to this life that costs a membership."""
        found = False
        for deed in self._deeds:
            if life in deed.victims and deed.at_ns <= at_ns <= deed.victim_deadline_ns and not self._is_mended(deed):
                found = deed.cost = True
        return found

    def _was_alone(self, step: Step) -> bool:
        """Whether there was no other member all the time to whom nothing had been done."""
        harmed = {number for deed in self._deeds for number in deed.victims}
        others = [life for life in self.lives.values() if life.number not in harmed | {step.life}]
        return not any(life.joined and life.joined_ns < step.start_ns and not life.ended_ns for life in others)

    def _is_mended(self, deed: Deed) -> bool:
        """Whether a membership survives this."""
        return deed.kind in MENDED or 0 < deed.pause_ns < self.bounds.silence * SECOND / 2

    def _judge_join(self, step: Step, life: Life) -> None:
        if step.numbers is None:
            return
        life.joined, life.joined_ns = True, step.end_ns
        self._joins.append((step.start_ns, step.end_ns))
        self.tally.joins += 1
        allowed_ns = self._allowed(step.life, step.start_ns, step.end_ns) + int(self.bounds.join * SECOND)
        if step.end_ns > allowed_ns:
            self._object(step.end_ns, "joining", f"life {step.life} was let in only after {step.seconds:.2f} s")

    def _judge_duration(self, step: Step) -> None:
        if step.call != PENDING and not step.error and not self._is_held_up(step.start_ns, step.end_ns):
            self.tally.longest = max(self.tally.longest, step.seconds)
        over_ns = step.end_ns - step.start_ns - self._call_ns
        if over_ns <= 0:
            return
        allowed_ns = self._allowed(step.life, step.start_ns + self._call_ns, step.end_ns)
        if step.call in (WAIT, PENDING):
            allowed_ns += self._slack_ns
        elif step.call == OPTIMIZE:
            allowed_ns += int(self.bounds.measuring * SECOND)
        if step.end_ns > allowed_ns:
            late = (step.end_ns - allowed_ns) / SECOND
            text = (
                f"{step.call} of life {step.life} took {step.seconds:.3f} s, {late:.3f} s more than any fault explains"
            )
            self._object(step.end_ns, "promptness", text)

    def _allowed(self, life: int, base_ns: int, end_ns: int) -> int:
        """Until when a call may last, given everything that was done before it ended.

        Faults never cease, so what is done to others is an excuse only for so long: else a call that hangs for ever
        would have a new one every second. A loss that is noticed at once may cost a call its time once more; silence
        may cost the time that it takes to notice it, and several peers may be silent one after the other.
        """
        allowed_ns = base_ns
        for deed in self._deeds:
            if deed.at_ns > end_ns:
                continue
            if life in deed.victims:
                allowed_ns = max(allowed_ns, deed.victim_deadline_ns)
            else:
                most_ns = self._hang_ns if deed.silent else self._call_ns
                allowed_ns = max(allowed_ns, min(deed.deadline_ns, base_ns + most_ns))
        return allowed_ns

    def _note_response(self, step: Step) -> None:
        """Measure how long a fault kept the last of its survivors: until a call returned that was begun after it."""
        for deed in self._deeds:
            if step.life in deed.waiting and step.start_ns > deed.at_ns:
                deed.waiting.discard(step.life)
                # While a peer is stopped, everybody waits for it, which says nothing about this deed.
                if not deed.waiting and not self._is_held_up(deed.at_ns, step.end_ns):
                    self.tally.responses.append((step.end_ns - deed.at_ns) / SECOND)

    def _note_recovery(self, step: Step) -> None:
        """Measure how long a kill kept the last of its survivors from a reduce: one that was begun after it."""
        for deed in self._deeds:
            if step.life in deed.reducing and step.start_ns > deed.at_ns:
                deed.reducing.discard(step.life)
                if not deed.reducing and not self._is_held_up(deed.at_ns, step.end_ns):
                    self.tally.recoveries.append((step.end_ns - deed.at_ns) / SECOND)
                    self.tally.recovered_ns.append(step.end_ns)

    def _is_held_up(self, start_ns: int, end_ns: int) -> bool:
        return any(deed.kind in PAUSES and deed.at_ns < end_ns and deed.deadline_ns > start_ns for deed in self._deeds)

    def tick(self, now_ns: int) -> None:
        """Look for what did not happen, and judge what has settled."""
        for life in self.lives.values():
            patience_ns = self._call_ns if life.joined else int(self.bounds.join * SECOND)
            allowed_ns = self._allowed(life.number, life.heard_ns + patience_ns, now_ns)
            if not life.ended_ns and now_ns > allowed_ns + self._hang_ns:
                text = f"life {life.number} was last heard of {(now_ns - life.heard_ns) / SECOND:.1f} s ago"
                self._object(now_ns, "liveness", text)
                life.heard_ns = now_ns  # once is enough
        self._settle(now_ns - SETTLED_NS)
        old_ns = now_ns - REMEMBERED_NS
        while self._joins and self._joins[0][1] < old_ns:
            self._joins.popleft()
        while self._deeds and self._deeds[0].victim_deadline_ns < old_ns:
            self._note_end(self._deeds.popleft())
        for number in [n for n, life in self.lives.items() if life.ended_ns and life.ended_ns < old_ns]:
            del self.lives[number]
            self._agreement.forget(number)

    def _note_end(self, deed: Deed) -> None:
        """What came of a deed is known by now."""
        short = deed.pause_ns < self.bounds.silence * SECOND
        if deed.kind in STOPS and deed.kind is not Kind.STOP_TRAINING:
            if short != deed.cost:
                self._mark(Path.SAT_OUT if short else Path.GIVEN_UP)
        elif deed.kind is Kind.BLACK_HOLE:
            if short != deed.cost:
                self._mark(Path.HOLE_SAT_OUT if short else Path.HOLE_NOTICED)
        elif deed.kind is Kind.FLIP_RING:
            self._mark(Path.FLIPPED)
        elif deed.kind in MENDED:
            self._mark(Path.REPLACED)

    def finish(self, now_ns: int) -> None:
        """The run is over: judge everything that is left."""
        self._settle(now_ns + 2 * SETTLED_NS)
        while self._deeds:
            self._note_end(self._deeds.popleft())

    def _settle(self, until_ns: int) -> None:
        agreement = self._agreement
        agreement.settle(until_ns)
        self.ledger.settle(until_ns)
        self.violations += agreement.found + self.ledger.found
        agreement.found.clear()
        self.ledger.found.clear()
        for path in self.ledger.paths:
            self._mark(path)
        self.ledger.paths.clear()
        self.tally.revisions = self.ledger.revisions
        self.tally.rounds = agreement.count
        while agreement.finished:
            found = agreement.finished.popleft()
            noticed_ns = found.last_start_ns - self._call_ns
            living = sum(
                life.born_ns < found.first_return_ns and not 0 < life.ended_ns < noticed_ns
                for life in self.lives.values()
            )
            for text in judge_round(found, living):
                self._object(found.first_return_ns, "world", text)
            if found.optimizes:
                self._mark_meanwhile(found)

    def _mark_meanwhile(self, found: Round) -> None:
        """What happened from the moment when all who tell of it were in an optimisation until the first had left it."""
        begin_ns, end_ns = found.last_start_ns, found.first_return_ns
        if any(start_ns < end_ns < until_ns for start_ns, until_ns in self._joins):
            self._mark(Path.JOINED_OPTIMIZING)
        for deed in self._deeds:
            lost = deed.kind in ENDINGS and deed.kind is not Kind.CLOSE
            if lost and begin_ns < deed.at_ns < end_ns and any(self._was_member(n, deed.at_ns) for n in deed.victims):
                self._mark(Path.DIED_OPTIMIZING)

    def _was_member(self, number: int, at_ns: int) -> bool:
        life = self.lives.get(number)
        return life is not None and life.joined and life.joined_ns < at_ns

    def _object(self, at_ns: int, law: str, text: str) -> None:
        self.violations.append(Violation(at_ns, law, text))


def judge_growth(name: str, sizes: list[int], allowed: int) -> str:
    """Whether a series of sizes has a trend: its last third against its first, the beginning left out; empty if not."""
    settled = sizes[len(sizes) // 4 :]
    if len(settled) < SAMPLES_MIN:
        return ""
    third = len(settled) // 3
    grown = median(settled[-third:]) - median(settled[:third])
    return f"{name} grew by {grown:,.0f} over the run" if grown > allowed else ""
