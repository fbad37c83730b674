"""The shared state of a training process: synced at the beginning of a round, moved on by the results at its end.

A checkpoint is written before each sync, because what is being agreed on must not be lost with those who agree. When a
group has lost everybody who was up to date, the library says which revision it wants back; any checkpoint of that
revision, of any peer of the group, will do.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import pccl
from pccl import Communicator, PCCLError, Result, SharedState, TensorInfo

from .arithmetic import BALLAST, NOTES, WEIGHTS, Array, ballast_of, checksum, move_on
from .records import APPLY, SYNC, Applied, Synced, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .reduce_loop import Outcome
    from .step_log import Teller

WANTED = re.compile(r"checkpoint of revision (\d+)")
RESUMES_MAX = 5  # in a row; whoever needs more has no checkpoint that helps
KEPT = 2  # checkpoints of each place: the one that is being agreed on, and the one before


class Keeper:
    """One state, over as many memberships as its process has."""

    def __init__(self, task: Task, teller: Teller) -> None:
        self._task = task
        self._teller = teller
        self._folder = Path(task.checkpoints)
        self._weights: Array = pccl.empty(WEIGHTS, "int64")
        self._ballast: Array = pccl.empty(BALLAST, "float32")
        self._notes: Array = np.zeros(NOTES, np.int64)
        self._own: Array = np.full(NOTES, task.life, np.int64)  # what peers may differ in
        self._state = SharedState(
            [
                TensorInfo.from_numpy(self._weights, "weights"),
                TensorInfo.from_numpy(self._ballast, "ballast"),
                TensorInfo.from_numpy(self._notes, "notes"),
                TensorInfo.from_numpy(self._own, "own", allow_content_inequality=True),
            ]
        )
        self._fill(0)

    def _fill(self, revision: int, data: bytes = bytes(8 * (WEIGHTS + NOTES))) -> None:
        """Become what a checkpoint holds; by default the state that a run begins with."""
        content = np.frombuffer(data, np.int64)
        self._weights[:] = content[:WEIGHTS]
        self._notes[:] = content[WEIGHTS:]
        self._ballast[:] = ballast_of(revision)
        self._state.revision = revision

    def _checksum(self) -> int:
        """Of all that peers compare; the ballast is one number, if it is right."""
        value = float(self._ballast[0])
        intact = bool((self._ballast == value).all()) and value == ballast_of(self._state.revision)
        return checksum(self._weights, self._notes) if intact else -1

    def sync(self, membership: Communicator, number: int) -> None:
        """Agree with the group, and tell what was held before and after."""
        for resumes in range(RESUMES_MAX):
            held = self._state.revision, self._checksum()
            self._save()
            start_ns = time.monotonic_ns()
            try:
                info = membership.sync_shared_state(self._state)
            except PCCLError as error:
                self._teller.tell(SYNC, start_ns, None, error)
                if error.result is not Result.NO_SHARED_STATE_AVAILABLE or resumes == RESUMES_MAX - 1:
                    raise
                self._resume(error.message)
                continue
            now = self._state.revision, self._checksum()
            fact = Synced(number, *held, *now, info.tx_bytes, info.rx_bytes, resumed=resumes > 0)
            self._teller.tell(SYNC, start_ns, None, None, fact)
            return

    def apply(self, number: int, outcomes: Iterable[Outcome]) -> None:
        """Move on by what came out of the round's reduces, and tell it."""
        before, start_ns = self._checksum(), time.monotonic_ns()
        told = []
        for outcome in outcomes:
            move_on(self._weights, self._notes, outcome.operation, outcome.tensor, outcome.checksum)
            told.append((outcome.operation.index, outcome.checksum))
        self._state.push_revision()
        self._notes[0] = self._state.revision
        self._ballast[:] = ballast_of(self._state.revision)
        fact = Applied(number, self._state.revision, before, self._checksum(), tuple(told))
        self._teller.tell(APPLY, start_ns, None, None, fact)

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        """What may be agreed on next. A newcomer has nothing to save, and must not take the place of what is wanted."""
        revision = self._state.revision
        path = self._folder / f"{self._task.group}-{self._task.place}-{revision % KEPT}"
        if _revision_in(path) > revision:
            return
        fresh = path.with_suffix(".new")
        fresh.write_bytes(revision.to_bytes(8, "little") + self._weights.tobytes() + self._notes.tobytes())
        os.replace(fresh, path)

    def _resume(self, reason: str) -> None:
        """Load the revision that is wanted, if anybody of this group has saved it."""
        found = WANTED.search(reason)
        wanted = int(found[1]) if found else -1
        for path in sorted(self._folder.glob(f"{self._task.group}-*-{wanted % KEPT}")):
            if _revision_in(path) == wanted:
                self._fill(wanted, path.read_bytes()[8:])
                return
        self._fill(0)


def _revision_in(path: Path) -> int:
    """Of a checkpoint; 0 if there is none."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(8), "little")
    except FileNotFoundError:
        return 0
