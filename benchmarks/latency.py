"""Latency of an all-reduce between two peers, compared with Gloo, and the cost of a launch for the training process.

Calls follow each other without a pause, in blocks; blocks take turns (ours, then Gloo's), so that noise hits both
equally. The figure of a block is the median of its calls on the slower peer; the figure of the table is the median over
blocks. Filling the tensor before each call is not timed; the last result of every block is checked.

A launch is `all_reduce_async` of a zero-copy tensor, up to its return; waiting for it is not timed.

    python -m benchmarks.latency --calls 200
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import pccl
from pccl import Communicator, MasterNode, ReduceOp

from .all_reduce import free_port
from .facts import RESULTS, facts, keep, size_text, time_text
from .ranks import Meeting, fill, progress, run_ranks, say, verify

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 2
SIZES = (4, 400 << 10)
CONNECT_SECONDS = 60

# A kind of call: the reduced array, and a timed function that returns the function to call after the timing.
Kind = tuple["np.ndarray[Any, Any]", "Callable[[], Callable[[], object] | None]"]


def main() -> int:
    """Measure, print a table, save the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each kind (9)")
    parser.add_argument("--calls", type=int, default=200, help="calls in a block (200)")
    parser.add_argument("--json", type=Path, default=RESULTS / "latency.json", help="where the numbers go")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(json.loads(arguments.rank))
        return 0
    results = {"facts": (known := facts()), "kinds": {}}
    progress(f"{arguments.rounds} rounds of {arguments.calls} calls of a kind")
    with MasterNode("127.0.0.1:0") as master:
        plan = {
            "address": master.address,
            "port": free_port() if known["versions"]["torch"] else 0,
            "rounds": arguments.rounds,
            "calls": arguments.calls,
        }
        with closing(run_ranks("benchmarks.latency", plan, WORLD, GLOO_SOCKET_IFNAME="lo")) as lines:
            (reports,) = lines
    for kind in reports[0]:
        by_round = [max(values) for values in zip(*(report[kind] for report in reports), strict=True)]
        results["kinds"][kind] = {
            "median_us": round(statistics.median(by_round), 1),
            "best_us": round(min(by_round), 1),
            "worst_us": round(max(by_round), 1),
        }
    show(results)
    keep(results, arguments.json)
    return 0


def be_rank(plan: dict[str, Any]) -> None:
    """Run one peer; print its median of each block."""
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with Communicator(plan["address"]) as communicator:
        communicator.connect()
        communicator.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
        kinds = _kinds(communicator, plan)
        report: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(-1, plan["rounds"]):  # the first is a warm-up
            for name, kind in kinds.items():
                meeting.meet()
                median = statistics.median(_durations(kind, plan, number))
                verify(kind[0], plan["world"], number, name)
                if number >= 0:
                    report[name].append(median)
        say(report)
        meeting.meet()  # no rank leaves while the other still reduces


def _kinds(communicator: Communicator, plan: dict[str, Any]) -> dict[str, Kind]:
    """All kinds, in the order of their turns."""
    kinds: dict[str, Kind] = {}
    gloo = _gloo(plan) if plan["port"] else None
    for nbytes in SIZES:
        ours, theirs = pccl.zeros(nbytes // 4), np.zeros(nbytes // 4, np.float32)
        kinds[f"all_reduce, {size_text(nbytes)}"] = ours, _ours(communicator, ours)
        if gloo is not None:
            kinds[f"gloo, {size_text(nbytes)}"] = theirs, gloo(theirs)
        kinds[f"launch, {size_text(nbytes)}"] = ours, _launch(communicator, ours)
    return kinds


def _ours(communicator: Communicator, array: np.ndarray[Any, Any]) -> Callable[[], None]:
    def call() -> None:
        communicator.all_reduce(array, array, op=ReduceOp.SUM)

    return call


def _launch(communicator: Communicator, array: np.ndarray[Any, Any]) -> Callable[[], Callable[[], object]]:
    return lambda: communicator.all_reduce_async(array, array, op=ReduceOp.SUM).wait


def _gloo(plan: dict[str, Any]) -> Callable[[np.ndarray[Any, Any]], Callable[[], None]]:
    import torch
    from torch import distributed

    store = f"tcp://127.0.0.1:{plan['port']}"
    distributed.init_process_group("gloo", init_method=store, rank=plan["rank"], world_size=plan["world"])

    def bind(array: np.ndarray[Any, Any]) -> Callable[[], None]:
        tensor = torch.from_numpy(array)

        def call() -> None:
            distributed.all_reduce(tensor)

        return call

    return bind


def _durations(kind: Kind, plan: dict[str, Any], salt: int) -> list[float]:
    array, call = kind
    contribution = array.copy()
    fill(contribution, plan["rank"], salt)
    durations = []
    for _ in range(plan["calls"]):
        array[:] = contribution
        begin = time.monotonic_ns()
        rest = call()
        durations.append((time.monotonic_ns() - begin) / 1000)
        if rest is not None:
            rest()
    return durations


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    print(f"two peers, float32, SUM, in place, zero-copy, {results['facts']['machine']['cores']} cores")
    print(f"{'call':22}{'median':>9}{'best':>9}{'worst':>9}")
    for kind, row in results["kinds"].items():
        print(f"{kind:22}" + "".join(f"{time_text(row[key]):>9}" for key in ("median_us", "best_us", "worst_us")))


if __name__ == "__main__":
    sys.exit(main())
