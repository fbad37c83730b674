"""The judge of the stress harness: a correct run breaks no law, and every violation is found under its law."""

from __future__ import annotations

import random

import pytest
from pccl.stress.checkers import SECOND, Judge, judge_growth
from pccl.stress.faults import FaultKind
from pccl.stress.records import (
    CONNECT,
    PENDING,
    REDUCE,
    SYNC,
    TOPOLOGY,
    WAIT,
    Bounds,
    Numbers,
    Reduced,
    Step,
    Synced,
    Task,
    spread,
)
from pccl.stress.round_check import Round, RoundCheck, judge_round

BOUNDS = Bounds(call=1.0, silence=2.0, join=5.0, hang=10.0)


def numbers(
    peer: int = 1, *, number: int = 1, epoch: int = 1, world: int = 2, group: int = 2, groups: int = 1, largest: int = 2
) -> Numbers:
    return Numbers(peer, number, epoch, world, group, groups, largest)


def step(
    life: int, start: float, end: float, told: Numbers | None = None, call: str = TOPOLOGY, error: str = ""
) -> Step:
    """Return a step of group 0, with times in seconds."""
    return Step(life, 0, call, int(start * SECOND), int(end * SECOND), told, error)


def judge_of(*lives: int) -> Judge:
    """Return a judge that has seen these lives join in the first second."""
    judge = Judge(BOUNDS, slack=0.5)
    for life in lives:
        judge.born(life, 0)
        judge.told(step(life, 0.0, 0.5, numbers(life, world=len(lives)), CONNECT))
    return judge


def laws(judge: Judge) -> list[str]:
    return [violation.law for violation in judge.violations]


