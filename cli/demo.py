"""`pccl demo`: a master and four peers in one terminal; one is killed, one joins, and everybody agrees on who is in.

The command starts real processes: a master, and a training process for each peer. It shows what they report, as it
happens: the ring that the master ordered, and the world size that each peer sees. A peer is this same file, run as
`python -m pccl.cli.demo ADDRESS NAME`.
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
from typing import IO, Any

import click

from pccl import Attribute, Communicator, Options

from .joining import exit_codes

STEP = 0.1  # seconds that a demo peer "computes" between two rounds
PATIENCE = 20.0  # seconds after which a demo that does not come along has failed
PAUSE = 1.5  # seconds between two acts, so that a viewer can follow


@click.command(epilog="\b\nExample:\n  pccl demo --peers 6\n\n" + exit_codes("the peers did not agree"))
@click.option(
    "--peers",
    default=4,
    show_default=True,
    type=click.IntRange(2, 16),
    metavar="N",
    help="How many peers start the run.",
)
def demo(peers: int) -> None:
    """Watch a run survive a killed peer.

    Peers join, one is killed with SIGKILL, another takes its place. Takes about ten seconds, needs no network and no
    GPU.
    """
    stage = Stage()
    try:
        stage.open_master()
        names = [chr(ord("A") + index) for index in range(peers)]
        for name in names:
            stage.start_peer(name)
        stage.until_world_is(peers, f"all {peers} peers are in")
        stage.pause()
        stage.kill_peer(names[peers // 2])
        stage.until_world_is(peers - 1, "the survivors have rewired their ring and go on")
        stage.pause()
        stage.start_peer(chr(ord("A") + peers))
        stage.until_world_is(peers, "the newcomer is in")
        stage.pause()
        stage.say("everybody leaves")
        stage.close()
        click.secho("done: nobody restarted, and every peer saw the same world at every step", fg="green")
    finally:
        stage.close()


class Stage:
    """The processes of the demo and what they say."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._master: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._peers: dict[str, subprocess.Popen[bytes]] = {}
        self._worlds: dict[str, int] = {}
        self._names: dict[int, str] = {}  # peer id -> name
        self._ring: list[int] = []

    def open_master(self) -> None:
        """Start the master and learn its address."""
        command = [sys.executable, "-m", "pccl.cli", "run-master", "--listen", "127.0.0.1:0", "--json"]
        self._master = subprocess.Popen(command, stdout=subprocess.PIPE)
        first = self._pipe(self._master).readline()
        if not first:
            raise click.ClickException("the master did not start")
        self._address = json.loads(first)["address"]
        self._listen(self._master, self._heard_master)
        self.say(f"pccl run-master listens on {self._address}")

    def start_peer(self, name: str) -> None:
        """Start a training process."""
        command = [sys.executable, "-m", "pccl.cli.demo", self._address, name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._peers[name] = process
        self._listen(process, lambda line: self._heard_peer(name, line))
        self.say(f"peer {name} starts (pid {process.pid})")

    def kill_peer(self, name: str) -> None:
        """What a spot market does."""
        process = self._peers.pop(name)
        self._worlds.pop(name, None)
        self._selector.unregister(self._pipe(process))
        self.say(click.style(f"kill -9 {process.pid} (peer {name})", fg="red"))
        process.kill()
        process.wait()
        self._pipe(process).close()

    def until_world_is(self, size: int, then: str) -> None:
        """Show what happens until every living peer sees a world of that size."""
        deadline = time.monotonic() + PATIENCE
        while not (len(self._worlds) == len(self._peers) and all(world == size for world in self._worlds.values())):
            if time.monotonic() > deadline:
                raise click.ClickException(f"the peers did not agree on a world of {size} within {PATIENCE:g} s")
            self._listen_for(0.2)
        self.say(click.style(then, bold=True))

    def pause(self) -> None:
        """Let the peers run for a moment."""
        end = time.monotonic() + PAUSE
        while time.monotonic() < end:
            self._listen_for(end - time.monotonic())

    def close(self) -> None:
        """End everything that was started; peers say goodbye first."""
        for process in self._peers.values():
            process.send_signal(signal.SIGTERM)
        for process in [*self._peers.values(), *([self._master] if self._master else [])]:
            if process is self._master:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._pipe(process).close()
        self._peers.clear()
        self._master = None
        self._selector.close()

    def say(self, line: str) -> None:
        """One line of the story."""
        click.echo(f"{time.monotonic() - self._started:6.2f} s  {line}")

    def _listen(self, process: subprocess.Popen[bytes], handler: Any) -> None:
        pipe = self._pipe(process)
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, handler)

    def _listen_for(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(seconds, 0)):
            pipe: Any = key.fileobj
            data = pipe.read()
            if not data:
                self._selector.unregister(pipe)
                continue
            for line in data.decode().splitlines():
                key.data(json.loads(line))

    def _heard_master(self, message: dict[str, Any]) -> None:
        found = re.fullmatch(r"group=\d+ epoch=(\d+) ring=\[(.*)\]", message.get("line", ""))
        if found:
            self._ring = [int(peer) for peer in found[2].split(", ")]
            self.say(f"master: ring {self._draw_ring()} (epoch {found[1]})")

    def _heard_peer(self, name: str, message: dict[str, Any]) -> None:
        if name in self._peers:
            self._names[message["id"]] = name
            self._worlds[name] = message["world"]
            self.say(f"peer {name} sees a world of {message['world']}")

    def _draw_ring(self) -> str:
        names = [self._names.get(peer, f"#{peer}") for peer in self._ring]
        return " → ".join([*names, names[0]])

    @staticmethod
    def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
        assert process.stdout is not None
        return process.stdout


def be_peer(address: str) -> None:
    """One training process of the demo: takes part until it is told to leave, and says how large the world is."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Communicator(address, options=Options(heartbeat_timeout=3.0)) as communicator:
        communicator.connect()
        seen = 0
        while True:
            world = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
            if world != seen:
                seen = world
                sys.stdout.write(json.dumps({"id": communicator.peer_id, "world": world}) + "\n")
                sys.stdout.flush()
            time.sleep(STEP)
            communicator.update_topology()


if __name__ == "__main__":
    be_peer(sys.argv[1])
