"""The actor's side of probes: the one of which this peer is the source, and those of which it is the target.

As a source it dials all links of an edge, and forks a worker when the last is up. As a target it accepts links of peers
of the run, and forks a worker when all links of one probe are up. No order announces them, so their number and their
time are bounded. Source and target never wait for each other's actors: a round that the master has given up ends by
itself.

Workers are disposable. The actor watches their mailboxes: a worker that ended has sent the reason, or was killed.
"""

from __future__ import annotations

from pccl._core.peer.events import ProbeDone
from pccl._core.protocol.codec import unpack
from pccl._core.protocol.events import DEBUG
from pccl._core.protocol.hellos import JoinProbe, Refused
from pccl._core.protocol.mailbox import ProbeEnded
from pccl._core.protocol.outcomes import RANK_CONNECTION_FAILED
from pccl.actors.io import fork
from pccl.actors.io.dialler import Dialler
from pccl.actors.io.fork import MAILBOX_BYTES_MAX
from pccl.actors.workers.probe_worker import Course, be_source, be_target
from pccl.options import LANES_MAX, PROBES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

    from pccl._core.peer.events import BeginProbe, EndProbe
    from pccl._core.protocol.hellos import Welcome
    from pccl.actors.io.connection import Connection
    from pccl.actors.io.loop import Loop

    from .identity import Identity

GRACE_NS = 1_000_000_000  # added to dialling and counting: a worker that takes longer was stopped or got no processor
DURATION_NS_MAX = 60_000_000_000  # how long a target counts at most: no master asks for more
REAP_NS = 1_000_000  # a killed process exits within this time


class ProbeEnd:
    """One probe at one of its ends, from the first connection until its worker is reaped."""

    def __init__(self, number: int, lanes: int) -> None:
        self.round = number
        self.lanes = lanes
        self.diallers: list[Dialler] = []  # of a source
        self.sockets: dict[int, socket.socket] = {}  # lane -> connection that is up
        self.pid = 0
        self.mailbox: socket.socket | None = None
        self.over = False


