"""The simulated network: connections that guarantee the order of their items, and nothing else.

A pipe is one direction of one connection; each item takes a delay of its own but never overtakes another. Different
connections reorder freely. A cut between a peer and the master loses nothing for good, because TCP resends: items that
were under way arrive after the cut, if the other side still listens. A close travels like a message. A host that
vanished sends nothing, not even a close.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from pccl._core.master.events import PeerCame, PeerSaid, PeerWent
from pccl._core.peer.events import LinkCame, LinkDown, LinkUp, MasterDown, MasterSaid, MasterUp
from pccl._core.protocol.codec import decode, encode
from pccl._core.protocol.handshake import Admit, Caller, PendingConnections, Say
from pccl._core.protocol.hellos import JoinLane, Register
from pccl._core.protocol.messages import Kick
from pccl._core.protocol.outcomes import INVALID_USAGE
from pccl._core.records import record, replace

from .clock import MILLISECOND

if TYPE_CHECKING:
    from .nodes import MasterShell, Node, PeerShell
    from .world import World

RESEND_NS = 200 * MILLISECOND  # when items that were lost in a cut are sent again


@record
class Fin:
    """The sender closed the connection, or the connection broke."""

    reason: str


@record
class Opened:
    """The answerer welcomed the caller."""


@record
class Turned:
    """The answerer refused the caller for good."""

    reason: str


@record
class BrokenFrame:
    """Bytes that are no frame, with the kind and the reason that the reading actor gives."""

    kind: str
    reason: str


class Pipe:
    """One direction of one connection."""

    __slots__ = ("_deliver", "_held_by", "_queue", "_target", "_world")

    def __init__(
        self, world: World, target: Node, deliver: Callable[[Any], None], held_by: PeerShell | None = None
    ) -> None:
        self._world = world
        self._target = target
        self._deliver = deliver
        self._held_by = held_by  # the peer whose cut from the master holds this pipe; none for lanes
        self._queue: deque[Any] = deque()

    def send(self, item: Any) -> None:
        """Send an item."""
        self._queue.append(item)
        self._world.clock.after(self._world.delay_ns(), self._arrive)

    def _arrive(self) -> None:
        if self._held_by is not None and self._world.clock.now_ns < self._held_by.cut_until_ns:
            self._world.clock.after(RESEND_NS + self._world.delay_ns(), self._arrive)
            return
        self._target.receive(self._deliver, self._queue.popleft())


def shake_hands(pending: PendingConnections, caller: Caller, conn: int, host: str, now_ns: int) -> tuple[Any, str]:
    """Do the whole handshake at one instant; return the accepted hello, or None and the reason."""
    pending.arrived(conn, host, now_ns)
    said, refusal = caller.opening(), "refused"
    for _ in range(2):
        for action in pending.received(conn, said):
            if isinstance(action, Say):
                try:
                    said = caller.received(action.message)
                except PermissionError as error:
                    refusal = str(error)
            elif isinstance(action, Admit):
                caller.received(action.welcome)
                assert caller.done, "the caller was admitted and did not notice"
                pending.check()
                return action.hello, ""
    assert conn not in pending, "a connection was neither admitted nor refused"
    return None, refusal


def is_numeric(host: str) -> bool:
    """Whether this is an IP address and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class ControlLink:
    """A connection between a peer and the master, from the first dial on."""

    __slots__ = ("_token", "_up", "_world", "conn", "down", "master", "peer", "register")

    def __init__(self, world: World, peer: PeerShell, register: Register, token: bytes) -> None:
        self._world = world
        self.peer = peer
        self.master: MasterShell = world.master
        self._token = token
        self.register = register
        self.conn = 0  # the master's number for it; 0 until it is known there
        self._up = Pipe(world, world.master, self._at_master, peer)
        self.down = Pipe(world, peer, self._at_peer, peer)
        if self.master.alive:
            self.master.calling.add(self)
            self._up.send(Opened())
        else:
            self.down.send(Fin("connection refused"))

    def say_to_master(self, item: Any) -> None:
        """Send a message of the peer, or its Fin."""
        self._up.send(self._through_bytes(item))

    def say_to_peer(self, item: Any) -> None:
        """Send a message of the master, or its Fin."""
        self.down.send(self._through_bytes(item))

    def _through_bytes(self, item: Any) -> Any:
        is_message = not isinstance(item, Fin | BrokenFrame)
        return decode(*encode(item)) if self._world.plan.bytes and is_message else item

    def _at_master(self, item: Any) -> None:
        master = self.master
        if isinstance(item, Opened):
            self._answer()
        elif self.conn not in master.links:
            return
        elif isinstance(item, Fin):
            del master.links[self.conn]
            self._world.feed(master, PeerWent(self.conn, item.reason))
        elif isinstance(item, BrokenFrame):
            del master.links[self.conn]
            reason = f"broke the protocol ({item.kind}): {item.reason}"
            self._dismiss(reason)
            self._world.feed(master, PeerWent(self.conn, reason))
        else:
            self._world.feed(master, PeerSaid(self.conn, item))

    def _answer(self) -> None:
        """Answer a caller that has reached the master's port."""
        master, world = self.master, self._world
        master.calling.discard(self)
        self.conn = master.new_conn()
        register = self.register
        if world.plan.handshakes:
            caller = Caller(self._token, world.nonce(), lambda proof: replace(register, proof=proof))
            hello, reason = shake_hands(master.pending, caller, self.conn, self.peer.host, world.clock.now_ns)
            if hello is None:
                self.down.send(Turned(reason))
                return
            register = hello
        self.down.send(Opened())
        if register.host and not is_numeric(register.host):
            world.paths.mark("an address that is a name is refused")
            self._dismiss(f"{register.host!r} is not a numeric address that others could dial")
            return
        master.links[self.conn] = self
        world.feed(master, PeerCame(self.conn, register, self.peer.host))

    def _dismiss(self, reason: str) -> None:
        """End the connection as the master's actor does, with a reason."""
        self.say_to_peer(Kick(INVALID_USAGE, reason))
        self.say_to_peer(Fin("closed by the master"))

    def _at_peer(self, item: Any) -> None:
        peer, feed = self.peer, self._world.feed
        if peer.control is not self:
            return  # closed meanwhile
        if isinstance(item, Opened):
            feed(peer, MasterUp())
        elif isinstance(item, Turned):
            peer.control = None
            feed(peer, MasterDown(item.reason, final=True))
        elif isinstance(item, Fin):
            peer.control = None
            feed(peer, MasterDown(item.reason))
        elif isinstance(item, BrokenFrame):
            peer.control = None
            self.say_to_master(Fin("connection reset by peer"))
            feed(peer, MasterDown(f"{item.kind}: {item.reason}"))
        else:
            feed(peer, MasterSaid(item))


