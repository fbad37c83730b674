"""What process tests share: masters, peers and scripts as real processes, and waiting with a bound.

Nothing here sleeps to synchronise: `eventually` checks a condition until it holds or the timeout is over, `Script`
waits for the line that a program prints, and `background` for the end of a call in another thread. The context manager
that starts a process also ends it, so that a failed test leaves no more processes behind than one that passed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Generic, Literal, TypeVar

import psutil

from pccl import Attribute, Communicator, MasterNode
from pccl._core.records import replace
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status
from pccl.memory.arena import default
from pccl.options import Options
from tests import ROOT
from tests.leaks import has_ended
from tests.readable import is_readable

T = TypeVar("T")

BOUND = 15.0  # seconds that no healthy step needs, also on a busy machine
POLL_SECONDS = 0.005  # between two checks of a condition

# Below the ephemeral ports of the system; each test process starts at another number, so that two seldom collide.
PORTS = (10_000 + (os.getpid() * 131 + step) % 20_000 for step in count())

# Short enough for tests of timeouts, long enough for a machine with more processes than cores.
QUICK = Options(heartbeat_interval=0.2, heartbeat_timeout=2.0, retry_interval=0.1, check=True)

PREAMBLE = """
import os, signal, sys, threading, time
from pccl import *
from pccl.errors import *
from tests.process.helpers import QUICK, join, quick, say
"""


def quick(**changes: object) -> Options:
    """Return options with short bounds, with these changes."""
    return replace(QUICK, **changes)


def eventually(condition: Callable[[], T | Literal[False] | None], what: str, timeout: float = BOUND) -> T:
    """Return the first true value of the condition; fail with the text `what` if there is none within the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(POLL_SECONDS)


# ---------------------------------------------------------------------------------------------- threads


class Background(Generic[T]):
    """A call that runs in a thread of its own."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: T | None = None
        self._error: BaseException | None = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - result() raises it
            self._error = error
        finally:
            self.ended.set()

    def result(self, timeout: float = BOUND) -> T:
        """Return what the call returned, or raise the exception that it raised."""
        self._join(timeout)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def error(self, timeout: float = BOUND) -> BaseException | None:
        """Return the exception that the call raised; None if it returned."""
        self._join(timeout)
        return self._error

    def _join(self, timeout: float) -> None:
        # Not `ended`: until the thread itself has ended, it refers to the tensors of the call, which would be a leak.
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the call still runs after {timeout:g} s"


def background(function: Callable[[], T]) -> Background[T]:
    """Start the call in another thread."""
    return Background(function)


def together(*functions: Callable[[], T], timeout: float = BOUND) -> list[T]:
    """Make all calls at once and return their results in order."""
    calls = [background(function) for function in functions]
    return [call.result(timeout) for call in calls]


# ---------------------------------------------------------------------------------------------- masters and peers


@contextlib.contextmanager
def running_master(options: Options = QUICK, host: str = "127.0.0.1", port: int = 0) -> Iterator[MasterNode]:
    """A master on a free port of this host.

    A test that uses the address after the master's end gives a `free_port()`: the system may assign a port that it
    chose itself to any other process as soon as it is free.
    """
    with MasterNode(f"{host}:{port}", options=options) as master:
        yield master


def free_port() -> int:
    """Return a port on which no process listens, below the range of ports that the system assigns itself."""
    for _ in range(1000):
        port = next(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a thousand ports are taken")


def voters(master: MasterNode, call: str) -> int:
    """Return how many peers the master knows to be in this call, for example `update_topology`."""
    votes = query_status(*parse_address(master.address), QUICK)["votes"]
    return sum(len(vote["present"]) for vote in votes if vote["call"] == call)


class Peers(list[Communicator]):
    """Communicators in this process that are members of one run."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def newcomer(self, group: int = 0, lanes: int = 1, options: Options = QUICK) -> Communicator:
        """Add a communicator that is not yet connected; it is closed with the others."""
        communicator = Communicator(self.address, group, lanes, options=options)
        self.append(communicator)
        return communicator

    def admit(self, *newcomers: Communicator) -> None:
        """Connect these while all other members hold topology rounds, until all are accepted."""
        together(*(partial(self._take_part, peer, peer in newcomers) for peer in self))

    def _take_part(self, peer: Communicator, is_new: bool) -> None:
        # A member's own attributes may be older than the last loss, so one round comes before they are read.
        (peer.connect if is_new else peer.update_topology)()
        while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < len(self):
            peer.update_topology()

    def update(self) -> None:
        """Hold one topology round of all members."""
        together(*(member.update_topology for member in self))

    def dismiss(self, member: Communicator) -> None:
        """Remove this member and close it."""
        self.remove(member)
        member.close()


@contextlib.contextmanager
def peers_of(address: str, *groups: int, lanes: int = 1, options: Options = QUICK) -> Iterator[Peers]:
    """A member for each of these group numbers, all in this process; closed at the end."""
    peers = Peers(address)
    try:
        for group in groups:
            peers.newcomer(group, lanes, options)
        peers.admit(*peers)
        yield peers
    finally:
        for communicator in peers:
            communicator.close()


