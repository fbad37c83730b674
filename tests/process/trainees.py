"""Training processes that a test kills again and again: how the test starts, reads and replaces them.

A program forks them on demand and passes on the lines that they print (see `trainee`). Not a test itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from pccl.stress.faults import children_of, name_of

from pccl import MasterNode, Options

from .helpers import Script

PEERS = 4
WHOLE_SECONDS_MAX = 15.0  # patience with a loaded machine


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
        return cls(int(number), event, *map(int, numbers), rest)  # type: ignore[arg-type, call-arg]


class Ring:
    """Four training processes of one run, and the lines that they printed."""

    def __init__(self, program: str, master: MasterNode, options: Options) -> None:
        command = (sys.executable, "-m", f"tests.process.{program}", master.address, options.encode())
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
        """Return the next line, or None after the timeout."""
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

    def errors(self) -> str:
        """Return the last part of the standard error of all trainees."""
        return self.script.errors()[-3000:]

    def until_whole(self) -> int:
        """Wait until the last success of all trainees was in one full ring; return its epoch."""
        deadline = time.monotonic() + WHOLE_SECONDS_MAX
        while True:
            lasts = [self.last[number] for number in self.pids if number in self.last]
            epochs = {told.epoch for told in lasts}
            if len(lasts) == PEERS and {told.world for told in lasts} == {PEERS} and len(epochs) == 1:
                return epochs.pop()
            assert time.monotonic() < deadline, f"the ring is not whole: {lasts}; {self.errors()}"
            self.read(0.1)

    def processes(self) -> list[tuple[int, str, int]]:
        """Return (trainee, role, pid) of all processes of all trainees; the role is the beginning of its name."""
        found = []
        for number, pid in self.pids.items():
            found.append((number, "training", pid))
            for actor in children_of(pid):
                found.append((number, "pccl-peer", actor))
                found += [(number, name_of(one).rpartition("-")[0], one) for one in children_of(actor)]
        return found

    def close(self) -> None:
        self.script.__exit__()
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
