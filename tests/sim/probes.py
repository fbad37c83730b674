"""Measurements in the simulated cluster: every ordered pair of hosts has a rate, drawn from the seed.

A probe takes its time, and the shell answers as the real one does: with the rate, or with a reason if the target is
dead, stopped, cut off from the source, or refuses. A target receives no order for a probe; only the network between
them counts.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from pccl._core.peer.events import ProbeDone
from pccl.options import nanoseconds

from .clock import MILLISECOND

if TYPE_CHECKING:
    from pccl._core.peer.events import BeginProbe, EndProbe

    from .nodes import PeerShell
    from .plan import Plan


class Probes:
    """The measurements of one peer: at most one at a time."""

    def __init__(self, shell: PeerShell) -> None:
        self._shell = shell
        self._under_way = 0  # the probe round; 0 if none

    def begin(self, action: BeginProbe) -> None:
        """Measure, and answer when the time is over."""
        assert not self._under_way, f"round {action.round} before the end of round {self._under_way}"
        assert action.target != self._shell.state.id, "a peer probes itself"
        self._under_way = action.round
        world = self._shell.world
        target = world.listeners.get((action.host, action.port))
        if target is None or not target.alive or world.is_blocked(self._shell, target):
            world.clock.after(2 * world.delay_ns(), self._shell.receive, self._end, action.round, 0, "refused")
        elif target.frozen or target.vanished:
            patience_ns = nanoseconds(world.plan.options.connect_timeout)
            world.clock.after(patience_ns, self._shell.receive, self._end, action.round, 0, "no answer")
        else:
            delay_ns = 4 * world.delay_ns() + action.milliseconds * MILLISECOND
            world.clock.after(delay_ns, self._shell.receive, self._count, action.round, target)

    def end(self, action: EndProbe) -> None:
        """End the probe; the machine does not need it any more."""
        assert self._under_way == action.round, f"round {action.round} ended, {self._under_way} is under way"
        self._under_way = 0

    def _count(self, number: int, target: PeerShell) -> None:
        if target.alive:
            self._end(number, rate(self._shell.world.plan, self._shell.number, target.number), "")
        else:
            self._end(number, 0, "reset")

    def _end(self, number: int, bytes_per_second: int, reason: str) -> None:
        if self._under_way == number and self._shell.alive:
            self._under_way = 0
            self._shell.world.feed(self._shell, ProbeDone(number, bytes_per_second, reason))


def rate(plan: Plan, source: int, target: int) -> int:
    """Return the rate from one host to another; it is constant in a run."""
    return Random(f"{plan.seed} {source} {target}").choice(plan.rates) * 1_000_000
