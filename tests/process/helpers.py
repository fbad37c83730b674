"""What process tests share: masters, peers and scripts as real processes, and waiting with a bound.

Nothing here sleeps to synchronise: `eventually` looks again until a condition holds or its bound is over, `Script`
waits for the line that a program prints, and `background` for the end of a call in another thread. Whatever is started
is ended by the context manager that started it, so that a failed test leaves as little behind as one that passed.
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
from pccl.memory.arena import default
from pccl.options import Options
from tests import ROOT
from tests.readable import is_readable

T = TypeVar("T")

BOUND = 15.0  # seconds that no healthy step needs, also on a busy machine
GLANCE = 0.005  # seconds between two looks at a condition

# Below those that the system hands out; each test process begins elsewhere, so that two seldom ask for the same.
PORTS = (10_000 + (os.getpid() * 131 + step) % 20_000 for step in count())

# Short enough for tests of silence, long enough for a machine with more processes than cores.
QUICK = Options(heartbeat_interval=0.2, heartbeat_timeout=2.0, retry_interval=0.1, check=True)

PREAMBLE = """
import os, signal, sys, threading, time
from pccl import *
from pccl.errors import *
from tests.process.helpers import QUICK, join, quick, say
"""


def quick(**changes: object) -> Options:
    """Options with short bounds, and some of them changed."""
    return replace(QUICK, **changes)


def eventually(condition: Callable[[], T | Literal[False] | None], what: str, timeout: float = BOUND) -> T:
    """The first true value of the condition; fails with the sentence when there is none in time."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(GLANCE)


# ---------------------------------------------------------------------------------------------- threads


class Background(Generic[T]):
    """A call that runs in a thread of its own."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: T | None = None
        self._error: BaseException | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
        finally:
            self.ended.set()

    def result(self, timeout: float = BOUND) -> T:
        """What the call returned, or the exception that it raised."""
        assert self.ended.wait(timeout), f"the call still runs after {timeout:g} s"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def error(self, timeout: float = BOUND) -> BaseException | None:
        """The exception that the call raised; None if it returned."""
        assert self.ended.wait(timeout), f"the call still runs after {timeout:g} s"
        return self._error


def background(function: Callable[[], T]) -> Background[T]:
    """Begin the call in another thread."""
    return Background(function)


def together(*functions: Callable[[], T], timeout: float = BOUND) -> list[T]:
    """Make all calls at once; their results in order."""
    calls = [background(function) for function in functions]
    return [call.result(timeout) for call in calls]


# ---------------------------------------------------------------------------------------------- masters and peers


@contextlib.contextmanager
def running_master(options: Options = QUICK, host: str = "127.0.0.1") -> Iterator[MasterNode]:
    """A master on a free port of this host."""
    with MasterNode(f"{host}:0", options=options) as master:
        yield master


def free_port() -> int:
    """A port on which nobody listens, and which the system gives to nobody who does not ask for it by number."""
    for _ in range(1000):
        port = next(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a thousand ports are taken")


class Crew(list[Communicator]):
    """Communicators in this process that are members of one run."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def newcomer(self, group: int = 0, lanes: int = 1, options: Options = QUICK) -> Communicator:
        """One more communicator, which is closed with the others and not yet connected."""
        communicator = Communicator(self.address, group, lanes, options=options)
        self.append(communicator)
        return communicator

    def admit(self, *newcomers: Communicator) -> None:
        """Connect these while everybody else holds topology rounds, until all are in."""
        together(*(partial(self._take_part, peer, peer in newcomers) for peer in self))

    def _take_part(self, peer: Communicator, is_new: bool) -> None:
        # A member's own numbers may be older than the last loss, so it asks once before it believes them.
        (peer.connect if is_new else peer.update_topology)()
        while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < len(self):
            peer.update_topology()

    def update(self) -> None:
        """One topology round of everybody."""
        together(*(member.update_topology for member in self))

    def dismiss(self, member: Communicator) -> None:
        """This one leaves."""
        self.remove(member)
        member.close()


