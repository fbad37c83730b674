"""The master's edge rates: probes replace them, reduces raise or confirm them, and lost peers are removed."""

from __future__ import annotations

import json
from array import array
from itertools import pairwise
from random import Random

import pytest

from pccl._core.master.bandwidths import CONFIRMED, PASSIVE, PROBE, Bandwidths, EdgeRate
from pccl._core.solver.solver import MEMBERS_MAX, RATE_MAX, solve

SECOND = 1_000_000_000
FRESH, FAILED = 600 * SECOND, 60 * SECOND


@pytest.fixture
def known() -> Bandwidths:
    """Three members, one edge of which was probed at second 100."""
    bandwidths = Bandwidths(FRESH, FAILED)
    for peer in (3, 1, 2):
        bandwidths.add(peer)
    assert bandwidths.put(1, 2, 1000, 100 * SECOND)
    return bandwidths


def test_an_edge_has_one_direction(known: Bandwidths) -> None:
    assert known.get(1, 2) == EdgeRate(1000.0, 100 * SECOND, PROBE)
    assert known.get(2, 1) is None


def test_a_probe_replaces_what_was_known(known: Bandwidths) -> None:
    known.saw(1, 2, 5000, 200 * SECOND, was_limit=False)

    assert known.put(1, 2, 10, 201 * SECOND)
    assert known.get(1, 2) == EdgeRate(10.0, 201 * SECOND, PROBE)


