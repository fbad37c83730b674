"""`wan`, optimised: all-reduce over two sites, on the ring in which peers joined and on the optimised ring.

Hosts 0 and 2 are at one site, 1 and 3 at the other. Links within a site are fast with a short delay, links between
sites slow with a long delay, except for one faster link in each direction, as if one machine of a site had a better
route. Machines of both sites join in turns: 0, 1, 2, 3. That ring crosses the sites with every step, mostly over slow
links. `optimize_topology()` knows nothing of sites; it measures every link and should find the ring that crosses twice,
over both of the faster links.

The prediction for a ring: it moves 2 (n - 1) / n of the tensor over every step, so the slowest step decides; two votes
of a round trip each and a delay for the last block are added. The optimised ring should be faster by at least 80 % of
the prediction. The ranks are those of `topology`.
"""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from typing import Any

from .box import Box, Link
from .facts import size_text, time_text
from .ranks import progress, run_ranks, summarize
from .topology import SETTINGS, all_rings, bottleneck

HOSTS = 4
LANES = 4
PORT = 47_200  # of the master
NEAR = Link(rate_bits=400e6, delay_s=0.0005)
FAR = Link(rate_bits=40e6, delay_s=0.04)
FAR_FASTER = Link(rate_bits=200e6, delay_s=0.04)
FASTER = ((2, 1), (3, 0))  # one in each direction between the sites; both are part of one ring
BYTES, QUICK_BYTES = 32 << 20, 4 << 20
PAYLOAD = 0.965  # of a packet of 1,500 bytes
WORTH = 0.8  # of the predicted ratio
JOINED, OPTIMISED = "as joined", "optimised"

# The position of a host in a picture: a site is a column.
PLACES = {0: (0.0, 1.0), 2: (0.0, 0.0), 1: (1.0, 1.0), 3: (1.0, 0.0)}


def links() -> dict[tuple[int, int], Link]:
    """Return the links between all pairs."""
    found = {}
    for source, target in itertools.permutations(range(HOSTS), 2):
        same_site = source % 2 == target % 2
        found[source, target] = NEAR if same_site else FAR_FASTER if (source, target) in FASTER else FAR
    return found


def predicted_us(ring: list[int], nbytes: int) -> float:
    """Return the predicted time of a reduce over this ring, in microseconds."""
    steps = [links()[step] for step in itertools.pairwise([*ring, ring[0]])]
    moved_bits = 2 * (len(ring) - 1) / len(ring) * nbytes * 8 / PAYLOAD
    delay_s = max(step.delay_s for step in steps)
    return (moved_bits / min(step.rate_bits for step in steps) + 5 * delay_s) * 1e6


# --- Measuring --------------------------------------------------------------


def measure(rounds: int, *, quick: bool) -> dict[str, Any]:
    """Both rings, what the links predict for them, and every link as it is and as it was measured."""
    nbytes, joined = QUICK_BYTES if quick else BYTES, list(range(HOSTS))
    said = run_box(joined, nbytes, rounds)
    group = said[0]["status"]["groups"][0]
    host_of = {rank["peer"]: host for host, rank in enumerate(said)}
    found = [host_of[peer] for peer in group["ring"]]
    rings = [
        ring_row(JOINED, joined, [rank["before"] for rank in said], nbytes),
        ring_row(OPTIMISED, found, [rank["after"] for rank in said], nbytes),
    ]
    before, after = rings
    gain = {
        "measured": round(before["time"]["median_us"] / after["time"]["median_us"], 2),
        "predicted": round(before["predicted_us"] / after["predicted_us"], 2),
    }
    gain["wanted"] = round(WORTH * gain["predicted"], 2)
    progress(f"optimised: {gain['measured']:g} times as fast, {gain['predicted']:g} predicted")
    return {
        "bytes": nbytes,
        "connections": LANES,
        "optimize_seconds": round(max(rank["optimize_seconds"] for rank in said), 2),
        "links": link_rows(group["bandwidths"]["edges"], host_of),
        "rings": rings,
        "best_bottleneck_mbit": max(bottleneck(ring, rates()) for ring in all_rings(HOSTS)),
        "gain": gain,
    }


