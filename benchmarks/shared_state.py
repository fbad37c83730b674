"""The cost of `sync_shared_state` if all peers agree, and the time in which a newcomer receives the state.

Steady state: two peers with a model of 100,000 parameters; each call hashes all of it, votes and returns.
`update_topology`, which is the same round trip without a state, takes turns with it. Then the same sync with one peer
that has a wrong number, in blocks of its own: it forks a worker on both sides, and where there are fewer cores than
processes, calls take up to half as long again for a tenth of a second afterwards, until the scheduler has found a good
place for all of them. The figure of a block is the median of its calls on the slower peer; the figure of the table is
the median over blocks.

Newcomer: four peers have the state; a fifth has nothing, then all but 1 % of the blocks, then nothing again while one
of the four is killed in the middle. Times are those of the newcomer's call; bytes are payload.

    python -m benchmarks.shared_state --bytes 1G
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pccl
from pccl import Communicator, MasterNode, SharedState, TensorInfo
from pccl._core.kernels.digest import STATE_BLOCK_BYTES

from .facts import RESULTS, facts, keep, size, size_text, time_text
from .ranks import Meeting, progress, run_ranks, say

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

# Layers of the report's model: 784 pixels to ten digits, some 100,000 parameters in six tensors.
LAYERS = ((784, 120), (120,), (120, 45), (45,), (45, 10), (10,))
SYNC, UPDATE_TOPOLOGY, DIRTY_SYNC = "sync", "update_topology", "sync, one dirty"
TURNS = (SYNC, UPDATE_TOPOLOGY), (DIRTY_SYNC,)  # calls of one tuple take turns
# The C++ reference on this kind of machine, µs: typical, and its best round.
REFERENCE_US = {SYNC: (350, 240), UPDATE_TOPOLOGY: (260, 170), DIRTY_SYNC: (830, 680)}
SOURCES = 4
VICTIM = 2  # the source that is killed
WRONG_SHARE = 0.01  # of the blocks
CONNECT_SECONDS = 60


def main() -> int:
    """Measure, print tables, save the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shared_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each kind (9)")
    parser.add_argument("--calls", type=int, default=200, help="calls in a block (200)")
    parser.add_argument("--bytes", type=size, default=1 << 30, help="state that the newcomer gets (1G)")
    parser.add_argument("--fetches", type=int, default=5, help="times that it gets it (5)")
    parser.add_argument("--json", type=Path, default=RESULTS / "shared_state.json", help="where the numbers go")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        logging.getLogger("pccl.peer").setLevel(logging.ERROR)  # members are divergent here on purpose
        plan = json.loads(arguments.rank)
        (be_steady if plan["kind"] == "steady" else be_source_or_newcomer)(plan)
        return 0
    results: dict[str, Any] = {"facts": facts()}
    progress(f"two peers, {arguments.rounds} rounds of {arguments.calls} calls")
    (reports,) = run_world(2, kind="steady", rounds=arguments.rounds, calls=arguments.calls)
    results["steady"] = {
        kind: _spread([max(values) for values in zip(*(report[kind] for report in reports), strict=True)])
        for kind in reports[0]
    }
    progress(f"{SOURCES} sources and a newcomer, {size_text(arguments.bytes)}, {arguments.fetches} times, then a kill")
    first, last = run_world(SOURCES + 1, kind="newcomer", bytes=arguments.bytes, fetches=arguments.fetches)
    results["newcomer"] = {"bytes": arguments.bytes, **first[SOURCES], "sent": first[0]["sent"], **last[SOURCES]}
    show(results)
    keep(results, arguments.json)
    return 0


def run_world(world: int, **plan: Any) -> list[list[Any]]:
    """Run one measurement; return the lines of all ranks."""
    with (
        MasterNode("127.0.0.1:0") as master,
        closing(run_ranks("benchmarks.shared_state", {**plan, "address": master.address}, world)) as lines,
    ):
        return list(lines)


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median_us": round(statistics.median(values), 1),
        "best_us": round(min(values), 1),
        "worst_us": round(max(values), 1),
    }


# --- Steady state -----------------------------------------------------------


def be_steady(plan: dict[str, Any]) -> None:
    """Run one of two peers; print its median of each block."""
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with Communicator(plan["address"]) as communicator:
        communicator.connect()
        communicator.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
        arrays = [pccl.zeros(shape) for shape in LAYERS]
        state = SharedState([TensorInfo.from_numpy(array, f"layer.{i}") for i, array in enumerate(arrays)])
        is_dirty = communicator.peer_id > 1  # of two, the peer with the lower id wins the election

        def sync() -> None:
            communicator.sync_shared_state(state)
            state.push_revision()

        def spoil() -> None:
            if is_dirty:
                arrays[0][0, 0] = 1.0

        kinds: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            SYNC: (lambda: None, sync),
            UPDATE_TOPOLOGY: (lambda: None, communicator.update_topology),
            DIRTY_SYNC: (spoil, sync),
        }
        report: dict[str, list[float]] = {name: [] for name in kinds}
        for names in TURNS:
            for number in range(-1, plan["rounds"]):  # the first is a warm-up
                for name in names:
                    prepare, call = kinds[name]
                    meeting.meet()
                    median = statistics.median(_durations(prepare, call, plan["calls"]))
                    if arrays[0].any():
                        raise RuntimeError("a sync left the wrong number where it was")
                    if number >= 0:
                        report[name].append(median)
        say(report)
        meeting.meet()  # no rank leaves while the other still syncs


