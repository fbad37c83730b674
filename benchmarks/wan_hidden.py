"""`wan`, hidden: the time of an outer step of DiLoCo if training waits for its all-reduce, and if it continues.

Two peers, a link with a long delay between them, and a fixed amount of computing on one thread, chosen so that it takes
half as long as the all-reduce, as long, and twice as long. Four things are timed, in turns:

* **compute** and **communication**, each alone, the latter after an idle time;
* **waited for**: compute, then reduce, step by step. This takes the sum of both.
* **hidden**: the reduce of a step runs while the next one computes, and is waited for after that, as in
  `examples/async_diloco.py`. This should take as long as the longer of the two; 10 % more are allowed. If that is
  communication, it may take less, because no idle time closes the windows of connections. If it is computing, it
  cannot: a shorter time means that other processes disturbed the measurement, and the row says so.

Filling and checking a delta, which stand for computing and applying it, are part of computing. Peers compute on half of
the cores, as if these were their accelerator; the other half runs everything else. The emulator takes half a second of
a core for each reduce, three times as much as all our processes together: on the cores that compute, it would dominate
the measurement. Run by itself, this file is a rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

import pccl
from pccl import AsyncReduceHandle, Communicator, MasterNode, ReduceOp

from .box import Box, Link, mesh
from .facts import size_text, time_text
from .ranks import Meeting, fill, progress, run_ranks, say, summarize, verify, verify_untouched
from .topology import SETTINGS

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
    Pairs = list[tuple[int, int]]

WORLD = 2
LANES = 4
PORT = 47_300  # of the master
LINK = Link(rate_bits=100e6, delay_s=0.05)
BYTES, QUICK_BYTES = 16 << 20, 2 << 20
LOADS, QUICK_LOADS = (0.5, 1.0, 2.0), (1.0,)  # time of computing divided by that of communication
STEPS = 4  # that follow each other in a round
ALONE = 2  # times that compute and communication are timed alone in a round
WANTED = 1.1  # the longest time of a step with a hidden reduce, divided by the longer of its two parts
DISTURBED = 0.95  # of its own computing: a shorter step means that other processes used the cores meanwhile
IDLE_SECONDS = 1.0  # before a reduce alone, so that its connections are as training leaves them
SIDE = 256  # of the matrices that are multiplied: they and their product stay in a cache
CALIBRATION = 200  # products that are timed to choose their number
CONNECT_ATTEMPTS, CONNECT_SECONDS = 30, 60
KINDS = ("compute", "communication", "waited for", "hidden")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def measure(rounds: int, *, quick: bool) -> dict[str, Any]:
    """A row for each load."""
    nbytes, loads = (QUICK_BYTES, QUICK_LOADS) if quick else (BYTES, LOADS)
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, cores[-half:])  # all later children inherit this
        box = stack.enter_context(Box(mesh(WORLD, LINK), settings=SETTINGS))
        plan = {
            "bytes": nbytes,
            "rounds": rounds,
            "loads": loads,
            "master": f"{box.address(0)}:{PORT}",
            "computing": cores[:half],
        }
        with closing(run_ranks("benchmarks.wan_hidden", plan, WORLD, start=box.spawn, **ONE_THREAD)) as lines:
            reports: list[dict[str, Any]] = next(lines)
    rows = [row_of(load, [report[str(load)] for report in reports], nbytes) for load in loads]
    return {
        "bytes": nbytes,
        "connections": LANES,
        "rate_bits": LINK.rate_bits,
        "round_trip_ms": LINK.delay_s * 2e3,
        "steps": STEPS,
        "wanted": WANTED,
        "loads": rows,
    }


def row_of(load: float, times: list[dict[str, Pairs]], nbytes: int) -> dict[str, Any]:
    """Return the time of each kind, and that of a hidden step divided by the longer of its parts."""
    row: dict[str, Any] = {"load": load}
    row |= {kind: summarize([rank[kind] for rank in times], nbytes) for kind in KINDS}
    compute, communication, waited, hidden = (row[kind]["median_us"] for kind in KINDS)
    row["by_longer"] = round(hidden / max(compute, communication), 3)
    row["is_disturbed"] = hidden < DISTURBED * compute
    progress(f"hidden, load {load:g}: waited for {time_text(waited)}, hidden {time_text(hidden)} a step")
    return row


# --- A rank -----------------------------------------------------------------


class Trainer:
    """One peer: it computes, measures deltas, and reduces them, in one of two ways."""

    def __init__(self, meeting: Meeting, communicator: Communicator, count: int) -> None:
        self._meeting = meeting
        self._communicator = communicator
        self._measured, self._sent = pccl.zeros(count), pccl.zeros(count)
        self._left = np.full((SIDE, SIDE), 0.5, np.float32)
        self._right = np.full((SIDE, SIDE), 0.5, np.float32)
        self._product = np.empty((SIDE, SIDE), np.float32)
        self.products = 0  # that a step computes

    def multiply(self, products: int) -> None:
        """Compute only."""
        for _ in range(products):
            np.matmul(self._left, self._right, out=self._product)

    def train(self, number: int) -> None:
        """Make the inner steps of an outer step, and compute its delta."""
        self.multiply(self.products)
        fill(self._measured, self._meeting.rank, number)

    def compute(self, number: int) -> None:
        """Do all of a step except communication."""
        self.train(number)
        verify_untouched(self._measured, self._meeting.rank, number, "compute")

    def reduce(self) -> None:
        """Do only the communication of a step."""
        self._communicator.all_reduce(self._measured, self._measured, op=ReduceOp.SUM)

    def launch(self) -> AsyncReduceHandle:
        """Launch the reduce of the delta."""
        self._measured, self._sent = self._sent, self._measured
        return self._communicator.all_reduce_async(self._sent, self._sent, op=ReduceOp.SUM)

    def waited_for(self, steps: int) -> Pairs:
        """Make steps that wait for their reduce; return the begin and end of each."""
        self._meeting.meet()
        ends = [time.monotonic_ns()]
        for number in range(steps):
            self.train(number)
            self.reduce()
            verify(self._measured, self._meeting.world, number, "waited for")
            ends.append(time.monotonic_ns())
        return list(pairwise(ends))

    def hidden(self, steps: int) -> Pairs:
        """The same with hidden reduces: one is under way when the first step begins and when the last has ended."""
        fill(self._measured, self._meeting.rank, -1)
        self._meeting.meet()
        handle = self.launch()
        ends = [time.monotonic_ns()]
        for number in range(steps):
            self.train(number)
            assert handle.wait()[0]
            verify(self._sent, self._meeting.world, number - 1, "hidden")
            handle = self.launch()
            ends.append(time.monotonic_ns())
        assert handle.wait()[0]
        return list(pairwise(ends))


def be_rank(plan: dict[str, Any]) -> None:
    """Run one rank; print the times of each kind, by load."""
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with ExitStack() as stack:
        if plan["rank"] == 0:
            stack.enter_context(MasterNode(plan["master"]))
        meeting.meet()
        communicator = stack.enter_context(Communicator(plan["master"], 0, LANES))
        communicator.connect(CONNECT_ATTEMPTS)
        communicator.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
        trainer = Trainer(meeting, communicator, plan["bytes"] // 4)
        os.sched_setaffinity(0, plan["computing"])  # this thread alone: workers and actor stay where they were started
        trainer.hidden(1)  # opens the windows of new connections, and touches all memory
        reduce_ns, product_ns = calibrate(trainer, meeting)
        report: dict[float, dict[str, Pairs]] = {}
        for load in plan["loads"]:
            trainer.products = max(1, round(load * reduce_ns / product_ns))
            report[load] = {kind: [] for kind in KINDS}
            for number in range(plan["rounds"]):
                for _ in range(ALONE):
                    report[load]["compute"].append(meeting.timed(partial(trainer.compute, number)))
                    time.sleep(IDLE_SECONDS)
                    report[load]["communication"].append(meeting.timed(trainer.reduce))
                report[load]["waited for"] += trainer.waited_for(STEPS)
                report[load]["hidden"] += trainer.hidden(STEPS)
        say(report)
        meeting.meet()  # no rank leaves while another still reduces


def calibrate(trainer: Trainer, meeting: Meeting) -> tuple[int, int]:
    """Nanoseconds of a reduce after idleness, and of a product while all compute; the same numbers on all ranks."""
    meeting.meet()
    time.sleep(IDLE_SECONDS)
    start, end = meeting.timed(trainer.reduce)
    reduce_ns = meeting.agree(end - start)
    start, end = meeting.timed(lambda: trainer.multiply(CALIBRATION))
    return reduce_ns, meeting.agree((end - start) // CALIBRATION)


# --- Showing ----------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """Print a row for each load, with the predicted sum and maximum."""
    print(
        f"\nhidden, {size_text(found['bytes'])}, {found['rate_bits'] / 1e6:g} Mbit/s, {found['round_trip_ms']:g} ms, "
        f"a step; in brackets what is expected"
    )
    print(f"{'compute':>9}{'communication':>15}{'waited for':>20}{'hidden':>20}{'by the longer':>16}")
    for row in found["loads"]:
        compute, communication, waited, hidden = (row[kind]["median_us"] for kind in KINDS)
        sums = f"{time_text(waited)} ({time_text(compute + communication)})"
        longer = f"{time_text(hidden)} ({time_text(max(compute, communication))})"
        long = "" if row["by_longer"] <= found["wanted"] else ", too long"
        long = ", disturbed: measure again" if row["is_disturbed"] else long
        print(f"{time_text(compute):>9}{time_text(communication):>15}{sums:>20}{longer:>20}", end="")
        print(f"{row['by_longer']:>16.2f}  (≤ {found['wanted']:g}{long})")


def plot(figure: Any, found: dict[str, Any]) -> None:
    """For each load compute upon communication, and beside that a step of either way."""
    panel, rows = figure.subplots(), found["loads"]
    seconds = {kind: [row[kind]["median_us"] / 1e6 for row in rows] for kind in KINDS}
    left = [position - 0.27 for position in range(len(rows))]
    panel.bar(left, seconds["compute"], 0.25, color="#afb8c1", label="compute alone")
    panel.bar(
        left,
        seconds["communication"],
        0.25,
        bottom=seconds["compute"],
        color="#d0d7de",
        hatch="//",
        label="communication alone",
    )
    panel.bar(list(range(len(rows))), seconds["waited for"], 0.25, color="#cf222e", label="step, reduce waited for")
    right = [position + 0.27 for position in range(len(rows))]
    panel.bar(right, seconds["hidden"], 0.25, color="#1a7f37", label="step, reduce hidden")
    names = [f"{row['load']:g}{' (disturbed)' if row['is_disturbed'] else ''}" for row in rows]
    panel.set_xticks(list(range(len(rows))), names)
    panel.set(xlabel="time of computing by that of communication", ylabel="seconds", title="an outer step")
    panel.grid(visible=True, axis="y", alpha=0.3)
    panel.legend(fontsize="small")


if __name__ == "__main__":
    be_rank(json.loads(sys.argv[-1]))
