"""Waiting for a descriptor, whatever its number: select() takes none above 1023, and a test process may hold more."""

from __future__ import annotations

import select


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    """Whether there is something to read, or the other side has closed, within that time."""
    return bool(readable([fd], seconds))


def readable(fds: list[int], seconds: float) -> list[int]:
    """Those of the descriptors that can be read; waits so long for the first of them."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(seconds, 0.0) * 1000)]
