"""What the edge from the previous peer carried while reduces ran, as its target saw it.

The rate is what was received, by the time in which at least one reduce ran. The edge was the limit if the receivers
spent nearly all of that time in the middle of frames: then the source always had something to send. A receiver that
waits for the next frame to begin waits for others, further back in the ring. What was aborted tells nothing, and
neither does what is too little to tell a rate from the delay. Part of the peer's machine; pure.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .events import ReduceEnded

BYTES_MIN = 4 << 20  # below it votes and delays are most of what is measured
LIMIT_SHARE = 0.9  # of a receiver's time in the middle of frames


class Meter:
    """Reduces that ended since the last heartbeat."""

    __slots__ = ("_busy_ns", "_network_ns", "_received", "_running", "_since_ns", "_spent_ns")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The ring changed, or a reduce came to nothing: begin anew."""
        self._running = 0
        self._since_ns = self._busy_ns = 0
        self._received = self._network_ns = self._spent_ns = 0

    def began(self, count: int, now_ns: int) -> None:
        """So many more reduces run."""
        if count and not self._running:
            self._since_ns = now_ns
        self._running += count

    def ended(self, event: ReduceEnded, now_ns: int) -> None:
        """This peer has received everything of a reduce."""
        if not self._running:
            return  # of the time before the last reset
        self._running -= 1
        self._received += event.rx_bytes
        self._network_ns += event.network_ns
        self._spent_ns += event.network_ns + event.neighbour_ns + event.reduce_ns
        if not self._running:
            self._busy_ns += now_ns - self._since_ns

    def take(self) -> tuple[int, bool]:
        """Bytes per second and whether the edge was the limit; (0, False) if nothing was seen, or not all of it yet."""
        if self._running or self._received < BYTES_MIN or self._busy_ns <= 0:
            return 0, False
        rate = self._received * 1_000_000_000 // self._busy_ns
        was_limit = self._network_ns >= LIMIT_SHARE * self._spent_ns
        self.reset()
        return rate, was_limit
