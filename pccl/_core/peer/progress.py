"""Reports on what takes long at one peer: a reduce that runs, a state that is fetched, a master that is not reached.

Something that moves bytes for a while is reported in one line, then after twice, four times that time: as information
while it moves, as a warning when nothing has moved lately. Something short is never reported. Pure.
"""

from __future__ import annotations

from pccl._core.protocol.events import INFO, WARNING

ATTEMPTS_REPORTED = 5  # attempts to reach the master that are all reported; then the 8th, 16th, 32nd


def is_reported(attempt: int) -> bool:
    """Whether the failure of this attempt to reach the master, counted from 1, gets a line."""
    return attempt <= ATTEMPTS_REPORTED or attempt & (attempt - 1) == 0


def name_addresses(addresses: bytes) -> str:
    """Name the addresses of a CallConnect for a reader."""
    pairs = [line.rpartition(" ") for line in addresses.decode().split("\n")]
    return " or ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, _, port in pairs)


class Progress:
    """The reports on one thing at a time, named by a key."""

    __slots__ = ("_key", "_moved", "_moved_ns", "_next_ns", "_since_ns")

    def __init__(self) -> None:
        self._key: object = None
        self._moved = self._moved_ns = self._since_ns = self._next_ns = 0

    def look(self, key: object, moved: int, now_ns: int, first_ns: int) -> tuple[int, str] | None:
        """Return the level and the words of a report that is due. `first_ns`: when the first is due; 0: never."""
        if key != self._key:
            self._key, self._moved = key, moved
            self._since_ns = self._moved_ns = now_ns
            self._next_ns = first_ns
        elif moved != self._moved:
            self._moved, self._moved_ns = moved, now_ns
        waited_ns = now_ns - self._since_ns
        if not first_ns or waited_ns < self._next_ns:
            return None
        while self._next_ns <= waited_ns:
            self._next_ns *= 2
        still_ns = now_ns - self._moved_ns
        words = f"{waited_ns / 1e9:.0f} s: {max(moved, 0) / 1e6:.1f} MB so far"
        if still_ns < first_ns:
            return INFO, words
        return WARNING, f"{words}, and nothing for {still_ns / 1e9:.0f} s"
