"""What a group's directed edges carry, as far as the master knows: rates with their age and their origin.

A rate comes from a **probe**, which has its links to itself and measures one edge, or from **operations**,
which cost nothing extra but tell less. An operation goes around the whole ring and is as slow as its slowest step, so
the rate of an edge in an operation is in general only a lower bound of what the edge can carry:

- If the edge itself was the limit (its source waited for this connection and for nothing else), the rate is a
  measurement. The new value is the mean of this rate and the known one, because one short disturbance must not rewire a
  run; a lasting change is adopted after a few operations.
- Otherwise a rate above the known one raises it. A rate near the known one confirms it, and makes it fresh again. A
  lower rate changes nothing: neither the rate nor its age. An edge that was never measured stays missing:
  otherwise a bound set by another slow link would be taken for its rate.

A failed probe gives a rate of 0: no ring uses that edge until it is measured again. Such a rate expires sooner than
others. Rates are bytes per second. Only edges between members are kept, so there are never more edges than pairs of
members; a late message about a peer that has left is ignored. Part of the master's machine; pure.
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

CONFIRMED = 0.9  # of the known rate: an operation that shares its links with others comes no closer
TRUST = 0.5  # share of a change seen in operations that is adopted at once


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
        self._failed_ns = failed_ns  # how long a failed probe is believed
        self._edges: dict[int, dict[int, EdgeRate]] = {}  # source -> target; a source for each member

    # ------------------------------------------------------------------------------------------ input

    def add(self, peer: int) -> None:
        """Keep the edges of this member from now on, unless there are MEMBERS_MAX members already."""
        if len(self._edges) < MEMBERS_MAX:
            self._edges.setdefault(peer, {})

    def drop(self, peer: int) -> None:
        """Remove all edges from and to a member that is gone."""
        self._edges.pop(peer, None)
        for targets in self._edges.values():
            targets.pop(peer, None)

    def put(self, source: int, target: int, rate: float, now_ns: int) -> bool:
        """Store the rate of a probe, 0 if it failed. Return False if this is not an edge between members."""
        _check_rate(source, target, rate)
        return self._store(source, target, rate, now_ns, PROBE)

    def saw(self, source: int, target: int, rate: float, now_ns: int, *, was_limit: bool) -> bool:
        """Take the rate of an edge in operations. Return True if it was stored."""
        _check_rate(source, target, rate)
        known = self.get(source, target)
        if not rate:
            return False  # nothing was carried; wiring and probes find an edge that cannot carry anything
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

    # ------------------------------------------------------------------------------------------ queries

    def get(self, source: int, target: int) -> EdgeRate | None:
        """Return the rate of an edge, however old; None if it was never measured."""
        return self._edges.get(source, {}).get(target)

    def is_fresh(self, edge: EdgeRate, now_ns: int) -> bool:
        """Whether this rate is still believed."""
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
        """Return the edges between these peers that were never measured, or too long ago."""
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

        An old rate is better than none, so age does not matter here: all edges that could be measured again were.
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
            assert source not in targets, f"peer {source} has an edge to itself"
            assert targets.keys() <= members, f"edges from peer {source} to non-members {targets.keys() - members}"


def is_rate(rate: float) -> bool:
    """Whether an edge can have this rate, in bytes per second; 0 is a probe that failed. False for NaN."""
    return rate == 0 or 1 <= rate <= RATE_MAX


def _check_rate(source: int, target: int, rate: float) -> None:
    if not is_rate(rate):
        raise ValueError(f"the rate from peer {source} to {target} is 0 or 1 to {RATE_MAX:g} bytes/s, not {rate}")
