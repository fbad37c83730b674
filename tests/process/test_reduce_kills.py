"""Kills in the middle of reduces: whichever process dies, the survivors' calls fail at once, and their retries work.

Four training processes reduce all the time, in place and staged. Each time a process is drawn from all of theirs
(training processes, peer actors, senders, receivers) and killed with SIGKILL. Survivors check by themselves that a
failed reduce left every bit as it was, and retry at once. `PCCL_TEST_REDUCE_KILLS` makes it a long run.
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
from .trainees import WHOLE_SECONDS_MAX, Ring

KILLS = int(os.environ.get("PCCL_TEST_REDUCE_KILLS", "32"))
FAIL_SECONDS_MAX = 2.0  # on a busy machine; 0.3 without load
PROMISED_SHARE = 0.95  # of all calls that fail; the loop bounds the others
WARM_REDUCES = 5  # after these a trainee has all the memory it will ever need
ROLES = ("training", "pccl-peer", "pccl-send", "pccl-recv")


@pytest.fixture
def ring() -> Iterator[Ring]:
    with running_master(QUICK) as master:
        made = Ring("trainee", master, QUICK)
        try:
            yield made
        finally:
            made.close()


def kill_one(ring: Ring, chance: random.Random, epoch: int, role: str) -> tuple[list[float], float]:
    """Kill a process of that role. Return the seconds until each survivor's call failed, and until all had retried."""
    number, _, pid = chance.choice([process for process in ring.processes() if process[1] == role])
    survivors = set(ring.pids) - ({number} if role in ("training", "pccl-peer") else set())
    killed_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    if role == "training":
        ring.remove(number)
    failed: list[float] = []
    done: set[int] = set()
    while done < survivors:
        waited = (time.monotonic_ns() - killed_ns) / 1e9
        problem = (
            f"{role} {pid} of {number} was killed: {survivors - done} did not go on; {ring.script.errors()[-3000:]}"
        )
        assert waited < WHOLE_SECONDS_MAX, problem
        told = ring.read(0.1)
        if told is None or told.number not in survivors or told.time_ns < killed_ns:
            continue
        if told.event == "lost" and told.number not in done:
            failed.append((told.time_ns - killed_ns) / 1e9)
        if told.event == "ok" and told.epoch > epoch:
            done.add(told.number)
    seconds = (time.monotonic_ns() - killed_ns) / 1e9
    if role == "training":
        ring.add()
    return failed, seconds


@pytest.mark.timeout(60 + KILLS)
def test_kills_in_the_middle_of_reduces(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: every survivor's call fails at once, with the old bits, the retry succeeds, and nothing leaks."""
    chance = random.Random(7)
    failed: list[float] = []
    again: list[float] = []
    roles: Counter[str] = Counter()
    began = time.monotonic()
    for count in range(KILLS):
        epoch = ring.until_whole()
        time.sleep(chance.uniform(0, 0.02))  # so that the kill hits the reduce at a random point
        role = ROLES[count % len(ROLES)]
        calls, seconds = kill_one(ring, chance, epoch, role)
        failed += calls
        again.append(seconds)
        roles[role] += bool(calls)
    ring.until_whole()

    with capsys.disabled():
        print(f"\n  {KILLS} kills in {time.monotonic() - began:.0f} s; met a reduce: {dict(roles)}")
        print(f"  to fail: {spread(failed)}\n  until all had retried: {spread(again)}")
    assert sorted(failed)[int(PROMISED_SHARE * (len(failed) - 1))] < FAIL_SECONDS_MAX
    assert all(roles[role] for role in ROLES[:KILLS]), f"not every kind of process met a reduce: {roles}"
    for number in ring.pids:
        # The first reduces of a membership allocate the memory that all later ones use.
        held = set(ring.footprints[number][WARM_REDUCES:])
        assert len(held) <= 1, f"trainee {number} held {held}"
