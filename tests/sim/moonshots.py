"""The moonshots of the simulated master: better rings come late, in steps, or never.

They replace the process that the master's actor starts, and the actor's own check of what that process reports: only a
ring that is better by the rates of the question becomes an event, and an answer to a cancelled question is dropped.
The search itself is the real solver with few steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pccl._core.master.events import BeginMoonshot, CancelMoonshot, MoonshotFound
from pccl._core.master.ring_choice import is_better
from pccl._core.solver.solver import evaluate, solve
from pccl.options import nanoseconds

if TYPE_CHECKING:
    from .nodes import MasterShell

REPORTS_MAX = 3  # of one search
STEPS = 300  # of the solver, for one report


class Moonshots:
    """At most one search at a time."""

    def __init__(self, shell: MasterShell) -> None:
        self._shell = shell
        self._question: BeginMoonshot | None = None
        self._best: list[int] | None = None  # the best order so far: positions in the ring of the question

    def begin(self, question: BeginMoonshot) -> None:
        """Search for a better ring; a search under way ends."""
        world = self._shell.world
        assert len(question.rates) == len(question.ring) ** 2, "rates of another ring"
        if self._question is not None:
            world.paths.mark("a search in the background gives way to the next")
        self._question, self._best = question, None
        for _ in range(world.random.randint(0, REPORTS_MAX)):
            delay_ns = world.random.randint(0, nanoseconds(world.plan.options.moonshot_time))
            world.clock.after(delay_ns, self._shell.receive, self._report, question)

    def cancel(self, action: CancelMoonshot) -> None:
        """Cancel the search."""
        assert self._question is not None, "the end of no search"
        assert self._question.group == action.group, "the end of the search for another group"
        self._question = None

    def _report(self, question: BeginMoonshot) -> None:
        """Report a ring; the actor passes it on if it is better than the present ring and the last report."""
        world = self._shell.world
        if question is not self._question:
            world.paths.mark("a ring is found for members that are gone")
            return
        count = len(question.ring)
        found = solve(question.rates, count, self._best or range(count), world.random.randrange(1 << 32), STEPS)
        present = evaluate(question.rates, self._best or range(count))
        if found is None or not is_better((found.bottleneck, found.total), present):
            world.paths.mark("a search in the background finds nothing better")
            return
        self._best = list(found.order)
        begin = self._best.index(0)
        order = self._best[begin:] + self._best[:begin]
        world.feed(self._shell, MoonshotFound(question.group, tuple(question.ring[index] for index in order)))
