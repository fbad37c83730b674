"""The processes of the simulated cluster: thin shells that do what the machines ask, as the real actors do.

A node can be stopped and continued: messages that arrive meanwhile wait in its backlog, as they would in the kernel. It
is drawn whether a continued node first handles its backlog or a Tick, because real event loops do either. A shell
checks its machine: every action must refer to something that exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pccl._core.master import events as master_events
from pccl._core.master.master_state import MasterState
from pccl._core.peer import events as peer_events
from pccl._core.peer.events import MasterDown
from pccl._core.peer.peer_state import PeerState
from pccl._core.protocol import events
from pccl._core.protocol.events import Tick
from pccl._core.protocol.handshake import PendingConnections
from pccl._core.protocol.hellos import JoinLane, Register
from pccl.actors.master.state_file import _parse, _render
from pccl.options import PENDING_CONNECTIONS_MAX, nanoseconds

from .dataplane import DataPlane
from .moonshots import Moonshots
from .network import ControlLink, Fin, LaneEnd, LaneLink, Opened
from .probes import Probes
from .states import StatePlane
from .trials import dial_back, try_peer

if TYPE_CHECKING:
    from .programs import Program
    from .world import World

NEVER = 1 << 62


class Node:
    """A process with a machine inside."""

    name: str
    state: Any

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.frozen = False
        self.troubled_ns = -NEVER  # when a fault last hit it; a heartbeat timeout must have such a cause
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._tick_ns = NEVER  # when the next Tick is planned

    def receive(self, function: Callable[..., None], *arguments: Any) -> None:
        """Deliver a call to this process: now, or when it continues."""
        if self.frozen:
            self._backlog.append((function, arguments))
        elif self.alive:
            function(*arguments)

    def freeze(self, duration_ns: int) -> None:
        """Stop for a while."""
        if not self.frozen:
            self.frozen = True
            self.world.clock.after(duration_ns, self.thaw)

    def thaw(self) -> None:
        """Continue."""
        if not self.frozen:
            return
        self.frozen = False
        self.troubled_ns = self.world.clock.now_ns
        if not self.alive:
            return
        time_first = self.world.random.random() < 0.5
        if time_first:
            self._tick(self._tick_ns)
        while self._backlog and self.alive:
            function, arguments = self._backlog.popleft()
            function(*arguments)
        if not time_first and self.alive:
            self._tick(self._tick_ns)

    def plan_tick(self) -> None:
        """Wake at the machine's deadline."""
        deadline_ns = self.state.next_deadline_ns
        if deadline_ns < self._tick_ns:
            self._tick_ns = deadline_ns
            self.world.clock.at(deadline_ns, self._tick, deadline_ns)

    def _tick(self, planned_ns: int) -> None:
        if planned_ns != self._tick_ns or self.frozen or not self.alive:
            return
        if self.world.clock.now_ns >= self.state.next_deadline_ns:
            self.report()
            self._tick_ns = NEVER
            self.world.feed(self, Tick())
            assert self.state.next_deadline_ns > self.world.clock.now_ns, (
                f"{self.name} would spin: its deadline is past"
            )
        self._tick_ns = NEVER
        self.plan_tick()

    def report(self) -> None:
        """Tell the machine the progress of its workers before a Tick."""

    def perform(self, action: Any) -> None:
        """Do what the machine asks."""
        raise NotImplementedError