# ---------------------------------------------------------------------------------------------- processes


def actor_pid(communicator: Communicator) -> int:
    """Return the process id of a communicator's peer actor."""
    assert communicator._actor is not None
    return communicator._actor.process.pid


def master_pid(master: MasterNode) -> int:
    """Return the process id of a master that runs in the background."""
    assert master._actor is not None
    return master._actor.pid


def comm(pid: int) -> str:
    """The name that `ps` shows; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children(pid: int, prefix: str = "pccl-") -> dict[str, int]:
    """Return the process ids of child processes by name."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            name = comm(child.pid)
            if name.startswith(prefix):
                found[name] = child.pid
    return found


def sockets(pid: int) -> set[str]:
    """The stream sockets that a process holds to other processes, by inode; its mailbox is not one of them."""
    tcp = {
        line.split()[9] for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    }
    return {inode for inode in _inodes(pid) if inode in tcp}


def _inodes(pid: int) -> Iterator[str]:
    # A process may end, and a descriptor be closed, while we look.
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def stopped_fetchers(peer: Communicator) -> set[int]:
    """Return the workers of a peer that fetch state and are stopped."""
    found = set()
    for pid in children(actor_pid(peer), "pccl-fetch").values():
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being replaced
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                found.add(pid)
    return found


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop these processes for the length of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def is_asleep(pid: int) -> bool:
    """Whether the process sleeps in a system call. A process that waits for a core does not."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


# ---------------------------------------------------------------------------------------------- scripts


def say(*words: object) -> None:
    """Print a line at once; for scripts."""
    print(*words, flush=True)


def join(**changes: object) -> Communicator:
    """Join the run whose address the script was given, and print `in` and the peer id; for scripts."""
    peer = Communicator(sys.argv[1], options=quick(**changes))
    peer.connect()
    say("in", peer.peer_id)
    return peer


class Script:
    """A Python program in its own process and session; it reads and prints lines."""

    def __init__(self, code: str, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, arguments)]
        self._start(command, environment)

    @classmethod
    def command(cls, *command: object, **environment: str) -> Script:
        """Start any other program."""
        script = cls.__new__(cls)
        script._start(list(map(str, command)), environment)
        return script

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._unread = b""
        self.lines: list[str] = []
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def errors(self) -> str:
        """Return what the program wrote to standard error so far."""
        return os.pread(self._errors.fileno(), 1 << 22, 0).decode(errors="replace")

    def say(self, line: str = "") -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def expect(self, beginning: str, timeout: float = BOUND) -> str:
        """Wait for the next line with this beginning and return its rest. Lines before it are kept in `lines`."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._next_line(deadline)
            if line is None:
                raise AssertionError(f"no line {beginning!r} within {timeout:g} s; {self._said()}")
            self.lines.append(line)
            if line.startswith(beginning):
                return line[len(beginning) :].strip()

    def end(self, timeout: float = BOUND) -> int:
        """Wait for its end and return its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout:g} s; {self._said()}") from None

    def signal(self, number: int) -> None:
        """Send a signal to this process only."""
        self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send a signal to all processes of its process group, as a terminal does."""
        os.killpg(self.pid, number)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]

    def _next_line(self, deadline: float) -> str | None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()  # below 0 also for a program that never stops printing
            data = os.read(fd, 65536) if left > 0 and is_readable(fd, left) else b""
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _said(self) -> str:
        return f"it said {self.lines}, status {self.process.poll()}, standard error:\n{self.errors()}"


# ---------------------------------------------------------------------------------------------- reduces


RINGS: dict[tuple[object, ...], list[int]] = {}  # what the master said about a ring, by its members and epoch


def ring_order(peers: list[Communicator]) -> list[Communicator]:
    """Return the members of one group by rank, as the master knows it; the others, which are gone, by id."""
    first = peers[0]
    key = first._host, first._port, first._group, first._last_round("ring_order").epoch, *sorted(map(id, peers))
    if key not in RINGS:
        groups = query_status(first._host, first._port, first._options)["groups"]
        RINGS[key] = next(group["ring"] for group in groups if group["group"] == first._group)
    ranks = {peer_id: rank for rank, peer_id in enumerate(RINGS[key])}
    return sorted(peers, key=lambda member: (ranks.get(member.peer_id, len(ranks)), member.peer_id))


def bytes_in_use() -> int:
    """Return the bytes that the arena has handed out, after the collection of arrays that only a traceback holds."""
    gc.collect()
    return default().statistics().bytes_in_use


def everybody(peers: list[Communicator], act: Callable[[Communicator, int], T], timeout: float = BOUND) -> list[T]:
    """Call `act(member, rank)` for all members at the same time, each in its own thread, and return the results."""
    return together(*(partial(act, member, rank) for rank, member in enumerate(ring_order(peers))), timeout=timeout)
