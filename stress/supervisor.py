"""Runs the stress test: starts a master and peers, commits the faults of the plan, and replaces dead peers.

One thread, one selector. Reports of processes go to the `Judge`; the `ProcessWatcher` reads /proc. A run has two
phases: faults, then peace, in which all peers must reach one world size before they are asked to leave.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import shutil
import signal
import socket
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pccl._core.records import replace
from pccl.actors.io.addresses import parse_address

from .checkers import Judge
from .faults import (
    ELDER,
    ENDINGS,
    LINK_FAULTS,
    NEWCOMERS,
    STOPS,
    Fault,
    FaultKind,
    commit,
    draw_plan,
    is_proxied,
    processes_of,
    send,
)
from .newcomers import BadNewcomers
from .paths import missing
from .procfs import PIPE_BYTES, checksum_memory, count_descriptors, enlarge, free_port
from .proxy import Network
from .records import ROUNDS, Reduced, Step, Task, Violation
from .stalls import Stalls
from .timed_faults import TICK as TIMED_TICK
from .timed_faults import TimedFaults
from .watch import ProcessWatcher
from .zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pccl import Options

    from .settings import Settings

TICK = 0.05  # seconds of the longest sleep: the longest delay of a fault
WATCH_INTERVAL = 1.0  # seconds between two samples of the watcher
PEACE_TIMEOUT = 15.0  # seconds after the last fault in which all peers must reach one world size
EXHIBIT_DELAY = 0.2  # seconds after which a restored tensor is read again, to find late writes
EXHIBIT_SECONDS_MAX = 1.2  # after that its owner may use it again
DESCRIPTORS_SPARE = 32  # descriptors of a master beside its peers: listener, loop, pending connections
VIOLATIONS_MAX = 20  # the run ends after so many
JOURNAL_LINES = 400  # lines of each life that are kept for a failure report
JOURNALS_MAX = 64  # lives whose lines are kept


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
    world: int = 0  # its latest world size


class Supervisor:
    """One run. `run` returns when everything has ended; `judge` then holds the verdict."""

    def __init__(self, settings: Settings, show: Callable[[Supervisor], None]) -> None:
        self.settings = settings
        slack = Task(0, "").wait_timeout + Task(0, "").ask_interval
        self.judge = Judge(settings.bounds, slack, settings.seed, settings.peers)
        self.peers: dict[int, Peer] = {}  # life -> peers that are not reaped yet
        self.done: list[Fault] = []
        self.timeline: list[tuple[float, int, int, int]] = []  # seconds; reduces, faults and members until then
        self.journals: dict[int, deque[bytes]] = {}  # life -> its latest lines
        self.began_ns = time.monotonic_ns()
        self.phase = "starting"
        self._show = show
        self._mark = uuid.uuid4().hex
        self.watcher = ProcessWatcher(self._mark, settings.bounds, self._add_violation)
        self._stalls = Stalls(self.logs / "master.log", settings.bounds, self._add_violation)
        self._newcomers = BadNewcomers(self.judge, self.logs / "newcomers.log", self._add_violation)
        self._selector = selectors.DefaultSelector()
        self._zygote: Zygote | None = None
        self._network: Network | None = None
        self._master_pid = 0
        self._proxy_pid = 0
        self._address = ""
        self._ports: set[int] = set()
        self._lives = 0
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._timed_faults = TimedFaults()
        self._watched = 0.0
        self._places: dict[int, Peer] = {}
        self._interrupted = False

    @property
    def elapsed(self) -> float:
        """Seconds since the first peer was started."""
        return (time.monotonic_ns() - self.began_ns) / 1e9

    @property
    def logs(self) -> Path:
        """The folder of the logs of master and peers."""
        return self.settings.folder / "logs"

    @property
    def scratch(self) -> Path:
        """The folder for checkpoints of peers, and for files that they might leave behind."""
        return self.settings.folder / "scratch"

    def run(self) -> list[Violation]:
        """Do the whole run; Ctrl-C ends it in order."""
        for folder in (self.logs, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        self.logs.mkdir(parents=True)
        checkpoints = self.scratch / "checkpoints"
        checkpoints.mkdir(parents=True)
        self._zygote = Zygote(self._mark, self.scratch)
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:  # a background job ignores Ctrl-C
            signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            self._selector.register(self._zygote, selectors.EVENT_READ)
            self._start_master()
            self._start_proxy()
            self._run_faults()
            self._run_peace()
            self._run_goodbye()
        finally:
            signal.signal(signal.SIGINT, before)
            self._zygote.close()
            if self._network is not None:
                self._network.close()
            for peer in self.peers.values():
                os.close(peer.pipe)
            self._selector.close()
        shutil.rmtree(checkpoints)
        addresses = [parse_address(self._address, 0), *(("127.0.0.1", port) for port in self._ports)]
        self.watcher.judge_remains(addresses, self.scratch, self.logs)
        if self.settings.all_paths and not self._interrupted:
            for path in missing(self.judge.totals.paths, self.settings.kinds, self.settings.groups):
                self._add_violation("paths", f"never happened: {path}")
        return self.judge.violations

    # ------------------------------------------------------------------------------------------ phases

    def _run_faults(self) -> None:
        settings = self.settings
        self.phase = "faults"
        self.began_ns = time.monotonic_ns()
        for place in range(settings.peers):
            self._start_peer(place)
        plan = draw_plan(settings.seed, settings.peers, settings.interval, settings.bounds.silence, settings.families)
        fault = next(plan, None)
        while self.elapsed < settings.duration and not self._is_over():
            if fault is not None and self.elapsed >= fault.at:
                self._commit(fault)
                fault = next(plan, None)
            self._serve()

    def _run_peace(self) -> None:
        """No more faults: stopped peers continue, dead ones are replaced, and all peers must reach one world size."""
        self.phase = "peace"
        self._timed_faults = TimedFaults()  # faults that still wait are cancelled
        deadline = time.monotonic() + PEACE_TIMEOUT
        while not self._is_over():
            self._serve()
            members = [peer for peer in self.peers.values() if peer.status is None]
            complete = len(members) == self.settings.peers and all(peer.world == len(members) for peer in members)
            if complete and not self._newcomers.any_left:
                return
            if time.monotonic() > deadline:
                worlds = {peer.life: peer.world for peer in members}
                self._add_violation("convergence", f"{PEACE_TIMEOUT:g} s after the last fault the worlds are {worlds}")
                return

    def _run_goodbye(self) -> None:
        self.phase = "goodbye"
        self._timers.clear()
        self._newcomers.dismiss()
        for peer in list(self.peers.values()):
            self._let_go(peer)
            self._harm(FaultKind.CLOSE, [peer], 0.0)
        self._serve_until(lambda: not self.peers, "peers that were asked to close are still there")
        self.judge.finish(time.monotonic_ns())
        self.phase = "end"
        if not self._master_pid:
            return  # it has ended by itself, which is reported as a violation
        fds = count_descriptors(self._master_pid)
        if fds > DESCRIPTORS_SPARE:
            self._add_violation("remains", f"the master holds {fds} descriptors after all peers have left")
        send(self._master_pid, signal.SIGTERM)
        self._serve_until(lambda: not self._master_pid, "the master was terminated and is still there")

    def _serve_until(self, reached: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + self.settings.bounds.exit
        while not reached():
            if time.monotonic() > deadline:
                self._add_violation("remains", complaint)
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

    def _start_proxy(self) -> None:
        """Start the proxy, if the run has link faults."""
        if not self.settings.kinds & set(LINK_FAULTS):
            return
        assert self._zygote is not None
        ours, theirs = socket.socketpair()
        with theirs, (self.logs / "proxy.log").open("ab") as log:
            task = Task(0, self.settings.options.encode(), role="proxy")
            self._proxy_pid = self._zygote.spawn(task, theirs.fileno(), log.fileno())
        self._network = Network(ours)

    def _start_peer(self, place: int) -> None:
        assert self._zygote is not None
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        enlarge(reader)
        task = self._task(place, place, *self._way_of(place))
        self.judge.born(self._lives, time.monotonic_ns(), task.group, place)
        with (self.logs / f"place-{place}.log").open("ab") as log:
            pid = self._zygote.spawn(task, writer, log.fileno())
        os.close(writer)
        peer = Peer(self._lives, place, pid, reader)
        self.peers[peer.life] = self._places[place] = peer
        self.journals[peer.life] = deque(maxlen=JOURNAL_LINES)
        while len(self.journals) > JOURNALS_MAX:
            del self.journals[min(self.journals)]
        self._selector.register(reader, selectors.EVENT_READ, peer)

    def _task(self, place: int, of_group: int, address: str, options: Options) -> Task:
        """The task of the next life, in the group of a place."""
        settings = self.settings
        self._lives += 1
        return Task(
            self._lives,
            options.encode(),
            address,
            group=of_group % settings.groups,
            lanes=settings.lanes,
            seed=settings.seed * 1_000_003 + self._lives,
            wait_share=0.0,
            place=place,
            places=settings.peers,
            run_seed=settings.seed,
            checkpoints=str(self.scratch / "checkpoints"),
        )

    def _way_of(self, place: int) -> tuple[str, Options]:
        """The master's address and the options of a peer: direct, or through the proxy and without host reads."""
        if self._network is None or not is_proxied(place):
            return self._address, self.settings.options
        port = free_port()
        self._ports.add(port)
        ring = self._network.open(f"{place}-ring", "127.0.0.1", port)
        master = self._network.open(f"{place}-master", *parse_address(self._address, 0))
        way = {"port": port, "advertise": f"127.0.0.1:{ring}", "host_memory": False}
        return f"127.0.0.1:{master}", replace(self.settings.options, **way)

    def _reap(self, peer: Peer) -> None:
        """Forget a peer whose pipe is empty and whose exit status is known."""
        assert peer.status is not None
        self.judge.ended(peer.life, peer.status, time.monotonic_ns())
        os.close(peer.pipe)
        del self.peers[peer.life]

    # ------------------------------------------------------------------------------------------ faults

    def _commit(self, fault: Fault) -> None:
        self.done.append(fault)
        if not self._newcomers.allow(fault.kind):
            self.judge.totals.missed += 1
            return
        if fault.kind is FaultKind.KILL_STATE_WORKER:
            self._timed_faults.await_worker(fault)
            return
        if fault.kind is FaultKind.KILL_TWO:
            self._kill_two(fault)
            return
        if fault.kind in NEWCOMERS:
            assert self._zygote is not None
            # A place that no peer has.
            task = self._task(self.settings.peers, fault.place, self._address, self.settings.options)
            self._newcomers.start(self._zygote, fault, task)
            return
        if fault.kind is FaultKind.MASS_DEATH:
            victims = [peer for place, peer in self._places.items() if place != fault.place and peer.status is None]
        else:
            victims = [peer for place, peer in self._places.items() if place == fault.place and peer.status is None]
            # A stopped process handles no signal; it can only be killed.
            if any(peer.stopped for peer in victims) and fault.kind is not FaultKind.KILL_TRAINING:
                victims = []
        if not victims or not self._harm(fault.kind, victims, fault.pause):
            self.judge.totals.missed += 1

    def _kill_two(self, fault: Fault) -> None:
        """Kill one peer, and another one of its group while the others retry without the first."""
        group = fault.place % self.settings.groups
        others = [p for p in range(ELDER + 1, self.settings.peers) if p % self.settings.groups == group]
        second = others[(others.index(fault.place) + 1) % len(others)]
        kill = dataclasses.replace(fault, kind=FaultKind.KILL_TRAINING)
        self._commit(kill)
        self._timed_faults.await_failure(dataclasses.replace(kill, place=second), group)

    def _commit_timed_faults(self) -> None:
        """Commit the timed faults that are due."""
        for fault in self._timed_faults.due():
            self._commit(fault)
        found = self._timed_faults.find_worker(self._places.values())
        if found is None:
            return
        fault, peer = found
        if peer is None or not self._harm(fault.kind, [peer], fault.pause):
            self.judge.totals.missed += 1

    def _harm(self, kind: FaultKind, victims: list[Peer], pause: float) -> bool:
        """Commit a fault; False if no process was hit. The judge is told first: no report may overtake it."""
        status = ENDINGS.get(kind)
        self.judge.harmed(kind, [peer.life for peer in victims], time.monotonic_ns(), pause, status)
        self._stalls.harmed(kind, time.monotonic(), pause)
        if kind in LINK_FAULTS:
            return self._harm_links(kind, victims[0].place, pause)
        hit = [pid for peer in victims for pid in commit(kind, peer.pid)]
        for peer in victims:
            if kind in STOPS:
                peer.stopped = True
                self._later(pause, lambda peer=peer, pids=tuple(hit): self._let_go(peer, pids))  # type: ignore[misc]
            elif status is not None and self.phase == "faults":
                self._later(pause, lambda place=peer.place: self._refill(place))  # type: ignore[misc]
        return bool(hit)

    def _harm_links(self, kind: FaultKind, place: int, pause: float) -> bool:
        assert self._network is not None
        order, sides = LINK_FAULTS[kind]
        arguments = {"seconds": pause} if kind is FaultKind.BLACK_HOLE else {}
        for side in sides:
            self._network.order(order, f"{place}-{side}", **arguments)
        return True

    def _let_go(self, peer: Peer, pids: tuple[int, ...] = ()) -> None:
        peer.stopped = False
        for pid in pids or processes_of(peer.pid).everyone:
            send(pid, signal.SIGCONT)

    def _refill(self, place: int) -> None:
        """Start the next peer of a place, once the previous one has ended."""
        if self._places[place].status is None:
            self._later(TICK, lambda: self._refill(place))
        else:
            self._start_peer(place)

    def _later(self, delay: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + delay, call))

    # ------------------------------------------------------------------------------------------ the loop

    def _serve(self) -> None:
        """One turn: read reports and exits, run what is due."""
        slept = time.monotonic()
        ready = self._selector.select(TIMED_TICK if self._timed_faults.waits else TICK)
        self.judge.totals.lateness = max(self.judge.totals.lateness, time.monotonic() - slept - TICK)
        if self._timed_faults.waits:
            self._commit_timed_faults()
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
            self._newcomers.look()
            self.judge.tick(time.monotonic_ns())
        self._show(self)

    def _read(self, peer: Peer) -> None:
        data = os.read(peer.pipe, PIPE_BYTES)
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            step = Step.decode(line)
            self.journals.get(peer.life, deque()).append(line)
            self.judge.told(step)
            self._timed_faults.note(step)
            if isinstance(step.fact, Reduced) and step.fact.exhibit is not None:
                self._later(EXHIBIT_DELAY, lambda step=step: self._inspect(peer, step))  # type: ignore[misc]
            if step.numbers is not None and (step.call in ROUNDS or not peer.world):
                peer.world = step.numbers.global_world
        if not data:
            # The last writer of the pipe is gone; an incomplete line is dropped.
            self._selector.unregister(peer.pipe)
            peer.drained = True
            if peer.status is not None:
                self._reap(peer)

    def _note_exits(self) -> None:
        assert self._zygote is not None
        for pid, status in self._zygote.exits():
            if pid == self._master_pid:
                self._master_pid = 0
                if status or self.phase != "end":
                    self._add_violation("exits", f"the master ended with status {status} in phase {self.phase!r}")
                continue
            if pid == self._proxy_pid:
                raise RuntimeError(f"the proxy ended with status {status}; see {self.logs / 'proxy.log'}")
            if self._newcomers.ended(pid, status):
                continue
            peer = next(peer for peer in self.peers.values() if peer.pid == pid and peer.status is None)
            peer.status = status
            if peer.drained:
                self._reap(peer)

    # ------------------------------------------------------------------------------------------ from outside

    def _inspect(self, peer: Peer, step: Step) -> None:
        """Read a tensor whose reduce failed, in the memory of its process, which leaves it unchanged for a while."""
        fact = step.fact
        assert isinstance(fact, Reduced)
        assert fact.exhibit is not None
        if peer.status is not None:
            return
        found = checksum_memory(peer.pid, *fact.exhibit)
        if found is None or time.monotonic_ns() - step.end_ns > EXHIBIT_SECONDS_MAX * 1e9:
            return
        self.judge.totals.inspected += 1
        if found != self.judge.ledger.contribution_of(step):
            where = f"the tensor of life {step.life} is {found:08x} in memory"
            self._add_violation("restoration", f"{where}, {EXHIBIT_DELAY} s after {fact}")

    def _watch(self) -> None:
        assert self._zygote is not None
        totals = self.judge.totals
        members = sum(life.joined and not life.ended_ns for life in self.judge.lives.values())
        self.timeline.append((self.elapsed, totals.reduces, sum(totals.faults.values()), members))
        if (elder := self._places.get(ELDER)) is not None and elder.status is None:
            self.watcher.look(self._zygote.pid, self._master_pid, elder.pid)
            self._stalls.look()

    def _add_violation(self, law: str, text: str) -> None:
        self.judge.violations.append(Violation(time.monotonic_ns(), law, text))
