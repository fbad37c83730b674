"""`pccl demo`: a master and four peers train in one terminal; one is killed, one joins, and the state stays identical.

The command starts real processes: a master, and a training process for each peer (`demo_peer`). It shows their reports
(`demo_view`), kills one peer and starts another. This file decides only when.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from .demo_view import PeerRow, View, plot
from .options import exit_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

# A stage of the demo is over when all living peers have made enough outer steps together; after STAGE_SECONDS, on a
# slow machine, STAGE_STEPS_MIN are enough.
STAGE_STEPS_MIN, STAGE_SECONDS = 3, 12.0
STAGE_SECONDS_MAX = 30.0  # after which a stage has failed; the demo has four stages
POLL_SECONDS = 0.1  # the longest sleep while waiting for output of the processes
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each ends the demo quietly, with 128 and its number


@click.command(
    epilog="\b\nExample:\n  pccl demo --peers 6 --plot loss.png\n\n"
    + exit_codes("the peers did not agree")
    + " 130 interrupted by Ctrl-C."
)
@click.option("--peers", default=4, show_default=True, type=click.IntRange(2, 16), metavar="N",
              help="Number of peers at the start.")  # fmt: skip
@click.option("--steps", default=20, show_default=True, type=click.IntRange(STAGE_STEPS_MIN), metavar="N",
              help="Outer steps between two events.")  # fmt: skip
@click.option("--plot", "picture", default="pccl-demo.png", show_default=True, metavar="FILE",
              type=click.Path(dir_okay=False, path_type=Path), help="File for the loss curve.")  # fmt: skip
def demo(peers: int, steps: int, picture: Path) -> None:
    """Watch training survive a killed peer.

    Peers train a small network with async DiLoCo. One peer is killed with SIGKILL, another joins, and at the end all
    peers hold bit-identical parameters. Takes about half a minute; needs numpy, no network and no GPU.
    """
    try:
        import numpy  # noqa: F401, ICN001 - the peers need it; here a better message is possible
    except ModuleNotFoundError:
        raise click.ClickException("pccl demo needs numpy; install it: pip install numpy") from None
    names = [chr(ord("A") + index) for index in range(peers + 1)]
    with _ended_by_signals(), DemoRun(View(live=sys.stdout.isatty())) as run:
        run.open_master()
        for name in names[:-1]:
            run.start_peer(name)
        run.watch_steps(steps, f"all {peers} peers train together")
        run.kill_peer(names[peers // 2])
        run.watch_steps(steps, "the survivors closed their ring and continue")
        run.start_peer(names[-1])
        run.watch_steps(steps, f"peer {names[-1]} received the state and trains with the others")
        run.end_peers()
        run.conclude(picture)


class DemoRun:
    """The processes of the demo and their latest reports."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._selector = selectors.DefaultSelector()
        self._address = ""
        self._master: subprocess.Popen[bytes] | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._rows: dict[str, PeerRow] = {}
        self._ring: list[int] = []
        self._marks: dict[str, float] = {}
        self._ends = False  # rings that shrink because peers end are not reported

    def __enter__(self) -> DemoRun:
        return self

    def __exit__(self, *_: object) -> None:
        with _held():
            processes = [process for process in (*self._processes.values(), self._master) if process is not None]
            for process in processes:  # all before the first wait: none is to report that it has lost another
                _kill(process)
            for process in processes:
                process.wait()
                _pipe(process).close()
            self._selector.close()

    def open_master(self) -> None:
        """Start the master and read its address."""
        command = [sys.executable, "-m", "pccl.cli", "run-master", "--listen", "127.0.0.1:0", "--json"]
        with _held():
            self._master = _start(command, os.environ)
        first = _pipe(self._master).readline()
        if not first:
            raise click.ClickException("the master did not start")
        self._address = json.loads(first)["address"]
        self._listen(self._master, self._on_master_line)
        self._view.say(f"pccl run-master listens on {self._address}")

    def start_peer(self, name: str) -> None:
        """Start a training process, with one thread for linear algebra because the peers share this machine."""
        command = [sys.executable, "-m", "pccl.cli.demo_peer", self._address]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if len(self._rows) > len(self._processes):
            self._marks[f"{name} starts"] = self._view.elapsed
        with _held():
            process = self._processes[name] = _start(command, environment)
        row = self._rows[name] = PeerRow(name, process.pid)
        self._listen(process, lambda message: self._on_peer_line(row, message))
        self._view.say(f"peer {name} starts")

    def kill_peer(self, name: str) -> None:
        """Kill a peer without warning, as a spot market does."""
        with _held():
            process, row = self._processes.pop(name), self._rows[name]
            self._selector.unregister(_pipe(process))
            process.kill()
            process.wait()
            _pipe(process).close()
        row.is_gone, row.state = True, "killed with SIGKILL"
        self._marks[f"{name} killed"] = self._view.elapsed
        self._view.say(click.style(f"kill -9 {process.pid}: peer {name} is gone", fg="red"))

    def watch_steps(self, steps: int, then: str) -> None:
        """Show the reports until every living peer has made this many steps with all others."""
        living = [self._rows[name] for name in self._processes]
        began, first = time.monotonic(), max(row.step for row in living)

        def is_over() -> bool:
            enough = steps if time.monotonic() < began + STAGE_SECONDS else STAGE_STEPS_MIN
            return all(row.step >= first + enough and row.world == len(living) for row in living)

        self._watch(is_over, then)
        self._view.say(click.style(then, bold=True))

    def end_peers(self) -> None:
        """Ask all peers to end; they end in the same step."""
        self._view.say("all peers are asked to end")
        self._ends = True
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        living = [self._rows[name] for name in self._processes]
        self._watch(lambda: all(row.digest for row in living), "the peers end")

    def conclude(self, picture: Path) -> None:
        """Compare the states of the peers, and print where the loss curve is."""
        digests = {self._rows[name].digest for name in self._processes}
        self._view.draw(self._rows.values(), self._drawn_ring(), at_end=True)
        curve = plot(self._rows.values(), picture, self._marks)
        if len(digests) != 1:
            raise click.ClickException(f"the peers hold different parameters: digests {', '.join(sorted(digests))}")
        click.secho(
            f"all {len(self._processes)} peers hold bit-identical parameters (digest {digests.pop()}); {curve}",
            fg="green",
        )

    def _watch(self, is_over: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + STAGE_SECONDS_MAX
        while not is_over():
            if time.monotonic() > deadline:
                raise click.ClickException(f"not within {STAGE_SECONDS_MAX:g} s: {what}")
            for name, process in self._processes.items():
                if process.poll() not in (None, 0):
                    raise click.ClickException(f"peer {name} ended with status {process.returncode}")
            self._view.draw(self._rows.values(), self._drawn_ring())
            for key, _ in self._selector.select(POLL_SECONDS):
                self._read(key.fileobj, key.data)

    def _read(self, pipe: Any, on_line: Callable[[dict[str, Any]], None]) -> None:
        data = pipe.read()
        if not data:
            self._selector.unregister(pipe)
            return
        for line in data.decode().splitlines():
            on_line(json.loads(line))

    def _listen(self, process: subprocess.Popen[bytes], on_line: Callable[[dict[str, Any]], None]) -> None:
        pipe = _pipe(process)
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, on_line)

    def _on_master_line(self, message: dict[str, Any]) -> None:
        found = re.fullmatch(r"group=\d+ epoch=\d+ ring=\[(.*)\]", message.get("line", ""))
        if found and not self._ends:
            self._ring = [int(peer) for peer in found[1].split(", ")]
            self._view.say(f"the master orders a ring of {len(self._ring)}")

    def _on_peer_line(self, row: PeerRow, message: dict[str, Any]) -> None:
        row.number = message.get("id", row.number)
        row.state = message.get("state", row.state)
        row.digest = message.get("digest", row.digest)
        if "step" in message:
            row.step, row.loss, row.rate, row.world = (message[name] for name in ("step", "loss", "rate", "world"))
            row.curve.append((self._view.elapsed, message["loss"]))

    def _drawn_ring(self) -> str:
        names = {row.number: row.name for row in self._rows.values()}
        ring = [names.get(number, f"peer {number}") for number in self._ring]
        return " → ".join([*ring, *ring[:1]])


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own: a Ctrl-C at the terminal reaches the demo only, which ends the others."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, process_group=0)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its actor and workers, which are in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()  # a signal to the demo ended it before it had a group, or it has ended


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise TypeError("this process was started without a pipe")
    return process.stdout


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End by exceptions, so that all processes of the demo are ended first; an ignored signal stays ignored."""
    heard = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _held() -> Iterator[None]:
    """Delay these signals: a process that has started is known, and one that is to end has ended."""
    # Handlers are delayed, not the signals themselves: a child would inherit a mask.
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDINGS}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        _end(heard[0], None)
