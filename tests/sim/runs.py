"""Names and ends of runs in the simulation: which run a new program belongs to, and the rules of an end.

A program that finds the end of its run was told the truth: a master that is started again with its state file knows
it too. When a run is finished, later programs belong to another one, so that the simulation continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pccl._core.master import events as master_events
from pccl._core.master.events import PeerCame, SendTo
from pccl._core.master.run_table import RUNS_MAX
from pccl._core.protocol.events import Log
from pccl._core.protocol.messages import Kick, Registered, RunFinished
from pccl._core.protocol.outcomes import KIND_FINISHED, SUCCESS

from .clock import SECOND

if TYPE_CHECKING:
    from .world import World

REFUSED = "this peer belongs to"  # how the reason of a peer of another run begins
REMEMBERED = RUNS_MAX - 4  # finished runs that a master surely knows; the others are served, or are not finished
TOGETHER_NS = 2 * SECOND  # how long the others are likely to join a program that wants to end the run

RUN_PATHS = {
    "all members finish the run",
    "a newcomer is told that the run is finished",
    "a peer comes after the end of its run",
    "a restarted master tells a peer that its run is finished",
    "a peer of another run is refused",
    "a run that was left is resumed",
    "the master is killed around the end",
    "a finish and another call never meet",
}


class Runs:
    """The runs of one simulated world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._names = ["", "b", "c"][: world.plan.names]
        self._generation = 0
        self.told: dict[bytes, None] = {}  # ids of runs whose members were told that they are finished, in order
        self.closing_ns = -1  # until then, programs are likely to call finish

    def name(self) -> str:
        """The run of a new program."""
        return self._names[0] if len(self._names) == 1 else self._world.random.choice(self._names)

    def check(self, event: Any, actions: list[Any]) -> None:
        """Check what a master that has handled an event tells about runs."""
        world = self._world
        state = world.master.state
        answered = [action.message for action in actions if type(action) is SendTo]
        ends = [message for message in answered if type(message) is RunFinished]
        if type(event) is PeerCame:
            self._check_newcomer(event, actions, ends, answered)
        elif ends:
            kinds = [type(getattr(action, "message", action)) for action in actions]
            assert master_events.Save in kinds, "the end of a run was not saved"
            assert kinds.index(master_events.Save) < kinds.index(RunFinished), "an end was told before it was saved"
            assert state.runs.finished, "an end without an end"
            world.paths.mark("all members finish the run")
            if any(not message.call for message in ends):
                world.paths.mark("a newcomer is told that the run is finished")
            self._replace(state.members.run_name)

    def _check_newcomer(self, event: PeerCame, actions: list[Any], ends: list[Any], answered: list[Any]) -> None:
        state, paths = self._world.master.state, self._world.paths
        name = event.register.run
        if ends:
            assert state.runs.table.is_finished(name) or state.members.run_name == name, f"{name!r} is not finished"
            paths.mark("a peer comes after the end of its run")
            if self._world.master.life and not state.members.counters["finished"]:
                paths.mark("a restarted master tells a peer that its run is finished")
            self._replace(name)
        elif any(type(message) is Kick and message.reason.startswith(REFUSED) for message in answered):
            assert name != state.members.run_name, "a peer of the same run was refused"
            assert state.members.peers, "a peer was refused by a master without peers"
            paths.mark("a peer of another run is refused")
        elif any(type(message) is Registered for message in answered):
            assert name == state.members.run_name, f"a peer of {name!r} joined {state.members.run_name!r}"
            if any(type(action) is Log and action.line.startswith("resumes") for action in actions):
                paths.mark("a run that was left is resumed")

    def _replace(self, name: str) -> None:
        """No more programs for a run that is finished."""
        if name in self._names:
            self._generation += 1
            self._names[self._names.index(name)] = f"run {self._generation}"

    def was_told(self, run: bytes) -> None:
        """A member was told that its run is finished."""
        self.told.setdefault(run)

    def check_restored(self) -> None:
        """A master that is started again with its state file knows the latest ends that members were told of."""
        state = self._world.master.state
        known = {run.id: run.finished for run in state.runs.table.runs.values()}
        known[state.members.run] = state.runs.finished
        if self._world.plan.durable:
            for run in list(self.told)[-REMEMBERED:]:
                assert known.get(run), f"run {run.hex()} was finished, and the restarted master does not know it"

    # ------------------------------------------------------------------------------------------ the phase at rest

    def finish_once_more(self) -> None:
        """Without faults a unanimous finish ends the run, and a peer that comes later does not wait."""
        world = self._world
        programs = [shell.program for shell in world.shells if shell.alive and shell.state.phase == "member"]
        name = world.master.state.members.run_name
        killed = world.plan.durable and world.chance(0.3)
        if killed:
            world.master.kill_at_save()
        for program in programs:
            program.finish_at_rest()
        bound_ns = 10 * world.delay_ns_max + 5 * SECOND
        if not world.clock.run(world.clock.now_ns + bound_ns, lambda: all(p.has_finished() for p in programs)):
            raise AssertionError(f"a finish has no answer after {bound_ns / SECOND:g} s")
        if killed:
            world.paths.mark("the master is killed around the end")
        else:
            assert {program.end for program in programs} == {(SUCCESS, 0)}, "a unanimous finish failed"
        late = world.spawn_late(name)
        if not world.clock.run(world.clock.now_ns + 2 * bound_ns, lambda: late.end is not None):
            raise AssertionError("a peer waits, though its run is finished")
        expected = KIND_FINISHED if world.master.state.runs.finished else 0
        assert late.end is not None
        assert late.end[1] == expected, f"a late peer ends with {late.end}"
