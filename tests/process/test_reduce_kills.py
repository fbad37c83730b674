"""Kills in the middle of reduces: whichever process dies, the survivors' calls fail at once, undone, and work again.

Four training processes reduce all the time, in place and staged. Each time a process is drawn from all of theirs
(training processes, peer actors, senders, receivers) and killed with SIGKILL. Survivors check by themselves that a
failed reduce left every bit as it was, and retry at once. `PCCL_REDUCE_KILLS` makes it a long run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from pccl.stress.faults import family_of
from pccl.stress.records import spread

from pccl import MasterNode, Options

from .helpers import QUICK, Script, running_master

KILLS = int(os.environ.get("PCCL_REDUCE_KILLS", "32"))
PEERS = 4
FAIL_SECONDS_MAX = 2.0  # of the suite on a busy machine; 0.3 is what it should be
WHOLE_SECONDS_MAX = 15.0  # patience with a loaded machine
WARM_REDUCES = 5  # after these a trainee has all the memory it will ever need
ROLES = ("training", "actors", "senders", "receivers")


@dataclass
class Told:
    """One line of a trainee."""

    number: int
    event: str
    time_ns: int
    epoch: int
    world: int
    bytes_in_use: int
    descriptors: int
    words: str

    @classmethod
    def read(cls, line: str) -> Told:
        number, event, *numbers, rest = [*line.split(" ", 7), ""][:8]
        return cls(int(number), event, *map(int, numbers), rest)  # type: ignore[arg-type]


class Ring:
    """Trainees and what they told."""

    def __init__(self, master: MasterNode, options: Options) -> None:
        command = (sys.executable, "-m", "tests.process.trainee", master.address, options.encode())
        self.script = Script.command(*command)
        self.pids: dict[int, int] = {}
        self.last: dict[int, Told] = {}  # the last success of each trainee
        self.footprints: dict[int, list[tuple[int, int]]] = {}  # after each success: memory and descriptors
        self._born = 0
        for _ in range(PEERS):
            self.add()

    def add(self) -> None:
        self._born += 1
        self.script.say(str(self._born))
        while self._born not in self.pids:
            self.read(5.0)

    def remove(self, number: int) -> None:
        del self.pids[number]
        self.last.pop(number, None)

    def read(self, timeout: float) -> Told | None:
        """The next line, if there is one in time."""
        line = self.script._next_line(time.monotonic() + timeout)
        if line is None:
            assert self.script.process.poll() is None, self.script.errors()
            return None
        told = Told.read(line)
        assert told.event != "wrong", f"trainee {told.number}: {told.words}; {self.script.errors()[-2000:]}"
        if told.event == "born":
            self.pids[told.number] = told.epoch
        elif told.event == "ok" and told.number in self.pids:
            self.last[told.number] = told
            self.footprints.setdefault(told.number, []).append((told.bytes_in_use, told.descriptors))
        return told

    def until_whole(self) -> int:
        """Wait until the last success of everybody was of one full ring; its epoch."""
        deadline = time.monotonic() + WHOLE_SECONDS_MAX
        while True:
            lasts = [self.last[number] for number in self.pids if number in self.last]
            epochs = {told.epoch for told in lasts}
            if len(lasts) == PEERS and {told.world for told in lasts} == {PEERS} and len(epochs) == 1:
                return epochs.pop()
            assert time.monotonic() < deadline, f"the ring is not whole: {lasts}; {self.script.errors()[-3000:]}"
            self.read(0.1)

    def processes(self) -> list[tuple[int, str, int]]:
        """(trainee, role, pid) of all processes of all trainees."""
        found = []
        for number, pid in self.pids.items():
            family = family_of(pid)
            for role in ROLES:
                pids = [family.training] if role == "training" else getattr(family, role)
                found += [(number, role, one) for one in pids]
        return found

    def close(self) -> None:
        self.script.__exit__()
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ring() -> Iterator[Ring]:
    with running_master(QUICK) as master:
        made = Ring(master, QUICK)
        try:
            yield made
        finally:
            made.close()


def kill_one(ring: Ring, chance: random.Random, epoch: int, role: str) -> tuple[list[float], float]:
    """Kill one of that role; seconds until each survivor's call failed, and until all had succeeded again."""
    number, _, pid = chance.choice([process for process in ring.processes() if process[1] == role])
    survivors = set(ring.pids) - ({number} if role in ("training", "actors") else set())
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
    """Goal: every survivor's call fails in no time, with the old bits, the retry succeeds, and nothing is left over."""
    chance = random.Random(7)
    failed: list[float] = []
    again: list[float] = []
    roles: Counter[str] = Counter()
    began = time.monotonic()
    for count in range(KILLS):
        epoch = ring.until_whole()
        time.sleep(chance.uniform(0, 0.02))  # so that the kill meets the reduce at any of its points
        role = ROLES[count % len(ROLES)]
        calls, seconds = kill_one(ring, chance, epoch, role)
        failed += calls
        again.append(seconds)
        roles[role] += bool(calls)
    ring.until_whole()

    with capsys.disabled():
        print(f"\n  {KILLS} kills in {time.monotonic() - began:.0f} s; met a reduce: {dict(roles)}")
        print(f"  to fail: {spread(failed)}\n  until all had retried: {spread(again)}")
    assert max(failed) < FAIL_SECONDS_MAX
    assert len(roles) == len(ROLES), "every kind of process was killed in the middle of a reduce"
    for number in ring.pids:
        # The first reduces of a life bring the memory that all later ones use.
        held = set(ring.footprints[number][WARM_REDUCES:])
        assert len(held) <= 1, f"trainee {number} held {held}"
