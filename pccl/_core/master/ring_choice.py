"""The choice of a group's ring from the rates of its edges, with the reason.

The present ring stays unless the slowest step of another is clearly faster: a new ring costs every lane a connection,
and two measurements of a rate are never equal. Two ring candidates are compared with it: the one that a short search
finds now, and the one that a moonshot has found since the last time. Pure.
"""

from __future__ import annotations

from pccl._core.solver.solver import MEMBERS_MAX, STEPS, evaluate, solve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

MARGIN = 1.05  # of the slowest steps: a smaller gain is noise of the measurement


def choose_ring(
    ring: Sequence[int], rates: array[float], seed: int, found: Sequence[int] | None = None
) -> tuple[list[int] | None, str]:
    """Return the ring to change to, or None, and why. `rates` are in the order of the ring, `found` is a moonshot's."""
    count = len(ring)
    if count < 3:
        return None, "fewer than 3 members have only one ring"
    if count > MEMBERS_MAX:
        return None, f"rings of more than {MEMBERS_MAX} members are not compared"
    present = evaluate(rates, range(count))
    best = solve(rates, count, range(count), seed, STEPS)
    order, worth = (list(range(count)), present) if best is None else (best.order, (best.bottleneck, best.total))
    if found is not None and set(found) == set(ring):
        position = {peer: index for index, peer in enumerate(ring)}
        there = [position[peer] for peer in found]
        value = evaluate(rates, there)
        if is_better(value, worth):
            order, worth = there, value
    if worth is None:
        return None, "no ring of measured edges was found"
    begin = order.index(0)
    chosen = [ring[index] for index in order[begin:] + order[:begin]]
    if present is None:
        return chosen, f"the present ring has a step that could not be measured; this one carries {_name(worth[0])}"
    if worth[0] < MARGIN * present[0]:
        return None, f"its slowest step carries {_name(present[0])}, that of the best one {_name(worth[0])}"
    return chosen, f"its slowest step carries {_name(worth[0])} instead of {_name(present[0])}"


def is_better(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Whether a ring of value `one` is better than a ring of value `other` (see `solver.evaluate`; None: no ring)."""
    if one is None or other is None:
        return one is not None
    return (one[0], -one[1]) > (other[0], -other[1])


def _name(rate: float) -> str:
    return f"{rate / 1e6:.4g} MB/s"
