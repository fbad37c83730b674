"""Kills in the middle of syncs: whichever process dies, the agreed state is never lost, split or older.

Four training processes sync a state; in each step one of them does not update it, so that every sync moves bytes. Each
time a process is drawn from all of theirs (training processes, peer actors, senders and receivers of lanes and of
state) and killed with SIGKILL. Each of them checks after every sync that its content belongs to its revision.
`PCCL_TEST_SYNC_KILLS` makes it a long run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from pccl.stress.records import spread

from .helpers import QUICK, running_master
from .trainees import WHOLE_SECONDS_MAX, Ring, Told

KILLS = int(os.environ.get("PCCL_TEST_SYNC_KILLS", "28"))
WARM_SYNCS = 8  # after these a keeper has all the memory it will ever need
ROLES = ("training", "pccl-peer", "pccl-send", "pccl-recv", "pccl-serve", "pccl-fetch")


@pytest.fixture
def ring() -> Iterator[Ring]:
    with running_master(QUICK) as master:
        made = Ring("state_keeper", master, QUICK)
        try:
            yield made
        finally:
            made.close()


def draw(ring: Ring, chance: random.Random, role: str) -> tuple[int, int]:
    """Return a process of that role. Workers of a transfer live for milliseconds, so look until there is one."""
    deadline = time.monotonic() + WHOLE_SECONDS_MAX
    while time.monotonic() < deadline:
        found = [(number, pid) for number, kind, pid in ring.processes() if kind == role]
        if found:
            return chance.choice(found)
        ring.read(0.001)
    raise AssertionError(f"there was no {role} in {WHOLE_SECONDS_MAX:g} s")


def kill_one(ring: Ring, chance: random.Random, role: str) -> tuple[float, int]:
    """Kill one of that role. Return the seconds until all survivors had synced again, and their revision then."""
    number, pid = draw(ring, chance, role)
    survivors = set(ring.pids) - ({number} if role in ("training", "pccl-peer") else set())
    killed_ns = time.monotonic_ns()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0.0, 0
    if role == "training":
        ring.remove(number)
    revisions: dict[int, int] = {}
    while revisions.keys() < survivors:
        waited = (time.monotonic_ns() - killed_ns) / 1e9
        still = survivors - revisions.keys()
        assert waited < WHOLE_SECONDS_MAX, f"{role} of {number} was killed, {still} stand still; {ring.errors()}"
        told = ring.read(0.1)
        if told is not None and told.event == "ok" and told.time_ns > killed_ns and told.number in survivors:
            revisions[told.number] = int(told.words)
    if role == "training":
        ring.add()
    return (time.monotonic_ns() - killed_ns) / 1e9, max(revisions.values(), default=0)


@pytest.mark.timeout(90 + 2 * KILLS)
def test_kills_in_the_middle_of_syncs(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the survivors' next sync succeeds, revisions only grow, and nothing is left over."""
    chance = random.Random(11)
    seconds: list[float] = []
    events: Counter[str] = Counter()
    read = ring.read

    def counting(timeout: float) -> Told | None:
        told = read(timeout)
        if told is not None:
            events[told.event] += 1
        return told

    ring.read = counting  # type: ignore[method-assign]
    began, highest = time.monotonic(), 0
    ring.until_whole()
    for count in range(KILLS):
        time.sleep(chance.uniform(0, 0.02))  # so that the kill hits the sync at a random point
        taken, revision = kill_one(ring, chance, ROLES[count % len(ROLES)])
        seconds.append(taken)
        assert not revision or revision >= highest, f"revision {highest} was agreed on, then {revision}"
        highest = max(highest, revision)
    ring.until_whole()

    with capsys.disabled():
        print(f"\n  {KILLS} kills in {time.monotonic() - began:.0f} s, revision {highest}; {dict(events)}")
        print(f"  until all had synced again: {spread(seconds)}")
    assert highest > KILLS // 4, "too few syncs succeeded"
    for number in ring.pids:
        # The first syncs of a membership allocate the memory that all later ones use.
        held = {descriptors for _, descriptors in ring.footprints[number][WARM_SYNCS:]}
        assert len(held) <= 2, f"keeper {number} held {held} descriptors"
