"""The master as a process: a listening port, one control link per peer, and the machine that decides.

This module decides nothing: bytes become events for `MasterState`, and its actions become bytes and log lines. The
actor owns a compiled fast path (`master_fastpath`), which nearly every message takes; the rest is here. An operator
that asks for the status gets a status report and is disconnected; the machine is not involved. The actor runs until
`stop`, in the process that called `run`. With a state file, an agreed state is on the disk before any peer is told. If
the file cannot be written any more, the run continues, and the log says so. If it is told to, it ends when the run is
finished and no restarted peer has asked for a while.
"""

from __future__ import annotations

import os
import socket

from pccl._core.master.events import (
    BeginMoonshot,
    CancelMoonshot,
    DialBack,
    DialledBack,
    Dismiss,
    MoonshotFound,
    PeerCame,
    PeerWent,
    Save,
)
from pccl._core.master.master_state import MasterState
from pccl._core.master.run_table import RUN_ID_BYTES, name_run
from pccl._core.protocol.codec import PROTOCOL_VERSION
from pccl._core.protocol.events import DEBUG, ERROR, INFO, WARNING, Log, Tick
from pccl._core.protocol.hellos import HANDSHAKE_TO_MASTER, AskStatus, Register
from pccl._core.protocol.messages import TO_MASTER, Kick
from pccl._core.protocol.outcomes import INVALID_USAGE
from pccl._core.system.futex import monotonic_ns
from pccl.actors.io.listener import Listener
from pccl.actors.io.loop import Loop
from pccl.actors.io.trials import Trials
from pccl.options import STATUS_REPORT_TIME, nanoseconds

from .master_fastpath import MasterFastpath
from .moonshot import Moonshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pccl._core.protocol.hellos import Welcome
    from pccl.actors.io.connection import Connection
    from pccl.options import Options

    from .state_file import StateFile

# How long a master that exits with its run still answers: a peer that died near the end, and is restarted after some
# seconds, hears that nothing is left to do, instead of a refused connection. Every peer that asks begins it anew.
FINISHED_STAY = 10.0

# Messages in the mailbox of a master that has its own process. One more is the reason why it could not start.
STATE_FILE = b"state file: "  # followed by its path, if there is one
BEGIN_NEW, EXIT_WHEN_FINISHED = b"new run", b"exit when finished"  # joined by commas, or nothing
READY = b"ready"


