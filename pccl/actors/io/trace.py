"""The debug log of an actor: one line for each event that its machine handles, for each action, and for each phase.

`PCCL_LOG_LEVEL=DEBUG` shows who joins and leaves, ring orders, lanes, votes, syncs and probes; `TRACE` also shows every
collective. A line has a word for the direction, the kind, and `field=value` pairs; secrets and long bytes are left out.
An actor makes a `Trace` when it starts, if the level asks for it; else it imports nothing of this module, and its fast
path compares one pointer for each event.
"""

from __future__ import annotations

from pccl._core.protocol.events import DEBUG
from pccl._core.story import HIDDEN, SECRET_FIELDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TRACE = 5  # below DEBUG

LINE_CHARS_MAX = 800  # a line travels in one message to the training process
BYTES_SHOWN_MAX = 16  # longer ones are shown by their length
# Kinds that say nothing new: they come with the clock, or are lines of the log themselves.
LEFT_OUT = frozenset(("Tick", "Beat", "Traffic", "ReduceProgress", "Log", "Tell", "Notice"))
# Kinds of every collective, or of every call.
FREQUENT = frozenset((
    *("Initiate", "Awaiting", "Commence", "Finished", "ReduceDone", "World", "PendingAnswer", "VotePending"),
    *("CallReduce", "CallAwait", "CallPending", "CallShare", "CallUnshare"),
    *("BeginOperation", "EndOperation", "ReduceEnded", "Complete"),
))  # fmt: skip


class Trace:
    """Turns the events and actions of one machine into lines of the log."""

    def __init__(
        self,
        level: int,
        log: Callable[[int, str], None],
        phases: Callable[[], dict[str, str]],
        name: Callable[[int], str],
    ) -> None:
        self._level = level
        self._log = log
        self._phases = phases  # the phases of the machine and of its parts, by name
        self._name = name  # of the other end of a connection of the master
        self._known: dict[str, str] = phases()

    def __call__(self, event: Any, actions: list[Any]) -> None:
        """Log what a machine has handled, and what it wants done."""
        self._show(event, "from", "event")
        for action in actions:
            self._show(action, "to", "action")
        phases = self._phases()
        for part, phase in phases.items():
            before = self._known.get(part)
            if phase != before:
                self._log(DEBUG, f"{part} phase={phase} was={before}")
        self._known = phases

    def _show(self, record: Any, direction: str, otherwise: str) -> None:
        head, subject = otherwise, record
        fields = type(record).__match_args__
        if fields == ("conn", "message"):
            head, subject = f"{direction}={self._name(record.conn)}", record.message
        elif fields == ("message",):
            head, subject = f"{direction}=master", record.message
        elif fields == ("call",):
            head, subject = "call", record.call
        kind = type(subject).__name__
        level = TRACE if kind in FREQUENT else DEBUG
        if level >= self._level and kind not in LEFT_OUT:
            self._log(level, f"{head} {describe(subject)}")


def describe(record: Any) -> str:
    """The kind of a record and its fields, on one line."""
    parts = [type(record).__name__]
    for name in type(record).__match_args__:
        value = HIDDEN if name in SECRET_FIELDS else _show_value(getattr(record, name))
        parts.append(f"{name}={value}")
    line = " ".join(parts)
    return line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]}..."


def _show_value(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex() or "empty" if len(value) <= BYTES_SHOWN_MAX else f"<{len(value)} bytes>"
    if hasattr(type(value), "__match_args__"):
        return f"({describe(value)})"
    return str(value) if isinstance(value, (int, float)) else repr(value)
