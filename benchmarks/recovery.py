"""Recovery after a kill: the time until the survivors have completed a reduce without the dead peer.

Peers reduce 400 KB in a loop, in place; one of them is killed with SIGKILL at a random moment. The clock runs from the
kill until the next reduce of the last survivor has returned: the loss was detected, the reduce failed on all members,
the buffers were restored (each survivor compares every bit), the ring was closed again, and the retry succeeded. Then a
new peer replaces the dead one.

    python -m benchmarks.recovery --kills 50
"""

from __future__ import annotations

import argparse
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
from pccl.stress.records import spread

import pccl
from pccl import Communicator, MasterNode, PeerLostError, ReduceOp, TooFewPeersError

from .facts import RESULTS, facts, keep
from .ranks import progress

WORLDS = (3, 4)
COUNT = 100_000  # float32: 400 KB
REDUCES = 50  # between two topology rounds, which admit newcomers
SETTLE = (0.1, 0.2)  # seconds that a whole ring reduces before the next kill
PATIENCE = 30.0  # seconds after which a ring without progress has failed
WANTED_MS = 60.0


def main() -> int:
    """Measure, print a table, save the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="in each world (50)")
    parser.add_argument("--json", type=Path, default=RESULTS / "recovery.json", help="where the numbers go")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        be_peer(arguments.peer)
        return 0
    results: dict[str, Any] = {"facts": facts(), "bytes": 4 * COUNT, "wanted_ms": WANTED_MS, "worlds": {}}
    for world in WORLDS:
        progress(f"{arguments.kills} kills among {world} peers")
        results["worlds"][str(world)] = spread(measure(world, arguments.kills))
    keep(results, arguments.json)
    show(results)
    return 0


class Peer:
    """A process that reduces, and prints a line when the world size has changed."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.recovery", "--peer", address]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.world = 0
        self.since_ns = 0

    @property
    def pipe(self) -> IO[bytes]:
        """Its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> None:
        """Read one line: the world size of a reduce, and the time of its return."""
        self.world, self.since_ns = (int(word) for word in self.pipe.readline().split())

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def measure(world: int, kills: int) -> list[float]:
    """Seconds from each kill until the last survivor's next reduce."""
    chance = random.Random(world)
    seconds = []
    with MasterNode("127.0.0.1:0") as master:
        peers = [Peer(master.address) for _ in range(world)]
        try:
            for _ in range(kills):
                await_world(peers, world)
                time.sleep(chance.uniform(*SETTLE))
                victim = peers.pop(chance.randrange(world))
                began_ns = time.monotonic_ns()
                victim.end()
                await_world(peers, world - 1)
                seconds.append((max(peer.since_ns for peer in peers) - began_ns) / 1e9)
                peers.append(Peer(master.address))
        finally:
            for peer in peers:
                peer.end()
    return seconds


def await_world(peers: list[Peer], world: int) -> None:
    """Read until each peer has completed a reduce with this world size."""
    deadline = time.monotonic() + PATIENCE
    poll = select.poll()  # unlike select, it accepts file descriptors above 1023
    for peer in peers:
        poll.register(peer.pipe, select.POLLIN)
    while any(peer.world != world for peer in peers):
        ready = [fd for fd, _ in poll.poll(max(deadline - time.monotonic(), 0) * 1000)]
        if not ready:
            raise SystemExit(f"the peers did not come to reduce as {world} within {PATIENCE:g} s")
        for peer in peers:
            if peer.pipe.fileno() in ready:
                peer.read()


def be_peer(address: str) -> None:
    """Reduce until killed."""
    array, contribution = pccl.zeros(COUNT), np.arange(COUNT, dtype=np.float32)
    told = 0
    with Communicator(address) as peer:
        peer.connect()
        while True:
            successes = 0
            while successes < REDUCES:  # not attempts: a slow peer may have missed one that failed
                array[:] = contribution
                try:
                    world = peer.all_reduce(array, array, op=ReduceOp.SUM).local_world_size
                except PeerLostError:
                    if not np.array_equal(array, contribution):
                        raise SystemExit("the tensor is not what it was before") from None
                    continue
                except TooFewPeersError:
                    break
                successes += 1
                if world != told:
                    told = world
                    sys.stdout.write(f"{world} {time.monotonic_ns()}\n")
                    sys.stdout.flush()
            peer.update_topology()


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    print(f"until the last survivor has reduced {results['bytes'] // 1000} KB again, after a SIGKILL")
    print(f"{'peers':>6}{'kills':>7}{'median':>11}{'p99':>11}{'max':>11}   wanted: median below {WANTED_MS:g} ms")
    for world, row in results["worlds"].items():
        times = "".join(f"{row[key] * 1e3:>8.1f} ms" for key in ("median", "p99", "max"))
        print(f"{world:>6}{row['count']:>7}{times}")


if __name__ == "__main__":
    sys.exit(main())