class MasterActor:
    """Owns the listener and the state file that it gets. Raises ValueError if the state file cannot be used."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        options: Options,
        log: Callable[[int, str], None],
        *,
        version: str = "unknown",
        level: int = INFO,
        state_file: StateFile | None = None,
        new_run: bool = False,
        exit_when_finished: bool = False,
    ) -> None:
        self._log = log
        self._token = token
        self._file = state_file
        self._exit_when_finished = exit_when_finished
        self._unwritten = False  # the file is older than the agreed states
        self.state = self._begin(options, new_run=new_run)
        self.loop = Loop()
        self._fastpath = MasterFastpath(self.state, self.loop, self._perform)
        self._connections = self._fastpath.connections
        self.loop.look_ns = nanoseconds(options.look_time)
        self._trials = Trials(self.loop)
        self._version = version  # of the package; an argument, because the lookup is slow
        self._numbers = 0
        self._question: BeginMoonshot | None = None  # the question of the search in the background
        self._moonshot = Moonshot(self.loop, on_better=self._found, on_ended=self._search_ended)
        self._listening = Listener(
            self.loop,
            listener,
            token=token,
            hellos={Register: self._admit, AskStatus: self._answer},
            limits=HANDSHAKE_TO_MASTER,
            new_number=self._new_number,
            log=log,
            timeout_ns=nanoseconds(options.handshake_timeout),
        )
        self._fastpath.pending = self._listening.pending
        if level <= DEBUG:
            from pccl.actors.io.trace import Trace  # here, because most masters do not need it

            self._fastpath.trace = Trace(level, log, self._phases, self._name)

    @property
    def port(self) -> int:
        """The port of the listener."""
        return self._listening.port

    def run(self) -> None:
        """Serve until `stop`, then close every connection."""
        try:
            self.loop.run(self._fastpath.deadline, self._tick)
        finally:
            self._moonshot.close()
            self._trials.cancel()
            self._listening.close()
            self.loop.close()  # and with it all connections, also those that have sent their last message
            if self._file is not None:
                self._file.close()

    def stop(self) -> None:
        """End `run`; safe in a signal handler."""
        self.loop.stop()

    def _phases(self) -> dict[str, str]:
        """The phases of the machine's parts, for the debug log."""
        state = self.state
        phases = {"topology": state.topology_round.phase, "optimize": state.optimizer.phase}
        return phases | {
            f"sync group={number}": group.consensus.phase() for number, group in state.members.groups.items()
        }

    def _name(self, conn: int) -> str:
        peer = self.state.members.conns.get(conn)
        return f"conn{conn}" if peer is None else str(peer.id)

    def _begin(self, options: Options, *, new_run: bool) -> MasterState:
        """Return the state of a new run, or of the run in the file, which must be writable before any peer comes."""
        if self._file is None:
            return MasterState(os.urandom(RUN_ID_BYTES), options, monotonic_ns())
        saved = self._file.load()
        if saved is None:
            state = MasterState(os.urandom(RUN_ID_BYTES), options, monotonic_ns())
        elif new_run:
            forgotten = {run["name"]: _revisions(run) for run in (saved, *saved["runs"])}
            self._log(WARNING, f"begins a new run: drops what {self._file.path} remembered by run, {forgotten}")
            fresh = {"name": "", "run": os.urandom(RUN_ID_BYTES).hex(), "finished": False, "groups": {}, "runs": []}
            state = MasterState.restore({**saved, **fresh}, options, monotonic_ns())
        else:
            state = MasterState.restore(saved, options, monotonic_ns())
            which = f"{name_run(saved['name'])}{', which is finished' if saved['finished'] else ''}"
            line = f"goes on with {which} in {self._file.path}: agreed revisions by group {_revisions(saved)}"
            others = {run["name"]: "finished" if run["finished"] else _revisions(run) for run in saved["runs"]}
            self._log(INFO, f"{line}; other runs {others}" if others else line)
        try:
            self._file.save(state.snapshot())
        except OSError as error:
            self._file.close()
            reason = f"state file {self._file.path} cannot be written: {error.strerror}. Choose another path for it"
            raise ValueError(reason) from None
        return state

    def _save(self) -> None:
        """Save before any peer is told. A full disk does not end the run, but a restarted master then knows less."""
        if self._file is None:
            return
        try:
            self._file.save(self.state.snapshot())
        except (OSError, ValueError) as error:
            self._unwritten = True
            line = (
                f"state file {self._file.path} cannot be written: {error}. The run goes on, but a master that starts "
            )
            self._log(ERROR, line + "again would know only what was agreed before")
        else:
            if self._unwritten:
                self._log(INFO, f"state file {self._file.path} is written again")
            self._unwritten = False

    def _dial_back(self, action: DialBack) -> None:
        """Find out whether a newcomer can be reached at the address that others would dial."""
        timeout_ns, conn = nanoseconds(self.state.options.connect_timeout), action.conn
        self._trials.begin(
            (action.host, action.port),
            action.instance,
            self._token,
            timeout_ns,
            lambda reason: self._feed(DialledBack(conn, reason)),
        )

    def _search(self, question: BeginMoonshot) -> None:
        """Let a child continue the search. If there can be no child, the run continues with its present ring."""
        self._question = question
        budget_ns = nanoseconds(self.state.options.moonshot_time)
        try:
            self._moonshot.begin(question.ring, question.rates, question.seed, budget_ns)
        except OSError as error:
            self._log(INFO, f"no search for a better ring in the background: {error.strerror}")

    def _found(self) -> None:
        assert self._question is not None
        ring = self._moonshot.better_than(self._question.ring, self._question.rates)
        if ring is not None:
            self._feed(MoonshotFound(self._question.group, tuple(ring)))

    def _search_ended(self, reason: str) -> None:
        self._log(DEBUG, f"the search for a better ring in the background {reason}")

    def _feed(self, event: Any) -> None:
        self._fastpath.feed(event)

    def _new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _tick(self, now_ns: int) -> None:
        self._listening.tick(now_ns)
        self._feed(Tick())
        if self._exit_when_finished and self._is_over(now_ns):
            self._log(INFO, "the run is finished: this master ends, as it was told (exit when finished)")
            self.stop()

    def _is_over(self, now_ns: int) -> bool:
        """Whether the run is finished, and no peer has been told so for a while."""
        return self.state.runs.finished and now_ns - self.state.runs.told_ns >= nanoseconds(FINISHED_STAY)

    def _admit(self, connection: Connection, hello: Register, host: str, welcome: Welcome) -> None:
        connection.become(TO_MASTER, self._fastpath.heard, self._broke)
        if hello.host and not _is_numeric(hello.host):
            # The master would tell other peers to dial this address, and they could not.
            connection.send(welcome)
            connection.send(Kick(INVALID_USAGE, f"{hello.host!r} is not a numeric address that others could dial"))
            connection.finish()
            return
        self._connections[connection.number] = connection
        connection.send(welcome)
        self._feed(PeerCame(connection.number, hello, host))

    def _answer(self, connection: Connection, _: AskStatus, host: str, welcome: Welcome) -> None:
        """Send an operator the status report; an operator sends nothing after that."""
        from pccl._core.master.status_report import report_pages  # here, because most masters are never asked

        connection.become({}, lambda *_: None, lambda *_: None)
        connection.send(welcome)
        for page in report_pages(self.state, monotonic_ns(), version=self._version, protocol_version=PROTOCOL_VERSION):
            connection.send(page)
        connection.finish(nanoseconds(STATUS_REPORT_TIME))
        self._log(DEBUG, f"sent a status report to an operator at {host}")

    def _broke(self, number: int, kind: str, reason: str) -> None:
        connection = self._connections.pop(number)
        if kind in ("closed", "error"):
            connection.close()
        else:
            reason = f"broke the protocol ({kind}): {reason}"
            connection.send(Kick(INVALID_USAGE, reason))
            connection.finish()
        self._feed(PeerWent(number, reason))

    def _perform(self, action: Any) -> None:
        kind = type(action)
        if kind is Log:
            self._log(action.level, action.line)
        elif kind is Dismiss:
            connection = self._connections.pop(action.conn, None)
            if connection is not None:
                connection.finish()
        elif kind is Save:
            self._save()
        elif kind is DialBack:
            self._dial_back(action)
        elif kind is BeginMoonshot:
            self._search(action)
        elif kind is CancelMoonshot:
            self._moonshot.cancel()
        else:
            raise TypeError(f"the master cannot perform {action!r}")