class MasterShell(Node):
    """The master's process, from one start to its end."""

    def __init__(self, world: World, saved: bytes = b"", life: int = 0) -> None:
        """`saved` is the state file, if there is one; `life` counts the masters before this one."""
        super().__init__(world)
        self.name = "master"
        self.life = life
        now_ns, options = world.clock.now_ns, world.plan.options
        self.state = (
            MasterState.restore(_parse(saved), options, now_ns)
            if saved
            else MasterState(life.to_bytes(16, "big"), options, now_ns)
        )
        if life:
            self.troubled_ns = now_ns
        self._actions_left = NEVER  # it dies after this many more actions
        self._dies_at_save = False
        self.moonshots = Moonshots(self)
        self.calling: set[ControlLink] = set()  # connections that are not accepted yet
        self.links: dict[int, ControlLink] = {}
        self.pending = PendingConnections(world.token, Register, world.nonce, NEVER // 2, PENDING_CONNECTIONS_MAX)
        self._conns = 0

    def new_conn(self) -> int:
        """Return a new number for a connection."""
        self._conns += 1
        return self._conns

    def perform(self, action: Any) -> None:
        """Do what the machine asks."""
        kind = type(action)
        if not self._actions_left or (kind is master_events.Save and self._dies_at_save):
            self.world.paths.mark("the master is killed in the middle of an event")
            if self._actions_left and self.world.chance(0.5):
                self.save()
            self.end("connection reset by peer")
            return
        self._actions_left -= 1
        if kind is master_events.SendTo:
            self.links[action.conn].say_to_peer(action.message)
        elif kind is master_events.Dismiss:
            self.links.pop(action.conn).say_to_peer(Fin("closed by the master"))
        elif kind is master_events.Save:
            self.save()
        elif kind is master_events.DialBack:
            dial_back(self, action)
        elif kind is master_events.BeginMoonshot:
            self.moonshots.begin(action)
        elif kind is master_events.CancelMoonshot:
            self.moonshots.cancel(action)
        elif kind is not events.Log:
            raise AssertionError(f"the master's machine asks for {action!r}")

    def save(self) -> None:
        """Save the state file."""
        if self.world.plan.durable:
            self.world.saved = _render(self.state.snapshot())

    def kill_after(self, actions: int) -> None:
        """Die before the action that follows this many more actions."""
        self._actions_left = actions

    def kill_at_save(self) -> None:
        """Die at the next save: just before it, or just after."""
        self._dies_at_save = True

    def spare(self) -> None:
        """Cancel all planned deaths."""
        self._actions_left, self._dies_at_save = NEVER, False

    def end(self, reason: str) -> None:
        """The process is gone; the kernel closes its connections."""
        self.alive = False
        for link in (*self.links.values(), *sorted(self.calling, key=lambda link: link.peer.number)):
            link.say_to_peer(Fin(reason))
        self.links.clear()
        self.calling.clear()
        self.world.master_ended()


class PeerShell(Node):
    """A peer actor's process with its workers, and the training process that started it."""

    def __init__(
        self, world: World, number: int, where: tuple[str, int], group: int, lanes: int, *, advertised: str
    ) -> None:
        super().__init__(world)
        host, port = where
        self.name = f"p{number}"
        self.number = number
        self.host = host
        self.advertised = advertised  # the host that it registers with; empty: the master uses the source address
        self.port = port
        self.instance = world.nonce()[:16]
        self.group = group
        self.lanes = lanes
        self.state = PeerState(world.plan.options, world.clock.now_ns)
        self.control: ControlLink | None = None
        self.links: dict[int, LaneEnd] = {}
        self.workers = 0  # pairs of processes that run
        self.vanished = False
        self.severed_ns = -NEVER  # when one of its lanes was last broken
        self.cut_until_ns = 0
        self.pending = PendingConnections(world.token, JoinLane, world.nonce, NEVER // 2, PENDING_CONNECTIONS_MAX)
        self.intruded = False  # a forged message came over its connection, or a frame of it was broken
        self.plane = DataPlane(self)
        self.probes = Probes(self)
        self.states = StatePlane(self)
        self.program: Program
        self._doing: dict[type[Any], Callable[[Any], None]] = {
            peer_events.DialMaster: self._dial_master,
            peer_events.HangUp: self._hang_up,
            peer_events.SendMaster: self._send_master,
            peer_events.SpawnLanes: self._spawn_lanes,
            peer_events.KillLanes: self._kill_lanes,
            peer_events.Dial: self._dial,
            peer_events.AnswerLink: self._answer_link,
            peer_events.AttachLink: self._attach_link,
            peer_events.DropLink: self._drop_link,
            peer_events.BeginOperation: self.plane.begin,
            peer_events.AbortOperation: self.plane.abort,
            peer_events.EndOperation: self.plane.end,
            peer_events.BeginTrial: lambda action: try_peer(self, action),
            peer_events.BeginProbe: self.probes.begin,
            peer_events.EndProbe: self.probes.end,
            peer_events.ServeState: self.states.serve,
            peer_events.FetchState: self.states.fetch,
            peer_events.ServeFetched: self.states.serve_fetched,
            peer_events.AddSources: self.states.add_sources,
            peer_events.DropSource: self.states.drop_source,
            peer_events.EndTransfer: self.states.end_transfer,
            peer_events.SendSchema: self.states.send_schema,
            peer_events.Complete: self._complete,
            peer_events.Stop: lambda _: self.end("exited"),
            peer_events.Tell: lambda _: None,
            peer_events.UseTiming: lambda _: None,
            events.Log: lambda _: None,
        }

    def perform(self, action: Any) -> None:
        """Do what the machine asks."""
        self._doing[type(action)](action)

    def is_served_by(self, master: MasterShell) -> bool:
        """Whether it has a connection to this master, also one whose end it has not noticed yet."""
        return self.control is not None and self.control.master is master

    def report(self) -> None:
        """Tell the machine the progress of every operation."""
        self.plane.report()

    def end(self, reason: str, *, silently: bool = False) -> None:
        """End the processes. The kernel closes their connections, unless the whole host is gone."""
        self.alive = False
        self.vanished = silently
        if not silently:
            if self.control is not None:
                self.control.say_to_master(Fin(reason))
            for end in self.links.values():
                end.say(Fin(reason))
            self.states.break_links(reason)
        self.control = None
        self.links.clear()
        self.world.ended(self)

    def _dial_master(self, _action: Any) -> None:
        world = self.world
        assert self.control is None, "a second connection to the master"
        token = world.token if self.program.knows_token else b"wrong"
        self.control = ControlLink(
            world,
            self,
            Register(bytes(32), self.group, self.lanes, self.advertised, self.port, self.instance, self.program.name),
            token,
        )
        options = world.plan.options
        patience_ns = nanoseconds(options.connect_timeout + options.handshake_timeout)
        world.clock.after(patience_ns, self.receive, self._dial_timed_out, self.control)

    def _dial_timed_out(self, link: ControlLink) -> None:
        if self.control is link and self.state.phase == "dialling":
            link.say_to_master(Fin("gave up dialling"))
            self.control = None
            self.world.feed(self, MasterDown("no answer"))

    def _hang_up(self, _action: Any) -> None:
        if self.control is not None:
            self.control.say_to_master(Fin("hung up"))
            self.control = None

    def _send_master(self, action: Any) -> None:
        assert self.control is not None, f"{action.message!r} without a connection to the master"
        self.control.say_to_master(action.message)

    def _spawn_lanes(self, action: Any) -> None:
        assert action.lanes > self.workers, f"{action.lanes} workers wanted, {self.workers} run"
        self.workers = action.lanes

    def _kill_lanes(self, _action: Any) -> None:
        assert not any(end.attached for end in self.links.values()), "workers killed with connections in hand"
        self.workers = 0

    def _dial(self, action: Any) -> None:
        assert action.link not in self.links, f"link {action.link} is taken"
        LaneLink(self.world, self, action.link, (action.host, action.port), action.hello)

    def _answer_link(self, action: Any) -> None:
        end = self.links[action.link]
        assert not end.dialled, "an answer to our own dial"
        end.say(Fin(action.reason) if action.reason else Opened())
        if action.reason:
            del self.links[action.link]

    def _attach_link(self, action: Any) -> None:
        end = self.links[action.link]
        assert end.lane.hello.lane == action.lane, f"lane {end.lane.hello.lane} attached as {action.lane}"
        assert action.sends == end.dialled, "a lane in the wrong direction"
        assert action.lane < self.workers, f"lane {action.lane} attached, but only {self.workers} workers run"
        assert not end.attached, "attached twice"
        end.attached = True

    def _drop_link(self, action: Any) -> None:
        self.links.pop(action.link).say(Fin("dropped"))

    def _complete(self, action: Any) -> None:
        self.plane.complete(action)
        self.program.completed(action)