@contextlib.contextmanager
def crew_of(address: str, *groups: int, lanes: int = 1, options: Options = QUICK) -> Iterator[Crew]:
    """A member for each of these group numbers, all in this process; closed at the end."""
    crew = Crew(address)
    try:
        for group in groups:
            crew.newcomer(group, lanes, options)
        crew.admit(*crew)
        yield crew
    finally:
        for communicator in crew:
            communicator.close()


# ---------------------------------------------------------------------------------------------- processes


def actor_pid(communicator: Communicator) -> int:
    """The process of the peer actor behind a communicator."""
    assert communicator._actor is not None
    return communicator._actor.process.pid


def master_pid(master: MasterNode) -> int:
    """The process of a master that runs in the background."""
    assert master._actor is not None
    return master._actor.pid


def comm(pid: int) -> str:
    """The name that `ps` shows; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children(pid: int, prefix: str = "pccl-") -> dict[str, int]:
    """Child processes by name."""
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
    """Workers of a peer that fetch state, and were stopped."""
    found = set()
    for pid in children(actor_pid(peer), "pccl-fetch").values():
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being replaced
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                found.add(pid)
    return found


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes do not run inside the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_asleep(pid: int) -> bool:
    """Whether the process waits for something, rather than for its turn on a busy machine."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


# ---------------------------------------------------------------------------------------------- scripts


def say(*words: object) -> None:
    """Print a line at once; for scripts."""
    print(*words, flush=True)


def join(**changes: object) -> Communicator:
    """Become a member of the run that the script was given, and say so; for scripts."""
    peer = Communicator(sys.argv[1], options=quick(**changes))
    peer.connect()
    say("in", peer.peer_id)
    return peer


class Script:
    """A Python program in a process and a session of its own, that speaks and listens by lines."""

    def __init__(self, code: str, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, arguments)]
        self._start(command, environment)

    @classmethod
    def command(cls, *command: object, **environment: str) -> Script:
        """Any other program."""
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
        """What it wrote to standard error so far."""
        return os.pread(self._errors.fileno(), 1 << 22, 0).decode(errors="replace")

    def say(self, line: str = "") -> None:
        """Give it a line on standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def expect(self, beginning: str, timeout: float = BOUND) -> str:
        """The rest of the next line that begins like this; lines before it are kept in `lines`."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._next_line(deadline)
            if line is None:
                raise AssertionError(f"no line {beginning!r} within {timeout:g} s; {self._said()}")
            self.lines.append(line)
            if line.startswith(beginning):
                return line[len(beginning) :].strip()

    def end(self, timeout: float = BOUND) -> int:
        """Its exit status, once it has ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout:g} s; {self._said()}") from None

    def signal(self, number: int) -> None:
        """Send it a signal, and to nobody else."""
        self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send everybody in its process group a signal, as a terminal does."""
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
            left = deadline - time.monotonic()  # below 0 also for a program that never stops talking
            data = os.read(fd, 65536) if left > 0 and is_readable(fd, left) else b""
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _said(self) -> str:
        return f"it said {self.lines}, status {self.process.poll()}, standard error:\n{self.errors()}"


# ---------------------------------------------------------------------------------------------- reduces


def ring_order(crew: list[Communicator]) -> list[Communicator]:
    """The members in the order of their ranks, which is that of joining as long as nobody was lost."""
    return sorted(crew, key=lambda member: member.peer_id)


def bytes_in_use() -> int:
    """What the arena has handed out, after arrays were collected that only a traceback still knew."""
    gc.collect()
    return default().statistics().bytes_in_use


def everybody(crew: list[Communicator], act: Callable[[Communicator, int], T], timeout: float = BOUND) -> list[T]:
    """Let each member act at the same time, in a thread of its own; it is told its rank."""
    return together(*(partial(act, member, rank) for rank, member in enumerate(ring_order(crew))), timeout=timeout)