def _revisions(run: dict[str, Any]) -> dict[int, int]:
    """The agreed revisions of a run in a state file, by group."""
    return {int(number): group["revision"] for number, group in run["groups"].items()}


def _is_numeric(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except (OSError, ValueError):
        return False
    return True


def open_state_file(path: str) -> StateFile | None:
    """Return the state file at `path`; None if `path` is empty, and then its module is not imported."""
    if not path:
        return None
    from .state_file import StateFile

    return StateFile(path)


def main(arguments: list[str]) -> int:
    """Entry point of a master that has its own process.

    Arguments: descriptors of listener and mailbox, the parent's process id, and whether to die with the parent.
    """
    listener_fd, mailbox_fd, parent, die = (int(argument) for argument in arguments)
    import logging  # here, because only this entry point needs it; a master in the caller's process uses the caller's
    import signal

    from pccl._core.system.process import die_with_parent, open_pidfd, set_process_name
    from pccl.actors.io.logs import configure_from_environment
    from pccl.options import Options

    if die:
        die_with_parent(signal.SIGKILL)
    try:
        parent_fd = open_pidfd(parent)
    except ProcessLookupError:
        return 0  # the parent is gone
    if os.getppid() != parent:
        return 0  # the same, and another process has its process id now
    set_process_name("pccl-master")
    configure_from_environment()
    mailbox = socket.socket(fileno=mailbox_fd)
    options, version = Options.decode(mailbox.recv(1 << 16).decode()), mailbox.recv(1 << 10).decode()
    path = os.fsdecode(mailbox.recv(1 << 16)[len(STATE_FILE) :])
    flags = mailbox.recv(1 << 10).split(b",")
    listener = socket.socket(fileno=listener_fd)
    logger = logging.getLogger("pccl.master")
    log, level = logger.log, logger.getEffectiveLevel()
    try:
        file = open_state_file(path)
        actor = MasterActor(
            listener,
            options.token.encode(),
            options,
            log,
            version=version,
            level=level,
            state_file=file,
            new_run=BEGIN_NEW in flags,
            exit_when_finished=EXIT_WHEN_FINISHED in flags,
        )
    except ValueError as error:
        mailbox.send(str(error).encode())
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: actor.stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    actor.loop.watch(parent_fd, lambda _: actor.stop())
    actor.loop.watch(mailbox.fileno(), lambda _: actor.stop())  # it is closed when the master is not needed any more
    mailbox.send(READY)
    actor.run()
    return 0
