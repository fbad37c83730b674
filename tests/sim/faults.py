"""The faults of a run: one after another, at drawn times and of drawn kinds, until the phase without faults.

A fault changes shells and connections only, never a machine: the machine reacts by itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pccl._core.master.status_report import report_pages
from pccl._core.peer.events import AppGone, WorkerDied
from pccl._core.protocol.codec import PROTOCOL_VERSION
from pccl._core.protocol.hellos import Register
from pccl._core.protocol.messages import (
    EdgeLost,
    Fetched,
    Finished,
    Initiate,
    Schema,
    VotePending,
    VoteSync,
    VoteTopology,
    Wired,
)
from pccl.options import nanoseconds

from .clock import MILLISECOND
from .network import BrokenFrame, Fin

if TYPE_CHECKING:
    from .nodes import PeerShell
    from .world import World


class Faults:
    """Draws the faults and commits them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kinds = list(world.plan.faults)
        self._weights = list(world.plan.faults.values())
        if self._kinds:
            self._plan_next()

    def _plan_next(self) -> None:
        mean_ns = self._world.plan.fault_every_ms * MILLISECOND
        self._world.clock.after(int(self._world.random.expovariate(1 / mean_ns)), self._strike)

    def _strike(self) -> None:
        if self._world.calm:
            return
        (kind,) = self._world.random.choices(self._kinds, self._weights)
        victims = [shell for shell in self._world.shells if shell.alive]
        if kind in ("join", "freeze_master", "restart_master", "inquire"):
            getattr(self, f"_{kind}")()
        elif victims:
            victim = self._world.random.choice(victims)
            self._world.note(f"{kind} {victim.name}")
            getattr(self, f"_{kind}")(victim)
        self._plan_next()

    def _duration_ns(self) -> int:
        return self._world.random.randint(*self._world.plan.trouble_for_ms) * MILLISECOND

    def _crash(self, shell: PeerShell) -> None:
        shell.end("connection reset by peer")

    def _vanish(self, shell: PeerShell) -> None:
        shell.end("", silently=True)

    def _freeze_peer(self, shell: PeerShell) -> None:
        shell.freeze(self._duration_ns())

    def _freeze_master(self) -> None:
        self._world.note("freeze_master")
        self._world.master.freeze(self._duration_ns())

    def _restart_master(self) -> None:
        """Kill the master: now, in the middle of its next event, or around its next save."""
        master = self._world.master
        choice = self._world.random.randrange(3)
        if choice == 0:
            master.kill_after(self._world.random.randint(0, 6))
        elif choice == 1:
            master.kill_at_save()
        elif master.alive:
            self._world.note("kill master")
            master.end("connection reset by peer")

    def _inquire(self) -> None:
        self._world.master.receive(self._report_status)

    def _report_status(self) -> None:
        """Ask for the status report: it can be made at any time, and changes nothing."""
        world = self._world
        state = world.master.state
        before = state.next_deadline_ns, len(state.story)
        pages = report_pages(state, world.clock.now_ns, version="simulated", protocol_version=PROTOCOL_VERSION)
        report = json.loads(b"".join(page.text for page in pages))
        assert report["world"] == len(state.members.accepted), f"a report of {report['world']} members"
        assert before == (state.next_deadline_ns, len(state.story)), "a report changed the master"
        if state.members.wiring:
            world.paths.mark("an operator asks while a ring is wired")

    def _break_frame(self, shell: PeerShell) -> None:
        """Break a frame of a control link, at either end."""
        if shell.control is not None:
            shell.intruded = True
            say = shell.control.say_to_master if self._world.chance(0.5) else shell.control.say_to_peer
            say(BrokenFrame("crc", "the checksum of a frame does not match"))

    def _cut(self, shell: PeerShell) -> None:
        shell.cut_until_ns = self._world.clock.now_ns + self._duration_ns()

    def _break_control(self, shell: PeerShell) -> None:
        if shell.control is not None:
            shell.control.say_to_master(Fin("connection reset"))
            shell.control.say_to_peer(Fin("connection reset"))

    def _break_lane(self, shell: PeerShell) -> None:
        if shell.links:
            self._world.random.choice(list(shell.links.values())).lane.sever("connection reset")

    def _partition(self, shell: PeerShell) -> None:
        others = [other for other in self._world.shells if other.alive and other is not shell]
        if others:
            other = self._world.random.choice(others)
            self._world.blocked[shell, other] = self._world.clock.now_ns + self._duration_ns()
            # A partition without traffic has no effect, so sometimes the connections between the two break with it.
            for end in shell.links.values():
                if end.lane.joins(other) and self._world.chance(0.7):
                    end.lane.sever("timed out")

    def _fumble(self, shell: PeerShell) -> None:
        fetching = [other for other in self._world.shells if other.alive and other.states.transfer is not None]
        if fetching:
            self._world.random.choice(fetching).states.fumble()
        else:
            self._stall(shell)

    def _stall(self, shell: PeerShell) -> None:
        """Let a link lose all bytes for a while without an error; if possible, a link with a running operation."""
        busy = [other for other in self._world.shells if other.alive and other.plane.parts] or [shell]
        patience_ns = nanoseconds(self._world.plan.options.stall_timeout)
        duration_ns = 2 * patience_ns if self._world.chance(0.5) else self._duration_ns()
        for part in self._world.random.choice(busy).plane.parts.values():
            part.run.stuck_until_ns = self._world.clock.now_ns + duration_ns

    def _disturb(self, _shell: PeerShell) -> None:
        """Hit a peer that takes part in a transfer, or is about to."""
        busy = [other for other in self._world.shells if other.alive and other.program.syncing.is_slow]
        if not busy:
            return
        sources = [other for other in busy if other.states.transfer is not None and not other.states.transfer.fetches]
        victim = self._world.random.choice(sources if sources and self._world.chance(0.5) else busy)
        choice = self._world.random.choice(("crash", "vanish", "break_control", "fumble", "leave", "give_up"))
        self._world.note(f"{choice} {victim.name} in a transfer")
        if choice == "fumble":
            victim.states.fumble()
        elif choice == "leave":
            victim.program.leave()
        elif choice == "give_up":
            victim.program.syncing.give_up()
        else:
            getattr(self, f"_{choice}")(victim)

    def at_optimization(self, lines: list[str]) -> None:
        """Commit a fault during an optimisation, which logs these lines; random faults seldom hit it.

        A member is lost while the new ring is wired, or all members give up while edges are measured.
        """
        world = self._world
        if world.calm or "disturb" not in world.plan.faults:
            return
        if any("takes another ring" in line for line in lines) and world.chance(0.3):
            victims = [shell for shell in world.shells if shell.alive and shell.state.phase == "member"]
            if victims:
                world.clock.after(world.delay_ns(), self._break_control, world.random.choice(victims))
        elif any(" measures round=" in line for line in lines) and world.chance(0.05):
            for shell in world.shells:
                shell.program.give_up(0, 1)

    def hits_move(self) -> bool:
        """Draw whether a link of a transfer breaks while it moves something; random faults seldom hit one."""
        return not self._world.calm and "disturb" in self._world.plan.faults and self._world.chance(0.1)

    def at_adopted(self, sink: PeerShell, holder: PeerShell, others: int) -> None:
        """A sink has adopted the manifest of a source, and has that many other sources.

        Often the source dies if there are others; sometimes the sink cannot reach any source again.
        """
        world = self._world
        if world.calm or "disturb" not in world.plan.faults:
            return
        if others and holder.alive and world.chance(0.7):
            self._crash(holder)
        elif world.chance(0.2):
            sink.states.fumble()

    def at_fetched(self, sink: PeerShell) -> None:
        """A sink has the whole state: sometimes every source dies before the other sinks have it."""
        world = self._world
        if not world.calm and "disturb" in world.plan.faults and world.chance(0.5):
            delay_ns = 20 * MILLISECOND + 2 * world.delay_ns_max
            world.clock.after(delay_ns, self._end_sources, sink.group)

    def _end_sources(self, group: int) -> None:
        parts = [
            shell
            for shell in self._world.shells
            if shell.alive and shell.group == group and shell.states.transfer is not None
        ]
        if self._world.calm or not any(shell.states.is_fetching for shell in parts):
            return
        for shell in parts:
            if not shell.states.transfer.fetches:  # type: ignore[union-attr]
                self._crash(shell)

    def _kill_worker(self, shell: PeerShell) -> None:
        if shell.workers:
            shell.receive(self._worker_died, shell)

    def _worker_died(self, shell: PeerShell) -> None:
        if shell.workers:
            self._world.feed(shell, WorkerDied("killed by signal 9"))

    def _kill_app(self, shell: PeerShell) -> None:
        shell.program.over = shell.program.killed = True
        shell.receive(self._world.feed, shell, AppGone("the training process is gone"))

    def _join(self) -> None:
        self._world.spawn()

    def _intruder(self, shell: PeerShell) -> None:
        """Start a peer with a wrong token or a useless address, or let an actor break the protocol."""
        if self._world.chance(0.1):
            self._world.spawn(advertised="a.name.example")
        elif self._world.plan.handshakes and self._world.chance(0.5):
            self._world.spawn(knows_token=False)
        elif shell.control is not None and shell.control.conn in self._world.master.links:
            wrong = [
                Register(bytes(32), 0, 1, "", 1, bytes(16)),
                EdgeLost(1, 1 << 40, 1 << 41, "an edge of other peers"),
                Wired(1 << 30),
                Initiate(b"nonsense"),
                Finished(1 << 40, True, ""),
                Fetched(1, 1 << 40, True, ""),
                Schema(1, 0, 1, b"nonsense"),
                VoteSync(1, 0, 77, False, 5, bytes(16), bytes(16)),
            ]
            if self._world.chance(0.7):
                wrong = [Finished(sequence, False, "not its own word") for sequence in shell.plane.parts] or wrong
            elif not self._world.plan.options.vote_timeout:  # a forged vote would make stragglers
                wrong += [VoteTopology(1 << 30, 0), VotePending(1 << 30)]
            shell.intruded = True
            shell.control.say_to_master(self._world.random.choice(wrong))
