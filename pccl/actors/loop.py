"""The loop of an actor: one thread, one epoll, a few timers, until told to stop.

An actor registers its mailbox, its sockets and what it wants to be woken for; the loop calls back. Nothing in here
knows about messages or machines. Everything Linux about waiting is in this file: another system would bring its own
`Loop` with the same five verbs.
"""

from __future__ import annotations

import os
import select
from heapq import heappop, heappush

from pccl._core.park import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
BROKEN = select.EPOLLHUP | select.EPOLLERR

EVENTS_MAX = 64  # per wake-up, so that timers are looked at however busy the sockets are
IDLE_NS = 1_000_000_000  # the longest sleep: nothing that is due is ever more than this late


class Loop:
    """Calls handlers when descriptors are ready and timers are due."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._running = False
        self._expecting = False
        self.look_ns = 0  # how long to look for what is expected before going to sleep
        # Written by stop(), also from a signal handler, so that a sleeping loop notices.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.watch(self._wake, lambda _: None)

    def watch(self, fd: int, handler: Callable[[int], None], events: int = READABLE) -> None:
        """Call the handler with the ready events whenever there are some."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events on a descriptor that is watched."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Watch it no longer; call before closing it."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, delay_ns: int, callback: Callable[[], None]) -> None:
        """Call back once, not before the delay has passed. A callback that no longer matters does nothing."""
        self._count += 1
        heappush(self._timers, (monotonic_ns() + delay_ns, self._count, callback))

    def expect(self) -> None:
        """Something is likely to follow at once.

        Being woken takes tens of microseconds, more than handling a vote; so the loop looks for it for a moment, and
        lets everybody else have the processor between two looks.
        """
        self._expecting = True

    def run(self, deadline: Callable[[], int], tick: Callable[[int], None]) -> None:
        """Serve until `stop`. `tick` is called whenever `deadline()` has passed, after what is ready was read."""
        self._running = True
        epoll, handlers, timers = self._epoll, self._handlers, self._timers
        due, now = deadline(), monotonic_ns()
        while self._running:
            sleep_ns = min(due - now, IDLE_NS)
            if timers:
                sleep_ns = min(sleep_ns, timers[0][0] - now)
            ready = self._look(now) if self._expecting else []
            # Rounded up to the next microsecond: waking before the deadline would mean going round for nothing.
            for fd, events in ready or epoll.poll((sleep_ns + 999) / 1e9 if sleep_ns > 0 else 0, EVENTS_MAX):
                handler = handlers.get(fd)
                if handler is not None:  # else: forgotten by a handler of the same round
                    handler(events)
            now = monotonic_ns()
            while timers and timers[0][0] <= now:
                heappop(timers)[2]()
            due = deadline()
            if now >= due:
                tick(now)
                due = deadline()

    def _look(self, now: int) -> list[tuple[int, int]]:
        self._expecting = False
        until = now + self.look_ns
        while now < until:
            ready = self._epoll.poll(0, EVENTS_MAX)
            if ready:
                return ready
            os.sched_yield()
            now = monotonic_ns()
        return []

    def stop(self) -> None:
        """Leave `run` after the present round."""
        self._running = False
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Give up the loop's own descriptors."""
        self._handlers.clear()
        self._timers.clear()
        self._epoll.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
