"""optimize_topology over links of known rates: the measured rates, the chosen ring, and its gain.

Hosts in a box (`benchmarks.box`) have a link for every ordered pair, with a rate that is drawn from a seed over one
decade. Peers join three times: in the worst order for these rates, in the order of their numbers, and then, after
`optimize_topology()`, in the order that it found. Over each ring a float32 tensor is reduced, SUM, in place.

A ring of n moves 2 (n - 1) / n of the tensor over every link, so its time is that of the slowest link, and the ratio of
two rings should be the ratio of their slowest links. Three things are checked: each measured rate is within 15 % of its
link, the chosen ring has the best possible slowest link, and it beats the others by at least 80 % of the prediction.

    python -m benchmarks.topology --quick
    python -m benchmarks.topology --hosts 6 --seed 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from .box import Box, Link, reason_against
from .facts import RESULTS, facts, keep, size, size_text, time_text
from .ranks import progress, run_ranks, summarize

if TYPE_CHECKING:
    from pccl import Communicator

    from .ranks import Meeting

    Matrix = dict[tuple[int, int], float]  # Mbit/s

PORT = 47_100  # of the master
RATES = (20, 50, 100, 200)  # Mbit/s: slow enough that a machine with two cores can emulate all of them at once
DELAY_S = 0.002  # one way
WITHIN = 0.15  # the largest error of a measured rate, as a share of its link
WORTH = 0.8  # the least gain of an optimised ring, as a share of the predicted ratio
CONNECT_SECONDS = 60
# Seeds for which the worst ring, the ring in the order of the hosts, and the best ring have different bottlenecks.
FULL = {"hosts": 5, "size": 8 << 20, "rounds": 3, "seed": 2}
QUICK = {"hosts": 4, "size": 2 << 20, "rounds": 2, "seed": 11}
SETTINGS = {"net.ipv4.tcp_no_metrics_save": "1"}  # no connection starts with metrics of an earlier one


def main() -> int:
    """Measure, print a table, keep the numbers. Exit code 1 if a check fails."""
    arguments = parse()
    if arguments.rank:
        be_rank(json.loads(arguments.rank))
        return 0
    if reason := reason_against():
        print(f"topology: {reason}", file=sys.stderr)
        return 2
    results = measure(arguments)
    keep(results, arguments.json)
    show(results)
    return 0 if all(results["kept"].values()) else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topology", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, help="peers, one on each host (5)")
    parser.add_argument("--lanes", type=int, default=2, help="connections of each pool (2)")
    parser.add_argument("--size", type=size, help="bytes of the tensor (8M)")
    parser.add_argument("--rounds", type=int, help="reduces over each ring (3)")
    parser.add_argument("--seed", type=int, help="which rates are drawn (2)")
    parser.add_argument("--quick", action="store_true", help="half a minute: four hosts, 2 MiB, two rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "topology.json", help="where the numbers go")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


# --- Rings ------------------------------------------------------------------


def draw(hosts: int, seed: int) -> Matrix:
    """A rate for every ordered pair."""
    random = Random(f"topology {hosts} {seed}")
    return {pair: random.choice(RATES) for pair in itertools.permutations(range(hosts), 2)}


def bottleneck(ring: list[int], rates: Matrix) -> float:
    """The rate of the slowest step."""
    return min(rates[step] for step in itertools.pairwise([*ring, ring[0]]))


def all_rings(hosts: int) -> list[list[int]]:
    """Return all rings, each starting at host 0."""
    return [[0, *rest] for rest in itertools.permutations(range(1, hosts))]


def worst_ring(hosts: int, rates: Matrix) -> list[int]:
    """Return a ring with the slowest bottleneck."""
    return min(all_rings(hosts), key=lambda ring: bottleneck(ring, rates))


def best_bottleneck(hosts: int, rates: Matrix) -> float:
    """Return the best bottleneck of all rings, by trying each of them: the reference for the solver."""
    return max(bottleneck(ring, rates) for ring in all_rings(hosts))


# --- Measuring --------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both boxes: one joined in the worst order, one in the order of the hosts and then optimised."""
    hosts, rates = arguments.hosts, draw(arguments.hosts, arguments.seed)
    worst, joined = worst_ring(hosts, rates), list(range(hosts))
    rows, report = [], {}
    for name, order, optimises in (("worst", worst, False), ("joined", joined, True)):
        said = run_box(order, rates, arguments, optimises=optimises)
        rows.append(row_of(name, order, rates, [rank["before"] for rank in said], arguments.size))
        progress(f"{name}: {time_text(rows[-1]['time']['median_us'])}")
        if optimises:
            report = said[0]["status"]
            host_of = {rank["peer"]: host for host, rank in enumerate(said)}
            found = [host_of[peer] for peer in report["groups"][0]["ring"]]
            rows.append(row_of("optimised", found, rates, [rank["after"] for rank in said], arguments.size))
            seconds = max(rank["optimize_seconds"] for rank in said)
            progress(f"optimised in {seconds:.1f} s: {time_text(rows[-1]['time']['median_us'])}")
    edges = [edge_of(edge, host_of, rates) for edge in report["groups"][0]["bandwidths"]["edges"]]
    best = best_bottleneck(hosts, rates)
    speed = {row["ring"]: 1 / row["time"]["median_us"] for row in rows}
    gains = [gain_of(row, rows[-1], speed) for row in rows[:-1]]
    return {
        "facts": facts(),
        "hosts": hosts,
        "lanes": arguments.lanes,
        "bytes": arguments.size,
        "optimize_seconds": round(seconds, 2),
        "edges": edges,
        "off_max": max(abs(edge["off"]) for edge in edges),
        "rings": rows,
        "best_bottleneck_mbit": best,
        "gains": gains,
        "kept": {
            "measured within 15 %": len(edges) == hosts * (hosts - 1)
            and all(abs(edge["off"]) <= WITHIN for edge in edges),
            "best bottleneck": rows[-1]["bottleneck_mbit"] == best,
            "as fast as predicted": all(gain["measured"] >= WORTH * gain["predicted"] for gain in gains),
        },
    }


