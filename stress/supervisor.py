"""Runs the stress: starts a master and peers, commits the faults of the plan, fills empty places, owns the verdict.

One thread, one selector. Whatever processes tell goes to the `Judge`; nothing is judged here except what only an
outsider can see: processes without a parent, memory, and what is left when everybody has gone. A run has two phases:
faults, then peace, in which all peers must find together before they are asked to leave.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pccl import Options
from pccl.addresses import parse_address

from .checkers import Judge, judge_growth
from .faults import ELDER, ENDINGS, STOPS, Fault, Kind, commit, draw_plan, family_of, send
from .records import ROUNDS, Bounds, Step, Task, Violation
from .zygote import MARK, Zygote

if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.05  # seconds of the longest sleep: faults come this late at most
WATCH_INTERVAL = 1.0  # seconds between two looks at memory and stray processes
PEACE_TIMEOUT = 15.0  # seconds in which all peers must find together once the faults have stopped
PIPE_BYTES = 1 << 20  # a peer must not wait because the supervisor is busy
DESCRIPTORS_SPARE = 32  # what a master holds beside its peers: listener, loop, strangers on their way in
VIOLATIONS_MAX = 20  # a run that is this broken needs no more evidence


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run; the command line fills it in."""

    duration: float = 60.0  # seconds
    peers: int = 10
    groups: int = 2
    lanes: int = 1
    interval: tuple[float, float] = (0.5, 1.0)  # seconds between two faults
    seed: int = 0
    folder: Path = Path("stress-report")
    options: Options = field(
        default_factory=lambda: Options(heartbeat_interval=0.2, heartbeat_timeout=2.0, retry_interval=0.2, check=True)
    )
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(slots=True)
class Peer:
    """One training process, from its fork until its pipe is empty and its exit is known."""

    life: int
    place: int
    pid: int
    pipe: int
    rest: bytes = b""
    status: int | None = None
    drained: bool = False
    stopped: bool = False
    world: int = 0  # what it was last told


