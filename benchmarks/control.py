"""Latency of the control calls on this machine.

For each world size a master and that many training processes run on loopback. Blocks of calls alternate (ours, then
Gloo's barrier if torch is installed), so that noise hits both equally. Each peer reports its own durations; the table
shows medians over all peers and rounds. The benchmark also measures how fast an actor and a lane worker start, and the
private memory of an idle worker.

A round with 2 peers on 2 cores, by `strace -c` and by the CPU clocks of the threads: four wake-ups in a row (training
process, actor, master, actor, training process), six system calls of each actor (two epoll_wait, two recv, one send,
one futex) and no others. Loop, connections and codec are compiled: in Python they were a third of the CPU time of actor
and master (77 and 67 µs a call, now 59 and 51, about half of it in the kernel). Most of the rest is waking processes:
actors and a master that poll for 100 µs before they sleep took a loop of 2 peers from 253-327 to 165-208 µs in the same
minutes (30 µs of polling changed nothing), but they would spend that time after every event on cores that train.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pccl import Attribute, Communicator, MasterNode, Options
from pccl.actors.io.loop import Loop
from pccl.actors.peer.lane_pool import LanePool

from .facts import RESULTS, facts, keep

# Measurements of the C++ reference on this kind of machine with 2 peers, in µs: typical, and its best round.
REFERENCE_US = {"update_topology": (260, 170), "are_peers_pending": (135, 85)}
# Upper targets: the start of a run's first peer, the start of a lane worker, and its private memory.
WANTED = {"actor_start_ms": 100, "worker_start_ms": 5, "worker_private_kib": 4096}


def main() -> None:
    """Run all measurements, print a table and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="world sizes to measure")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--calls", type=int, default=300, help="calls of a kind in a round")
    parser.add_argument("--no-gloo", action="store_true", help="leave Gloo out")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        be_peer(json.loads(arguments.peer[0]), int(arguments.peer[1]))
        return
    results: dict[str, Any] = {"facts": facts(), "wanted": WANTED, "worlds": {}}
    for world in arguments.worlds:
        results["worlds"][world] = measure_world(world, arguments.rounds, arguments.calls, not arguments.no_gloo)
    results["actor_start_ms"] = measure_actor_start()
    results["worker_start_ms"], results["worker_private_kib"] = measure_workers()
    show(results)
    keep(results, RESULTS / "control.json")


def measure_world(world: int, rounds: int, calls: int, gloo: bool) -> dict[str, Any]:
    """Medians of each kind of call, in microseconds."""
    with MasterNode("127.0.0.1:0") as master, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        plan = {"address": master.address, "world": world, "rounds": rounds, "calls": calls, "gloo": gloo, "port": port}
        command = [sys.executable, "-m", "benchmarks.control", "--peer", json.dumps(plan)]
        peers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(world)]
        reports = [json.loads(peer.communicate()[0]) for peer in peers]
    merged: dict[str, Any] = {}
    for name in reports[0]:
        # A call is over when the slowest peer has returned, so each round counts with its slowest median.
        by_round = [max(report[name][index] for report in reports) for index in range(rounds)]
        merged[name] = {"median_us": statistics.median(by_round), "best_us": min(by_round), "worst_us": max(by_round)}
    return merged


def be_peer(plan: dict[str, Any], rank: int) -> None:
    """One training process of the measurement; prints its median per round and kind."""
    kinds: dict[str, Any] = {}
    communicator = Communicator(plan["address"])
    communicator.connect()
    communicator.wait_for_world_size(plan["world"], timeout=60)
    kinds["update_topology"] = communicator.update_topology
    kinds["are_peers_pending"] = communicator.are_peers_pending
    kinds["get_attribute"] = lambda: communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
    if plan["gloo"]:
        try:
            from torch import distributed
        except ImportError:
            pass
        else:
            store = f"tcp://127.0.0.1:{plan['port']}"
            distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=plan["world"])
            kinds["gloo barrier"] = distributed.barrier
    report: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(plan["rounds"]):
        for name, call in kinds.items():
            communicator.update_topology()  # all peers begin the block together
            report[name].append(statistics.median(_durations(call, plan["calls"])))
    sys.stdout.write(json.dumps(report))
    communicator.update_topology()
    communicator.close()


def _durations(call: Any, count: int) -> list[float]:
    durations = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        durations.append((time.perf_counter_ns() - begin) / 1000)
    return durations


def measure_actor_start(times: int = 9) -> dict[str, float]:
    """From connect() of a run's first peer until it is a member: exec, imports, handshake, admission."""
    durations = []
    with MasterNode("127.0.0.1:0") as master:
        for _ in range(times):
            begin = time.perf_counter()
            with Communicator(master.address) as communicator:
                communicator.connect()
                durations.append((time.perf_counter() - begin) * 1000)
    return {"median": statistics.median(durations), "best": min(durations), "worst": max(durations)}


def measure_workers(lanes: int = 8) -> tuple[dict[str, float], float]:
    """Milliseconds per worker from the fork until it has served its first connection, and its private memory in KiB."""
    with MasterNode("127.0.0.1:0") as master:
        options = Options()
        first, second = (Communicator(master.address, 0, lanes, options=options) for _ in range(2))
        first.connect()
        pid = first._actor.process.pid  # type: ignore[union-attr]
        import threading

        thread = threading.Thread(target=second.connect)
        thread.start()
        first.wait_for_world_size(2, timeout=30)
        thread.join()
        private = [_private_kib(child) for child in _children(pid)]
        first.close()
        second.close()
    durations = []
    for _ in range(15):
        ended: list[int] = []
        loop = Loop()
        life = os.eventfd(0)
        pool = LanePool(
            loop,
            life,
            on_link_ended=lambda link, _, ended=ended: ended.append(link),  # type: ignore[misc]
            on_worker_died=lambda _: None,
        )
        ours, theirs = socket.socketpair()
        begin = time.perf_counter()
        pool.spawn(1)
        pool.attach(1, theirs, True, 0)
        ours.close()
        loop.run(lambda: 0, lambda _: loop.stop() if ended else None)  # noqa: B023
        durations.append((time.perf_counter() - begin) * 1000 / 2)
        pool.kill()
        pool.wait_for_exit()
        loop.close()
        os.close(life)
    return {"median": statistics.median(durations), "best": min(durations), "worst": max(durations)}, max(private)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _private_kib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    out = sys.stdout.write
    out(f"{'call':22}{'world':>6}{'median µs':>11}{'best':>8}{'worst':>8}   against\n")
    for world, kinds in results["worlds"].items():
        gloo = kinds.get("gloo barrier", {}).get("median_us")
        for name, numbers in kinds.items():
            notes = []
            if gloo and name in REFERENCE_US:
                notes.append(f"{gloo / numbers['median_us']:.2f} x as fast as a Gloo barrier")
            if int(world) == 2 and name in REFERENCE_US:
                notes.append(f"C++ reference {REFERENCE_US[name][0]} (best {REFERENCE_US[name][1]})")
            out(
                f"{name:22}{world:>6}{numbers['median_us']:>11.1f}{numbers['best_us']:>8.1f}{numbers['worst_us']:>8.1f}"
                f"   {'; '.join(notes)}\n"
            )
    actor, worker, memory = (f"(wanted: below {goal})" for goal in WANTED.values())
    out(f"a run's first connect(), actor started: {results['actor_start_ms']['median']:.1f} ms {actor}\n")
    out(f"a lane worker: {results['worker_start_ms']['median']:.2f} ms {worker}, ")
    out(f"private memory {results['worker_private_kib']:.0f} KiB {memory}\n")


if __name__ == "__main__":
    main()