def run_box(order: list[int], rates: Matrix, arguments: argparse.Namespace, *, optimises: bool) -> list[dict[str, Any]]:
    """Join in this order and reduce; return the results of all ranks, by host."""
    links = {pair: Link(rate * 1e6, DELAY_S) for pair, rate in rates.items()}
    with Box(links, settings=SETTINGS) as box:
        plan = {
            "order": order,
            "lanes": arguments.lanes,
            "bytes": arguments.size,
            "rounds": arguments.rounds,
            "optimises": optimises,
            "master": f"{box.address(0)}:{PORT}",
        }
        ranks = run_ranks("benchmarks.topology", plan, len(order), start=box.spawn)
        with closing(ranks):
            said: list[dict[str, Any]] = next(ranks)
    return said


def row_of(name: str, ring: list[int], rates: Matrix, times: list[Any], nbytes: int) -> dict[str, Any]:
    """Return the row of one ring: its order, its slowest link, and the time of a reduce."""
    slowest = bottleneck(ring, rates)
    return {"ring": name, "order": ring, "bottleneck_mbit": slowest, "time": summarize(times, nbytes)}


def edge_of(edge: dict[str, Any], host_of: dict[int, int], rates: Matrix) -> dict[str, Any]:
    """Return the row of one edge: the rate of its link, the measured rate, and the error."""
    source, target = host_of[edge["source"]], host_of[edge["target"]]
    true, measured = rates[source, target], edge["bytes_per_second"] * 8 / 1e6
    off = round(measured / true - 1, 4)
    ends = {"source": source, "target": target, "origin": edge["origin"]}
    return {**ends, "mbit": true, "measured_mbit": round(measured, 2), "off": off}


