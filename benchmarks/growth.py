"""How the master's work grows with the number of peers: its machine only, without sockets, in virtual time.

Every figure is per peer: the cost of one more peer in one more round. A flat row means that a run of a thousand peers
is a thousand times the work of a run of one; a row that grows is a bug in `master_state`.

    python -m benchmarks.growth --peers 10,100,1000,3000
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pccl._core.master.events import DialBack, DialledBack, PeerCame, PeerSaid, PeerWent, SendTo
from pccl._core.master.master_state import MasterState
from pccl._core.protocol.events import Tick
from pccl._core.protocol.hellos import Register
from pccl._core.protocol.messages import Accepted, Beat, RingOrder, Tried, Try, VotePending, VoteTopology, Wired
from pccl.options import Options

from .facts import RESULTS, facts, keep

if TYPE_CHECKING:
    from collections.abc import Callable

MILLISECOND = 1_000_000

# What is measured, in the order of the table.
WORKS = {
    "join": "all peers but the first are tried and admitted in one round",
    "update_topology": "a settled round: all peers vote, all get the numbers",
    "are_peers_pending": "all peers ask, all get the same answer",
    "heartbeats": "one interval: a heartbeat from and to every peer, one sweep",
    "held heartbeats": "the same while all peers wait for a larger group",
    "loss": "a member is lost, its ring is ordered and wired anew",
}


class Bench:
    """One master and its peers, which answer every order at once."""

    def __init__(self, peers: int) -> None:
        self.peers = peers
        self.now_ns = 0
        self.actions = 0
        self.state = MasterState(bytes(16), Options(), 0)
        self.conns: list[int] = []

    def feed(self, event: Any) -> list[Any]:
        """Feed one event; count its actions."""
        actions = self.state.handle(event, self.now_ns)
        self.actions += len(actions)
        return actions

    def answer(self, actions: list[Any]) -> list[Any]:
        """Report every order as wired and every trial as a success; return the actions that follow."""
        after: list[Any] = []
        for action in actions:
            if isinstance(action, DialBack):
                after += self.answer(self.feed(DialledBack(action.conn, "")))
            elif isinstance(action, SendTo) and isinstance(action.message, Try):
                after += self.answer(self.feed(PeerSaid(action.conn, Tried(action.message.target, ""))))
            elif isinstance(action, SendTo) and isinstance(action.message, RingOrder):
                after += self.feed(PeerSaid(action.conn, Wired(action.message.epoch)))
        return after

    def come(self, conn: int) -> list[Any]:
        """A peer registers."""
        self.conns.append(conn)
        return self.feed(PeerCame(conn, Register(bytes(32), 0, 1, "10.0.0.1", 1 + conn % 65535, bytes(16)), "10.0.0.1"))

    def join(self) -> None:
        """All peers register; the first one admits them."""
        accepted = self.answer(self.come(1))
        for conn in range(2, self.peers + 1):
            self.answer(self.come(conn))
        accepted += self.answer(self.feed(PeerSaid(1, VoteTopology(1, 0))))
        assert (
            sum(isinstance(action.message, Accepted) for action in accepted if isinstance(action, SendTo)) == self.peers
        )

    def vote(self, message: Any) -> None:
        """All peers make the same call."""
        for conn in self.conns:
            self.feed(PeerSaid(conn, message))
        assert not any(self.state.votes.values())

    def beat(self) -> None:
        """One interval of heartbeats."""
        self.now_ns += 1000 * MILLISECOND
        for conn in self.conns:
            self.feed(PeerSaid(conn, Beat(self.now_ns)))
        self.feed(Tick())

    def lose(self) -> None:
        """The youngest member is lost."""
        self.answer(self.feed(PeerWent(self.conns.pop(), "gone")))
        assert not self.state.members.wiring


def measure(bench: Bench, rounds: int, work: Callable[[], None]) -> dict[str, float]:
    """Median CPU time and number of actions, per peer."""
    times, actions = [], []
    for _ in range(rounds):
        peers, bench.actions = len(bench.conns) or bench.peers, 0
        gc.collect()  # what earlier machines have left is not this one's work
        began = time.process_time_ns()
        work()
        times.append((time.process_time_ns() - began) / 1000 / peers)
        actions.append(bench.actions / peers)
    return {"microseconds": round(statistics.median(times), 3), "actions": round(statistics.median(actions), 3)}


def grow(peers: int, rounds: int) -> dict[str, dict[str, float]]:
    """All works for one number of peers."""
    joining = [measure(bench, 1, bench.join) for bench in (Bench(peers) for _ in range(min(rounds, 5)))]
    results = {"join": min(joining, key=lambda result: result["microseconds"])}
    bench = Bench(peers)
    bench.join()
    results["update_topology"] = measure(bench, rounds, lambda: bench.vote(VoteTopology(1, 0)))
    results["are_peers_pending"] = measure(bench, rounds, lambda: bench.vote(VotePending(1)))
    results["heartbeats"] = measure(bench, rounds, bench.beat)
    for conn in bench.conns:
        bench.feed(PeerSaid(conn, VoteTopology(1, peers + 1)))
    results["held heartbeats"] = measure(bench, rounds, bench.beat)
    results["loss"] = measure(bench, min(rounds, peers // 2), bench.lose)
    return results


def main() -> int:
    """Measure, print a table, save the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.split("\n\n")[0])
    parser.add_argument("--peers", default="10,100,1000,3000", help="numbers of peers, separated by commas")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per work; the median counts")
    parser.add_argument("--output", type=Path, default=RESULTS / "growth.json", help="where the JSON goes")
    arguments = parser.parse_args()
    sizes = [int(part) for part in arguments.peers.split(",")]
    results = {size: grow(size, arguments.rounds) for size in sizes}
    print(f"{'CPU of the master per peer (actions)':38}" + "".join(f"{size:>9} peers" for size in sizes))
    for work, meaning in WORKS.items():
        cells = [results[size][work] for size in sizes]
        print(f"{work:38}" + "".join(f"{cell['microseconds']:6.1f} us ({cell['actions']:3.1f})" for cell in cells))
        print(f"  {meaning}")
    keep({"facts": facts(), "per_peer": results}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
