"""The cost of a pool of connections where it cannot help, and its gain where one connection is slow; two peers.

All bytes go through the connections: host reads are switched off.

Three questions, each answered by contenders that take turns in the same processes (see `ranks`), zero-copy, in place:

- One large reduce over a pool of 8 against a pool of 1. On loopback one connection fills the machine, so seven more
  can only cost.
- Eight reduces at once, each with an eighth of the bytes, against one large reduce: they share the pool fairly and
  should take no longer.
- One of 8 connections throttled to a tenth. A split in equal parts would be as slow as that tenth. The target is that
  the others take over its share, so that (7 + 0.1) / 8 of the throughput is left. Runs in its own network namespace,
  where every connection has a rate far below that of the machine; left out, with the reason, where there is none. At
  the end all wait for the B bytes that the slow connection still has to send: the time of a tensor of S bytes grows by
  the share 80 B / S, whatever the rates.

    python -m benchmarks.pool --quick
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pccl
from pccl import Communicator, MasterNode, Options, ReduceOp

from .facts import RESULTS, facts, keep, size, size_text, time_text
from .ranks import Meeting, fill, merge, progress, run_ranks, say, verify
from .throttling import Throttle, in_namespace, raise_loopback, reason_against

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

WORLD = 2
LANES = 8
TENTH = 0.1
WARM_UPS = 2
CONNECT_SECONDS = 60

POOL_OF_ONE, POOL, AT_ONCE = "pool of 1", f"pool of {LANES}", f"{LANES} at once"
EVEN, THROTTLED = "all alike", "one throttled"

# The compared contenders, by throughput, and the targets.
WANTED = {(POOL, POOL_OF_ONE): 0.9, (AT_ONCE, POOL): 0.9, (THROTTLED, EVEN): (LANES - 1 + TENTH) / LANES}

Calls = dict[str, "Callable[[], object]"]


def main() -> int:
    """Measure, print a table, save the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=size, help="bytes of the large tensor (256M)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (9)")
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s of each connection in the throttled part (200)")
    parser.add_argument("--quick", action="store_true", help="half a minute: a smaller tensor, fewer rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "pool.json", help="where the numbers go")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(json.loads(arguments.rank))
        return 0
    if arguments.inside:
        raise_loopback()
        say(measure(json.loads(arguments.inside)))
        return 0
    nbytes = arguments.size or (64 << 20 if arguments.quick else 256 << 20)
    plan = {"bytes": nbytes, "rounds": arguments.rounds or (3 if arguments.quick else 9), "rate_mbit": 0}
    results: dict[str, Any] = {"facts": facts(), "bytes": nbytes, "contenders": measure(plan)}
    if reason := reason_against():
        results["throttled_left_out"] = reason
    else:
        results["rate_mbit"] = plan["rate_mbit"] = arguments.rate
        results["contenders"] |= json.loads(in_namespace("benchmarks.pool", "--inside", json.dumps(plan)))
    results["ratios"] = ratios(results["contenders"])
    show(results)
    keep(results, arguments.json)
    return 0


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the quartiles of all contenders; if the plan has a rate, those of the throttled part."""
    part = f"connections of {plan['rate_mbit']} Mbit/s" if plan["rate_mbit"] else "connections as fast as they come"
    progress(f"{size_text(plan['bytes'])}, {plan['rounds']} rounds, {part}")
    with ExitStack() as stack:
        masters = [stack.enter_context(MasterNode("127.0.0.1:0")) for _ in range(1 if plan["rate_mbit"] else 2)]
        plan = {**plan, "addresses": [master.address for master in masters]}
        (reports,) = stack.enter_context(closing(run_ranks("benchmarks.pool", plan, WORLD)))
    return merge(reports, plan["bytes"])


def be_rank(plan: dict[str, Any]) -> None:
    """Run one peer; print the starts and ends of every contender."""
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with ExitStack() as stack:
        communicators = []
        for address, lanes in zip(plan["addresses"], (LANES, 1), strict=False):
            communicator = stack.enter_context(Communicator(address, 0, lanes, options=Options(host_memory=False)))
            communicator.connect()
            communicator.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
            communicators.append(communicator)
        tensor = pccl.zeros(plan["bytes"] // 4)
        meeting.meet()
        if not plan["rate_mbit"]:
            say(_measure(meeting, tensor, _pools(tensor, *communicators), plan["rounds"]))
        else:
            # The rates belong to the namespace, so one rank sets them for both.
            throttle = Throttle(plan["rate_mbit"]) if plan["rank"] == 0 else None
            say(_measure(meeting, tensor, _throttled(tensor, communicators[0]), plan["rounds"], throttle))
        meeting.meet()  # no rank leaves while the other still reduces


def _pools(tensor: np.ndarray[Any, Any], pool: Communicator, single: Communicator) -> Calls:
    parts = [tensor[index * tensor.size // LANES : (index + 1) * tensor.size // LANES] for index in range(LANES)]

    def at_once() -> None:
        handles = [pool.all_reduce_async(part, part, op=ReduceOp.SUM, tag=tag) for tag, part in enumerate(parts)]
        for handle in handles:
            handle.wait()

    return {
        POOL_OF_ONE: lambda: single.all_reduce(tensor, tensor, op=ReduceOp.SUM),
        POOL: lambda: pool.all_reduce(tensor, tensor, op=ReduceOp.SUM),
        AT_ONCE: at_once,
    }


def _throttled(tensor: np.ndarray[Any, Any], pool: Communicator) -> Calls:
    def reduce() -> object:
        return pool.all_reduce(tensor, tensor, op=ReduceOp.SUM)

    return {EVEN: reduce, THROTTLED: reduce}


def _measure(
    meeting: Meeting, tensor: np.ndarray[Any, Any], calls: Calls, rounds: int, throttle: Throttle | None = None
) -> dict[str, list[tuple[int, int]]]:
    """Return starts and ends of all rounds that count."""
    report: dict[str, list[tuple[int, int]]] = {name: [] for name in calls}
    for number in range(-WARM_UPS, rounds):
        for name, call in calls.items():
            if throttle is not None:
                throttle.slow_down(TENTH if name == THROTTLED else 1)
            fill(tensor, meeting.rank, number)
            times = meeting.timed(call)
            verify(tensor, meeting.world, number, name)
            if number >= 0:
                report[name].append(times)
    return report


def ratios(contenders: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ratios of throughputs, with their targets."""
    return [
        {
            "name": name,
            "rival": rival,
            "ratio": round(contenders[rival]["median_us"] / contenders[name]["median_us"], 2),
            "wanted": round(goal, 2),
        }
        for (name, rival), goal in WANTED.items()
        if name in contenders
    ]


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    print(f"all-reduce of {size_text(results['bytes'])} float32, SUM, in place, zero-copy, {WORLD} peers")
    print(f"{'contender':16}{'median':>9}{'p25':>9}{'p75':>9}{'MB/s':>8}{'rounds':>8}")
    for name, row in results["contenders"].items():
        times = "".join(f"{time_text(row[key]):>9}" for key in ("median_us", "p25_us", "p75_us"))
        print(f"{name:16}{times}{row['bytes_per_second'] / 1e6:>8.0f}{row['rounds']:>8}")
    for entry in results["ratios"]:
        mark = "" if entry["ratio"] >= entry["wanted"] else ", short"
        print(f"{entry['name']} by {entry['rival']}: {entry['ratio']:.2f} (≥ {entry['wanted']:g}{mark})")
    if "throttled_left_out" in results:
        print(f"one connection throttled: left out: {results['throttled_left_out']}")


if __name__ == "__main__":
    sys.exit(main())
