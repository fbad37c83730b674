"""The shared state of a training process: synced at the start of a round, updated with the results at its end.

A checkpoint is written before each sync, so that the state survives if all members that agree on it are lost. When a
group has lost every up-to-date member, the library names the revision that it needs; any checkpoint of that revision,
of any peer of the group, is accepted.
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

from .arithmetic import BALLAST, NOTES, WEIGHTS, Array, ballast_of, checksum, update_state
from .records import APPLY, SYNC, Applied, Synced, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .reduce_loop import ReduceOutcome
    from .step_log import StepLog

WANTED = re.compile(r"checkpoint of revision (\d+)")
RESUMES_MAX = 5  # in a row; more attempts mean that no checkpoint helps
KEPT = 2  # checkpoints of each place: the one of the current sync and the one before


class StateLoop:
    """The shared state of one process, over all its memberships."""

    def __init__(self, task: Task, step_log: StepLog) -> None:
        self._task = task
        self._step_log = step_log
        self._folder = Path(task.checkpoints)
        self._weights: Array = pccl.empty(WEIGHTS, "int64")
        self._ballast: Array = pccl.empty(BALLAST, "float32")
        self._notes: Array = np.zeros(NOTES, np.int64)
        self._own: Array = np.full(NOTES, task.life, np.int64)  # may differ between peers
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
        """Load the content of a checkpoint; by default the initial state of a run."""
        content = np.frombuffer(data, np.int64)
        self._weights[:] = content[:WEIGHTS]
        self._notes[:] = content[WEIGHTS:]
        self._ballast[:] = ballast_of(revision)
        self._state.revision = revision

    def _checksum(self) -> int:
        """The checksum of everything that peers compare; -1 if the ballast is not what the revision says."""
        value = float(self._ballast[0])
        intact = bool((self._ballast == value).all()) and value == ballast_of(self._state.revision)
        return checksum(self._weights, self._notes) if intact else -1

    def sync(self, membership: Communicator, number: int) -> None:
        """Sync with the group, and report the content before and after."""
        for resumes in range(RESUMES_MAX):
            held = self._state.revision, self._checksum()
            self._save()
            start_ns = time.monotonic_ns()
            try:
                info = membership.sync_shared_state(self._state)
            except PCCLError as error:
                self._step_log.record(SYNC, start_ns, None, error)
                if error.result is not Result.NO_SHARED_STATE_AVAILABLE or resumes == RESUMES_MAX - 1:
                    raise
                self._resume(error.message)
                continue
            now = self._state.revision, self._checksum()
            fact = Synced(number, *held, *now, info.tx_bytes, info.rx_bytes, resumed=resumes > 0)
            self._step_log.record(SYNC, start_ns, None, None, fact)
            return

    def apply(self, number: int, outcomes: Iterable[ReduceOutcome]) -> None:
        """Update the state with the results of the round's reduces, and report it."""
        before, start_ns = self._checksum(), time.monotonic_ns()
        told = []
        for outcome in outcomes:
            update_state(self._weights, self._notes, outcome.operation, outcome.tensor, outcome.checksum)
            told.append((outcome.operation.index, outcome.checksum))
        self._state.push_revision()
        self._notes[0] = self._state.revision
        self._ballast[:] = ballast_of(self._state.revision)
        fact = Applied(number, self._state.revision, before, self._checksum(), tuple(told))
        self._step_log.record(APPLY, start_ns, None, None, fact)

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        """Write a checkpoint, unless the file has a newer one: a newcomer must not overwrite it."""
        revision = self._state.revision
        path = self._folder / f"{self._task.group}-{self._task.place}-{revision % KEPT}"
        if _revision_in(path) > revision:
            return
        fresh = path.with_suffix(".new")
        fresh.write_bytes(revision.to_bytes(8, "little") + self._weights.tobytes() + self._notes.tobytes())
        os.replace(fresh, path)

    def _resume(self, reason: str) -> None:
        """Load the revision that the group needs, if a peer of this group has saved it."""
        found = WANTED.search(reason)
        wanted = int(found[1]) if found else -1
        for path in sorted(self._folder.glob(f"{self._task.group}-*-{wanted % KEPT}")):
            if _revision_in(path) == wanted:
                self._fill(wanted, path.read_bytes()[8:])
                return
        self._fill(0)


def _revision_in(path: Path) -> int:
    """The revision of a checkpoint; 0 if there is no file."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(8), "little")
    except FileNotFoundError:
        return 0