def _durations(prepare: Callable[[], None], call: Callable[[], None], calls: int) -> list[float]:
    durations = []
    for _ in range(calls):
        prepare()
        begin = time.monotonic_ns()
        call()
        durations.append((time.monotonic_ns() - begin) / 1000)
    return durations


# --- Newcomer ---------------------------------------------------------------


def be_source_or_newcomer(plan: dict[str, Any]) -> None:
    """Run one of four sources, or the newcomer; print its results, twice."""
    if plan["rank"] == VICTIM and (child := os.fork()):
        os.waitpid(child, 0)  # it is killed on purpose; its parent prints its second line
        say({})
        return
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    is_newcomer = plan["rank"] == SOURCES
    array = pccl.empty(plan["bytes"] // 4)
    state = SharedState([TensorInfo.from_numpy(array, "model")])
    report: dict[str, Any] = {"whole_us": [], "part_us": [], "sent": [], "received": [], "part_received": []}
    with Communicator(plan["address"]) as communicator:
        communicator.connect()
        communicator.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
        for number in range(plan["fetches"]):
            _whole(array, state, number, is_newcomer)
            begin, end = meeting.timed(lambda: _keep_info(communicator, state, report, "sent", "received"))
            report["whole_us"].append((end - begin) / 1000)
            _verify(array, number)
            state.push_revision()
            _spoil(array, number, is_newcomer)
            begin, end = meeting.timed(lambda: _keep_info(communicator, state, report, None, "part_received"))
            report["part_us"].append((end - begin) / 1000)
            _verify(array, number)
            state.push_revision()
        say(report)
        _whole(array, state, plan["fetches"], is_newcomer)
        meeting.meet()
        if plan["rank"] == VICTIM:
            half = statistics.median(report["whole_us"]) / 2e6
            threading.Timer(half, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        begin = time.monotonic_ns()
        info = communicator.sync_shared_state(state)
        taken = (time.monotonic_ns() - begin) / 1000
        _verify(array, plan["fetches"])
        say({"killed_us": taken, "killed_received": info.rx_bytes})


def _keep_info(
    communicator: Communicator, state: SharedState, report: dict[str, Any], sent: str | None, received: str
) -> None:
    info = communicator.sync_shared_state(state)
    report[received].append(info.rx_bytes)
    if sent is not None:
        report[sent].append(info.tx_bytes)


def _whole(array: np.ndarray[Any, Any], state: SharedState, number: int, is_newcomer: bool) -> None:
    """Fill the state of this round; a newcomer has zeros, and begins at revision 0."""
    array[:] = 0 if is_newcomer else number + 1
    if is_newcomer:
        state.revision = 0


def _spoil(array: np.ndarray[Any, Any], number: int, is_newcomer: bool) -> None:
    if is_newcomer:
        per_block = STATE_BLOCK_BYTES // array.itemsize
        blocks = range(-(-array.size // per_block))
        chosen = random.Random(number).sample(blocks, max(1, round(len(blocks) * WRONG_SHARE)))
        array[[block * per_block for block in chosen]] = -1


def _verify(array: np.ndarray[Any, Any], number: int) -> None:
    if not (array == number + 1).all():
        raise RuntimeError("the state is not the one that was agreed on: a wrong result has no speed")


# --- Tables -----------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """Print both tables."""
    print(f"two peers, 100,000 float32 parameters, {results['facts']['machine']['cores']} cores")
    print(f"{'call':22}{'median':>9}{'best':>9}{'worst':>9}   C++ reference, and its best")
    for kind, row in results["steady"].items():
        typical, best = REFERENCE_US[kind]
        print(
            f"{kind:22}" + "".join(f"{time_text(row[key]):>9}" for key in ("median_us", "best_us", "worst_us")), end=""
        )
        print(f"   {typical} µs, {best} µs")
    found = results["newcomer"]
    print(f"a newcomer and {SOURCES} sources, {size_text(found['bytes'])}")
    for kind, time_key, bytes_key in (
        ("everything", "whole_us", "received"),
        ("1 % of the blocks", "part_us", "part_received"),
        ("one source killed", "killed_us", "killed_received"),
    ):
        times = found[time_key] if isinstance(found[time_key], list) else [found[time_key]]
        moved = found[bytes_key] if isinstance(found[bytes_key], list) else [found[bytes_key]]
        median, share = statistics.median(times), statistics.median(moved) / found["bytes"]
        print(f"{kind:22}{time_text(median):>9}   {share:.4f} of the state received")
    shares = [sent / found["bytes"] for sent in found["sent"]]
    print(f"one source's share     {' '.join(f'{share:.2f}' for share in shares)}")


if __name__ == "__main__":
    sys.exit(main())