class Supervisor:
    """One run. `run` returns when everything has ended; `judge` then holds the verdict."""

    def __init__(self, settings: Settings, show: Callable[[Supervisor], None]) -> None:
        self.settings = settings
        self.judge = Judge(settings.bounds, slack=Task(0, "").wait_timeout + Task(0, "").ask_interval)
        self.peers: dict[int, Peer] = {}  # life -> whoever is not yet buried
        self.done: list[Fault] = []
        self.sizes: dict[str, list[int]] = {}  # process -> its resident bytes, once a second
        self.began_ns = time.monotonic_ns()
        self.phase = "starting"
        self._show = show
        self._mark = uuid.uuid4().hex
        self._descriptors = _count_descriptors(os.getpid())  # before the selector, which holds one
        self._selector = selectors.DefaultSelector()
        self._zygote: Zygote | None = None
        self._master_pid = 0
        self._address = ""
        self._lives = 0
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._strays: set[int] = set()
        self._watched = 0.0
        self._watched_pids: dict[str, int] = {}
        self._places: dict[int, Peer] = {}
        self._interrupted = False

    @property
    def elapsed(self) -> float:
        """Seconds since the first peer was started."""
        return (time.monotonic_ns() - self.began_ns) / 1e9

    @property
    def logs(self) -> Path:
        """Where master and peers write."""
        return self.settings.folder / "logs"

    def run(self) -> list[Violation]:
        """Everything, from the first process to the last; Ctrl-C goes to the end in order."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for path in self.logs.iterdir():
            path.unlink()  # of an earlier run, which must not speak for this one
        self._zygote = Zygote(self._mark)
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            self._selector.register(self._zygote, selectors.EVENT_READ)
            self._start_master()
            self._make_trouble()
            self._make_peace()
            self._say_goodbye()
        finally:
            signal.signal(signal.SIGINT, before)
            self._zygote.close()
            for peer in self.peers.values():
                os.close(peer.pipe)
            self._selector.close()
        self._check_remains()
        return self.judge.violations

    # ------------------------------------------------------------------------------------------ phases

    def _make_trouble(self) -> None:
        settings = self.settings
        self.phase = "faults"
        self.began_ns = time.monotonic_ns()
        for place in range(settings.peers):
            self._start_peer(place)
        plan = draw_plan(settings.seed, settings.peers, settings.interval, settings.bounds.silence)
        fault = next(plan)
        while self.elapsed < settings.duration and not self._is_over():
            if self.elapsed >= fault.at:
                self._commit(fault)
                fault = next(plan)
            self._serve()

    def _make_peace(self) -> None:
        """Faults have stopped: whoever is stopped goes on, places are filled, and everybody must meet."""
        self.phase = "peace"
        deadline = time.monotonic() + PEACE_TIMEOUT
        while not self._is_over():
            self._serve()
            members = [peer for peer in self.peers.values() if peer.status is None]
            if len(members) == self.settings.peers and all(peer.world == len(members) for peer in members):
                return
            if time.monotonic() > deadline:
                worlds = {peer.life: peer.world for peer in members}
                self._object("convergence", f"{PEACE_TIMEOUT:g} s after the last fault the worlds are {worlds}")
                return

    def _say_goodbye(self) -> None:
        self.phase = "goodbye"
        self._timers.clear()
        for peer in list(self.peers.values()):
            self._let_go(peer)
            self._harm(Kind.CLOSE, [peer], 0.0)
        self._serve_until(lambda: not self.peers, "peers that were asked to close are still there")
        self.judge.finish(time.monotonic_ns())
        fds = _count_descriptors(self._master_pid)
        if fds > DESCRIPTORS_SPARE:
            self._object("remains", f"the master holds {fds} descriptors after everybody has left")
        self.phase = "end"
        send(self._master_pid, signal.SIGTERM)
        self._serve_until(lambda: not self._master_pid, "the master was terminated and is still there")

    def _serve_until(self, reached: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + self.settings.bounds.exit
        while not reached():
            if time.monotonic() > deadline:
                self._object("remains", complaint)
                return
            self._serve()

    def _is_over(self) -> bool:
        return self._interrupted or not self._master_pid or len(self.judge.violations) >= VIOLATIONS_MAX

    def _on_interrupt(self, *_: object) -> None:
        self._interrupted = True

    # ------------------------------------------------------------------------------------------ processes

    def _start_master(self) -> None:
        assert self._zygote is not None
        reader, writer = os.pipe()
        with (self.logs / "master.log").open("ab") as log, os.fdopen(reader, "rb") as told:
            task = Task(0, self.settings.options.encode())
            self._master_pid = self._zygote.spawn(task, writer, log.fileno())
            os.close(writer)
            self._address = told.readline().decode().strip()
        if not self._address:
            raise RuntimeError(f"the master did not start; see {self.logs / 'master.log'}")

    def _start_peer(self, place: int) -> None:
        assert self._zygote is not None
        settings = self.settings
        self._lives += 1
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        _enlarge(reader)
        task = Task(
            self._lives,
            settings.options.encode(),
            self._address,
            group=place % settings.groups,
            lanes=settings.lanes,
            seed=settings.seed * 1_000_003 + self._lives,
        )
        self.judge.born(self._lives, time.monotonic_ns())
        with (self.logs / f"place-{place}.log").open("ab") as log:
            pid = self._zygote.spawn(task, writer, log.fileno())
        os.close(writer)
        peer = Peer(self._lives, place, pid, reader)
        self.peers[peer.life] = self._places[place] = peer
        self._selector.register(reader, selectors.EVENT_READ, peer)

    def _bury(self, peer: Peer) -> None:
        """Its pipe is empty and its exit is known."""
        assert peer.status is not None
        self.judge.ended(peer.life, peer.status, time.monotonic_ns())
        os.close(peer.pipe)
        del self.peers[peer.life]

    # ------------------------------------------------------------------------------------------ faults

    def _commit(self, fault: Fault) -> None:
        self.done.append(fault)
        if fault.kind is Kind.MASS_DEATH:
            victims = [peer for place, peer in self._places.items() if place != fault.place and peer.status is None]
        else:
            victims = [peer for place, peer in self._places.items() if place == fault.place and peer.status is None]
            # A process that stands still cannot obey; it can only be killed.
            if any(peer.stopped for peer in victims) and fault.kind is not Kind.KILL_TRAINING:
                victims = []
        if not victims or not self._harm(fault.kind, victims, fault.pause):
            self.judge.tally.missed += 1

    def _harm(self, kind: Kind, victims: list[Peer], pause: float) -> bool:
        """Commit a deed. False if nobody was hit; the judge was told beforehand, because news must not overtake it."""
        status = ENDINGS.get(kind)
        self.judge.harmed(kind, [peer.life for peer in victims], time.monotonic_ns(), pause, status)
        hit = [pid for peer in victims for pid in commit(kind, peer.pid)]
        for peer in victims:
            if kind in STOPS:
                peer.stopped = True
                self._later(pause, lambda peer=peer, pids=tuple(hit): self._let_go(peer, pids))  # type: ignore[misc]
            elif status is not None and self.phase == "faults":
                self._later(pause, lambda place=peer.place: self._refill(place))  # type: ignore[misc]
        return bool(hit)

    def _let_go(self, peer: Peer, pids: tuple[int, ...] = ()) -> None:
        peer.stopped = False
        for pid in pids or family_of(peer.pid).everyone:
            send(pid, signal.SIGCONT)

    def _refill(self, place: int) -> None:
        """The next peer takes the place, once the one before has ended."""
        if self._places[place].status is None:
            self._later(TICK, lambda: self._refill(place))
        else:
            self._start_peer(place)

    def _later(self, delay: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + delay, call))

    # ------------------------------------------------------------------------------------------ the loop

    def _serve(self) -> None:
        """One turn: what was told, who ended, what is due."""
        slept = time.monotonic()
        ready = self._selector.select(TICK)
        self.judge.tally.lateness = max(self.judge.tally.lateness, time.monotonic() - slept - TICK)
        for key, _ in ready:
            if isinstance(key.data, Peer):
                self._read(key.data)
        self._note_exits()
        now = time.monotonic()
        due = [call for at, call in self._timers if at <= now]
        self._timers = [(at, call) for at, call in self._timers if at > now]
        for call in due:
            call()
        if now - self._watched >= WATCH_INTERVAL:
            self._watched = now
            self._watch()
            self.judge.tick(time.monotonic_ns())
        self._show(self)

    def _read(self, peer: Peer) -> None:
        data = os.read(peer.pipe, PIPE_BYTES)
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            step = Step.decode(line)
            self.judge.told(step)
            if step.numbers is not None and (step.call in ROUNDS or not peer.world):
                peer.world = step.numbers.global_world
        if not data:
            # The last holder of the pipe is gone, with whatever half a line it was writing.
            self._selector.unregister(peer.pipe)
            peer.drained = True
            if peer.status is not None:
                self._bury(peer)

    def _note_exits(self) -> None:
        assert self._zygote is not None
        for pid, status in self._zygote.exits():
            if pid == self._master_pid:
                self._master_pid = 0
                if status or self.phase != "end":
                    self._object("exits", f"the master ended with status {status} in phase {self.phase!r}")
                continue
            peer = next(peer for peer in self.peers.values() if peer.pid == pid and peer.status is None)
            peer.status = status
            if peer.drained:
                self._bury(peer)

    # ------------------------------------------------------------------------------------------ from outside

    def _watch(self) -> None:
        """Memory of those who live long, and processes that have lost their parent and are still there."""
        watched = {"master": self._master_pid}
        elder = self._places.get(ELDER)
        if elder is not None and elder.status is None:
            watched["elder"] = elder.pid
            for actor in family_of(elder.pid).actors[:1]:
                watched["elder's actor"] = actor
        for name, pid in watched.items():
            if self._watched_pids.get(name) != pid:
                self._watched_pids[name] = pid
                self.sizes[name] = []
            self.sizes[name].append(_resident_bytes(pid))
        assert self._zygote is not None
        strays = {pid for pid in marked_processes(self._mark) if not _descends_from(pid, self._zygote.pid)}
        for pid in strays & self._strays:
            self._object("orphans", f"process {pid} has outlived its training process: {_describe(pid)}")
        self._strays = strays

    def _check_remains(self) -> None:
        """When everybody has gone: no process, and so no memory segment, socket or port; no trace of an error."""
        deadline = time.monotonic() + self.settings.bounds.exit
        left = marked_processes(self._mark)
        while left and time.monotonic() < deadline:
            time.sleep(TICK)
            left = marked_processes(self._mark)
        for pid in left:
            self._object("remains", f"process {pid} is left: {_describe(pid)}")
            send(pid, signal.SIGKILL)
        held = _count_descriptors(os.getpid())
        if held > self._descriptors:
            self._object("remains", f"this process holds {held} descriptors, {self._descriptors} before the run")
        host, port = parse_address(self._address, 0)
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) == 0:
                self._object("remains", f"somebody still listens on {self._address}")
        for path in sorted(self.logs.iterdir()):
            count = path.read_text(errors="replace").count("Traceback (most recent call last)")
            if count:
                self._object("errors", f"{count} tracebacks in {path}")
        for name, sizes in self.sizes.items():
            text = judge_growth(name, sizes, self.settings.bounds.grown_bytes)
            if text:
                self._object("memory", text)

    def _object(self, law: str, text: str) -> None:
        self.judge.violations.append(Violation(time.monotonic_ns(), law, text))


# ---------------------------------------------------------------------------------------------- what /proc shows


def marked_processes(mark: str, variable: str = MARK) -> set[int]:
    """Every process of a run, wherever it hangs by now. One that has ended and waits to be reaped does not count."""
    wanted = f"{variable}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may end while we look, or belong to somebody else.
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def _descends_from(pid: int, ancestor: int) -> bool:
    with suppress(OSError, IndexError):
        while pid > 1:
            if pid == ancestor:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        return False
    return True  # it ended while we looked


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _count_descriptors(pid: int) -> int:
    with suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


def _describe(pid: int) -> str:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({command[:120].strip()})"
    return "gone by now"


def _enlarge(pipe: int) -> None:
    import fcntl

    with suppress(OSError):  # beyond what this user may have: then the default has to do
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