class Probes:
    """At most one probe by this peer, and a bounded number by others."""

    def __init__(
        self,
        loop: Loop,
        life_fd: int,
        *,
        feed: Callable[[Any], None],
        tell: Callable[[int, str], None],
        identity: Callable[[], Identity],
    ) -> None:
        self._loop = loop
        self._life_fd = life_fd  # every worker holds it open, so the pipe closes when the last has exited
        self._feed = feed
        self._tell = tell
        self._identity = identity
        self._own: ProbeEnd | None = None
        self._others: dict[tuple[int, int], ProbeEnd] = {}  # (round, source) -> probe with this peer as its target
        self._killed: set[int] = set()  # pids of workers to be reaped
        self._forked = 0

    # ------------------------------------------------------------------------------------------ as a source

    def begin(self, action: BeginProbe) -> None:
        """Dial all links; `ProbeDone` follows, but never within this call."""
        identity = self._identity()
        probe = self._own = ProbeEnd(action.round, action.lanes)
        course = Course(action.milliseconds * 1_000_000, action.milliseconds * 1_000_000 + GRACE_NS)
        for lane in range(action.lanes):
            probe.diallers.append(self._dial(probe, lane, action, course, identity))

    def _dial(self, probe: ProbeEnd, lane: int, action: BeginProbe, course: Course, identity: Identity) -> Dialler:
        def hello(proof: bytes) -> JoinProbe:
            ends = (identity.peer, action.target)
            return JoinProbe(proof, identity.run, action.round, *ends, lane, action.lanes, action.milliseconds)

        return Dialler(
            self._loop,
            [(action.host, action.port)],
            token=identity.token,
            hello=hello,
            on_up=lambda connection: self._dialled(probe, lane, connection, course),
            on_down=lambda reason, _: self._own_ended(probe, 0, reason),
            timeout_ns=identity.connect_ns,
        )

    def _dialled(self, probe: ProbeEnd, lane: int, connection: Connection, course: Course) -> None:
        sock = connection.detach()
        if probe.over or sock is None or not connection.is_idle():
            if sock is not None:
                sock.close()
            self._own_ended(probe, 0, "an incomplete message was left on the connection")
            return
        probe.sockets[lane] = sock
        if len(probe.sockets) == probe.lanes:
            self._fork(probe, "probe", be_source, course, lambda rate, reason: self._own_ended(probe, rate, reason))

    def end(self, action: EndProbe) -> None:
        """End the probe, because its result is not needed any more."""
        if self._own is not None and self._own.round == action.round:
            self._drop(self._own)
            self._own = None

    def _own_ended(self, probe: ProbeEnd, rate: int, reason: str) -> None:
        self._drop(probe)
        if self._own is probe:
            self._own = None
            self._loop.after(0, lambda: self._feed(ProbeDone(probe.round, rate, reason)))

    # ------------------------------------------------------------------------------------------ as a target

    def link_came(self, connection: Connection, hello: JoinProbe, _: str, welcome: Welcome) -> None:
        """Answer a peer that has proven itself to the listener and wants to send a probe."""
        reason = self._reason_against(hello)
        key = hello.round, hello.source
        probe = self._others.get(key)
        if not reason and probe is None:
            probe = self._others[key] = ProbeEnd(hello.round, hello.lanes)
            limit_ns = self._identity().connect_ns + 2 * GRACE_NS + hello.milliseconds * 1_000_000
            held = probe
            self._loop.after(limit_ns, lambda: self._other_ended(key, held, 0, "it did not end in time"))
        if reason or probe is None:
            connection.send(Refused(RANK_CONNECTION_FAILED, reason))
            connection.finish()
            self._tell(DEBUG, f"refused a connection that wants to be measured: {reason}")
            return
        connection.send(welcome)
        sock = connection.detach()
        if sock is None or not connection.is_idle():
            if sock is not None:
                sock.close()
            self._other_ended(key, probe, 0, "it sent a message too early")
            return
        probe.sockets[hello.lane] = sock
        if len(probe.sockets) == probe.lanes:
            duration_ns = hello.milliseconds * 1_000_000
            ended = self._other_ended
            course = Course(duration_ns, duration_ns + GRACE_NS)
            self._fork(probe, "count", be_target, course, lambda rate, why: ended(key, probe, rate, why))

    def _reason_against(self, hello: JoinProbe) -> str:
        """Return why this connection is refused; empty if it is accepted."""
        identity = self._identity()
        if not identity.peer or hello.run != identity.run or hello.target != identity.peer:
            return "this is another peer, or another run"
        if not 1 <= hello.lanes <= LANES_MAX or hello.lane >= hello.lanes:
            return f"lane {hello.lane} of {hello.lanes} does not exist"
        if not 0 < hello.milliseconds * 1_000_000 <= DURATION_NS_MAX:
            return f"a probe of {hello.milliseconds} ms is too long or too short"
        probe = self._others.get((hello.round, hello.source))
        if probe is not None and (probe.pid or hello.lane in probe.sockets or hello.lanes != probe.lanes):
            return f"lane {hello.lane} of round {hello.round} is taken"
        if sum(len(other.sockets) for other in self._others.values()) >= PROBES_MAX + LANES_MAX:
            return "too many peers measure the edge to this peer"
        return ""

    def _other_ended(self, key: tuple[int, int], probe: ProbeEnd, rate: int, reason: str) -> None:
        if self._others.get(key) is not probe:
            return
        del self._others[key]
        self._drop(probe)
        result = reason or f"{rate / 1e6:.3g} MB/s"
        self._tell(DEBUG, f"counted what peer {key[1]} sends in round {key[0]}: {result}")

    # ------------------------------------------------------------------------------------------ workers

    def _fork(
        self,
        probe: ProbeEnd,
        kind: str,
        work: Callable[[socket.socket, list[socket.socket], Course], None],
        course: Course,
        ended: Callable[[int, str], None],
    ) -> None:
        """Fork a worker for all connections; only the worker holds them from now on."""
        sockets = [probe.sockets[lane] for lane in range(probe.lanes)]
        kept = [self._life_fd, *(sock.fileno() for sock in sockets)]
        name = f"pccl-{kind}-{self._forked}"
        self._forked += 1
        try:
            probe.pid, mailbox = fork.fork(
                self._loop,
                name,
                kept,
                lambda mailbox: work(mailbox, sockets, course),
                lambda: self._heard(mailbox, name, ended),
            )
        except OSError as error:
            ended(0, f"cannot start a worker: {error.strerror}")
            return
        for sock in sockets:
            sock.close()
        probe.mailbox = mailbox
        # It ends by itself when its time is over. This timer is for a worker that is stopped or gets no processor.
        self._loop.after(course.limit_ns + GRACE_NS, lambda: None if probe.over else ended(0, f"{name} does not end"))

    def _heard(self, mailbox: socket.socket, name: str, ended: Callable[[int, str], None]) -> None:
        try:
            data = mailbox.recv(MAILBOX_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        message = unpack(data) if data else None
        if isinstance(message, ProbeEnded):
            ended(message.bytes_per_second, message.reason)
        else:
            ended(0, f"{name} ended unexpectedly")

    def _drop(self, probe: ProbeEnd) -> None:
        """End a probe: cancel its diallers, close its connections, kill its worker."""
        if probe.over:
            return
        probe.over = True
        for dialler in probe.diallers:
            dialler.cancel()
        for sock in probe.sockets.values():
            sock.close()
        if probe.mailbox is not None:
            self._loop.forget(probe.mailbox.fileno())
            probe.mailbox.close()
        if probe.pid:
            fork.kill(probe.pid)
            self._killed.add(probe.pid)
            self._loop.after(0, self._reap)

    def _reap(self) -> None:
        fork.reap(self._killed)
        if self._killed:
            self._loop.after(REAP_NS, self._reap)

    def kill(self) -> None:
        """End all probes, because this process ends."""
        probes = [*self._others.values(), *([] if self._own is None else [self._own])]
        self._own = None
        self._others.clear()
        for probe in probes:
            self._drop(probe)
        fork.wait_for_exit(self._killed)
