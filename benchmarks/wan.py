"""All-reduce over a wide-area network in a box: 1 Gbit/s, round trips of 10 to 100 ms, real TCP (`benchmarks.box`).

* **Connections**: one reduce over pools of 1 to 32 connections, for each round trip.
* **At once**: the same bytes as one reduce, and as many reduces that run at the same time; longest round trip.
* **Gloo**, in the same rounds and over the same link, with a smaller tensor, because Gloo is slow here.
* **Optimised**: two sites, on the ring as peers joined and on the optimised one; see `wan_optimised`.
* **Hidden**: training that waits for its all-reduce, and training that continues; see `wan_hidden`.

The last two have links of their own. The others:

Two peers, a float32 tensor in shared memory, SUM, in place. With two peers each sends as many bytes as the tensor has,
so the share of the link is the bits of the tensor divided by time and rate. At most 96.5 % are possible, because of the
headers of packets of 1,500 bytes. A reduce also votes twice, at its start and its end, which costs a round trip each,
and the last block needs half of one to arrive: with 512 MiB at 1 Gbit/s and 100 ms at most 91 % are left.

Every reduce is measured twice: after an idle second, and directly after another one, when the connections are warm
(`wan_ranks`). One round before the measurement opens the windows of new connections. The queue of a link holds the
bytes of one round trip, and drops more. Connections use the congestion control of this system.

Experiments that `--only` leaves out stay in the results unchanged, with the facts of their run.

    python -m benchmarks.wan --quick
    python -m benchmarks.wan --round-trips 100 --pools 1 8 32 --loss 0.0001
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import wan_hidden, wan_optimised
from benchmarks.box.capacity import capacity_bits

from .box import DEVICE, Box, Link, mesh, reason_against
from .facts import RESULTS, facts, keep, size, size_text, time_text
from .ranks import merge, progress, run_ranks
from .wan_ranks import AT_ONCE, GLOO, STRIPED

if TYPE_CHECKING:
    from collections.abc import Callable

    Contenders = list[tuple[str, str, int]]  # name, kind, connections

WORLD = 2
PORT = 47_000  # of Gloo's store; masters have those above
SEPARATE = {"optimised": wan_optimised, "hidden": wan_hidden}  # experiments with their own links, rows and pictures
EXPERIMENTS = ("connections", "at once", "gloo", *SEPARATE)
FULL = {"round_trips": [10, 50, 100], "pools": [1, 2, 4, 8, 16, 32], "size": 512 << 20, "rounds": 3}
QUICK = {"round_trips": [100], "pools": [1, 8], "size": 64 << 20, "rounds": 1}
POOLS_COMPARED = (8, 16)  # at once and striped
POOLS_WITH_GLOO = (1, 8)
KEPT = ("runs", "experiments")  # keys of the results by experiment
GLOO_BYTES_MAX = 128 << 20  # eight seconds of Gloo at 100 ms

# The target of the warm share of the link, from this number of connections, milliseconds of round trip and bytes up.
# Shorter reduces may miss it, because the properties of a link are known only after some of them: four rounds of
# 256 MiB reached 83 % over 8 connections, and 73 % over 16.
WANTED, WANTED_LANES, WANTED_ROUND_TRIP, WANTED_BYTES = 0.8, 8, 100, 512 << 20

# A connection must not start with the metrics of an earlier one with another round trip.
SETTINGS = {"net.ipv4.tcp_no_metrics_save": "1"}


def main() -> int:
    """Measure, print a table, save the numbers, draw pictures."""
    arguments = parse()
    if arguments.rank:
        from .wan_ranks import be_rank

        be_rank(json.loads(arguments.rank))
        return 0
    if reason := reason_against():
        print(f"wan: {reason}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {
        "facts": facts(),
        "rate_bits": arguments.rate * 1e6,
        "loss": arguments.loss,
        "capacity_bits": capacity_bits(),
        **earlier(arguments),
    }
    for name in arguments.only or EXPERIMENTS:
        if name == "gloo" and results["facts"]["versions"]["torch"] is None:
            progress("gloo is left out: torch is not installed")
        else:
            results["experiments"][name] = measure(name, arguments)
            results["runs"][name] = results["facts"]
            keep(results, arguments.json)
    show(results)
    plot(results, arguments.folder)
    return 0


def parse() -> argparse.Namespace:
    """The command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, help="leave the other experiments out")
    parser.add_argument("--round-trips", type=float, nargs="+", help="milliseconds (10 50 100)")
    parser.add_argument("--pools", type=int, nargs="+", help="numbers of connections (1 2 4 8 16 32)")
    parser.add_argument("--size", type=size, help="bytes of the tensor (512M)")
    parser.add_argument("--rounds", type=int, help="rounds that count (3)")
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s of the link, each way (1000)")
    parser.add_argument("--loss", type=float, default=0, help="probability that a packet gets lost (0)")
    parser.add_argument("--idle", type=float, default=1, help="seconds of idleness ahead of a reduce (1)")
    parser.add_argument("--quick", action="store_true", help="a minute: one round trip, fewer pools and bytes")
    parser.add_argument("--json", type=Path, default=RESULTS / "wan.json", help="where the numbers go")
    parser.add_argument("--folder", type=Path, default=Path("build/wan"), help="where pictures go (build/wan)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def earlier(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return earlier results, with their facts, of the experiments that are left out now; over the same links."""
    known = json.loads(arguments.json.read_text()) if arguments.only and arguments.json.exists() else {}
    if (known.get("rate_bits"), known.get("loss")) != (arguments.rate * 1e6, arguments.loss):
        return {"runs": {}, "experiments": {}}
    return {key: {name: what for name, what in known[key].items() if name not in arguments.only} for key in KEPT}


# --- Measuring --------------------------------------------------------------


def measure(experiment: str, arguments: argparse.Namespace) -> Any:
    """Run an experiment; return its results, mostly a row for each contender and round trip."""
    if experiment in SEPARATE:
        return SEPARATE[experiment].measure(arguments.rounds, quick=arguments.quick)
    rows = []
    for milliseconds in arguments.round_trips if experiment != "at once" else [max(arguments.round_trips)]:
        link = Link(arguments.rate * 1e6, milliseconds / 2000, loss=arguments.loss)
        for contenders in fields(experiment, arguments.pools):
            rows += run_field(experiment, contenders, link, arguments)
    return rows


def fields(experiment: str, pools: list[int]) -> list[Contenders]:
    """Return the lists of contenders that take turns. Pools of different sizes do not: each has its own processes."""
    if experiment == "connections":
        return [[(f"pool of {lanes}", STRIPED, lanes)] for lanes in pools]
    if experiment == "at once":
        compared = [lanes for lanes in POOLS_COMPARED if lanes in pools]
        return [[("one striped", STRIPED, lanes), (f"{lanes} at once", AT_ONCE, lanes)] for lanes in compared]
    ours: Contenders = [(f"pool of {lanes}", STRIPED, lanes) for lanes in POOLS_WITH_GLOO if lanes in pools]
    return [[("gloo", GLOO, 1), *ours]]


def run_field(
    experiment: str, contenders: Contenders, link: Link, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Let contenders take turns over a link; return the row of each."""
    nbytes = min(arguments.size, GLOO_BYTES_MAX) if experiment == "gloo" else arguments.size
    with Box(mesh(WORLD, link), settings=SETTINGS) as box:
        plan = {
            "bytes": nbytes,
            "rounds": arguments.rounds,
            "warm_ups": 1,
            "idle_seconds": arguments.idle,
            "contenders": contenders,
            "master_host": box.address(0),
            "port": PORT,
        }
        ranks = run_ranks("benchmarks.wan", plan, WORLD, start=box.spawn, GLOO_SOCKET_IFNAME=DEVICE)
        with closing(ranks):
            (reports,) = ranks
        counted = box.counters()
    packets = sum(row.packets for row in counted.links.values())
    dropped = sum(row.overflowed + row.lost for row in counted.links.values())
    idle, warm = (merge([report[key] for report in reports], nbytes) for key in ("idle", "warm"))
    rows = []
    for name, _, lanes in contenders:
        row: dict[str, Any] = {
            "round_trip_ms": link.delay_s * 2000,
            "name": name,
            "connections": lanes,
            "bytes": nbytes,
            "idle": idle[name],
            "warm": warm[name],
            "idle_share": share(idle[name], link.rate_bits),
            "warm_share": share(warm[name], link.rate_bits),
            "dropped": round(dropped / packets, 5),  # of the packets of all contenders
            "emulator_late_s_max": counted.late_s_max,
        }
        row["wanted"] = goal(row, link.loss)
        rows.append(row)
        progress(f"{experiment}, {row['round_trip_ms']:g} ms, {name}: {100 * row['warm_share']:.0f} % of the link")
    return rows


def share(numbers: dict[str, float], rate_bits: float) -> float:
    """Return the share of the link, by payload."""
    return round(numbers["bytes_per_second"] * 8 / rate_bits, 3)


def goal(row: dict[str, Any], loss: float) -> float | None:
    """Return the target of the warm share of a row; None if it has no target."""
    promised = (
        row["connections"] >= WANTED_LANES
        and row["round_trip_ms"] >= WANTED_ROUND_TRIP
        and row["bytes"] >= WANTED_BYTES
        and loss == 0
    )
    return WANTED if promised else None


# --- Showing ----------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """A table for each experiment."""
    known = results["facts"]
    print(
        f"all-reduce of float32, SUM, {WORLD} peers, {known['machine']['cores']} cores, "
        f"{results['rate_bits'] / 1e6:g} Mbit/s each way, {known['congestion_control']}, commit {known['commit']}"
    )
    print(f"the emulator itself carries {results['capacity_bits'] / 1e9:.1f} Gbit/s")
    heads = "".join(f"{head:>12}" for head in ("after idle", "share", "warm", "share", "dropped"))
    for name, rows in results["experiments"].items():
        if name in SEPARATE:
            SEPARATE[name].show(rows)
            continue
        print(f"\n{name}, {size_text(rows[0]['bytes'])}\n{'round trip':>10}  {'contender':14}{heads}")
        for row in rows:
            cells = [
                time_text(row["idle"]["median_us"]),
                f"{100 * row['idle_share']:.0f} %",
                time_text(row["warm"]["median_us"]),
                f"{100 * row['warm_share']:.0f} %",
                f"{100 * row['dropped']:.2f} %",
            ]
            wanted = row["wanted"]
            short = "" if wanted is None or row["warm_share"] >= wanted else ", short"
            mark = "" if wanted is None else f"  (≥ {100 * wanted:g} %{short})"
            print(f"{row['round_trip_ms']:>7g} ms  {row['name']:14}" + "".join(f"{cell:>12}" for cell in cells) + mark)


def plot(results: dict[str, Any], folder: Path) -> None:
    """A picture for each experiment."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        print("no pictures: matplotlib is not installed", file=sys.stderr)
        return
    folder.mkdir(parents=True, exist_ok=True)
    painters: dict[str, Callable[..., None]] = {
        "connections": plot_connections,
        "at once": partial(plot_bars, title="one striped reduce, and many at once"),
        "gloo": partial(plot_bars, title="beside Gloo"),
    }
    for name, found in results["experiments"].items():
        figure = plt.figure(figsize=(7, 4.2))
        if name in SEPARATE:
            SEPARATE[name].plot(figure, found)
        else:
            panel = figure.subplots()
            painters[name](panel, found)
            panel.set(ylabel="share of the link", ylim=(0, 1))
            panel.axhline(WANTED, color="grey", linewidth=0.8, linestyle=":")
            panel.grid(visible=True, axis="y", alpha=0.3)
            panel.legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(folder / f"{name.replace(' ', '_')}.png", dpi=120)
        plt.close(figure)


def plot_connections(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Share against connections, a line for each round trip: solid when warm, dashed after idleness."""
    for milliseconds in dict.fromkeys(row["round_trip_ms"] for row in rows):
        own = [row for row in rows if row["round_trip_ms"] == milliseconds]
        lanes = [row["connections"] for row in own]
        (line,) = panel.plot(lanes, [row["warm_share"] for row in own], marker="o", label=f"{milliseconds:g} ms, warm")
        idle = [row["idle_share"] for row in own]
        panel.plot(lanes, idle, linestyle="--", color=line.get_color(), label=f"{milliseconds:g} ms, after idleness")
        panel.set_xscale("log", base=2)
        panel.set_xticks(lanes, [str(number) for number in lanes])
    panel.set(title="one striped all-reduce", xlabel="connections")


def plot_bars(panel: Any, rows: list[dict[str, Any]], title: str) -> None:
    """Warm and idle share of each contender, grouped by round trip."""
    bars = range(len(rows))
    panel.bar([bar - 0.2 for bar in bars], [row["idle_share"] for row in rows], 0.4, label="after idleness")
    panel.bar([bar + 0.2 for bar in bars], [row["warm_share"] for row in rows], 0.4, label="warm")
    panel.set_xticks(list(bars), [f"{row['name']}\n{row['round_trip_ms']:g} ms" for row in rows], fontsize="x-small")
    panel.set_title(title)


if __name__ == "__main__":
    sys.exit(main())
