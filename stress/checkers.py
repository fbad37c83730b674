"""The laws of a run, checked over the steps that its processes report. Pure: time, steps and faults are arguments.

**Agreement** of topology rounds is checked in `round_check`, the content of tensors in `ledger`.

**Promptness.** A call may take `Bounds.call`, counted from its start or from the last fault, whichever is later. A
stopped peer, or a peer behind a silent link, delays the others until it continues or its silence is detected.

**Progress.** No reduce is attempted forever. **Innocence.** A peer that no fault hit does not lose its membership.
**Exits** have the expected status. **Memory** does not grow. **Admission.** A bad newcomer is refused and told so; no
member waits for one that cannot be reached or is of another run, and a reduce of others fails once at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from .faults import ENDINGS, MENDED, NEWCOMERS, OUTVOTED, PAUSES, STOPS, FaultKind
from .ledger import Ledger
from .paths import Path
from .records import (
    APPLY,
    CONNECT,
    OPTIMIZE,
    PENDING,
    REFUSED,
    ROUNDS,
    SPARED,
    SYNC,
    WAIT,
    Bounds,
    Reduced,
    RunTotals,
    Step,
    Synced,
    Violation,
)
from .round_check import RoundCheck, judge_round

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .round_check import Round

SECOND = 1_000_000_000
SETTLED_NS = 8 * SECOND  # how late a report of a round may arrive: longer than any stop
REMEMBERED_NS = 60 * SECOND  # rounds, deaths and faults older than this are forgotten
SAMPLES_MIN = 40  # one a second; in a shorter run, first allocations are no different from a leak
LINK_LOSSES = frozenset(
    {FaultKind.HALF_CLOSE_RING, FaultKind.HALF_CLOSE_MASTER, FaultKind.FLIP_RING, FaultKind.FLIP_MASTER}
)
ATTEMPTS_MAX = 50  # at one reduce; every attempt but the last needs its own fault
REFUSALS = {
    FaultKind.NEWCOMER_DEAF: Path.REFUSED_DEAF,
    FaultKind.NEWCOMER_SILENT: Path.REFUSED_SILENT,
    FaultKind.NEWCOMER_STRANGER: Path.REFUSED_STRANGER,
    FaultKind.NEWCOMER_STATE: Path.REFUSED_STATE,
    FaultKind.NEWCOMER_SHAPE: Path.REFUSED_SHAPE,
    FaultKind.NEWCOMER_CALL: Path.REFUSED_CALL,
}
NO_STATE = "NO_SHARED_STATE_AVAILABLE"
CUT_OFF = "it cannot fetch the shared state"
ALONE = "needs at least 2 peers in the run"


@dataclass(slots=True)
class CommittedFault:
    """A fault that was committed, as the laws see it."""

    kind: FaultKind
    at_ns: int
    victims: frozenset[int]
    deadline_ns: int  # until then the fault may delay survivors
    victim_deadline_ns: int  # until then it may delay its victims
    waiting: set[int] = field(default_factory=set)  # survivors without an answered call since
    reducing: set[int] = field(default_factory=set)  # survivors in the victims' groups without a reduce since
    pause_ns: int = 0
    silent: bool = False  # no connection closes, so only a timeout detects it
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
    ended_ns: int = 0  # when a fault ended it, or when it was found ended
    expected: set[int] = field(default_factory=set)  # exit statuses that its faults explain
    mistake: FaultKind | None = None  # of a bad newcomer, which reports no steps


class Judge:
    """All laws together, over one run."""

    def __init__(self, bounds: Bounds, slack: float, seed: int = 0, places: int = 0) -> None:
        self.bounds = bounds
        self.totals = RunTotals()
        self.violations: list[Violation] = []
        self.lives: dict[int, Life] = {}
        self.ledger = Ledger(seed, places)
        self._slack_ns = int(slack * SECOND)  # added by the workload: pauses, waiting for more peers
        self._call_ns = int(bounds.call * SECOND)
        self._hang_ns = int(bounds.hang * SECOND)
        self._faults: deque[CommittedFault] = deque()
        self._joins: deque[tuple[int, int]] = deque()  # begin and end of connects
        self._round_check = RoundCheck()

    # ------------------------------------------------------------------------------------------ what happens

    def born(self, life: int, now_ns: int, group: int = 0, place: int = 0) -> None:
        """Add a training process that was started."""
        self.lives[life] = Life(life, now_ns, now_ns, group)
        self.ledger.born(life, group, place)
        self.totals.lives += 1

    def came(self, life: int, kind: FaultKind, now_ns: int, group: int, place: int) -> None:
        """Take a bad newcomer that is started now. Members may wait only for one that most of them must outvote."""
        self.lives[life] = Life(life, now_ns, now_ns, group, expected={REFUSED, SPARED}, mistake=kind)
        self.ledger.born(life, group, place)
        lasting_ns = int(self.bounds.refusal * SECOND) if kind in OUTVOTED else 0
        fault = CommittedFault(kind, now_ns, frozenset({life}), now_ns + lasting_ns, now_ns, silent=True)
        self._faults.append(fault)
        self.totals.faults[kind.value] = self.totals.faults.get(kind.value, 0) + 1

    def went(self, life: int, status: int, now_ns: int) -> None:
        """Take the end of a bad newcomer."""
        newcomer = self.lives[life]
        assert newcomer.mistake is not None
        newcomer.ended_ns = now_ns
        for fault in self._faults:
            if life in fault.victims:
                fault.deadline_ns = min(fault.deadline_ns, now_ns + self._call_ns)
        if status == REFUSED:
            self._mark(REFUSALS[newcomer.mistake])
        elif status not in newcomer.expected:
            text = f"life {life} ({newcomer.mistake}) ended with status {status} instead of being refused: see its log"
            self._add_violation(now_ns, "admission", text)

    def harmed(self, kind: FaultKind, victims: Iterable[int], now_ns: int, pause: float, status: int | None) -> None:
        """Take a fault that is committed now; `status` is how the victims will exit, None if they continue."""
        hit = frozenset(victims)
        silence_ns = int(self.bounds.silence * SECOND)
        held_ns = victim_ns = pause_ns = 0
        if kind in PAUSES:
            pause_ns = int(pause * SECOND)
            held_ns = pause_ns if kind is FaultKind.STOP_TRAINING else min(pause_ns, silence_ns)
            victim_ns = pause_ns + silence_ns
        elif kind in LINK_LOSSES:
            # Bytes that a broken link lost are detected only when nothing moves for a while.
            held_ns = int(self.bounds.stall * SECOND)
        deadline_ns = now_ns + held_ns + self._call_ns
        survivors = {number for number, life in self.lives.items() if life.joined and not life.ended_ns} - hit
        fault = CommittedFault(kind, now_ns, hit, deadline_ns, deadline_ns + victim_ns, survivors, pause_ns=pause_ns)
        fault.silent = held_ns > 0
        if kind in ENDINGS or kind is FaultKind.KILL_ACTOR:
            groups = {self.lives[number].group for number in hit}
            fault.reducing = {number for number in survivors if self.lives[number].group in groups}
        self._faults.append(fault)
        self.totals.faults[kind.value] = self.totals.faults.get(kind.value, 0) + 1
        self._note_harm(fault, status)

    def _note_harm(self, fault: CommittedFault, status: int | None) -> None:
        if fault.kind is FaultKind.MASS_DEATH:
            self._mark(Path.MASS_DEATH)
        for number in fault.victims:
            life = self.lives[number]
            if status is None:
                continue
            life.expected.add(status)
            # A peer that closes stays a member until it has closed.
            if fault.kind is not FaultKind.CLOSE:
                life.ended_ns = fault.at_ns
                if life.joined and not life.synced:
                    self._mark(Path.SINK_LOST)

    def ended(self, life: int, status: int, now_ns: int) -> None:
        """Take the end of a training process, and check its exit status."""
        known = self.lives[life]
        known.ended_ns = known.ended_ns or now_ns
        if status not in known.expected:
            expected = sorted(known.expected) or "no end"
            self._add_violation(now_ns, "exits", f"life {life} ended with status {status}; expected: {expected}")

    def told(self, step: Step) -> None:
        """Take a step of a training process."""
        life = self.lives[step.life]
        if step.call != PENDING:  # its thread may run while the training hangs
            life.heard_ns = max(life.heard_ns, step.end_ns)
        self.totals.steps += 1
        if step.error:
            self._judge_error(step)
        if step.call == CONNECT:
            self._judge_join(step, life)
        elif step.call != APPLY:
            self._judge_duration(step)
        if step.call in (CONNECT, OPTIMIZE) or step.call in ROUNDS:
            self._round_check.add(step)
        if step.call in ROUNDS and step.numbers is not None:
            self._note_response(step)
        if step.fact is not None:
            self.ledger.add(step)
            self._count(step, life)

    def _count(self, step: Step, life: Life) -> None:
        """Count a fact in the totals and the rare paths."""
        fact, totals = step.fact, self.totals
        if isinstance(fact, Reduced):
            if not fact.ok:
                self._judge_failure(step, fact)
            totals.reduces += fact.ok
            totals.aborts += not fact.ok
            totals.retries += fact.attempt > 1
            if fact.ok:
                self._note_recovery(step)
            elif fact.attempt % ATTEMPTS_MAX == 0 and fact.attempt:
                text = f"life {step.life} failed {fact.attempt} times at one reduce"
                self._add_violation(step.end_ns, "progress", text)
        elif isinstance(fact, Synced):
            totals.syncs += 1
            totals.received += fact.rx_bytes > 0
            life.synced = True
            if fact.rx_bytes and any(
                fault.kind in ENDINGS and step.start_ns < fault.at_ns < step.end_ns and self._is_loss(fault, life)
                for fault in self._faults
            ):
                self._mark(Path.SOURCE_LOST)

    def _is_loss(self, fault: CommittedFault, life: Life) -> bool:
        """Whether a fault killed a member of the same group that had the state."""
        known = [self.lives.get(number) for number in fault.victims]
        return any(other is not None and other.group == life.group and other.synced for other in known)

    def _mark(self, path: Path) -> None:
        self.totals.paths[path] = self.totals.paths.get(path, 0) + 1

    # ------------------------------------------------------------------------------------------ the laws

    def _judge_error(self, step: Step) -> None:
        kind = step.error.split(":", 1)[0]
        if kind == "TooFewPeersError" and step.call == WAIT:
            for fault in self._faults:
                fault.waiting.discard(step.life)  # it waited for more peers, not for the answer to a fault
            return
        if step.call == OPTIMIZE and ALONE in step.error and self._was_alone(step):
            return
        if kind in ("MasterLostError", "KickedError") and self._was_harmed(step.life, step.end_ns):
            self.lives[step.life].joined = self.lives[step.life].synced = False
            return
        if step.call == SYNC and self._was_harm():
            if kind == "PeerLostError" or NO_STATE in step.error:
                return  # the peers that had the state were lost
            if CUT_OFF in step.error:
                self.lives[step.life].joined = self.lives[step.life].synced = False
                return  # or could not be reached
        self._add_violation(step.end_ns, "innocence", f"life {step.life} got from {step.call}: {step.error}")

    def _judge_failure(self, step: Step, fact: Reduced) -> None:
        """A reduce fails because a peer was lost, or once because a newcomer reduces something else."""
        if self._was_harm():
            return
        if fact.attempt <= 1 and any(
            fault.kind is FaultKind.NEWCOMER_SHAPE and fault.at_ns <= step.end_ns and step.start_ns <= fault.deadline_ns
            for fault in self._faults
        ):
            return
        text = f"attempt {fact.attempt} of life {step.life} at a reduce failed, and no peer was harmed"
        self._add_violation(step.end_ns, "innocence", text)

    def _was_harm(self) -> bool:
        """Whether a fault hit any peer lately. Bad newcomers hit none."""
        return any(fault.kind not in NEWCOMERS for fault in self._faults)

    def _was_harmed(self, life: int, at_ns: int) -> bool:
        """Whether a fault hit this life that costs a membership."""
        found = False
        for fault in self._faults:
            if (
                life in fault.victims
                and fault.at_ns <= at_ns <= fault.victim_deadline_ns
                and not self._is_mended(fault)
            ):
                found = fault.cost = True
        return found

    def _was_alone(self, step: Step) -> bool:
        """Whether no other unharmed member existed during the whole step."""
        harmed = {number for fault in self._faults for number in fault.victims}
        others = [life for life in self.lives.values() if life.number not in harmed | {step.life}]
        return not any(life.joined and life.joined_ns < step.start_ns and not life.ended_ns for life in others)

    def _is_mended(self, fault: CommittedFault) -> bool:
        """Whether a membership survives this fault."""
        return fault.kind in MENDED or 0 < fault.pause_ns < self.bounds.silence * SECOND / 2

    def _judge_join(self, step: Step, life: Life) -> None:
        if step.numbers is None:
            return
        life.joined, life.joined_ns = True, step.end_ns
        self._joins.append((step.start_ns, step.end_ns))
        self.totals.joins += 1
        allowed_ns = self._allowed(step.life, step.start_ns, step.end_ns) + int(self.bounds.join * SECOND)
        if step.end_ns > allowed_ns:
            self._add_violation(
                step.end_ns, "joining", f"life {step.life} was accepted only after {step.seconds:.2f} s"
            )

    def _judge_duration(self, step: Step) -> None:
        if step.call != PENDING and not step.error and not self._is_held_up(step.start_ns, step.end_ns):
            self.totals.longest = max(self.totals.longest, step.seconds)
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
            self._add_violation(step.end_ns, "promptness", text)

    def _allowed(self, life: int, base_ns: int, end_ns: int) -> int:
        """Until when a call may last, given all faults before its end.

        Faults never stop, so faults of other peers excuse a call only for a bounded time; otherwise a call that hangs
        would have a new excuse every second. A loss that is detected at once may cost the time of one more call.
        Silence may cost the time until it is detected, and several peers may be silent one after the other.
        """
        allowed_ns = base_ns
        for fault in self._faults:
            if fault.at_ns > end_ns:
                continue
            if life in fault.victims:
                allowed_ns = max(allowed_ns, fault.victim_deadline_ns)
            else:
                most_ns = self._hang_ns if fault.silent else self._call_ns
                allowed_ns = max(allowed_ns, min(fault.deadline_ns, base_ns + most_ns))
        return allowed_ns

    def _note_response(self, step: Step) -> None:
        """Measure the time from a fault until its last survivor has returned from a call that began after the fault."""
        for fault in self._faults:
            if step.life in fault.waiting and step.start_ns > fault.at_ns:
                fault.waiting.discard(step.life)
                # While a peer is stopped, all peers wait for it; then the time says nothing about this fault.
                if not fault.waiting and not self._is_held_up(fault.at_ns, step.end_ns):
                    self.totals.responses.append((step.end_ns - fault.at_ns) / SECOND)

    def _note_recovery(self, step: Step) -> None:
        """Measure the time from a kill until its last survivor has completed a reduce that began after the kill."""
        for fault in self._faults:
            if step.life in fault.reducing and step.start_ns > fault.at_ns:
                fault.reducing.discard(step.life)
                if not fault.reducing and not self._is_held_up(fault.at_ns, step.end_ns):
                    self.totals.recoveries.append((step.end_ns - fault.at_ns) / SECOND)
                    self.totals.recovered_ns.append(step.end_ns)

    def _is_held_up(self, start_ns: int, end_ns: int) -> bool:
        return any(
            fault.kind in PAUSES and fault.at_ns < end_ns and fault.deadline_ns > start_ns for fault in self._faults
        )

    def tick(self, now_ns: int) -> None:
        """Look for lives without reports, and judge what is complete."""
        for life in self.lives.values():
            if life.mistake is not None:
                continue
            patience_ns = self._call_ns if life.joined else int(self.bounds.join * SECOND)
            allowed_ns = self._allowed(life.number, life.heard_ns + patience_ns, now_ns)
            if not life.ended_ns and now_ns > allowed_ns + self._hang_ns:
                text = f"life {life.number} reported its last step {(now_ns - life.heard_ns) / SECOND:.1f} s ago"
                self._add_violation(now_ns, "liveness", text)
                life.heard_ns = now_ns  # report it once
        self._settle(now_ns - SETTLED_NS)
        old_ns = now_ns - REMEMBERED_NS
        while self._joins and self._joins[0][1] < old_ns:
            self._joins.popleft()
        while self._faults and self._faults[0].victim_deadline_ns < old_ns:
            self._note_end(self._faults.popleft())
        for number in [n for n, life in self.lives.items() if life.ended_ns and life.ended_ns < old_ns]:
            del self.lives[number]
            self._round_check.forget(number)

    def _note_end(self, fault: CommittedFault) -> None:
        """Mark the rare paths of a fault whose effects are known."""
        short = fault.pause_ns < self.bounds.silence * SECOND
        if fault.kind in STOPS and fault.kind is not FaultKind.STOP_TRAINING:
            if short != fault.cost:
                self._mark(Path.SAT_OUT if short else Path.GIVEN_UP)
        elif fault.kind is FaultKind.BLACK_HOLE:
            if short != fault.cost:
                self._mark(Path.HOLE_SAT_OUT if short else Path.HOLE_NOTICED)
        elif fault.kind is FaultKind.FLIP_RING:
            self._mark(Path.FLIPPED)
        elif fault.kind in MENDED:
            self._mark(Path.REPLACED)

    def finish(self, now_ns: int) -> None:
        """Judge everything that is left, at the end of the run."""
        self._settle(now_ns + 2 * SETTLED_NS)
        while self._faults:
            self._note_end(self._faults.popleft())

    def _settle(self, until_ns: int) -> None:
        rounds = self._round_check
        rounds.settle(until_ns)
        self.ledger.settle(until_ns)
        self.violations += rounds.found + self.ledger.found
        rounds.found.clear()
        self.ledger.found.clear()
        for path in self.ledger.paths:
            self._mark(path)
        self.ledger.paths.clear()
        self.totals.revisions = self.ledger.revisions
        self.totals.rounds = rounds.count
        while rounds.finished:
            found = rounds.finished.popleft()
            noticed_ns = found.last_start_ns - self._call_ns
            living = sum(
                life.born_ns < found.first_return_ns and not 0 < life.ended_ns < noticed_ns
                for life in self.lives.values()
            )
            for text in judge_round(found, living):
                self._add_violation(found.first_return_ns, "world", text)
            if found.optimizes:
                self._mark_meanwhile(found)

    def _mark_meanwhile(self, found: Round) -> None:
        """Mark joins and deaths between the last start and the first return of an optimisation."""
        begin_ns, end_ns = found.last_start_ns, found.first_return_ns
        if any(start_ns < end_ns < until_ns for start_ns, until_ns in self._joins):
            self._mark(Path.JOINED_OPTIMIZING)
        for fault in self._faults:
            lost = fault.kind in ENDINGS and fault.kind is not FaultKind.CLOSE
            if (
                lost
                and begin_ns < fault.at_ns < end_ns
                and any(self._was_member(n, fault.at_ns) for n in fault.victims)
            ):
                self._mark(Path.DIED_OPTIMIZING)

    def _was_member(self, number: int, at_ns: int) -> bool:
        life = self.lives.get(number)
        return life is not None and life.joined and life.joined_ns < at_ns

    def _add_violation(self, at_ns: int, law: str, text: str) -> None:
        self.violations.append(Violation(at_ns, law, text))


def judge_growth(name: str, sizes: list[int], allowed: int) -> str:
    """The growth from the first third of a series to its last, without the warm-up, as a text; empty if allowed."""
    settled = sizes[len(sizes) // 4 :]
    if len(settled) < SAMPLES_MIN:
        return ""
    third = len(settled) // 3
    grown = median(settled[-third:]) - median(settled[:third])
    return f"{name} grew by {grown:,.0f} over the run" if grown > allowed else ""
