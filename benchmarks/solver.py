"""The quality of the ring that the solver finds in a given time, compared with the best known ring.

Three kinds of networks (`networks`): independent edges, machines at several sites, and a network that hides its best
ring behind faster edges that lead nowhere. The best ring is proven for up to a dozen members and where it was hidden;
otherwise it is the ring that long runs of the same search have found, kept in `best_rings.json`. A long run starts
where the last one ended:

    python -m benchmarks.solver --long 60

A figure is the worst of the seeds: the slowest edge as a share of the best one, and by how much the total cost exceeds
the best. `bounds` are limits that no ring can beat: the distance to them is certain, but they may not be reachable.
`proven in` is the time after which the solver itself knew that there is no better ring, if it did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pccl._core.solver.solver import EXACT_MAX, evaluate, solve

from .bounds import bottleneck_bound, total_bound
from .facts import RESULTS, facts, keep, time_text
from .networks import planted, scattered, sites

if TYPE_CHECKING:
    from array import array

BEST = Path(__file__).parent / "best_rings.json"
SIZES = (8, 12, 20, 50, 100, 200)
SEEDS = (0, 1, 2)
STEPS_MAX = 1 << 62  # time is the bound here
SECOND = 1_000_000_000


def networks(count: int, seed: int) -> dict[str, tuple[array[float], list[int] | None]]:
    """Return one network of each kind, with the best ring where it is known by construction."""
    return {
        "scattered": (scattered(count, seed), None),
        "sites": (sites(count, seed), None),
        "planted": planted(count, seed),
    }


class Known:
    """The best known rings, by kind, size and seed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._orders: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}

    def find(self, name: str, rates: array[float], count: int, long_ns: int) -> list[int]:
        """Return the best known ring, after a search of `long_ns` if that is not 0."""
        if count <= EXACT_MAX:
            found = solve(rates, count)
        elif name not in self._orders or long_ns:
            budget_ns = long_ns or 5 * SECOND
            found = solve(rates, count, self._orders.get(name), time.time_ns() % 1000, STEPS_MAX, budget_ns)
            if found is not None:
                self._orders[name] = found.order
                self._keep()
        else:
            return self._orders[name]
        assert found is not None, f"{name} has no ring"
        return found.order

    def _keep(self) -> None:
        lines = [f" {json.dumps(name)}: {json.dumps(order)}" for name, order in sorted(self._orders.items())]
        self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def quality(rates: array[float], order: list[int], best: list[int]) -> tuple[float, float]:
    """Return the share of the best bottleneck, and the excess of the total cost if the bottleneck is not worse."""
    ours, theirs = evaluate(rates, order), evaluate(rates, best)
    assert ours is not None
    assert theirs is not None
    return ours[0] / theirs[0], ours[1] / theirs[1] - 1 if ours[0] == theirs[0] else 0.0


def measure(rates: array[float], count: int, best: list[int], budget_ns: int) -> dict[str, Any]:
    """Make one search; return its time and the quality of its ring."""
    began = time.perf_counter()
    found = solve(rates, count, seed=7, steps=STEPS_MAX, budget_ns=budget_ns)
    microseconds = (time.perf_counter() - began) * 1e6
    assert found is not None
    bottleneck, above = quality(rates, found.order, best)
    return {
        "us": round(microseconds),
        "proven": found.exact,
        "bottleneck": bottleneck,
        "above": above,
        "bottleneck_of_bound": found.bottleneck / bottleneck_bound(rates, count),
        "above_bound": found.total / total_bound(rates, count, found.bottleneck) - 1,
    }


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of several seeds."""
    return {
        "us": max(row["us"] for row in rows),
        "proven": all(row["proven"] for row in rows),
        "bottleneck": round(min(row["bottleneck"] for row in rows), 6),
        "above": round(max(row["above"] for row in rows), 6),
        "bottleneck_of_bound": round(min(row["bottleneck_of_bound"] for row in rows), 6),
        "above_bound": round(max(row["above_bound"] for row in rows), 6),
    }


def main() -> int:
    """Measure, print a table, save the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.solver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of members")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="networks of each sort and size")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 1.0], help="seconds of a search (0.1 1)")
    parser.add_argument(
        "--long", type=float, default=0, help="first improve the best known rings, for so many seconds each"
    )
    parser.add_argument("--best", type=Path, default=BEST, help="where the best known rings are kept")
    parser.add_argument("--json", type=Path, default=RESULTS / "solver.json", help="where the numbers go")
    arguments = parser.parse_args()
    known = Known(arguments.best)
    results: dict[str, Any] = {"facts": facts(), "sorts": {}}
    for count in arguments.sizes:
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for seed in arguments.seeds:
            for sort, (rates, hidden) in networks(count, seed).items():
                best = hidden or known.find(f"{sort} {count} {seed}", rates, count, int(arguments.long * SECOND))
                for budget in arguments.budgets:
                    row = measure(rates, count, best, int(budget * SECOND))
                    rows.setdefault(sort, {}).setdefault(f"{budget:g}", []).append(row)
        for sort, budgets in rows.items():
            results["sorts"].setdefault(sort, {})[count] = {budget: worst(found) for budget, found in budgets.items()}
    show(results, [f"{budget:g}" for budget in arguments.budgets])
    keep(results, arguments.json)
    return 0


def show(results: dict[str, Any], budgets: list[str]) -> None:
    """Print the table."""
    heads = "".join(f"{'within ' + budget + ' s':>22}" for budget in budgets)
    print(f"{'network':12}{'members':>8}{heads}{'bounds':>20}{'proven in':>12}")
    for sort, sizes in results["sorts"].items():
        for count, cells in sizes.items():
            texts = [f"{cells[budget]['bottleneck']:8.1%}, +{cells[budget]['above']:.2%}" for budget in budgets]
            proven = next((time_text(cells[budget]["us"]) for budget in budgets if cells[budget]["proven"]), "-")
            last = cells[budgets[-1]]
            bounds = f"{last['bottleneck_of_bound']:.1%}, +{last['above_bound']:.2%}"
            print(f"{sort:12}{count:>8}" + "".join(f"{text:>22}" for text in texts) + f"{bounds:>20}{proven:>12}")


if __name__ == "__main__":
    sys.exit(main())
