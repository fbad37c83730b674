"""Waiting for one descriptor, with a bound.

It uses poll(), never select(): select() refuses descriptors from 1024 on, which a process with a large pool and many
segments has. A process that waits for several descriptors at once uses `Loop`, or its own poll object.
"""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class HasDescriptor(Protocol):
        """A socket, or another object that has a descriptor."""

        def fileno(self) -> int:
            """The descriptor."""


def wait_readable(source: HasDescriptor, timeout_ms: int) -> bool:
    """Wait until there is something to read, or the other side has closed; False if neither happened in time."""
    return _wait(source, select.POLLIN, timeout_ms)


def wait_writable(target: HasDescriptor, timeout_ms: int) -> bool:
    """Wait until there is room to write, or the other side has closed; False if neither happened in time."""
    return _wait(target, select.POLLOUT, timeout_ms)


def _wait(end: HasDescriptor, event: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(end.fileno(), event)
    return bool(poll.poll(timeout_ms))