def rounds_of(lives: int, rounds: int, seed: int) -> list[Step]:
    """Return the steps of a correct run: rounds with one end each, uneven wake-ups, newcomers, cancelled calls."""
    rng = random.Random(seed)
    steps: list[Step] = []
    ready = dict.fromkeys(range(1, lives // 2 + 1), 0.0)
    for index in range(1, rounds + 1):
        starts = {life: at + rng.uniform(0, 0.01) for life, at in ready.items()}
        instant = max(starts.values()) + 0.0001
        newcomer = len(ready) + 1 if len(ready) < lives and rng.random() < 0.1 else None
        size = len(ready) + bool(newcomer)
        told = numbers(number=index, epoch=index, world=size, group=size, largest=size)
        for life, start in starts.items():
            back = instant + rng.uniform(0, 0.02)
            given_up = rng.random() < 0.03  # answered too late: the life has no result, though the round took place
            steps.append(step(life, start, back, None if given_up else told, WAIT if given_up else TOPOLOGY))
            ready[life] = back
        if newcomer:
            ready[newcomer] = instant + rng.uniform(0, 0.02)
            steps.append(step(newcomer, max(instant - 0.5, 0.0), ready[newcomer], told, CONNECT))
    return steps


def shuffled(steps: list[Step], seed: int) -> list[Step]:
    """Return the steps as pipes deliver them: those of one life in order, those of different lives in any order."""
    queues: dict[int, list[Step]] = {}
    for told in steps:
        queues.setdefault(told.life, []).append(told)
    rng = random.Random(seed)
    mixed: list[Step] = []
    while queues:
        life = rng.choice(list(queues))
        mixed.append(queues[life].pop(0))
        if not queues[life]:
            del queues[life]
    return mixed


@pytest.mark.parametrize("seed", range(20))
def test_a_sound_run_is_sorted_into_its_rounds(seed: int) -> None:
    """Goal: no false alarm, however late peers wake up, also with newcomers and cancelled calls."""
    agreement = RoundCheck()

    for told in shuffled(rounds_of(6, 300, seed), seed):
        agreement.add(told)
    agreement.settle(1000 * SECOND)

    assert agreement.found == []
    assert agreement.count == len(agreement.finished) == 300


@pytest.mark.parametrize("seed", range(20))
def test_a_lie_to_one_peer_is_found(seed: int) -> None:
    """Goal: a peer that gets other numbers than the others in any one round is found."""
    steps = rounds_of(4, 60, seed)
    liable = [index for index, told in enumerate(steps) if told.call == TOPOLOGY and index > len(steps) // 2]
    index = random.Random(seed).choice(liable)
    told = steps[index]
    assert told.numbers is not None
    steps[index] = Step(told.life, 0, TOPOLOGY, told.start_ns, told.end_ns, told.numbers._replace(global_world=99))
    agreement = RoundCheck()

    for told in shuffled(steps, seed):
        agreement.add(told)

    assert {violation.law for violation in agreement.found} == {"agreement"}


def test_a_newcomer_that_is_told_something_else_is_found() -> None:
    """Goal: the numbers from connect() are compared with those of the members in that round."""
    agreement = RoundCheck()
    agreement.add(step(1, 1.0, 1.1, numbers(world=2)))
    agreement.add(step(2, 0.5, 1.1, numbers(2, world=3), CONNECT))

    assert {violation.law for violation in agreement.found} == {"agreement"}


@pytest.mark.parametrize(("number", "epoch"), [(5, 0), (4, 2), (6, 2)])
def test_an_epoch_that_falls_and_a_round_that_is_missed_are_found(number: int, epoch: int) -> None:
    """Goal: epochs only grow within a membership, and rounds are consecutive; both may jump in the next membership."""
    agreement = RoundCheck()
    for index, (peer, count, old) in enumerate([(1, 1, 5), (1, 2, 6), (9, 3, 1), (9, 4, 1)]):
        agreement.add(step(1, index, index + 0.5, numbers(peer, number=count, epoch=old)))
    assert agreement.found == []

    agreement.add(step(1, 5.0, 5.5, numbers(9, number=number, epoch=epoch)))

    assert "order" in {violation.law for violation in agreement.found}


@pytest.mark.parametrize(
    ("told", "lives", "living", "complaint"),
    [
        (numbers(world=3, group=3, largest=3), {1, 2, 3}, 3, ""),
        (numbers(world=3, group=3, largest=3), {1, 2}, 2, "only 2 lived"),
        (numbers(world=2, group=2, largest=2), {1, 2, 3}, 3, "3 took part in a world of 2"),
        (numbers(world=3, group=2, largest=2), {1, 2}, 3, "groups of [2] in a world of 3"),
    ],
)
def test_a_world_that_cannot_be_is_found(told: Numbers, lives: set[int], living: int, complaint: str) -> None:
    """Goal: a world counts no dead peer and every participant, and is the sum of its groups."""
    found = Round(0, 0, (told, 1), {0: (told, 1)}, lives)

    wrong = judge_round(found, living)

    assert complaint in "; ".join(wrong)
    assert bool(wrong) == bool(complaint)


def test_a_slow_call_needs_an_excuse() -> None:
    """Goal: a call may end a second after its start or the last fault; a stop is an excuse until it is noticed."""
    judge = judge_of(1, 2)
    judge.told(step(1, 1.0, 1.9, numbers()))
    judge.harmed(FaultKind.KILL_TRAINING, [2], 2 * SECOND, 0.0, -9)
    judge.told(step(1, 1.9, 2.9, numbers()))
    assert laws(judge) == []

    judge.told(step(1, 2.9, 4.0, numbers()))
    assert laws(judge) == ["promptness"]

    judge = judge_of(1, 2)
    judge.harmed(FaultKind.STOP_ACTOR, [2], 1 * SECOND, 10.0, None)
    judge.told(step(1, 1.0, 3.9, numbers()))
    assert laws(judge) == []
    judge.told(step(1, 1.0, 4.1, numbers()))
    assert laws(judge) == ["promptness"]


def test_a_call_that_never_returns_is_found() -> None:
    """Goal: a hang is found although there is no step for it; a dead life is not waited for."""
    judge = judge_of(1, 2)
    judge.harmed(FaultKind.KILL_TRAINING, [2], 1 * SECOND, 0.0, -9)

    judge.tick(11 * SECOND)
    assert laws(judge) == []
    judge.tick(13 * SECOND)
    assert laws(judge) == ["liveness"]


def test_late_admission_is_found() -> None:
    """Goal: newcomers are accepted within the bound, counted from the last fault."""
    judge = judge_of(1)
    judge.born(2, SECOND)
    judge.told(step(2, 1.0, 7.0, numbers(2), CONNECT))

    assert laws(judge) == ["joining"]


@pytest.mark.parametrize("error", ["KickedError: silent", "MasterLostError: gone", "UsageError: deadlock"])
def test_the_innocent_do_not_lose_their_membership(error: str) -> None:
    """Goal: only a fault at the peer itself explains the end of its membership; nothing explains a usage error."""
    judge = judge_of(1, 2)
    judge.harmed(FaultKind.KILL_ACTOR, [2], 1 * SECOND, 0.0, None)
    judge.told(step(2, 1.0, 1.1, None, TOPOLOGY, error))
    assert laws(judge) == (["innocence"] if error.startswith("Usage") else [])

    judge.told(step(1, 1.0, 1.1, None, PENDING, error))
    assert laws(judge)[-1:] == ["innocence"]


def test_too_few_peers_is_an_answer_to_waiting_only() -> None:
    judge = judge_of(1)
    judge.told(step(1, 1.0, 1.3, None, WAIT, "TooFewPeersError: the time is over"))
    assert laws(judge) == []
    judge.told(step(1, 1.0, 1.3, None, TOPOLOGY, "TooFewPeersError: the time is over"))
    assert laws(judge) == ["innocence"]


@pytest.mark.parametrize(("pause", "found"), [(0.3, ["innocence"]), (3.0, [])])
def test_a_short_pause_costs_no_membership(pause: float, found: list[str]) -> None:
    """Goal: a stop or a silence shorter than the timeouts must not end a membership."""
    for kind in (FaultKind.STOP_PEER, FaultKind.BLACK_HOLE):
        judge = judge_of(1, 2)
        judge.harmed(kind, [2], SECOND, pause, None)
        judge.told(step(2, 1.0, 1.5, None, TOPOLOGY, "MasterLostError: silent"))
        assert laws(judge) == found


@pytest.mark.parametrize(
    "error",
    ["PeerLostError: gone", "PCCLError: [NO_SHARED_STATE_AVAILABLE]", "KickedError: it cannot fetch the shared state"],
)
def test_a_lost_state_needs_a_reason(error: str) -> None:
    """Goal: a sync may fail because the peers with the state died or were unreachable, and for no other reason."""
    judge = judge_of(1, 2)
    judge.told(step(1, 1.0, 1.1, None, SYNC, error))
    assert laws(judge) == ["innocence"]
    judge.harmed(FaultKind.KILL_TRAINING, [2], 2 * SECOND, 0.0, -9)
    judge.told(step(1, 2.0, 2.1, None, SYNC, error))
    assert laws(judge) == ["innocence"]


def test_the_time_to_the_next_reduce_is_measured() -> None:
    """Goal: from a kill to the last survivor's success in an attempt that began after it, within the group."""
    judge = judge_of(1, 2, 3)
    judge.born(4, 0, group=1)
    judge.told(Step(4, 1, CONNECT, 0, SECOND // 2, numbers(4, world=4)))
    judge.harmed(FaultKind.KILL_TRAINING, [3], SECOND, 0.0, -9)
    for life, start, end, ok in [(1, 0.99, 1.01, False), (1, 1.02, 1.04, True), (2, 1.02, 1.05, True)]:
        fact = Reduced(1, 0, 1, ok, 2 * ok, 7, 7)
        judge.told(Step(life, 0, REDUCE, int(start * SECOND), int(end * SECOND), fact=fact))

    assert judge.totals.recoveries == [pytest.approx(0.05)]
    assert (judge.totals.reduces, judge.totals.aborts) == (2, 1)


def test_exits_must_follow_from_what_was_done() -> None:
    """Goal: a killed process ends by that signal; a process without a fault does not end."""
    judge = judge_of(1, 2, 3)
    judge.harmed(FaultKind.KILL_TRAINING, [1], SECOND, 0.0, -9)
    judge.harmed(FaultKind.CLOSE, [2], SECOND, 0.0, 0)
    judge.ended(1, -9, 2 * SECOND)
    judge.ended(2, 1, 2 * SECOND)
    judge.ended(3, 0, 2 * SECOND)

    assert laws(judge) == ["exits", "exits"]


def test_the_dead_are_not_counted_for_long() -> None:
    """Goal: until a second after a kill, and not longer, a round may count the dead peer."""
    for start, expected in [(1.4, []), (3.0, ["world"])]:
        judge = judge_of(1, 2)
        judge.harmed(FaultKind.KILL_TRAINING, [2], SECOND, 0.0, -9)
        judge.told(step(1, start, start + 0.1, numbers(number=2, world=2)))
        judge.finish(4 * SECOND)
        assert laws(judge) == expected


def test_the_answer_to_a_fault_is_measured() -> None:
    """Goal: from the fault to the return of the last survivor's next call."""
    judge = judge_of(1, 2, 3)
    judge.harmed(FaultKind.KILL_TRAINING, [3], SECOND, 0.0, -9)
    judge.told(step(1, 0.9, 1.01, numbers()))
    judge.told(step(1, 1.02, 1.10, numbers()))
    judge.told(step(2, 1.02, 1.25, numbers(2)))

    assert judge.totals.responses == [pytest.approx(0.25)]
    assert spread(judge.totals.responses)["max"] == 0.25


@pytest.mark.parametrize(("gain", "found"), [(0, False), (100_000, True)])
def test_growth_is_told_from_noise(gain: int, found: bool) -> None:
    """Goal: a leak shows over a minute; noise and the first allocations do not."""
    rng = random.Random(1)
    sizes = [5_000_000] * 5 + [20_000_000 + gain * index + rng.randrange(500_000) for index in range(60)]

    assert bool(judge_growth("master", sizes, 1 << 20)) == found


def test_a_run_that_is_too_short_shows_no_growth() -> None:
    """Goal: on a loaded machine, a run of twenty seconds ends while the arena still grows to its size."""
    sizes = [20_000_000 + 1_500_000 * index for index in range(20)]

    assert not judge_growth("elder", sizes, 1 << 20)


def test_tasks_and_steps_survive_the_pipe() -> None:
    """Goal: reading returns what was written, also errors with line ends."""
    task = Task(3, "a=1\nb=2", "127.0.0.1:1", group=1, seed=9)
    told = [step(1, 1.0, 2.0, numbers()), step(2, 1.0, 2.0, None, CONNECT, "E: two\nlines")]
    told.append(
        Step(1, 0, REDUCE, 1, 2, fact=Reduced(1, 0, 1, True, 2, 7, 8, members=((0, 1), (1, 2)), span=(0.5, 1.5)))
    )
    told.append(Step(1, 0, SYNC, 1, 2, fact=Synced(1, 0, 7, 1, 8, 0, 100)))

    assert Task.decode(task.encode()) == task
    assert [Step.decode(one.encode()) for one in told] == told
    assert all(one.encode().count(b"\n") == 1 for one in told)
