"""Faults that wait for their moment: the plan says about when, and what the run shows or tells says exactly.

A state worker lives for milliseconds, and is killed when it shows itself. The second of two kills is to meet the retry
that the first has made necessary: it comes a moment after somebody of the group has told that a reduce failed. What
never comes is not waited for: then nobody is hit, or the second is killed all the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .faults import Fault, family_of
from .records import Reduced, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .supervisor import Peer

HUNT = 1.5  # seconds in which a worker that lives for milliseconds is looked for
FAILURE = 0.4  # seconds in which somebody must have told of a failure, or there was nothing to fail
RETRY = 0.012  # seconds after that in which the retry is under way
TICK = 0.001  # seconds between two looks


@dataclass(slots=True)
class Ambush:
    """A kill that waits for a failure."""

    fault: Fault
    group: int
    at: float  # when it happens; sooner if the failure is told


class Hunter:
    """Whatever waits. Its owner tells it what it hears and asks it at every turn whose moment has come."""

    def __init__(self) -> None:
        self._ambushes: list[Ambush] = []
        self._prey: tuple[float, Fault] | None = None  # until when a state worker is looked for

    @property
    def waits(self) -> bool:
        """Whether moments matter just now."""
        return bool(self._prey or self._ambushes)

    def await_worker(self, fault: Fault) -> None:
        """Hit the first state worker that shows itself."""
        self._prey = time.monotonic() + HUNT, fault

    def await_failure(self, fault: Fault, group: int) -> None:
        """Hit in the middle of a retry of this group."""
        self._ambushes.append(Ambush(fault, group, time.monotonic() + FAILURE))

    def hear(self, step: Step) -> None:
        """Somebody told of a call."""
        if not self._ambushes or not isinstance(step.fact, Reduced) or step.fact.ok:
            return
        for ambush in self._ambushes:
            if ambush.group == step.group:
                ambush.at = min(ambush.at, time.monotonic() + RETRY * ambush.fault.pause)

    def due(self) -> list[Fault]:
        """Kills whose moment has come."""
        now = time.monotonic()
        ripe = [ambush.fault for ambush in self._ambushes if ambush.at <= now]
        self._ambushes = [ambush for ambush in self._ambushes if ambush.at > now]
        return ripe

    def find(self, peers: Iterable[Peer]) -> tuple[Fault, Peer | None] | None:
        """The fault that a state worker is looked for, and whose it is; nobody's if it never came; else nothing."""
        if self._prey is None:
            return None
        until, fault = self._prey
        for peer in peers:
            if peer.status is None and not peer.stopped and family_of(peer.pid).state_workers:
                self._prey = None
                return fault, peer
        if time.monotonic() <= until:
            return None
        self._prey = None
        return fault, None
