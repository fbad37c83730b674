"""The bad newcomers of a run, as the supervisor sees them: it starts one, and expects that it is refused in time.

A newcomer has a life, because the master may count it in a world, and its own place, which no peer has. What it did
wrong, and what it was told, is in its log. The judge learns when it came and how it ended.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .faults import MENDED, NEWCOMERS, OUTVOTED, Fault, FaultKind, send
from .records import REFUSED, SPARED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .checkers import Judge
    from .records import Task
    from .zygote import Zygote


MANY_LOSSES = frozenset({FaultKind.KILL_TWO, FaultKind.MASS_DEATH})


@dataclass(slots=True)
class Outsider:
    """One process that tries to join."""

    life: int
    kind: FaultKind
    until: float  # when it must have ended; infinite once that was reported
    harmed: bool = False  # a fault has cost a member since it came


class BadNewcomers:
    """All of them that have not ended, by process id."""

    def __init__(self, judge: Judge, log: Path, add_violation: Callable[[str, str], None]) -> None:
        self._judge = judge
        self._log = log
        self._add_violation = add_violation
        self._present: dict[int, Outsider] = {}

    @property
    def any_left(self) -> bool:
        """Whether one has not ended yet."""
        return bool(self._present)

    def allow(self, kind: FaultKind) -> bool:
        """Whether a fault may be committed now; the answer yes says that it will be.

        While one is there that most of the others must outvote, one fault may cost a member, and no second such
        newcomer comes: otherwise the newcomers could be as many as the others.
        """
        outvoted = [newcomer for newcomer in self._present.values() if newcomer.kind in OUTVOTED]
        if not outvoted or kind in MENDED | NEWCOMERS - OUTVOTED:
            return True
        if kind in OUTVOTED | MANY_LOSSES or any(newcomer.harmed for newcomer in outvoted):
            return False
        for newcomer in outvoted:
            newcomer.harmed = True
        return True

    def start(self, zygote: Zygote, fault: Fault, task: Task) -> None:
        """Start one. The judge is told first: no report of a member may overtake it."""
        self._judge.came(task.life, fault.kind, time.monotonic_ns(), task.group, task.place)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            with self._log.open("ab") as log:
                pid = zygote.spawn(replace(task, mistake=fault.kind.value), nowhere, log.fileno())
        finally:
            os.close(nowhere)
        until = time.monotonic() + self._judge.bounds.refusal
        self._present[pid] = Outsider(task.life, fault.kind, until)

    def ended(self, pid: int, status: int) -> bool:
        """Take the end of a process; False if it is none of these."""
        newcomer = self._present.pop(pid, None)
        if newcomer is None:
            return False
        self._judge.went(newcomer.life, status, time.monotonic_ns())
        totals = self._judge.totals
        totals.refused += status == REFUSED
        totals.missed += status == SPARED
        return True

    def look(self) -> None:
        """Report those whose time is up, and kill them."""
        for pid, newcomer in self._present.items():
            if time.monotonic() > newcomer.until:
                bound = self._judge.bounds.refusal
                text = f"life {newcomer.life} ({newcomer.kind}) is neither refused nor gone after {bound:g} s"
                self._add_violation("admission", text)
                self._kill(pid, newcomer)

    def dismiss(self) -> None:
        """Kill all of them, because the run is over."""
        for pid, newcomer in self._present.items():
            self._kill(pid, newcomer)

    def _kill(self, pid: int, newcomer: Outsider) -> None:
        self._judge.lives[newcomer.life].expected.add(-signal.SIGKILL)
        newcomer.until = math.inf
        send(pid, signal.SIGKILL)
