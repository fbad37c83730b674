"""Wait for descriptors of any number: select() fails above 1023, and a test process may have more open."""

from __future__ import annotations

import select


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    """Return whether the descriptor has data, or the other side has closed, within this time."""
    return bool(readable([fd], seconds))


def readable(fds: list[int], seconds: float) -> list[int]:
    """Return the descriptors that can be read; wait at most this long for the first one."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(seconds, 0.0) * 1000)]