class LaneEnd:
    """One end of a lane's connection, and the shell that holds it."""

    __slots__ = ("attached", "dialled", "lane", "link", "out", "shell")

    def __init__(self, lane: LaneLink, shell: PeerShell, link: int, *, dialled: bool) -> None:
        self.lane = lane
        self.shell = shell
        self.link = link  # the shell's number for it
        self.dialled = dialled
        self.attached = False  # a worker serves it
        self.out: Pipe | None = None  # to the other end, once there is one
        shell.links[link] = self

    @property
    def is_open(self) -> bool:
        """Whether the shell still holds it."""
        return self.shell.links.get(self.link) is self

    def say(self, item: Any) -> None:
        """Send an item to the other end."""
        if self.out is not None:
            self.out.send(item)

    def hear(self, item: Any) -> None:
        """Handle an item from the other end."""
        if not self.is_open:
            return
        if isinstance(item, Opened):
            self.lane.world.feed(self.shell, LinkUp(self.link))
        else:
            del self.shell.links[self.link]
            self.lane.world.feed(self.shell, LinkDown(self.link, item.reason))


class LaneLink:
    """A lane's connection: the end of the peer that dialled, and the end of the one that was dialled."""

    __slots__ = ("_back", "_where", "far", "hello", "near", "world")

    def __init__(self, world: World, dialler: PeerShell, link: int, where: tuple[str, int], hello: JoinLane) -> None:
        self.world = world
        self._where = where
        self.hello = hello
        self.near = LaneEnd(self, dialler, link, dialled=True)
        self.far: LaneEnd | None = None  # until the dial arrived
        self._back = Pipe(world, dialler, self.near.hear)
        world.clock.after(2 * world.delay_ns(), self._reach)

    def joins(self, shell: PeerShell) -> bool:
        """Whether that peer holds one of the ends."""
        return shell is self.near.shell or (self.far is not None and shell is self.far.shell)

    def sever(self, reason: str) -> None:
        """Break the connection; both ends are told, each after its own delay."""
        self.near.shell.severed_ns = self.world.clock.now_ns
        if self.far is not None:
            self.far.shell.severed_ns = self.world.clock.now_ns
        self._back.send(Fin(reason))
        self.near.say(Fin(reason))

    def _reach(self) -> None:
        """Let the dial arrive at its target, or fail."""
        world, target = self.world, self.world.listeners.get(self._where)
        if not self.near.is_open:
            return
        blocked = target is not None and world.is_blocked(self.near.shell, target)
        if blocked or (target is not None and target.vanished):
            if blocked and world.chance(0.5):
                self._back.send(Fin("no route to host"))
            return  # else no answer: only a timeout ends the dial
        if target is None or not target.alive:
            self._back.send(Fin("connection refused"))
            return
        target.receive(self._come, target)

    def _come(self, target: PeerShell) -> None:
        world, hello = self.world, self.hello
        if not self.near.is_open:
            return
        link = target.state.new_link()
        if world.plan.handshakes:
            caller = Caller(world.token, world.nonce(), lambda proof: replace(self.hello, proof=proof))
            hello, reason = shake_hands(target.pending, caller, link, self.near.shell.host, world.clock.now_ns)
            assert hello is not None, reason
        self.far = LaneEnd(self, target, link, dialled=False)
        self.far.out = self._back
        self.near.out = Pipe(world, target, self.far.hear)
        world.feed(target, LinkCame(link, hello))