def test_what_is_missing_is_unknown_or_old(known: Bandwidths) -> None:
    """Goal: an edge is measured again when it was measured too long ago, a failed one sooner."""
    known.put(2, 3, 0, 100 * SECOND)
    unknown = [(1, 3), (2, 1), (3, 1), (3, 2)]

    assert known.missing([2, 3, 1], 159 * SECOND) == unknown
    assert known.missing([2, 3, 1], 160 * SECOND) == sorted([*unknown, (2, 3)])
    assert known.missing([1, 2], 700 * SECOND) == [(1, 2), (2, 1)]
    assert known.missing([1], 0) == []
    assert known.stale(159 * SECOND) == []
    assert known.stale(160 * SECOND) == [(2, 3)]
    assert known.stale(700 * SECOND) == [(1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("rate", "was_limit", "told", "expected"),
    [
        (100, False, False, EdgeRate(1000.0, 100 * SECOND, PROBE)),  # slowed down by another edge
        (1000 * CONFIRMED - 1, False, False, EdgeRate(1000.0, 100 * SECOND, PROBE)),
        (1000 * CONFIRMED, False, True, EdgeRate(1000.0, 500 * SECOND, PASSIVE)),  # confirms the old rate
        (3000, False, True, EdgeRate(3000.0, 500 * SECOND, PASSIVE)),  # faster than known
        (100, True, True, EdgeRate(550.0, 500 * SECOND, PASSIVE)),  # slow, and the edge itself was the limit
        (3000, True, True, EdgeRate(2000.0, 500 * SECOND, PASSIVE)),
        (0, True, False, EdgeRate(1000.0, 100 * SECOND, PROBE)),
        (0, False, False, EdgeRate(1000.0, 100 * SECOND, PROBE)),
    ],
)
def test_operations_tell_what_they_can_know(
    known: Bandwidths, rate: float, was_limit: bool, told: bool, expected: EdgeRate
) -> None:
    """Goal: a lower bound raises or confirms a rate; only the rate of an edge that was the limit itself is lowered."""
    assert known.saw(1, 2, rate, 500 * SECOND, was_limit=was_limit) == told
    assert known.get(1, 2) == expected


def test_a_lasting_change_is_believed(known: Bandwidths) -> None:
    rates = []
    for at in range(10):
        known.saw(1, 2, 10, at * SECOND, was_limit=True)
        rates.append(known.get(1, 2).rate)  # type: ignore[union-attr]

    assert all(later < earlier for earlier, later in pairwise(rates))
    assert rates[-1] < 12


def test_a_bound_is_no_measurement(known: Bandwidths) -> None:
    """Goal: an edge that only ever waited for others must still be probed, and so must one whose probe failed."""
    known.put(3, 1, 0, 100 * SECOND)

    assert not known.saw(2, 3, 50, 200 * SECOND, was_limit=False)
    assert not known.saw(3, 1, 50, 200 * SECOND, was_limit=False)
    assert (2, 3) in known.missing([2, 3], 200 * SECOND)
    assert known.saw(2, 3, 50, 200 * SECOND, was_limit=True)
    assert known.saw(3, 1, 50, 200 * SECOND, was_limit=True)
    assert (2, 3) not in known.missing([2, 3], 200 * SECOND)
    assert known.get(3, 1) == EdgeRate(50.0, 200 * SECOND, PASSIVE)


def test_who_is_gone_is_forgotten(known: Bandwidths) -> None:
    """Goal: row and column are removed, late reports are ignored, and a new peer with the same id starts empty."""
    known.put(2, 1, 5, 0)
    known.put(2, 3, 5, 0)
    known.put(3, 2, 5, 0)
    known.drop(2)
    known.drop(77)

    assert not known.put(1, 2, 10, 0)
    assert not known.saw(2, 3, 10, 0, was_limit=True)
    assert known.report(0)["edges"] == []
    known.add(2)
    assert known.get(1, 2) is None
    known.check()


def test_strangers_and_selves_have_no_edges(known: Bandwidths) -> None:
    assert not known.put(1, 9, 10, 0)
    assert not known.put(9, 1, 10, 0)
    assert not known.put(1, 1, 10, 0)
    known.check()


@pytest.mark.parametrize("rate", [-1, 0.5, float("nan"), float("inf"), RATE_MAX * 2])
def test_what_is_no_rate_is_refused(known: Bandwidths, rate: float) -> None:
    with pytest.raises(ValueError, match="from peer 1 to 2"):
        known.put(1, 2, rate, 0)
    with pytest.raises(ValueError, match="from peer 1 to 2"):
        known.saw(1, 2, rate, 0, was_limit=True)
    assert known.get(1, 2) == EdgeRate(1000.0, 100 * SECOND, PROBE)


def test_the_table_is_in_the_order_of_the_ring(known: Bandwidths) -> None:
    """Goal: rows are sources in the given order; unknown and forbidden edges have no rate."""
    known.put(2, 3, 7, 0)
    known.put(3, 1, 8, 0)

    assert known.matrix([3, 1, 2]) == array("d", [0, 8, 0, 0, 0, 1000, 7, 0, 0])
    assert known.matrix([3, 1, 2], {(1, 2)}) == array("d", [0, 8, 0, 0, 0, 0, 7, 0, 0])
    assert known.matrix([1]) == array("d", [0])
    assert known.matrix([]) == array("d")
    found = solve(known.matrix([1, 3, 2]), 3)
    assert found is not None
    assert found.order == [0, 2, 1]


def test_it_is_bounded() -> None:
    """Goal: with any number of peers, no more edges are kept than the solver takes."""
    bandwidths = Bandwidths(FRESH, FAILED)
    for peer in range(MEMBERS_MAX + 50):
        bandwidths.add(peer)

    bandwidths.check()
    assert not bandwidths.put(0, MEMBERS_MAX + 1, 10, 0)


def test_people_and_programs_can_read_it(known: Bandwidths) -> None:
    known.put(2, 1, 0, 90 * SECOND)
    described = known.report(160 * SECOND)

    assert json.loads(json.dumps(described)) == described
    assert described["peers"] == [1, 2, 3]
    assert described["stale"] == 1
    assert described["unknown"] == 4
    assert described["edges"] == [
        {"source": 1, "target": 2, "bytes_per_second": 1000.0, "age": 60.0, "fresh": True, "origin": PROBE},
        {"source": 2, "target": 1, "bytes_per_second": 0.0, "age": 70.0, "fresh": False, "origin": PROBE},
    ]


def test_anything_may_be_said_in_any_order() -> None:
    """Goal: after a few thousand random changes the invariants hold, and the solver accepts the table."""
    random = Random(8)
    bandwidths = Bandwidths(FRESH, FAILED)
    for at in range(4000):
        source, target, rate = random.randrange(12), random.randrange(12), random.choice((0, 1, 50.5, 1e9, 1e12))
        word = random.randrange(5)
        if word == 0:
            bandwidths.add(source)
        elif word == 1 and random.random() < 0.2:
            bandwidths.drop(source)
        elif word == 2:
            bandwidths.put(source, target, rate, at * SECOND)
        else:
            bandwidths.saw(source, target, rate, at * SECOND, was_limit=word == 3)
        bandwidths.check()
    peers = bandwidths.report(0)["peers"]

    solve(bandwidths.matrix(peers), len(peers))
