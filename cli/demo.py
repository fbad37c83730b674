"""`pccl demo`: a master and four peers train in one terminal; one is killed, one joins, and nobody loses a bit.

The command starts real processes: a master, and a training process for each peer (`demo_peer`). It shows what they
report as it happens (`demo_view`), and does what a spot market does. What is decided here is only when.
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
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from .demo_view import Row, View, plot
from .options import exit_codes

if TYPE_CHECKING:
    from collections.abc import Callable

# An act is over when all living peers have made enough outer steps together, or on a slow machine fewer in more time.
ACT_STEPS_MIN, ACT_SECONDS = 3, 12.0
PATIENCE = 30.0  # seconds after which an act has failed: four of them are two minutes
GLANCE = 0.1  # seconds between two looks at the clock


@click.command(epilog="\b\nExample:\n  pccl demo --peers 6 --plot loss.png\n\n" + exit_codes("the peers did not agree"))
@click.option("--peers", default=4, show_default=True, type=click.IntRange(2, 16), metavar="N",
              help="How many peers start the run.")  # fmt: skip
@click.option("--steps", default=20, show_default=True, type=click.IntRange(ACT_STEPS_MIN), metavar="N",
              help="Outer steps between two events.")  # fmt: skip
@click.option("--plot", "picture", default="pccl-demo.png", show_default=True, metavar="FILE",
              type=click.Path(dir_okay=False, path_type=Path), help="Where the loss curve goes.")  # fmt: skip
def demo(peers: int, steps: int, picture: Path) -> None:
    """Watch training survive a killed peer.

    Peers train a small network with async DiLoCo. One of them is killed with SIGKILL, another joins, and in the end all
    hold the same parameters, bit for bit. Takes about half a minute; needs numpy, no network and no GPU.
    """
    try:
        import numpy  # noqa: F401, ICN001 - what peers need, missed here with a better message
    except ModuleNotFoundError:
        raise click.ClickException("pccl demo needs numpy; install it: pip install numpy") from None
    names = [chr(ord("A") + index) for index in range(peers + 1)]
    with Stage(View(live=sys.stdout.isatty())) as stage:
        stage.open_master()
        for name in names[:-1]:
            stage.start_peer(name)
        stage.play(steps, f"all {peers} peers train together")
        stage.kill_peer(names[peers // 2])
        stage.play(steps, "the survivors closed their ring and went on")
        stage.start_peer(names[-1])
        stage.play(steps, f"peer {names[-1]} received the state and trains with them")
        stage.end_peers()
        stage.conclude(picture)


class Stage:
    """The processes of the demo and what they say."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._selector = selectors.DefaultSelector()
        self._address = ""
        self._master: subprocess.Popen[bytes] | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._rows: dict[str, Row] = {}
        self._ring: list[int] = []
        self._marks: dict[str, float] = {}
        self._ends = False  # rings of peers that say goodbye are no news

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._processes.values(), self._master):
            if process is not None:
                process.kill() if process is not self._master else process.terminate()
                process.wait()
                _pipe(process).close()
        self._selector.close()

    def open_master(self) -> None:
        """Start the master and learn its address."""
        command = [sys.executable, "-m", "pccl.cli", "run-master", "--listen", "127.0.0.1:0", "--json"]
        self._master = subprocess.Popen(command, stdout=subprocess.PIPE)
        first = _pipe(self._master).readline()
        if not first:
            raise click.ClickException("the master did not start")
        self._address = json.loads(first)["address"]
        self._listen(self._master, self._heard_master)
        self._view.say(f"pccl run-master listens on {self._address}")

    def start_peer(self, name: str) -> None:
        """Start a training process. Its linear algebra gets one thread: the peers share this machine."""
        command = [sys.executable, "-m", "pccl.cli.demo_peer", self._address]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        if len(self._rows) > len(self._processes):
            self._marks[f"{name} starts"] = self._view.elapsed
        row = self._rows[name] = Row(name, process.pid)
        self._processes[name] = process
        self._listen(process, lambda message: self._heard_peer(row, message))
        self._view.say(f"peer {name} starts")

    def kill_peer(self, name: str) -> None:
        """What a spot market does."""
        process, row = self._processes.pop(name), self._rows[name]
        self._selector.unregister(_pipe(process))
        process.kill()
        process.wait()
        _pipe(process).close()
        row.is_gone, row.state = True, "killed with SIGKILL"
        self._marks[f"{name} killed"] = self._view.elapsed
        self._view.say(click.style(f"kill -9 {process.pid}: peer {name} is gone", fg="red"))

    def play(self, steps: int, then: str) -> None:
        """Show what happens until every living peer has made so many steps with all others."""
        living = [self._rows[name] for name in self._processes]
        began, first = time.monotonic(), max(row.step for row in living)

        def is_over() -> bool:
            enough = steps if time.monotonic() < began + ACT_SECONDS else ACT_STEPS_MIN
            return all(row.step >= first + enough and row.world == len(living) for row in living)

        self._watch(is_over, then)
        self._view.say(click.style(then, bold=True))

    def end_peers(self) -> None:
        """Ask all peers to end, which they do in the same step."""
        self._view.say("everybody is asked to end")
        self._ends = True
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        living = [self._rows[name] for name in self._processes]
        self._watch(lambda: all(row.digest for row in living), "the peers end")

    def conclude(self, picture: Path) -> None:
        """Compare the peers bit for bit, and say where the curve is."""
        digests = {self._rows[name].digest for name in self._processes}
        self._view.draw(self._rows.values(), self._drawn_ring(), at_last=True)
        curve = plot(self._rows.values(), picture, self._marks)
        if len(digests) != 1:
            raise click.ClickException(f"the peers hold different parameters: digests {', '.join(sorted(digests))}")
        click.secho(
            f"all {len(self._processes)} peers hold bit-identical parameters (digest {digests.pop()}); {curve}",
            fg="green",
        )

    def _watch(self, is_over: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_over():
            if time.monotonic() > deadline:
                raise click.ClickException(f"not within {PATIENCE:g} s: {what}")
            for name, process in self._processes.items():
                if process.poll() not in (None, 0):
                    raise click.ClickException(f"peer {name} ended with status {process.returncode}")
            self._view.draw(self._rows.values(), self._drawn_ring())
            for key, _ in self._selector.select(GLANCE):
                self._read(key.fileobj, key.data)

    def _read(self, pipe: Any, heard: Callable[[dict[str, Any]], None]) -> None:
        data = pipe.read()
        if not data:
            self._selector.unregister(pipe)
            return
        for line in data.decode().splitlines():
            heard(json.loads(line))

    def _listen(self, process: subprocess.Popen[bytes], heard: Callable[[dict[str, Any]], None]) -> None:
        pipe = _pipe(process)
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, heard)

    def _heard_master(self, message: dict[str, Any]) -> None:
        found = re.fullmatch(r"group=\d+ epoch=\d+ ring=\[(.*)\]", message.get("line", ""))
        if found and not self._ends:
            self._ring = [int(peer) for peer in found[1].split(", ")]
            self._view.say(f"the master orders a ring of {len(self._ring)}")

    def _heard_peer(self, row: Row, message: dict[str, Any]) -> None:
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


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout
