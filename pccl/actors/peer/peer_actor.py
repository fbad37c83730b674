"""The peer actor: the process between a training process and the run.

It has a mailbox to the training process, a control link to the master, one listening port for connections of other
peers, and worker processes. `PeerState` decides; this module performs its actions. The actor owns a compiled fast path
(`peer_fastpath`), which every reduce takes; the rest is here. The actor lives exactly as long as the training process:
it watches a descriptor of that process, not only its mailbox, because a forked child of the training process may hold
the mailbox open. It ignores SIGINT and SIGTERM: the training process decides what they mean, and may want to save its
state first.

`spawn.ActorProcess` starts it with a clean exec of the interpreter. It does not import numpy, torch or logging.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys

from pccl._core.peer.events import (
    AbortOperation,
    AddSources,
    AnswerLink,
    AppGone,
    AppStopped,
    AttachLink,
    BeginProbe,
    BeginTrial,
    Called,
    Dial,
    DialMaster,
    DropLink,
    DropSource,
    EndProbe,
    EndTransfer,
    FetchState,
    HangUp,
    KillLanes,
    LinkCame,
    LinkDown,
    LinkUp,
    MasterDown,
    MasterUp,
    SendSchema,
    ServeFetched,
    ServeState,
    SpawnLanes,
    Stop,
    Tell,
    TrialEnded,
    UseTiming,
    WorkerDied,
)
from pccl._core.peer.peer_state import PeerState
from pccl._core.protocol.codec import pack
from pccl._core.protocol.events import DEBUG, Log, Tick
from pccl._core.protocol.hellos import HANDSHAKE_TO_PEER, JoinLane, JoinProbe, JoinState, JoinTrial, Refused, Register
from pccl._core.protocol.mailbox import CallCancel, CallConnect, CallManifest, CallShare, CallUnshare, FollowMaster
from pccl._core.protocol.messages import TO_PEER, Notice
from pccl._core.protocol.outcomes import INVALID_USAGE, KIND_CANCELLED, RANK_CONNECTION_FAILED, join
from pccl._core.records import replace
from pccl._core.system.futex import monotonic_ns
from pccl._core.system.process import die_with_parent, is_stopped, open_pidfd, set_process_name
from pccl.actors.io import fork
from pccl.actors.io.dialler import Dialler
from pccl.actors.io.fault_points import planned
from pccl.actors.io.listener import Listener, bind_peer_port
from pccl.actors.io.loop import IDLE_NS, Loop
from pccl.actors.io.trials import Trials, answer_trial
from pccl.memory.completion_slots import SlotTable
from pccl.options import Options, link_silence_ns, nanoseconds

from .identity import Identity
from .lane_pool import LanePool
from .op_runner import OpRunner
from .peer_fastpath import PeerFastpath
from .probes import Probes
from .transfers import Transfers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pccl._core.protocol.hellos import Welcome
    from pccl.actors.io.connection import Connection

INSTANCE_BYTES = 16  # of the random name of this process
COLLECT_NS = 10_000_000_000  # interval: old rings, links and callbacks form cycles, some kilobytes in this time


class PeerActor:
    """One membership of one communicator."""

    def __init__(self, mailbox: socket.socket, slots: SlotTable, life_fd: int) -> None:
        self.loop = Loop()
        self.state: PeerState | None = None  # created by the first call
        self._mailbox = mailbox
        self._slots = slots
        self._fastpath = PeerFastpath(
            self.loop,
            mailbox,
            slots,
            planned(),
            perform=self._perform,
            receive=self._receive,
            app_gone=self._app_gone,
        )
        self._feed = self._fastpath.feed
        self._parent = 0
        self._listening: Listener | None = None
        self._master_dialler: Dialler | None = None
        self._join: CallConnect | None = None
        self._patience_ns = 0  # how long the training process may be stopped
        self._stopped_ns = 0  # how long it has been stopped while this process ran
        self._token = b""
        self._addresses: list[tuple[str, int]] = []
        self._diallers: dict[int, Dialler] = {}  # link -> the running attempt
        self._links: dict[int, tuple[Connection, Welcome | None]] = {}  # link -> connection that no worker has yet
        self._lanes = LanePool(
            self.loop,
            life_fd,
            on_link_ended=lambda link, reason: self._feed(LinkDown(link, reason)),
            on_worker_died=lambda reason: self._feed(WorkerDied(reason)),
        )
        self._op_runner = OpRunner(self.loop, self._lanes, self._feed)
        self._transfers = Transfers(
            self.loop,
            life_fd,
            feed=self._feed,
            tell=self._tell,
            descriptor=self._lanes.descriptor,
            identity=self._identity,
        )
        self._probes = Probes(self.loop, life_fd, feed=self._feed, tell=self._tell, identity=self._identity)
        self._trials = Trials(self.loop)
        self._instance = os.urandom(INSTANCE_BYTES)
        self._fastpath.op_runner = self._op_runner
        self._fastpath.windows = self._transfers.windows
        mailbox.setblocking(False)
        self.loop.watch(mailbox.fileno(), self._fastpath)

    def run(self, parent: int, parent_fd: int) -> None:
        """Serve until the training process leaves or dies."""
        self._parent = parent
        self.loop.watch(parent_fd, lambda _: self._app_gone("the training process ended without close()"))
        self._slots.beat(monotonic_ns())
        try:
            self.loop.run(self._fastpath.deadline, self._tick)
        finally:
            self._lanes.kill()
            self._transfers.kill()
            self._probes.kill()
            self._lanes.wait_for_exit()

    # ------------------------------------------------------------------------------------------ mailbox

    def _receive(self, call: Any, descriptor: int) -> None:
        """Take a call of the training process that is not for the fast path."""
        if isinstance(call, CallShare):
            self._lanes.share(call.segment, descriptor, call.nbytes)
        elif isinstance(call, CallUnshare):
            self._lanes.unshare(call.segment)
        else:
            if self.state is None and isinstance(call, CallConnect):
                self._begin(call)
            if self.state is not None:
                if isinstance(call, CallManifest):
                    self._transfers.described(call)
                self._feed(Called(call))
                if isinstance(call, CallCancel):
                    self._end_unknown(call)

    def _end_unknown(self, cancel: CallCancel) -> None:
        """Complete a cancelled call that never arrived, because its caller was interrupted before the post."""
        state = self.state
        assert state is not None
        if not state.owes(cancel.slot, cancel.generation):
            self._slots.complete(cancel.slot, cancel.generation, join(INVALID_USAGE, KIND_CANCELLED))

    def _begin(self, call: CallConnect) -> None:
        """Take the options from the first call, open the port and create the machine."""
        self._join = call
        if call.level <= DEBUG:
            self._begin_trace(call.level)
        options = Options.decode(call.options.decode())
        self._lanes.size = max(call.lanes, 1)
        self._lanes.patience_ns = link_silence_ns(nanoseconds(options.stall_timeout))
        self._lanes.host_read = options.host_memory
        self._patience_ns = nanoseconds(options.heartbeat_timeout)
        self.loop.look_ns = nanoseconds(options.look_time)
        # Until the master's times are known; the training process checks the beats by its own.
        self._fastpath.rhythm_ns = min(IDLE_NS, nanoseconds(options.heartbeat_interval))
        self._token = options.token.encode()
        text = call.addresses.decode()
        self._addresses = [(host, int(port)) for host, port in (line.split(" ") for line in text.split("\n"))]
        try:
            listener = bind_peer_port(options.port)
        except OSError as error:
            which = f"port {options.port}" if options.port else "any port"
            reason = f"this peer cannot listen on {which}: {error.strerror}"
            self._slots.complete(call.slot, call.generation, INVALID_USAGE, reason.encode())
            return
        self.state = self._fastpath.state = PeerState(options, monotonic_ns())
        self._listening = Listener(
            self.loop,
            listener,
            token=self._token,
            hellos={
                JoinLane: self._link_came,
                JoinState: self._transfers.link_came,
                JoinProbe: self._probes.link_came,
                JoinTrial: lambda connection, hello, _, welcome: answer_trial(
                    connection, hello, welcome, self._instance
                ),
            },
            limits=HANDSHAKE_TO_PEER,
            new_number=self.state.new_link,
            log=self._tell,
            timeout_ns=nanoseconds(options.handshake_timeout),
        )
        self._fastpath.pending = self._listening.pending

    def _begin_trace(self, level: int) -> None:
        """Write a debug log, which travels to the training process."""
        from pccl.actors.io.trace import Trace  # here, because most peers do not need it

        def phases() -> dict[str, str]:
            return {} if self.state is None else {"membership": self.state.phase}

        number = 0  # until it is registered; kept when the membership is over

        def log(level: int, line: str) -> None:
            nonlocal number
            number = number if self.state is None else self.state.id or number
            self._tell(level, f"peer={number} {line}")

        self._fastpath.trace = Trace(level, log, phases, str)
        fork.worker_log = lambda line: log(DEBUG, line)

    def _identity(self) -> Identity:
        assert self.state is not None
        options, links = self.state.options, self.state.ring_links
        return Identity(
            links.run,
            links.id,
            lanes=self._lanes.size,
            token=self._token,
            stall_ns=nanoseconds(options.stall_timeout),
            dial_ns=nanoseconds(options.connect_timeout + options.handshake_timeout),
            connect_ns=nanoseconds(options.connect_timeout),
            new_link=self.state.new_link,
            check=options.check,
            report_ns=nanoseconds(links.options.vote_warning),
        )

    def _app_gone(self, reason: str) -> None:
        if self.state is None:
            self.loop.stop()
        else:
            self._feed(AppGone(reason))

    def _tell(self, level: int, line: str) -> None:
        """Send a line for the user's log; it is lost if the mailbox is full, because the training process computes."""
        try:
            self._mailbox.send(pack(Notice(level, line)))
        except OSError:
            pass

    # ------------------------------------------------------------------------------------------ time

    def _tick(self, now_ns: int) -> None:
        # At most the rhythm: if this process was stopped too, it does not know what happened meanwhile.
        elapsed_ns = min(now_ns - self._slots.last_beat_ns, self._fastpath.rhythm_ns)
        self._slots.beat(now_ns)
        self._lanes.reap()
        if self._listening is not None:
            self._listening.tick(now_ns)
        if self.state is not None:
            self._op_runner.report()
            self._transfers.report(now_ns)
            self._watch_parent(elapsed_ns)
            self._feed(Tick())

    def _watch_parent(self, elapsed_ns: int) -> None:
        """End the membership if the training process was stopped for `heartbeat_timeout`; it may continue later."""
        self._stopped_ns = self._stopped_ns + elapsed_ns if is_stopped(self._parent) else 0
        if self._stopped_ns > self._patience_ns:
            bound = f"{self._patience_ns / 1e9:g} s (heartbeat_timeout)"
            self._feed(AppStopped(f"the training process {self._parent} was stopped for more than {bound}"))

    # ------------------------------------------------------------------------------------------ the machine

    def _perform(self, action: Any) -> None:
        _PERFORM[type(action)](self, action)

    def _send_schema(self, action: SendSchema) -> None:
        for page in self._transfers.schema_pages(action):
            if self._fastpath.master is not None:
                self._fastpath.master.send(page)

    def _dial_master(self, _: DialMaster) -> None:
        call, listening = self._join, self._listening
        assert call is not None
        assert listening is not None
        assert self.state is not None
        port = call.advertise_port or listening.port
        options = self.state.options
        self._master_dialler = Dialler(
            self.loop,
            self._addresses,
            token=self._token,
            hello=lambda proof: Register(
                proof, call.group, call.lanes, call.advertise_host, port, self._instance, options.run
            ),
            on_up=self._master_up,
            on_down=lambda reason, final: self._feed(MasterDown(reason, final)),
            timeout_ns=nanoseconds(options.connect_timeout + options.handshake_timeout),
        )

    def _master_up(self, connection: Connection) -> None:
        self._fastpath.master = connection
        connection.become(TO_PEER, self._fastpath.heard, self._master_down)
        self._feed(MasterUp())

    def _master_down(self, _: int, kind: str, reason: str) -> None:
        if self._fastpath.master is not None:
            self._fastpath.master.close()
            self._fastpath.master = None
        self._feed(MasterDown(f"{kind}: {reason}" if kind not in ("closed", "error") else reason))

    def _begin_trial(self, action: BeginTrial) -> None:
        assert self.state is not None
        where, timeout_ns = (action.host, action.port), nanoseconds(self.state.options.connect_timeout)
        target = action.target
        self._trials.begin(
            where, action.instance, self._token, timeout_ns, lambda reason: self._feed(TrialEnded(target, reason))
        )

    def _hang_up(self, _: HangUp) -> None:
        self._trials.cancel()
        if self._master_dialler is not None:
            self._master_dialler.cancel()
        if self._fastpath.master is not None:
            self._fastpath.master.finish()
            self._fastpath.master = None

    def _spawn_lanes(self, action: SpawnLanes) -> None:
        try:
            self._lanes.spawn(action.lanes)
        except OSError as error:
            # Out of processes or descriptors. The ring cannot be wired with this peer until the machine gives up.
            reason = f"cannot start workers: {error.strerror}"
            self.loop.after(0, lambda: self._feed(WorkerDied(reason)))

    def _kill_lanes(self, _: KillLanes) -> None:
        self._op_runner.keep_traffic()
        self._lanes.kill()

    def _use_timing(self, action: UseTiming) -> None:
        """Follow the master's heartbeat times; the training process checks this one by the same times."""
        self._patience_ns = action.silence_ns
        self._fastpath.rhythm_ns = min(IDLE_NS, action.interval_ns)
        try:
            self._mailbox.send(pack(FollowMaster(action.silence_ns)))
        except OSError:
            pass  # it is gone, or still checks by its own time

    def _stop(self, _: Stop) -> None:
        """End the loop. The kernel still sends the last messages that HangUp queued, because we read nothing more."""
        self.loop.stop()

    # ------------------------------------------------------------------------------------------ links

    def _dial(self, action: Dial) -> None:
        link, hello = action.link, action.hello
        self._diallers[link] = Dialler(
            self.loop,
            [(action.host, action.port)],
            token=self._token,
            hello=lambda proof: replace(hello, proof=proof),
            on_up=lambda connection: self._link_up(link, connection),
            on_down=lambda reason, _: self._link_down(link, reason),
            number=link,
        )

    def _link_up(self, link: int, connection: Connection) -> None:
        del self._diallers[link]
        self._hold(link, connection, None)
        self._feed(LinkUp(link))

    def _link_down(self, link: int, reason: str) -> None:
        self._diallers.pop(link, None)
        held = self._links.pop(link, None)
        if held is not None:
            held[0].close()
        self._feed(LinkDown(link, reason))

    def _link_came(self, connection: Connection, hello: JoinLane, _: str, welcome: Welcome) -> None:
        self._hold(connection.number, connection, welcome)
        self._feed(LinkCame(connection.number, hello))

    def _hold(self, link: int, connection: Connection, welcome: Welcome | None) -> None:
        """Keep a connection until the machine decides. A connection that sends or ends meanwhile is dropped."""
        self._links[link] = (connection, welcome)
        connection.become(
            {},
            lambda number, _: self._link_down(number, "sent a message too early"),
            lambda number, _, reason: self._link_down(number, reason),
        )

    def _answer_link(self, action: AnswerLink) -> None:
        held = self._links.get(action.link)
        if held is None:
            return
        connection, welcome = held
        if action.reason:
            del self._links[action.link]
            connection.send(Refused(RANK_CONNECTION_FAILED, action.reason))
            connection.finish()
            self._tell(DEBUG, f"refused a lane: {action.reason}")
        else:
            assert welcome is not None
            connection.send(welcome)

    def _attach_link(self, action: AttachLink) -> None:
        connection, _ = self._links.pop(action.link)
        sock = connection.detach()
        if sock is None or not connection.is_idle():
            if sock is not None:
                sock.close()
            self.loop.after(0, lambda: self._feed(LinkDown(action.link, "an incomplete message was left on the lane")))
            return
        self._lanes.attach(action.link, sock, action.sends, action.lane)

    def _drop_link(self, action: DropLink) -> None:
        link = action.link
        dialler = self._diallers.pop(link, None)
        if dialler is not None:
            dialler.cancel()
        held = self._links.pop(link, None)
        if held is not None:
            held[0].close()
        self._lanes.drop(link)


