"""What a group's directed edges carry, as far as the master knows: rates with their age and their origin.

An edge is known by a **probe**, which is alone on its links and measures what it wants to know, or from **operations**,
which cost nothing but tell less. An operation goes around the whole ring and is as slow as its slowest step, so what an
edge carried meanwhile is in general only a lower bound of what it could:

- If the edge itself was the limit (its source waited for this connection and for nothing else), the rate is a
  measurement. It counts half against what was known, because one hiccup must not rewire a run; a lasting change is
  believed after a few operations.
- Otherwise a rate above the known one raises it. A rate near the known one confirms it, and it is fresh again. A rate
  below tells nothing, and changes nothing: neither the rate, nor its age. An edge that was never measured stays
  missing, or a bound set by another slow link would be taken for its rate.

A probe that could not be made is a rate of 0: no way for a ring, until it is forgotten, sooner than other rates.
Rates are bytes per second. Only edges between members are kept, so there are never more than their pairs; what a late
message says of a peer that has left is ignored. Part of the master's machine; pure.
"""

from __future__ import annotations

from array import array

from pccl._core.records import record
from pccl._core.solver.solver import MEMBERS_MAX, RATE_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

    from .ring import Pair

PROBE = "probe"
PASSIVE = "passive"

CONFIRMED = 0.9  # of the known rate: what is carried beside others on the same links comes no closer
TRUST = 0.5  # how much of a change that an operation saw is believed at once


@record
class EdgeRate:
    """What the master knows about the rate of one edge."""

    rate: float  # bytes per second; 0: it could not be measured
    seen_ns: int
    origin: str


class Bandwidths:
    """The edges between the members of one group."""

    __slots__ = ("_edges", "_failed_ns", "_fresh_ns")

    def __init__(self, fresh_ns: int, failed_ns: int) -> None:
        self._fresh_ns = fresh_ns  # how long a rate is believed
        self._failed_ns = failed_ns  # how long a failed probe is
        self._edges: dict[int, dict[int, EdgeRate]] = {}  # source -> target; a source for each member

    # ------------------------------------------------------------------------------------------ what is told

    def add(self, peer: int) -> None:
        """A member: its edges may be kept from now on. Beyond what a ring may have, edges are not kept."""
        if len(self._edges) < MEMBERS_MAX:
            self._edges.setdefault(peer, {})

    def drop(self, peer: int) -> None:
        """A member is gone, and all edges from and to it."""
        self._edges.pop(peer, None)
        for targets in self._edges.values():
            targets.pop(peer, None)

    def put(self, source: int, target: int, rate: float, now_ns: int) -> bool:
        """A probe's result, 0 if it failed; replaces whatever was known. False: not an edge between members."""
        _check_rate(source, target, rate)
        return self._store(source, target, rate, now_ns, PROBE)

    def saw(self, source: int, target: int, rate: float, now_ns: int, *, was_limit: bool) -> bool:
        """What the edge carried in operations. True if that told something."""
        _check_rate(source, target, rate)
        known = self.get(source, target)
        if not rate:
            return False  # nothing was carried; what cannot carry is found by wiring and by probes
        if was_limit:
            believed = rate if known is None or not known.rate else known.rate + TRUST * (rate - known.rate)
            return self._store(source, target, believed, now_ns, PASSIVE)
        if known is None or not known.rate or rate < CONFIRMED * known.rate:
            return False
        return self._store(source, target, max(rate, known.rate), now_ns, PASSIVE)

    def _store(self, source: int, target: int, rate: float, now_ns: int, origin: str) -> bool:
        if source == target or source not in self._edges or target not in self._edges:
            return False
        self._edges[source][target] = EdgeRate(float(rate), now_ns, origin)
        return True

    # ------------------------------------------------------------------------------------------ what is asked

    def get(self, source: int, target: int) -> EdgeRate | None:
        """What is known of an edge, however old; None if it was never measured."""
        return self._edges.get(source, {}).get(target)

    def is_fresh(self, edge: EdgeRate, now_ns: int) -> bool:
        """Whether it is still believed."""
        return now_ns - edge.seen_ns < (self._fresh_ns if edge.rate else self._failed_ns)

    def stale(self, now_ns: int) -> list[Pair]:
        """Edges that were measured too long ago."""
        return [
            (source, target)
            for source, targets in sorted(self._edges.items())
            for target, edge in sorted(targets.items())
            if not self.is_fresh(edge, now_ns)
        ]

    def missing(self, peers: Iterable[int], now_ns: int) -> list[Pair]:
        """Edges between these peers that should be measured: never, or too long ago."""
        among = sorted(peers)
        found = []
        for source in among:
            for target in among:
                edge = self.get(source, target) if source != target else None
                if source != target and (edge is None or not self.is_fresh(edge, now_ns)):
                    found.append((source, target))
        return found

    def matrix(self, peers: Sequence[int], forbidden: Collection[Pair] = ()) -> array[float]:
        """The table that `solver` takes, in the order of these peers; 0 for what is unknown or forbidden.

        An old rate is better than none, so age does not matter here: what could be measured anew, was.
        """
        rates = array("d", bytes(8 * len(peers) ** 2))
        position = {peer: index for index, peer in enumerate(peers)}
        for source, row in position.items():
            for target, edge in self._edges.get(source, {}).items():
                if target in position and (source, target) not in forbidden:
                    rates[row * len(peers) + position[target]] = edge.rate
        return rates

    def report(self, now_ns: int) -> dict[str, Any]:
        """All edges for the status report, as JSON values. Ages are seconds."""
        edges = [
            {
                "source": source,
                "target": target,
                "bytes_per_second": edge.rate,
                "age": round((now_ns - edge.seen_ns) / 1e9, 3),
                "fresh": self.is_fresh(edge, now_ns),
                "origin": edge.origin,
            }
            for source, targets in sorted(self._edges.items())
            for target, edge in sorted(targets.items())
        ]
        members = len(self._edges)
        return {
            "peers": sorted(self._edges),
            "edges": edges,
            "stale": sum(not edge["fresh"] for edge in edges),
            "unknown": members * (members - 1) - len(edges),
        }

    def check(self) -> None:
        """Invariants between two events."""
        members = self._edges.keys()
        assert len(members) <= MEMBERS_MAX, f"{len(members)} members"
        for source, targets in self._edges.items():
            assert source not in targets, f"peer {source} measured the way to itself"
            assert targets.keys() <= members, f"edges from peer {source} to non-members {targets.keys() - members}"


def is_rate(rate: float) -> bool:
    """Whether this can be what an edge carries, in bytes per second; 0 is a probe that failed. False for NaN."""
    return rate == 0 or 1 <= rate <= RATE_MAX


def _check_rate(source: int, target: int, rate: float) -> None:
    if not is_rate(rate):
        raise ValueError(f"the rate from peer {source} to {target} is 0 or 1 to {RATE_MAX:g} bytes/s, not {rate}")
