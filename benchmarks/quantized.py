"""The gain of quantization on a slow link, and its cost in precision; two peers.

Over a link of 1 Gbit/s the bytes of an all-reduce decide its time. Reduces of plain float32 elements, and of codes of
16, 8 and 4 bits, take turns in the same processes (see `ranks`), zero-copy, in place, in two network namespaces with
one link between them (see `linked`). That part needs root, or user namespaces, and is left out where there is neither.
The target is that 8 bits are 3.5 times as fast; 4 is the limit. After each round every sum is compared with the exact
one, and the bits of both peers with each other.

The errors are those of one quantization, for each distribution, algorithm and width: the root mean square of the error,
divided by that of the data, in per cent. A reduce over N peers quantizes each element N times: N - 1 times on its way,
and once as a result.

    python -m benchmarks.quantized --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import pccl
from pccl import Communicator, DataType, MasterNode, QuantizationAlgorithm, QuantizationOptions, ReduceOp
from pccl._core.dataplane.quantization import coded_size, decode_into, encode_into

from .facts import RESULTS, facts, keep, size, size_text, time_text
from .linked import NEAR, Link, move_to, reason_against
from .ranks import Meeting, merge, progress, run_ranks, say
from .throttling import in_namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, Any]

WORLD = 2
LANES = 2
WARM_UPS = 1
CONNECT_SECONDS = 60
ERROR_ELEMENTS = 1 << 20

PLAIN, WANTED_NAME, WANTED = "as they are", "MIN_MAX, 8 bits", 3.5

# By name: the type of the codes, the algorithm, and the bits.
WAYS: dict[str, tuple[DataType, QuantizationAlgorithm, int]] = {
    "MIN_MAX, 16 bits": (DataType.UINT16, QuantizationAlgorithm.MIN_MAX, 16),
    "MIN_MAX, 8 bits": (DataType.UINT8, QuantizationAlgorithm.MIN_MAX, 8),
    "MIN_MAX, 4 bits": (DataType.UINT8, QuantizationAlgorithm.MIN_MAX_4BIT, 4),
    "ZERO_POINT_SCALE, 16 bits": (DataType.UINT16, QuantizationAlgorithm.ZERO_POINT_SCALE, 16),
    "ZERO_POINT_SCALE, 8 bits": (DataType.UINT8, QuantizationAlgorithm.ZERO_POINT_SCALE, 8),
    "ZERO_POINT_SCALE, 4 bits": (DataType.UINT8, QuantizationAlgorithm.ZERO_POINT_SCALE_4BIT, 4),
}
TIMED = ("MIN_MAX, 16 bits", "MIN_MAX, 8 bits", "MIN_MAX, 4 bits")

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda source, count: source.normal(size=count),
    "uniform": lambda source, count: source.uniform(-1, 1, count),
    "heavy-tailed": lambda source, count: source.standard_t(2, count),
    "constant": lambda _, count: np.full(count, 1 / 3),
}


def main() -> int:
    """Measure, print the tables, save the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=size, default=64 << 20, help="bytes of the tensor (64M)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (9)")
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s of the link (1000)")
    parser.add_argument("--quick", action="store_true", help="a quarter of a minute: fewer rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "quantized.json", help="where the numbers go")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(json.loads(arguments.rank))
        return 0
    if arguments.inside:
        say(measure(json.loads(arguments.inside)))
        return 0
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    plan = {"bytes": arguments.size, "rounds": rounds, "rate_mbit": arguments.rate}
    results: dict[str, Any] = {"facts": facts(), "bytes": arguments.size, "rate_mbit": arguments.rate}
    if reason := reason_against():
        results["link_left_out"] = reason
    else:
        results["contenders"] = json.loads(in_namespace("benchmarks.quantized", "--inside", json.dumps(plan)))
        results["ratios"] = ratios(results["contenders"])
    results["errors_percent"] = measure_errors()
    show(results)
    keep(results, arguments.json)
    return 0


# --- Times ------------------------------------------------------------------


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """The quartiles of all contenders, and the bytes that a peer sent for each."""
    progress(f"{size_text(plan['bytes'])}, {plan['rounds']} rounds, a link of {plan['rate_mbit']} Mbit/s")
    with Link(plan["rate_mbit"]) as link, MasterNode(f"{NEAR}:0") as master:
        plan = {**plan, "address": master.address, "other": link.pid}
        with closing(run_ranks("benchmarks.quantized", plan, WORLD)) as lines:
            (reports,) = lines
    if reports[0]["checksums"] != reports[1]["checksums"]:
        raise RuntimeError("the peers ended with different bits")
    merged = merge([report["times"] for report in reports], plan["bytes"])
    return {name: {**row, "sent_bytes": reports[0]["sent_bytes"][name]} for name, row in merged.items()}


def be_rank(plan: dict[str, Any]) -> None:
    """Run one peer; the second one is at the other end of the link."""
    if plan["rank"] == 1:
        move_to(plan["other"])
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with Communicator(plan["address"], 0, LANES) as peer:
        peer.connect()
        peer.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
        say(_measure(meeting, peer, plan["bytes"] // 4, plan["rounds"]))
        meeting.meet()  # no rank leaves while the other still reduces


def _measure(meeting: Meeting, peer: Communicator, count: int, rounds: int) -> dict[str, Any]:
    given = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(WORLD)]
    exact = given[0] + given[1]
    tensor = pccl.zeros(count)
    ways: dict[str, QuantizationOptions | None] = {PLAIN: None}
    ways |= {name: QuantizationOptions(WAYS[name][0], WAYS[name][1]) for name in TIMED}
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in ways}
    sent: dict[str, int] = {}
    checksums = []
    for number in range(-WARM_UPS, rounds):
        for name, how in ways.items():
            tensor[:] = given[meeting.rank]

            def reduce(name: str = name, how: QuantizationOptions | None = how) -> None:
                sent[name] = peer.all_reduce(tensor, tensor, op=ReduceOp.SUM, quantization_options=how).tx_bytes

            span = meeting.timed(reduce)
            _verify(tensor, exact, name)
            checksums.append(zlib.crc32(tensor.data))
            if number >= 0:
                times[name].append(span)
    return {"times": times, "sent_bytes": sent, "checksums": checksums}


def _verify(tensor: Array, exact: Array, name: str) -> None:
    """Check the error: at most one step of the range of all sums, which no quantization group exceeds."""
    bound = 0.0 if name == PLAIN else float(np.ptp(exact)) / ((1 << WAYS[name][2]) - 1) * 1.01
    if (worst := float(np.abs(tensor - exact).max())) > bound:
        raise RuntimeError(f"{name}: off by {worst}, but at most {bound} can be explained")


def ratios(contenders: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the speed of each contender, relative to plain elements."""
    plain = contenders[PLAIN]["median_us"]
    return [
        {
            "name": name,
            "ratio": round(plain / contenders[name]["median_us"], 2),
            "wanted": WANTED if name == WANTED_NAME else None,
        }
        for name in TIMED
    ]


# --- Errors -----------------------------------------------------------------


def measure_errors() -> dict[str, dict[str, float]]:
    """Return the errors by quantization and distribution, in per cent."""
    source = np.random.default_rng(1)
    drawn = {name: draw(source, ERROR_ELEMENTS).astype(np.float32) for name, draw in DISTRIBUTIONS.items()}
    return {
        way: {name: relative_error(values, quantized, algorithm) for name, values in drawn.items()}
        for way, (quantized, algorithm, _) in WAYS.items()
    }


def relative_error(values: Array, quantized: DataType, algorithm: QuantizationAlgorithm) -> float:
    """Return the root mean square of the error of one quantization, divided by that of the values, in per cent."""
    numbers = DataType.FLOAT.value, algorithm.value, quantized.value
    coded, arrived = bytearray(coded_size(values.size, *numbers)), np.empty_like(values)
    encode_into(*numbers, coded, values.data)
    decode_into(*numbers, arrived.data, coded)
    error = np.sqrt(np.mean(np.square(arrived - values, dtype=np.float64)))
    return float(f"{100 * error / np.sqrt(np.mean(np.square(values, dtype=np.float64))):.3g}")


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    if "contenders" in results:
        what = f"all-reduce of {size_text(results['bytes'])} float32 over {results['rate_mbit']} Mbit/s"
        print(f"{what}, SUM, in place, zero-copy, {WORLD} peers")
        print(f"{'contender':28}{'median':>9}{'p25':>9}{'p75':>9}{'MB/s':>8}{'MB sent':>9}{'rounds':>8}")
        for name, row in results["contenders"].items():
            times = "".join(f"{time_text(row[key]):>9}" for key in ("median_us", "p25_us", "p75_us"))
            rate, sent = row["bytes_per_second"] / 1e6, row["sent_bytes"] / 1e6
            print(f"{name:28}{times}{rate:>8.0f}{sent:>9.1f}{row['rounds']:>8}")
        for entry in results["ratios"]:
            goal = entry["wanted"]
            mark = "" if goal is None else f" (≥ {goal:g}{'' if entry['ratio'] >= goal else ', short'})"
            print(f"{entry['name']}: {entry['ratio']:.2f} times as fast{mark}")
    else:
        print(f"the link of {results['rate_mbit']} Mbit/s: left out: {results['link_left_out']}")
    print(f"{'error of one coding, in %':28}", *(f"{name:>13}" for name in DISTRIBUTIONS))
    for way, row in results["errors_percent"].items():
        print(f"{way:28}", *(f"{error:>13.3g}" for error in row.values()))


if __name__ == "__main__":
    sys.exit(main())
