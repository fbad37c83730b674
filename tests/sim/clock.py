"""Virtual time: a heap of planned calls by time.

Nothing here reads a real clock, and two calls due at the same instant run in the order in which they were planned: so
a run is a function of its seed.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

MILLISECOND = 1_000_000
SECOND = 1_000_000_000


class Clock:
    """The present time, and all planned calls."""

    __slots__ = ("_heap", "_serial", "now_ns", "steps")

    def __init__(self) -> None:
        self.now_ns = 0
        self.steps = 0  # planned calls that have run
        self._serial = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Plan a call; one with a time in the past runs next."""
        self._serial += 1
        heappush(self._heap, (max(when_ns, self.now_ns), self._serial, action, arguments))

    def after(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Plan a call relative to now."""
        self.at(self.now_ns + delay_ns, action, *arguments)

    def run(self, until_ns: int, done: Callable[[], bool] | None = None) -> bool:
        """Run the planned calls until that time, or until `done`; return whether it was `done`."""
        heap = self._heap
        while done is None or not done():
            if not heap or heap[0][0] > until_ns:
                self.now_ns = until_ns
                return done is not None and done()
            self.now_ns, _, action, arguments = heappop(heap)
            self.steps += 1
            action(*arguments)
        return True