def run_box(order: list[int], nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Join in this order, optimise and reduce; return the results of all ranks, by host."""
    with Box(links(), settings=SETTINGS) as box:
        plan = {
            "order": order,
            "lanes": LANES,
            "bytes": nbytes,
            "rounds": rounds,
            "optimises": True,
            "master": f"{box.address(0)}:{PORT}",
        }
        with closing(run_ranks("benchmarks.topology", plan, HOSTS, start=box.spawn)) as lines:
            said: list[dict[str, Any]] = next(lines)
    return said


def rates() -> dict[tuple[int, int], float]:
    """Mbit/s of each link."""
    return {pair: link.rate_bits / 1e6 for pair, link in links().items()}


def ring_row(name: str, ring: list[int], times: list[Any], nbytes: int) -> dict[str, Any]:
    """Return the row of one ring: its order, its slowest link, the time of a reduce and the predicted time."""
    return {
        "ring": name,
        "order": ring,
        "bottleneck_mbit": bottleneck(ring, rates()),
        "time": summarize(times, nbytes),
        "predicted_us": round(predicted_us(ring, nbytes)),
    }


def link_rows(edges: list[dict[str, Any]], host_of: dict[int, int]) -> list[dict[str, Any]]:
    """Return the rate of each link, and its measured rate."""
    measured = {(host_of[edge["source"]], host_of[edge["target"]]): edge for edge in edges}
    return [
        {
            "source": source,
            "target": target,
            "mbit": link.rate_bits / 1e6,
            "delay_ms": link.delay_s * 1e3,
            "measured_mbit": round(measured[source, target]["bytes_per_second"] * 8 / 1e6, 1),
            "origin": measured[source, target]["origin"],
        }
        for (source, target), link in links().items()
    ]


# --- Showing ----------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """Print links, rings and the gain."""
    print(f"\noptimised, {size_text(found['bytes'])}, {HOSTS} peers at two sites; Mbit/s, link / measured")
    cells = {(row["source"], row["target"]): f"{row['mbit']:g}/{row['measured_mbit']:.0f}" for row in found["links"]}
    print("      " + "".join(f"{host:>10}" for host in range(HOSTS)))
    for source in range(HOSTS):
        print(f"{source:>4}  " + "".join(f"{cells.get((source, target), '.'):>10}" for target in range(HOSTS)))
    for row in found["rings"]:
        taken, predicted = time_text(row["time"]["median_us"]), time_text(row["predicted_us"])
        print(f"{row['ring']:10} {ring_text(row['order']):18} slowest {row['bottleneck_mbit']:>3g} Mbit/s", end="")
        print(f"{taken:>10}, {predicted} predicted")
    gain, seconds = found["gain"], found["optimize_seconds"]
    short = "" if gain["measured"] >= gain["wanted"] else ", short"
    print(f"optimised in {seconds:.1f} s: {gain['measured']:.2f} times as fast (≥ {gain['wanted']:g}{short}), ", end="")
    print(f"{gain['predicted']:.2f} predicted")


def ring_text(order: list[int]) -> str:
    """A ring, closed."""
    return " → ".join(map(str, [*order, order[0]]))


def plot(figure: Any, found: dict[str, Any]) -> None:
    """Both rings over the two sites, arrows as wide as their links are fast."""
    of_link = {(row["source"], row["target"]): row["mbit"] for row in found["links"]}
    for panel, row in zip(figure.subplots(1, 2), found["rings"], strict=True):
        for source, target in itertools.pairwise([*row["order"], row["order"][0]]):
            _arrow(panel, PLACES[source], PLACES[target], of_link[source, target])
        for host, (x, y) in PLACES.items():
            panel.plot(x, y, marker="o", markersize=22, color="#1f6feb" if x == 0 else "#1a7f37", zorder=3)
            panel.text(x, y, str(host), color="white", ha="center", va="center", weight="bold", zorder=4)
        panel.set_title(f"{row['ring']}: {time_text(row['time']['median_us'])}")
        panel.set(xlim=(-0.35, 1.35), ylim=(-0.3, 1.3), xticks=(0, 1), yticks=())
        panel.set_xticklabels(("one site", "the other"))
        panel.set_frame_on(False)
        panel.tick_params(length=0)


def _arrow(panel: Any, begin: tuple[float, float], end: tuple[float, float], mbit: float) -> None:
    """Draw an arrow with its rate at a third of its length, where the labels of crossing arrows do not overlap."""
    look = {"arrowstyle": "->", "linewidth": math.sqrt(mbit) / 4, "color": "#57606a", "shrinkA": 14, "shrinkB": 14}
    panel.annotate("", xy=end, xytext=begin, arrowprops=look)
    x, y = (near + (far - near) / 3 for near, far in zip(begin, end, strict=True))
    panel.text(x, y, f"{mbit:g} Mbit/s", ha="center", va="center", fontsize="x-small", backgroundcolor="white")