_PERFORM: dict[type[Any], Callable[[PeerActor, Any], None]] = {
    DialMaster: PeerActor._dial_master,
    HangUp: PeerActor._hang_up,
    SpawnLanes: PeerActor._spawn_lanes,
    KillLanes: PeerActor._kill_lanes,
    Dial: PeerActor._dial,
    AnswerLink: PeerActor._answer_link,
    AttachLink: PeerActor._attach_link,
    DropLink: PeerActor._drop_link,
    AbortOperation: lambda actor, action: actor._op_runner.abort(action.sequence),
    ServeState: lambda actor, action: actor._transfers.serve(action),
    FetchState: lambda actor, action: actor._transfers.fetch(action),
    AddSources: lambda actor, action: actor._transfers.add_sources(action),
    ServeFetched: lambda actor, action: actor._transfers.serve_fetched(action),
    DropSource: lambda actor, action: actor._transfers.drop_source(action),
    EndTransfer: lambda actor, action: actor._transfers.end(action),
    SendSchema: PeerActor._send_schema,
    BeginProbe: lambda actor, action: actor._probes.begin(action),
    EndProbe: lambda actor, action: actor._probes.end(action),
    BeginTrial: PeerActor._begin_trial,
    Tell: lambda actor, action: actor._tell(action.level, action.line),
    Log: lambda actor, action: actor._tell(action.level, action.line),
    UseTiming: PeerActor._use_timing,
    Stop: PeerActor._stop,
}


def main(arguments: list[str]) -> int:
    """Entry point of the process.

    Arguments: descriptors of mailbox, slots and life pipe, the parent's process id, and whether to die with it.
    """
    mailbox_fd, slots_fd, life_fd, parent, die = (int(argument) for argument in arguments)
    if die:
        die_with_parent(signal.SIGKILL)
    try:
        parent_fd = open_pidfd(parent)
    except ProcessLookupError:
        return 0  # the training process died before this one was ready
    if os.getppid() != parent:
        return 0  # the same, and another process has its process id now
    set_process_name("pccl-peer")
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in held:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
    raise_descriptor_limit()
    actor = PeerActor(socket.socket(fileno=mailbox_fd), SlotTable.attach(slots_fd), life_fd)
    # Workers are forked from here: a collection in a worker would visit, and so copy, objects that never die.
    gc.freeze()
    gc.disable()
    actor.loop.collect(COLLECT_NS)
    actor.run(parent, parent_fd)
    return 0


def raise_descriptor_limit() -> None:
    """Allow more descriptors than a shell does, for a large pool and many segments. This process uses no select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass  # the usual limit stays; if it is too small, starting workers fails with a reason


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
