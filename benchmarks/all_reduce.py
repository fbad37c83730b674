"""All-reduce compared with Gloo: float32 SUM among ranks of one host, in the same processes and the same rounds.

For each world size that many ranks run, each a process that holds both a Gloo group and a Communicator. Contenders take
turns in each round, so that noise hits all of them equally: Gloo, Gloo with the congestion control of our sockets, and
pccl with a tensor in shared memory (zero-copy), with an ordinary tensor (staged), and from one shared tensor into
another (out of place; the others are in place). By default peers of one host read blocks from each other's memory; pccl
also takes part with every byte through TCP. `ranks` describes a round and the check of results, `contenders` how Gloo
gets our congestion control.

A time is the median over rounds. The effective throughput is the size of one peer's contribution divided by that time.
Ratios are ours to Gloo's throughput, with the target beside them. Worlds with more ranks than cores also measure how
well the contenders share the cores.

    python -m benchmarks.all_reduce --quick
    python -m benchmarks.all_reduce --worlds 2 4 --sizes 4K 64M --plot build/all_reduce.png
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from pccl import MasterNode

from .facts import RESULTS, facts, keep, memory_kib, size, size_text, time_text
from .ranks import merge, progress, run_ranks

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [4 * KIB, 400 * KIB, 64 * MIB, 256 * MIB]
SIZES_OF_TWO = [*SIZES, GIB]  # a world of 2 also has memory for 1 GiB
QUICK = {"worlds": [2, 4], "sizes": [4 * KIB, 400 * KIB, 64 * MIB], "seconds": 0.5}
COMMUNICATORS = 3  # of a rank: see `contenders`
COPIES = 6  # of a tensor that a rank may hold: ordinary, shared, target, staged, backup, and Gloo's own

# Targets of our throughput divided by Gloo's, with defaults and over TCP alone: from LARGE up, by contender, at world 2
# and above it; at two small sizes, zero-copy; and from LARGE up, zero-copy over TCP under one congestion control, by
# world.
LARGE = 64 * MIB
OURS = ("zero-copy", "staged", "out of place", "tcp zero-copy", "tcp staged", "tcp checked")
WANTED_LARGE = {"zero-copy": (2.0, 1.3), "staged": (1.5, 1.1)}
WANTED_SMALL = {4 * KIB: 1.0, 400 * KIB: 2.0}
WANTED_ALIKE = {2: 1.5, 4: 1.1, 8: 1.0}


def main() -> int:
    """Measure, print tables, save the numbers."""
    arguments = parse()
    if arguments.rank:
        from .contenders import be_rank

        be_rank(json.loads(arguments.rank))
        return 0
    if (found := facts())["versions"]["torch"] is None:
        print("all_reduce: left out, because torch is not installed and there is no Gloo to compare with")
        return 0
    results: dict[str, Any] = {"facts": found, "pool": arguments.pool, "worlds": {}}
    for world in arguments.worlds:
        results["worlds"][world] = measure_world(world, arguments)
    results["ratios"] = ratios(results["worlds"])
    show(results)
    keep(results, arguments.json)
    if arguments.plot:
        plot(results, arguments.plot)
    return 0


def parse() -> argparse.Namespace:
    """The command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--worlds", type=int, nargs="+", help="world sizes (2 4 8)")
    parser.add_argument("--sizes", type=size, nargs="+", help="bytes of a tensor (4K 400K 64M 256M, and 1G at world 2)")
    parser.add_argument("--pool", type=int, default=1, help="our connections to each neighbour (1)")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per size instead of as many as fit")
    parser.add_argument(
        "--seconds", type=float, help="time for each size and contender, if --rounds is not given (1.5)"
    )
    parser.add_argument("--quick", action="store_true", help="about a minute: fewer worlds, sizes and rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "all_reduce.json", help="where the numbers go")
    parser.add_argument("--plot", type=Path, help="where a picture of throughput against size goes (PNG)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    defaults = QUICK if arguments.quick else {"worlds": [2, 4, 8], "sizes": None, "seconds": 1.5}
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def measure_world(world: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every contender's quartiles for each size."""
    sizes = fitting(arguments.sizes or (SIZES_OF_TWO if world == 2 else SIZES), world)
    progress(f"world {world}: starting {world} ranks")
    with ExitStack() as stack:
        plan = {
            "addresses": [stack.enter_context(MasterNode("127.0.0.1:0")).address for _ in range(COMMUNICATORS)],
            "port": free_port(),
            "pool": arguments.pool,
            "sizes": sizes,
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
        }
        with closing(run_ranks("benchmarks.all_reduce", plan, world, GLOO_SOCKET_IFNAME="lo")) as lines:
            measured: dict[str, Any] = {"gloo_alike_control": next(lines)[0]["control"], "sizes": {}}
            if not measured["gloo_alike_control"]:
                progress("gloo alike is left out: this user may not choose the congestion control of a socket")
            for nbytes, reports in zip(sizes, lines, strict=True):
                numbers = merge(reports, nbytes)
                measured["sizes"][nbytes] = numbers
                shown = ", ".join(f"{name} {time_text(row['median_us'])}" for name, row in numbers.items())
                progress(f"world {world}, {size_text(nbytes)}, {numbers['gloo']['rounds']} rounds: {shown}")
    return measured


def fitting(sizes: list[int], world: int) -> list[int]:
    """The sizes for which there is memory."""
    available = memory_kib("MemAvailable") * KIB
    for nbytes in sizes:
        if nbytes * COPIES * world > available:
            progress(f"world {world}, {size_text(nbytes)} is left out: {size_text(available)} of memory are available")
    return [nbytes for nbytes in sizes if nbytes * COPIES * world <= available]


def free_port() -> int:
    """Return a port that was free a moment ago, for Gloo's store."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- Judging ----------------------------------------------------------------


def ratios(worlds: dict[int, Any]) -> list[dict[str, Any]]:
    """Return our throughput divided by Gloo's, for every contender of ours, with the targets."""
    found = []
    for world, measured in worlds.items():
        for nbytes, numbers in measured["sizes"].items():
            for name in OURS:
                for rival in sorted({"gloo", "gloo alike"} & set(numbers)):
                    ratio = round(numbers[rival]["median_us"] / numbers[name]["median_us"], 2)
                    goal = wanted(name, rival, world, nbytes)
                    found.append(
                        {"world": world, "bytes": nbytes, "name": name, "rival": rival, "ratio": ratio, "wanted": goal}
                    )
    return found


def wanted(name: str, rival: str, world: int, nbytes: int) -> float | None:
    """Return the target of a ratio; None if it has no target."""
    if rival == "gloo alike":
        return WANTED_ALIKE.get(world) if name == "tcp zero-copy" and nbytes >= LARGE else None
    way = name.removeprefix("tcp ")
    if nbytes >= LARGE:
        return WANTED_LARGE[way][world > 2] if way in WANTED_LARGE else None
    return WANTED_SMALL.get(nbytes) if way == "zero-copy" else None


# --- Showing ----------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """Print times, then ratios against Gloo with its defaults, then under one congestion control."""
    known = results["facts"]
    print(
        f"all-reduce of float32, SUM, one host, {known['machine']['cores']} cores, pool of {results['pool']}, "
        f"commit {known['commit']}"
    )
    print(f"{'world':>5}{'size':>9}  {'contender':14}{'median':>9}{'p25':>9}{'p75':>9}{'MB/s':>8}{'rounds':>8}")
    for world, measured in results["worlds"].items():
        for nbytes, numbers in measured["sizes"].items():
            for name, row in numbers.items():
                times = "".join(f"{time_text(row[key]):>9}" for key in ("median_us", "p25_us", "p75_us"))
                speed = f"{row['bytes_per_second'] / 1e6:>8.0f}"
                print(f"{world:>5}{size_text(nbytes):>9}  {name:14}{times}{speed}{row['rounds']:>8}")
    controls = {measured["gloo_alike_control"] for measured in results["worlds"].values()} - {""}
    show_ratios(results["ratios"], "gloo", f"times the throughput of Gloo as it comes ({known['congestion_control']})")
    show_ratios(results["ratios"], "gloo alike", f"the same under one congestion control ({', '.join(controls)})")


def show_ratios(found: list[dict[str, Any]], rival: str, title: str) -> None:
    """One table: a row per world and size, a column per contender of ours."""
    rows: dict[tuple[int, int], list[str]] = {}
    for entry in found:
        if entry["rival"] == rival:
            goal = entry["wanted"]
            mark = "" if goal is None else f" (≥ {goal:g}{'' if entry['ratio'] >= goal else ', short'})"
            rows.setdefault((entry["world"], entry["bytes"]), []).append(f"{entry['ratio']:.2f}{mark}")
    if not rows:
        return
    print(f"\n{title}; in brackets what is wanted")
    print(f"{'world':>5}{'size':>9}  " + "".join(f"{name:22}" for name in OURS).rstrip())
    for (world, nbytes), cells in rows.items():
        print(f"{world:>5}{size_text(nbytes):>9}  " + "".join(f"{cell:22}" for cell in cells).rstrip())


def plot(results: dict[str, Any], path: Path) -> None:
    """Effective throughput against size, a panel per world."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    worlds = results["worlds"]
    figure, panels = plt.subplots(1, len(worlds), figsize=(5 * len(worlds), 4), squeeze=False)
    for panel, (world, measured) in zip(panels[0], worlds.items(), strict=True):
        sizes = sorted(measured["sizes"])
        for name in measured["sizes"][sizes[0]] if sizes else ():
            speeds = [measured["sizes"][nbytes][name]["bytes_per_second"] / 1e6 for nbytes in sizes]
            panel.plot(sizes, speeds, marker="o", label=name)
        panel.set(title=f"{world} peers", xlabel="bytes", ylabel="effective throughput, MB/s", ylim=(0, None))
        panel.set_xscale("log", base=2)
        panel.grid(visible=True, alpha=0.3)
        panel.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
