"""Networks to solve rings over: tables of directed rates, made from a seed. Some hide a ring that is the best.

Rates are megabytes per second, row by row; the diagonal is 0. Shared by tests and benchmarks; nothing is measured here.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def scattered(count: int, seed: int, decades: float = 2.0) -> array[float]:
    """Return independent rates over some decades: no structure to exploit."""
    random = Random(f"scattered {count} {seed}")
    return _table(count, lambda *_: 10 ** random.uniform(3 - decades, 3))


def sites(count: int, seed: int, peers_per_site: int = 8) -> array[float]:
    """Return rates of machines at several sites: fast inside, slow and asymmetric between, limited by each uplink."""
    random = Random(f"sites {count} {seed}")
    site = [random.randrange(max(2, count // peers_per_site)) for _ in range(count)]
    between = {(a, b): random.uniform(20, 300) for a in set(site) for b in set(site)}
    uplink = [random.choice((125.0, 312.0, 1250.0)) for _ in range(count)]
    downlink = [random.choice((125.0, 312.0, 1250.0)) for _ in range(count)]

    def rate(source: int, target: int) -> float:
        way = 2500.0 if site[source] == site[target] else between[site[source], site[target]]
        return min(way, uplink[source], downlink[target]) * random.uniform(0.85, 1.0)

    return _table(count, rate)


def planted(count: int, seed: int, decoys: int = 3) -> tuple[array[float], list[int]]:
    """Return a table of rates that hides the best ring, and this ring.

    Every edge that is neither a step of the ring nor a decoy is slower than every step. Decoys are faster than steps,
    but lead only backwards along the ring. A ring over steps and decoys alone must get from the first member to the
    last, and forwards there are only the steps, one by one; these visit all members, so only the edge back to the first
    is left. So no other ring is as fast, whatever the sums are.
    """
    random = Random(f"planted {count} {seed} {decoys}")
    ring = random.sample(range(count), count)
    rates = _table(count, lambda *_: random.uniform(1, 90))
    for position in range(count):
        rates[ring[position - 1] * count + ring[position]] = random.uniform(100, 120)
        for _ in range(min(decoys, position)):
            back = random.randrange(position)
            if (position, back) != (count - 1, 0):
                rates[ring[position] * count + ring[back]] = random.uniform(120, 1000)
    return rates, ring


def _table(count: int, rate: Callable[[int, int], float]) -> array[float]:
    return array(
        "d", [0.0 if source == target else rate(source, target) for source in range(count) for target in range(count)]
    )
