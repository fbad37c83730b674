"""What an asynchronous call returns: wait for it, or look whether it is done.

A handle knows how to finish its call and how to look at it, and keeps the outcome. It never raises for a call that
failed, because a training loop decides by the outcome what to retry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .values import ReduceInfo, Result

if TYPE_CHECKING:
    from collections.abc import Callable


class AsyncReduceHandle:
    """A reduce under way. `wait` never raises; it says whether it succeeded, the Result as a number, and what moved."""

    def __init__(
        self, finish: Callable[[float | None], tuple[int, ReduceInfo] | None], done: Callable[[], bool]
    ) -> None:
        self._finish = finish
        self._done = done
        self._outcome: tuple[bool, int, ReduceInfo] | None = None

    def wait(self, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Block until the reduce ended; cached. After `timeout` seconds: not ok, and not done."""
        if self._outcome is None:
            ended = self._finish(timeout)
            if ended is None:
                return False, Result.PENDING_ASYNC_OPS.value, ReduceInfo(0, 0, 0)
            result, info = ended
            self._outcome = (result == 0, result, info)
        return self._outcome

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._outcome is not None or self._done()
