"""The law of stalls: the master's log says when a reduce was aborted because nothing moved, and that needs a cause.

A kill closes connections, which all neighbours detect at once. Only a stop, a silent link, or a link that lost bytes
makes a reduce wait for `stall_timeout`. A worker that forgets to wake up costs no more than that, which is less than a
call may take, so without this law it would go unnoticed between the faults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .faults import PAUSES, FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .records import Bounds

SIGN = "(stall_timeout)"
SWALLOWS = frozenset(
    {FaultKind.HALF_CLOSE_RING, FaultKind.HALF_CLOSE_MASTER, FaultKind.FLIP_RING, FaultKind.FLIP_MASTER}
)


class Stalls:
    """Reads the growing log of the master, and reports stalls that no fault explains."""

    def __init__(self, log: Path, bounds: Bounds, add_violation: Callable[[str, str], None]) -> None:
        self._log = log
        # Several peers may abort a reduce one after the other, each after its own timeout.
        self._lasting = 2 * bounds.stall + bounds.silence + bounds.call
        self._add_violation = add_violation
        self._read = 0  # bytes of the log
        self._excuses: list[tuple[float, float]] = []  # begin and end, in seconds of the monotonic clock

    def harmed(self, kind: FaultKind, now: float, pause: float) -> None:
        """Take a fault that is committed now."""
        if kind in PAUSES | SWALLOWS:
            self._excuses.append((now, now + pause + self._lasting))

    def look(self) -> None:
        """Judge the lines that were logged since the last call."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            if SIGN in line:
                self._judge(line)

    def _judge(self, line: str) -> None:
        at = float(line.split(" ", 1)[0])
        self._excuses = [(begin, end) for begin, end in self._excuses if end >= at]
        if not any(begin <= at for begin, _ in self._excuses):
            self._add_violation(
                "stalls", f"a reduce stalled, though no peer was stopped and no link was silent: {line}"
            )
