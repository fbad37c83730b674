"""Reduces that stood still: the master's log says when one was given up because nothing moved, and that needs a cause.

A kill closes connections, which everybody notices at once; only a stop, a silent link, or one that swallowed something
makes a reduce wait for `stall_timeout`. A worker that sleeps through its work costs no more than that, which is less
than any call may take, so it would go unnoticed between faults that never cease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .faults import PAUSES, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .records import Bounds

SIGN = "(stall_timeout)"
SWALLOWS = frozenset({Kind.HALF_CLOSE_RING, Kind.HALF_CLOSE_MASTER, Kind.FLIP_RING, Kind.FLIP_MASTER})


class Stalls:
    """Reads the master's log as it grows, and objects to stalls that no fault explains."""

    def __init__(self, log: Path, bounds: Bounds, object_: Callable[[str, str], None]) -> None:
        self._log = log
        # Several peers may give a reduce up one after the other, each after its own longest pause.
        self._lasting = 2 * bounds.stall + bounds.silence + bounds.call
        self._object = object_
        self._read = 0  # bytes of the log
        self._excuses: list[tuple[float, float]] = []  # begin and end, in seconds of the monotonic clock

    def harmed(self, kind: Kind, now: float, pause: float) -> None:
        """Something is done at this moment."""
        if kind in PAUSES | SWALLOWS:
            self._excuses.append((now, now + pause + self._lasting))

    def look(self) -> None:
        """Judge what was logged since the last look."""
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
            self._object("stalls", f"a reduce stood still, though nobody was stopped and no link was silent: {line}")
