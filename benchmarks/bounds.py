"""Bounds that no ring can beat, by arguments that are independent of the solver.

A ring connects all members, so its slowest step is not faster than the slowest edge that is needed to connect all
members. A ring also gives every member one target and every target one source. An assignment does this too, possibly in
several cycles, so no ring over edges of some rate costs less than the cheapest assignment over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from array import array

NO_EDGE = 1e9  # costs more than any ring over rates above a millionth


def bottleneck_bound(rates: array[float], count: int) -> float:
    """Return the best possible slowest step: over faster edges alone, a member cannot reach member 0 or be reached."""
    table = np.array(rates).reshape(count, count)
    return min(_widest(table), _widest(table.T))


def _widest(table: Any) -> float:
    widths, reached, bound = table[0].copy(), np.arange(len(table)) == 0, np.inf
    while not reached.all():
        here = int(np.argmax(np.where(reached, -1, widths)))
        reached[here] = True
        bound = min(bound, widths[here])
        widths = np.maximum(widths, np.minimum(widths[here], table[here]))
    return float(bound)


def total_bound(rates: array[float], count: int, slowest: float) -> float:
    """Return a lower bound of the sum of 1 / rate, over rings whose steps are all at least that fast."""
    table = np.array(rates).reshape(count, count)
    with np.errstate(divide="ignore"):
        return _cheapest_assignment(np.where((table >= slowest) & ~np.eye(count, dtype=bool), 1 / table, NO_EDGE))


def _cheapest_assignment(costs: Any) -> float:
    """The Hungarian method: sources are added one by one, each along the cheapest augmenting path."""
    count = len(costs)
    of_source, of_target = np.zeros(count + 1), np.zeros(count + 1)  # potentials; index 0: the source being added
    source_of = np.zeros(count + 1, int)  # numbered from 1; 0: none
    before = np.zeros(count + 1, int)
    for newcomer in range(1, count + 1):
        source_of[0], here = newcomer, 0
        least, done = np.full(count + 1, np.inf), np.zeros(count + 1, bool)
        while source_of[here]:
            done[here] = True
            reduced = costs[source_of[here] - 1] - of_source[source_of[here]] - of_target[1:]
            closer = ~done[1:] & (reduced < least[1:])
            least[1:][closer] = reduced[closer]
            before[1:][closer] = here
            here = int(np.argmin(np.where(done, np.inf, least)[1:])) + 1
            step = least[here]
            of_source[source_of[done]] += step
            of_target[done] -= step
            least[~done] -= step
        while here:
            source_of[here] = source_of[before[here]]
            here = before[here]
    return float(sum(costs[source_of[target] - 1, target - 1] for target in range(1, count + 1)))