def gain_of(row: dict[str, Any], best: dict[str, Any], speed: dict[str, float]) -> dict[str, Any]:
    """Return by how much the optimised ring is faster than another one, and the prediction of the rates."""
    return {
        "over": row["ring"],
        "predicted": round(best["bottleneck_mbit"] / row["bottleneck_mbit"], 3),
        "measured": round(speed[best["ring"]] / speed[row["ring"]], 3),
    }


# --- A rank -----------------------------------------------------------------


def be_rank(plan: dict[str, Any]) -> None:
    """Run one peer on its host; rank 0 runs the master as well."""
    import pccl
    from pccl import Communicator, MasterNode, Options, ReduceOp
    from pccl.client.status_query import query_status

    from .ranks import Meeting, fill, say, verify

    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with ExitStack() as stack:
        if plan["rank"] == 0:
            stack.enter_context(MasterNode(plan["master"]))
        meeting.meet()
        peer = stack.enter_context(Communicator(plan["master"], 0, plan["lanes"]))
        join(peer, plan["order"].index(plan["rank"]), meeting)
        tensor = pccl.zeros(plan["bytes"] // 4)

        def reduces() -> list[tuple[int, int]]:
            times = []
            for number in range(-1, plan["rounds"]):  # the first one opens the windows of new connections
                fill(tensor, meeting.rank, number)
                pair = meeting.timed(lambda: peer.all_reduce(tensor, tensor, op=ReduceOp.SUM))
                verify(tensor, meeting.world, number, "all_reduce")
                times.append(pair)
            return times[1:]

        said: dict[str, Any] = {"peer": peer.peer_id, "before": reduces()}
        if plan["optimises"]:
            meeting.meet()
            began = time.monotonic()
            peer.optimize_topology()
            said["optimize_seconds"] = time.monotonic() - began
            if plan["rank"] == 0:
                host, port = plan["master"].split(":")
                said["status"] = query_status(host, int(port), Options())
            said["after"] = reduces()
        say(said)
        meeting.meet()  # no rank leaves while another still reduces


def join(peer: Communicator, rank: int, meeting: Meeting) -> None:
    """Become the member with this rank: rings are in the order of joining, so peers join one by one."""
    for turn in range(meeting.world):
        if rank == turn:
            peer.connect(CONNECT_SECONDS)
        elif rank < turn:
            peer.wait_for_world_size(turn + 1, timeout=CONNECT_SECONDS)
        meeting.meet()


# --- Showing ----------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """Print rates, rings and gains."""
    hosts = results["hosts"]
    print(
        f"{hosts} peers, pools of {results['lanes']}, {size_text(results['bytes'])}; rates in Mbit/s, link / measured"
    )
    cells = {
        (edge["source"], edge["target"]): f"{edge['mbit']}/{edge['measured_mbit']:.0f}" for edge in results["edges"]
    }
    print("      " + "".join(f"{host:>10}" for host in range(hosts)))
    for source in range(hosts):
        print(f"{source:>4}  " + "".join(f"{cells.get((source, target), '.'):>10}" for target in range(hosts)))
    print(f"measured in {results['optimize_seconds']:.1f} s; at most {100 * results['off_max']:.1f} % off")
    for row in results["rings"]:
        order = " -> ".join(map(str, row["order"]))
        taken = time_text(row["time"]["median_us"])
        print(f"{row['ring']:10} {order:24} slowest {row['bottleneck_mbit']:>4} Mbit/s  {taken:>10}")
    for gain in results["gains"]:
        print(f"optimised over {gain['over']}: {gain['measured']:.2f} times as fast, {gain['predicted']:.2f} predicted")
    for promise, is_kept in results["kept"].items():
        print(f"{promise}: {'yes' if is_kept else 'NO'}")


if __name__ == "__main__":
    sys.exit(main())
