"""Faults that wait for an event: the plan says roughly when, an event of the run says exactly when.

A state worker lives for milliseconds; it is killed when it appears. The second of two kills must hit the retry that the
first one causes: it follows shortly after a member of the group has reported a failed reduce. Every wait has a bound:
if no state worker appears, no process is killed; if no failure is reported, the second kill happens anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .faults import Fault, processes_of
from .records import Reduced, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .supervisor import Peer

WORKER_SEARCH_SECONDS = 1.5  # how long a state worker is searched for
FAILURE_SECONDS = 0.4  # how long the second kill waits for the report of a failed reduce
RETRY_SECONDS = 0.012  # the longest time from that report to the second kill: the retry is running
TICK = 0.001  # seconds between two checks


@dataclass(slots=True)
class KillOnFailure:
    """A kill that waits for a failure."""

    fault: Fault
    group: int
    at: float  # when it happens; earlier if a failure is reported


class TimedFaults:
    """The faults that wait. The supervisor passes steps to `note`, and commits what `due` and `find_worker` return."""

    def __init__(self) -> None:
        self._kills: list[KillOnFailure] = []
        self._worker_search: tuple[float, Fault] | None = None  # end of the search, and the fault

    @property
    def waits(self) -> bool:
        """Whether a fault waits, so that the supervisor must check often."""
        return bool(self._worker_search or self._kills)

    def await_worker(self, fault: Fault) -> None:
        """Kill the first state worker that appears."""
        self._worker_search = time.monotonic() + WORKER_SEARCH_SECONDS, fault

    def await_failure(self, fault: Fault, group: int) -> None:
        """Kill during a retry of this group."""
        self._kills.append(KillOnFailure(fault, group, time.monotonic() + FAILURE_SECONDS))

    def note(self, step: Step) -> None:
        """Take a step that a peer has reported."""
        if not self._kills or not isinstance(step.fact, Reduced) or step.fact.ok:
            return
        for kill in self._kills:
            if kill.group == step.group:
                kill.at = min(kill.at, time.monotonic() + RETRY_SECONDS * kill.fault.pause)

    def due(self) -> list[Fault]:
        """The kills that are due now."""
        now = time.monotonic()
        due = [kill.fault for kill in self._kills if kill.at <= now]
        self._kills = [kill for kill in self._kills if kill.at > now]
        return due

    def find_worker(self, peers: Iterable[Peer]) -> tuple[Fault, Peer | None] | None:
        """The fault and the peer that has a state worker; the fault and None after the bound; else None."""
        if self._worker_search is None:
            return None
        until, fault = self._worker_search
        for peer in peers:
            if peer.status is None and not peer.stopped and processes_of(peer.pid).state_workers:
                self._worker_search = None
                return fault, peer
        if time.monotonic() <= until:
            return None
        self._worker_search = None
        return fault, None
