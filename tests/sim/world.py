"""One simulated run: first with faults, then without, then all peers leave.

*Safety*: while everything may fail, no invariant may ever be broken. *Liveness*: faults stop, frozen processes go on,
partitions heal; within a bounded time all living peers are members in wired rings with the same world. *The end*: all
peers leave, and the master is as empty as at its start.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter
from itertools import count
from random import Random
from typing import Any

from pccl._core.master.optimizer import IDLE
from pccl._core.protocol.events import Log
from pccl._core.protocol.outcomes import INVALID_ARGUMENT, NO_SHARED_STATE_AVAILABLE, SUCCESS
from pccl.options import PEER_PORT_FIRST, nanoseconds

from . import invariants
from .clock import MILLISECOND, SECOND, Clock
from .dataplane import Run
from .faults import Faults
from .nodes import MasterShell, Node, PeerShell
from .paths import Paths
from .plan import Plan, describe, draw
from .programs import Program
from .runs import Runs


class ViolationError(AssertionError):
    """A run broke a rule. The text has the seed, the rule, the plan and the last events of the machine."""


class World:
    """Master, peers, programs, network and faults of one seed."""

    def __init__(self, plan: Plan, *, tell: bool = False) -> None:
        self.plan = plan
        self.random = Random(plan.seed * 2 + 1)
        self.clock = Clock()
        self.paths = Paths(syncs=plan.syncs)
        self.lines: list[str] | None = [] if tell else None
        self.token = b"the secret of this run"
        self.saved = b""  # the master's state file
        self.calm = False
        self.calm_ns = 0
        self.kicks_end_ns = 0  # when the last effect of the faults must be over
        self.settled = False
        self.counted = False  # a program received new numbers
        self.rounds: dict[tuple[int, int], tuple[int, int, int]] = {}  # life of the master and round -> the numbers
        self.runs: dict[tuple[bytes, int, int], Run] = {}  # run, peer id and sequence -> the collective
        self.agreed_states: dict[tuple[bytes, int], dict[int, bytes]] = {}  # run and group -> revision -> the digest
        self.told: dict[tuple[bytes, int], int] = {}  # run and group -> the latest revision that a caller was told
        self.contents: dict[bytes, tuple[int, ...]] = {}  # digest -> the values of a vote with it, unless torn
        self.peer_id = 0  # the latest of this run
        self.acting: Node | None = None
        self.run_rules = Runs(self)
        self.master = MasterShell(self)
        self.master.save()
        self.shells: list[PeerShell] = []
        self.listeners: dict[tuple[str, int], PeerShell] = {}
        self.blocked: dict[tuple[PeerShell, PeerShell], int] = {}  # (source, target) that cannot connect, until when
        self._taken: set[tuple[str, int]] = set()  # hosts and ports
        self._delay_ns_min, self.delay_ns_max = (delay_ms * MILLISECOND for delay_ms in plan.delay_ms)
        self.master.plan_tick()
        for _ in range(plan.peers):
            self.clock.after(self.random.randint(0, 1000) * MILLISECOND, self.spawn)
        self.faults = Faults(self)

    # ------------------------------------------------------------------------------------------ the one way in

    def feed(self, node: Node, event: Any) -> None:
        """Let a machine handle an event and its shell carry out the actions."""
        if not node.alive:
            return
        self.acting = node
        if isinstance(node, PeerShell):
            before = self.paths.before_peer(node, event, self.clock.now_ns)
            actions = self._handle(node, event)
            self.paths.at_peer(node, before, event, actions)
            for action in actions:
                node.perform(action)
            invariants.check_peer(self, node, event, actions)
        else:
            before = self.paths.before_master(self.master, event, self.clock.now_ns)
            actions = self._handle(node, event)
            self.paths.at_master(self.master, before, event, actions)
            invariants.check_master(self, event, actions)
            if self.master.state.optimizer.phase != IDLE:
                self.faults.at_optimization([action.line for action in actions if type(action) is Log])
            for action in actions:
                if node.alive:
                    node.perform(action)
        if node.alive:
            node.plan_tick()

    def report(self, node: Node, event: Any) -> None:
        """Tell a machine the progress of its workers; that event alone must lead to no action."""
        actions = self._handle(node, event)
        assert not actions, f"{event!r} led to {actions!r}"

    def _handle(self, node: Node, event: Any) -> list[Any]:
        now_ns = self.clock.now_ns
        actions: list[Any] = node.state.handle(event, now_ns)
        if self.lines is not None:
            self.lines.append(f"{now_ns / SECOND:12.6f} {node.name:7} {brief(event)} -> {brief(actions)}")
        return actions

    # ------------------------------------------------------------------------------------------ what the parts ask

    def delay_ns(self) -> int:
        """Draw the delay of one message."""
        return self._delay_ns_min + int(self.random.random() * (self.delay_ns_max - self._delay_ns_min))

    def chance(self, probability: float) -> bool:
        """Draw whether an event with this probability happens."""
        return probability > 0 and self.random.random() < probability

    def nonce(self) -> bytes:
        """A number used once, from the seed."""
        return self.random.randbytes(32)

    def is_blocked(self, source: PeerShell, target: PeerShell) -> bool:
        """Whether one peer cannot dial the other at present."""
        return self.blocked.get((source, target), -1) > self.clock.now_ns

    def note(self, line: str) -> None:
        """Add a line to the story that is not a transition."""
        if self.lines is not None:
            self.lines.append(f"{self.clock.now_ns / SECOND:12.6f} ***     {line}")

    def spawn(self, *, knows_token: bool = True, advertised: str | None = None) -> None:
        """Start a training process with its peer actor, on the first free port of its host."""
        plan = self.plan
        if self.settled or sum(shell.alive for shell in self.shells) >= plan.peers_max:
            return
        self._start(self.run_rules.name(), knows_token=knows_token, advertised=advertised)

    def spawn_late(self, name: str) -> Program:
        """Start a training process of this run when everything is over."""
        return self._start(name)

    def _start(self, name: str, *, knows_token: bool = True, advertised: str | None = None) -> Program:
        plan, number = self.plan, len(self.shells) + 1
        host = f"10.0.0.{self.random.randint(1, plan.hosts)}"
        where = next((host, port) for port in count(PEER_PORT_FIRST) if (host, port) not in self._taken)
        self._taken.add(where)
        if advertised is None:
            advertised = host if self.chance(0.3) else ""
        group, lanes = self.random.randrange(plan.groups), self.random.randint(1, plan.lanes)
        shell = PeerShell(self, number, where, group, lanes, advertised=advertised)
        self.shells.append(shell)
        self.listeners[where] = shell
        style = self.random.choice(plan.styles)
        shell.program = Program(self, shell, style, name=name, knows_token=knows_token)
        return shell.program

    def ended(self, shell: PeerShell) -> None:
        """A peer's processes are gone; its port is free for the next one."""
        if not shell.vanished:
            self._taken.discard((shell.host, shell.port))
        alone = self.calm and not any(other.alive for other in self.shells)
        if alone or (not self.calm and self.chance(self.plan.rejoin)):
            self.clock.after(self.random.randint(0, 1000) * MILLISECOND, self.spawn)

    def master_ended(self) -> None:
        """The master's process has ended; start another one."""
        self.clock.after(0 if self.calm else self.random.randint(0, 2000) * MILLISECOND, self._start_master)

    def _start_master(self) -> None:
        """Start a master: it continues the run of its state file, or begins another run."""
        if self.master.alive:
            return
        self.note("start master")
        self.master = MasterShell(self, self.saved, self.master.life + 1)
        invariants.check_restored(self)
        self.master.save()
        self.master.plan_tick()

    # ------------------------------------------------------------------------------------------ the phases

    def play(self) -> None:
        """Play the whole run. Raise at the first violation."""
        self.clock.run(self.plan.trouble_ms * MILLISECOND)
        self._calm_down()
        if not self.clock.run(self.clock.now_ns + self._bound_ns(), self._is_agreed):
            raise AssertionError(f"not converged {self._bound_ns() / SECOND:g} s after all faults: {self._standing()}")
        self.settled = True
        for shell in self.shells:
            shell.program.give_up(0, 1)
        self.clock.run(self.clock.now_ns + 2 * SECOND)
        invariants.check_rings(self)
        self._optimize_once_more()
        if self.plan.is_crowd:  # rings that the moonshot finds meanwhile are compared the next time
            self.clock.run(self.clock.now_ns + nanoseconds(self.plan.options.moonshot_time))
            self._optimize_once_more()
        self._reduce_once_more()
        if self.plan.syncs:
            self._sync_once_more()
        if self.plan.finishes:
            self.run_rules.finish_once_more()
        for shell in self.shells:
            if shell.alive:
                shell.program.leave()
        self.clock.run(self.clock.now_ns + 2 * SECOND)
        assert not any(shell.alive for shell in self.shells), f"a peer cannot leave: {self._standing()}"
        # A peer may have vanished during its registration; the master notices that only by the heartbeat timeout.
        options = self.plan.options
        self.clock.run(self.clock.now_ns + nanoseconds(options.heartbeat_timeout + 2 * options.heartbeat_interval))
        invariants.check_empty(self)

    def _optimize_once_more(self) -> None:
        """Without faults an optimisation ends, and its rings are the best for the measured rates."""
        programs = [shell.program for shell in self.shells if shell.alive and shell.state.phase == "member"]
        for program in programs:
            program.optimize_at_rest()
        options = self.plan.options
        rounds = min(options.probe_rounds, len(self.shells))
        bound_ns = 30 * self.delay_ns_max + nanoseconds(options.wire_timeout + 2)
        bound_ns += rounds * (nanoseconds(options.probe_time + options.connect_timeout + 2) + 8 * self.delay_ns_max)
        if not self.clock.run(self.clock.now_ns + bound_ns, lambda: all(p.has_optimized() for p in programs)):
            raise AssertionError(f"an optimisation has no answer after {bound_ns / SECOND:g} s: {self._standing()}")
        invariants.check_optimal(self)

    def _reduce_once_more(self) -> None:
        """Without faults every reduce succeeds, except in a group of one."""
        programs = [shell.program for shell in self.shells if shell.alive and shell.state.phase == "member"]
        for program in programs:
            program.reduce_at_rest()
        bound_ns = 10 * self.delay_ns_max + 5 * SECOND  # a vote, the work itself, and another vote
        if not self.clock.run(self.clock.now_ns + bound_ns, lambda: all(p.is_at_rest() for p in programs)):
            raise AssertionError(f"a reduce has no verdict after {bound_ns / SECOND:g} s: {self._standing()}")

    def _sync_once_more(self) -> None:
        """Without faults every sync succeeds; after a checkpoint was loaded or a schema repaired, if that is needed."""
        for _ in range(3):
            programs = [shell.program for shell in self.shells if shell.alive and shell.state.phase == "member"]
            for program in programs:
                program.sync_at_rest()
            bound_ns = 40 * self.delay_ns_max + 10 * SECOND + 20 * self.plan.work_ms * MILLISECOND
            if not self.clock.run(self.clock.now_ns + bound_ns, lambda: all(p.is_at_rest() for p in programs)):  # noqa: B023
                raise AssertionError(f"a synchronisation has no end after {bound_ns / SECOND:g} s: {self._standing()}")
            results = {program.syncing.resting for program in programs if not program.is_done()}
            assert results <= {SUCCESS, NO_SHARED_STATE_AVAILABLE, INVALID_ARGUMENT}, (
                f"in a world at rest a synchronisation ended: {results}"
            )
            if results <= {SUCCESS}:
                return
        raise AssertionError(f"a checkpoint of the agreed state does not resume the run: {self._standing()}")

    def play_or_explain(self) -> None:
        """Play the whole run; raise a violation with the seed, the plan and the story of the machine."""
        try:
            self.play()
        except Exception as error:  # noqa: BLE001, whatever it is must be told with its seed
            node = self.acting or self.master
            story = "\n".join(
                f"  {now_ns / SECOND:12.6f} {brief(event)} -> {brief(actions)}"
                for now_ns, event, actions in list(node.state.story)[-12:]
            )
            raise ViolationError(
                f"seed {self.plan.seed} at {self.clock.now_ns / SECOND:.6f} s, in {node.name}: {error!r}\n"
                f"{describe(self.plan)}\nlast events of {node.name}:\n{story}\n{traceback.format_exc(limit=-4)}\n"
                f"replay: python -m tests.sim --seed {self.plan.seed} --story"
            ) from None

    def _is_agreed(self) -> bool:
        """Whether the run has converged. Called after every step, so it checks only after new numbers."""
        if not self.counted:
            return False
        self.counted = False
        return invariants.is_agreed(self)

    def _calm_down(self) -> None:
        self.calm = True
        self.calm_ns = self.clock.now_ns
        self.note("calm")
        options = self.plan.options
        # A loss may still have to be noticed, then a ring may fail to be wired, and a peer may be kicked for it.
        self.kicks_end_ns = self.calm_ns + nanoseconds(
            options.heartbeat_timeout + 2 * options.heartbeat_interval + 2 * options.wire_timeout + options.vote_timeout
        )
        self.blocked = {pair: min(until_ns, self.clock.now_ns) for pair, until_ns in self.blocked.items()}
        for shell in self.shells:
            shell.cut_until_ns = min(shell.cut_until_ns, self.clock.now_ns)
            shell.thaw()
            shell.program.calm_down()
        self.master.thaw()
        self.master.spare()
        self._start_master()
        self.spawn()

    def _bound_ns(self) -> int:
        """The sum of all timeouts that may have to expire, with time for many messages in between."""
        options = self.plan.options
        joining = 5 * (options.connect_timeout + options.handshake_timeout + options.retry_interval)
        waits = (
            3 * options.heartbeat_timeout
            + 3 * options.wire_timeout
            + options.unreachable_expiry
            + options.vote_timeout
            + 2 * options.stall_timeout
        )
        return nanoseconds(joining + waits + 2 * options.deadlock_timeout + 5) + 50 * self.delay_ns_max

    def _standing(self) -> str:
        """Describe all nodes, for the message of a run that did not converge."""
        lines = [
            f"{shell.name} is peer {shell.state.id}, {shell.state.phase}, at epoch {shell.state.ring_links.epoch},"
            f" in {list(shell.program.under_way.values())}, counted {shell.program.numbers},"
            f" reduces { ({tag: one.phase for tag, one in shell.state.member.reduces.tags.items()}) },"
            f" state {shell.program.syncing.state.revision} {shell.program.syncing.state.values}"
            for shell in self.shells
            if shell.alive
        ]
        state = self.master.state
        lines += [f"group {number}: holds {group.collectives.held}" for number, group in state.members.groups.items()]
        lines.append(
            f"master: accepted {state.members.accepted} registered {state.members.registered} votes {state.votes}"
        )
        return "\n  ".join(lines)


def brief(value: Any) -> str:
    """Return a short text of a record: its name and its values."""
    if isinstance(value, list):
        return "[" + ", ".join(brief(item) for item in value) + "]"
    if isinstance(value, bytes):
        return f"<{len(value)}>" if len(value) >= 16 else repr(value)
    names = getattr(type(value), "__match_args__", None)
    if names is None:
        return repr(value)
    return f"{type(value).__name__}({', '.join(brief(getattr(value, name)) for name in names)})"


def run(seed: int, *, tell: bool = False) -> World:
    """Play one seed. Raise ViolationError with the cause and the command that replays it."""
    world = World(draw(seed), tell=tell)
    world.play_or_explain()
    return world


def story_hash(seed: int) -> str:
    """Return a hash of everything that happened in a run."""
    lines = run(seed, tell=True).lines
    assert lines
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def run_many(seeds: range) -> Counter[str]:
    """Play all these seeds; return how often each rare path was taken."""
    taken: Counter[str] = Counter()
    for seed in seeds:
        taken.update(run(seed).paths.taken)
    return taken
