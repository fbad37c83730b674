"""The handle of an asynchronous reduce: `wait` for it, or ask whether it is `done`.

A handle finishes its reduce through the membership that launched it, and keeps the outcome. It never raises for a
reduce that failed, because a training loop decides by the outcome what to retry.
"""

from __future__ import annotations

from _thread import RLock
from typing import TYPE_CHECKING

from pccl._core.system.futex import monotonic_ns
from pccl.options import nanoseconds
from pccl.values import ReduceInfo, Result

if TYPE_CHECKING:
    from .pending_reduces import PendingReduces
    from .reduce_request import PendingReduce

WAIT_SECONDS_MAX = 1_000_000.0  # eleven days; a lock cannot wait much longer
_PENDING = (False, Result.PENDING_ASYNC_OPS.value, ReduceInfo(0, 0, 0))


class AsyncReduceHandle:
    """A reduce in flight. `wait` never raises; it returns whether it succeeded, its Result and its info."""

    def __init__(self, reduces: PendingReduces, launched: PendingReduce) -> None:
        self._reduces = reduces
        self._launched = launched
        self._outcome: tuple[bool, int, ReduceInfo] | None = None
        self._turn = RLock()  # one thread waits for the reduce, the others for that thread

    def wait(self, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Block until the reduce has ended; return (ok, number of the Result, ReduceInfo). Later calls return the same.

        After `timeout` seconds it returns not ok and PENDING_ASYNC_OPS. Any thread may call it.
        """
        if self._outcome is not None:
            return self._outcome
        if timeout is None:
            with self._turn:
                return self._take(None)
        deadline_ns = monotonic_ns() + nanoseconds(min(max(timeout, 0.0), WAIT_SECONDS_MAX))
        if not self._turn.acquire(timeout=_seconds_until(deadline_ns)):
            return _PENDING
        try:
            return self._take(deadline_ns)
        finally:
            self._turn.release()

    def _take(self, deadline_ns: int | None) -> tuple[bool, int, ReduceInfo]:
        """Return the outcome, and keep it for other threads."""
        if self._outcome is None:
            outcome = self._reduces.finish("wait", self._launched, deadline_ns)
            if outcome is None:
                return _PENDING
            self._outcome = (outcome.result == 0, outcome.result, outcome.info)
        return self._outcome

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._outcome is not None or self._launched.slot.done


def _seconds_until(deadline_ns: int) -> float:
    return max(deadline_ns - monotonic_ns(), 0) / 1e9
