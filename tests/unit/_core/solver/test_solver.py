"""The solver: the best ring for few members, nearly the best for many, and never worse than the present one."""

from __future__ import annotations

import json
from array import array
from functools import cache
from itertools import pairwise, permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bounds import bottleneck_bound, total_bound
from benchmarks.networks import planted, scattered, sites
from pccl._core.solver.solver import EXACT_MAX, MEMBERS_MAX, RATE_MAX, Solution, evaluate, solve
from tests import ROOT

BEST_KNOWN = json.loads((ROOT / "benchmarks" / "best_rings.json").read_text())

COST_MAX = 1 << 40

# ---------------------------------------------------------------------------------------------- what is expected


@cache
def all_rings(count: int) -> Any:
    """Every ring once: member 0 first, the others in every order."""
    return np.array([[0, *rest] for rest in permutations(range(1, count))], dtype=np.int64)


def costs_of(rates: array[float], count: int) -> Any:
    """Compute the costs of the edges by a second implementation of the solver's rule."""
    table = np.array(rates).reshape(count, count)
    with np.errstate(divide="ignore", invalid="ignore"):
        costs = np.floor(np.minimum(table.max() / table * 2**20, COST_MAX) + 0.5)
    return np.where(table > 0, costs, COST_MAX).astype(np.int64)


def brute_force(rates: array[float], count: int) -> tuple[float, int] | None:
    """Return (bottleneck, total in quanta) of the best ring, by trying all rings."""
    rings = all_rings(count)
    steps = rings * count + np.roll(rings, -1, axis=1)
    bottlenecks = np.array(rates)[steps].min(axis=1)
    best = bottlenecks.max()
    if best <= 0:
        return None
    totals = costs_of(rates, count).reshape(-1)[steps].sum(axis=1)
    return float(best), int(totals[bottlenecks == best].min())


def worth(rates: array[float], count: int, order: list[int]) -> tuple[float, int]:
    """Return (bottleneck, total in quanta) of one ring."""
    table, costs = np.array(rates).reshape(count, count), costs_of(rates, count)
    steps = [*pairwise(order), (order[-1], order[0])]
    return min(float(table[step]) for step in steps), sum(int(costs[step]) for step in steps)


def adversaries(random: Random, count: int) -> dict[str, array[float]]:
    """Return tables of rates of every kind that has been difficult for a solver."""

    def table(rate: Any) -> array[float]:
        return array("d", [0.0 if a == b else float(rate(a, b)) for a in range(count) for b in range(count)])

    site = [random.randrange(2) for _ in range(count)]
    bad = random.randrange(count), random.randrange(count)
    lone = random.randrange(count)
    return {
        "random": table(lambda *_: random.uniform(1, 1000)),
        "all alike": table(lambda *_: 7.5),
        "many ties": table(lambda *_: random.choice((1, 2, 3))),
        "many zeros": table(lambda *_: random.choice((0, 0, 1, 2.5))),
        "nearly disconnected": table(lambda *_: random.choice((0, 0, 0, 0, 5))),
        "asymmetric": table(lambda a, b: 1000 if a < b else 1 + random.random()),
        "two sites": table(lambda a, b: 1000 * random.uniform(0.9, 1) if site[a] == site[b] else random.uniform(5, 50)),
        "one bad edge": table(lambda a, b: 0.001 if (a, b) == bad else random.uniform(90, 100)),
        "one slow peer": table(lambda a, b: random.uniform(1, 2) if lone in (a, b) else random.uniform(90, 100)),
        "twenty decades": table(lambda *_: 10 ** random.uniform(-5, 15)),
    }


# ---------------------------------------------------------------------------------------------- few members


@pytest.mark.parametrize(
    ("count", "rounds"), [(2, 100), (3, 100), (4, 100), (5, 100), (6, 100), (7, 60), (8, 25), (9, 8)]
)
def test_few_members_get_the_best_ring(count: int, rounds: int) -> None:
    """Goal: on thousands of tables of every kind, the result equals brute force; None exactly if there is no ring."""
    random = Random(count)
    for _ in range(rounds):
        for name, rates in adversaries(random, count).items():
            found, expected = solve(rates, count), brute_force(rates, count)

            assert (found is None) == (expected is None), name
            if found is not None:
                assert found.exact
                assert found.order[0] == 0
                assert worth(rates, count, found.order) == expected, name
                assert found.bottleneck == expected[0]
                assert evaluate(rates, found.order) == (found.bottleneck, found.total)


@pytest.mark.parametrize("count", [10, 11, 12])
def test_a_dozen_members_by_another_proof(count: int) -> None:
    """Goal: too many for brute force: with a faster bottleneck there is no ring, and the search finds none better."""
    random = Random(count)
    for _ in range(6):
        for name, rates in adversaries(random, count).items():
            found = solve(rates, count)
            searched = solve(rates, count, exact=False, steps=3000)

            if found is None:
                assert searched is None, name
                continue
            assert searched is not None, name
            faster = array("d", [rate if rate > found.bottleneck else 0.0 for rate in rates])
            assert solve(faster, count) is None, name
            assert searched.bottleneck == found.bottleneck, name
            assert found.total <= searched.total <= found.total * 1.02, name


@pytest.mark.parametrize("count", range(4, 10))
def test_the_search_is_good_for_few_members_too(count: int) -> None:
    """Goal: the local search finds the proven optimum of small rings, and claims a proof only if there is one."""
    random = Random(count)
    for _ in range(15):
        for name, rates in adversaries(random, count).items():
            best, searched = solve(rates, count), solve(rates, count, exact=False, steps=500)

            assert (best is None) == (searched is None), name
            if best is not None and searched is not None:
                assert (searched.bottleneck, searched.total) == (best.bottleneck, best.total), name


# ---------------------------------------------------------------------------------------------- many members


@pytest.mark.parametrize("name", sorted(BEST_KNOWN))
def test_many_members_come_close_to_the_best_known(name: str) -> None:
    """Goal: a bounded number of steps comes within a twentieth of what long runs of the benchmark found."""
    sort, count, seed = name.split()
    rates = {"scattered": scattered, "sites": sites}[sort](int(count), int(seed))

    found, known = solve(rates, int(count), seed=5, steps=3000), evaluate(rates, BEST_KNOWN[name])

    assert found is not None
    assert known is not None
    assert found.bottleneck >= known[0] * 0.95
    assert found.total <= known[1] * 1.05


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("network", [scattered, sites])
def test_a_hundred_members_come_close_to_what_nobody_can_beat(network: Any, seed: int) -> None:
    """Goal: the result is compared with independent bounds, not only with our own best results."""
    rates = network(100, seed)

    found = solve(rates, 100, seed=5, steps=3000)

    assert found is not None
    assert found.bottleneck == bottleneck_bound(rates, 100)
    assert 1 <= found.total / total_bound(rates, 100, found.bottleneck) < 1.05


def test_bounds_hold_for_the_best_ring() -> None:
    """Goal: no ring of brute force is better than the bounds, and the bounds are close to the best."""
    random = Random(6)
    gaps = []
    for _ in range(20):
        for name, rates in adversaries(random, 7).items():
            best = solve(rates, 7)
            if best is not None and name != "twenty decades":  # its costs are rounded too coarsely
                assert best.bottleneck <= bottleneck_bound(rates, 7), name
                gaps.append(best.total / total_bound(rates, 7, best.bottleneck))
    assert min(gaps) > 1 - 1e-5
    assert sorted(gaps)[len(gaps) // 2] < 1.05


@pytest.mark.parametrize("decoys", [0, 1, 3, 8])
@pytest.mark.parametrize("count", [13, 40, 100])
def test_a_hidden_ring_is_found(count: int, decoys: int) -> None:
    """Goal: the ring that is best by construction is found and proven, despite faster edges that lead nowhere."""
    for seed in range(3):
        rates, ring = planted(count, seed, decoys)

        found = solve(rates, count, seed=seed, steps=2000)

        assert found is not None
        assert found.exact
        begin = ring.index(0)
        assert found.order == ring[begin:] + ring[:begin]


def test_a_planted_ring_is_the_best() -> None:
    """Goal: brute force confirms that the planted ring is the best."""
    for seed in range(30):
        rates, ring = planted(8, seed, decoys=seed % 5)

        assert worth(rates, 8, ring) == brute_force(rates, 8)


@pytest.mark.parametrize("count", [13, 60])
def test_a_member_that_nobody_reaches_has_no_ring(count: int) -> None:
    """Goal: without an edge out, without an edge in, or across a one-way bridge the answer is None, at once."""
    rates = scattered(count, 0)
    edges = [divmod(at, count) for at in range(count * count)]
    for missing in (
        {edge for edge in edges if edge[1] == 3},
        {edge for edge in edges if edge[0] == 3},
        {edge for edge in edges if edge[0] < 5 <= edge[1]},
        {edge for edge in edges if edge[0] in (3, 4) and edge[1] != 7},  # both have only one edge, to the same target
    ):
        spoiled = array("d", [0.0 if edge in missing else rate for edge, rate in zip(edges, rates, strict=True)])

        assert solve(spoiled, count, steps=10**9) is None


def test_few_edges_among_many_members() -> None:
    """Goal: a ring is found though nine of ten edges are missing, and no missing edge is ever used."""
    random = Random(4)
    for count in (30, 100):
        ring = random.sample(range(count), count)
        kept = {(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)}
        kept |= {(random.randrange(count), random.randrange(count)) for _ in range(count * count // 10)}
        dense = scattered(count, 1)
        rates = array("d", [rate if divmod(at, count) in kept else 0.0 for at, rate in enumerate(dense)])

        found = solve(rates, count, steps=3000)

        assert found is not None
        assert found.bottleneck > 0


# ---------------------------------------------------------------------------------------------- the present ring


def draw_case(seed: int, count: int, choices: tuple[float, ...]) -> tuple[array[float], list[int]]:
    random = Random(seed)
    return array("d", random.choices(choices, k=count * count)), random.sample(range(count), count)


CHOICES = ((0.0, 1.0), (1.0, 2.0, 3.0), (0.0, 0.5, 8.0, 9.0), tuple(float(rate) for rate in range(1, 99)))


@settings(max_examples=200)
@given(st.integers(0, 2**64 - 1), st.integers(2, 24), st.sampled_from(CHOICES))
def test_never_worse_than_the_present_ring(seed: int, count: int, choices: tuple[float, ...]) -> None:
    """Goal: a better ring, or the same ring from its first member on; never a forbidden edge."""
    rates, start = draw_case(seed, count, choices)
    for exact in (True, False):
        found = solve(rates, count, start, seed, steps=40, exact=exact)
        before = evaluate(rates, start)

        if found is None:
            assert before is None
            continue
        assert sorted(found.order) == list(range(count))
        assert found.order[0] == start[0]
        assert (found.bottleneck, found.total) == evaluate(rates, found.order)
        assert found.bottleneck > 0
        if before is not None:
            assert (-found.bottleneck, found.total) <= (-before[0], before[1])
            if (found.bottleneck, found.total) == before:
                assert found.order == start


@pytest.mark.parametrize("count", [5, 50])
def test_a_tie_keeps_the_present_order(count: int) -> None:
    """Goal: a ring is not rewired without gain, and a ring that cannot be improved needs no search."""
    start = Random(0).sample(range(count), count)

    assert solve(array("d", [3.0] * count * count), count, start, steps=10**9) == Solution(
        start,
        3.0,
        pytest.approx(count / 3),  # type: ignore[arg-type]
        exact=True,
    )


def test_the_same_question_has_the_same_answer() -> None:
    """Goal: the same seed and steps give the same ring, which replaying a story needs; other seeds may differ."""
    rates = scattered(60, 3)
    start = list(range(60))

    answers = [solve(rates, 60, start, seed=9, steps=500) for _ in range(3)]

    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(solve(rates, 60, start, seed=seed, steps=50).order) for seed in range(5)}) > 1  # type: ignore[union-attr]


def test_more_steps_are_never_worse() -> None:
    rates = sites(60, 2)
    found = [solve(rates, 60, steps=steps) for steps in (0, 1, 10, 100, 1000)]

    worths = [(-each.bottleneck, each.total) for each in found if each is not None]
    assert worths == sorted(worths, reverse=True)
    assert len(worths) == 5


def test_time_ends_a_search() -> None:
    """Goal: the time limit ends a search with the best ring so far, however many steps are allowed."""
    found = solve(scattered(100, 0), 100, steps=2**62, budget_ns=20_000_000)

    assert found is not None


# ---------------------------------------------------------------------------------------------- what is refused


def test_a_ring_of_one_and_of_two() -> None:
    assert solve(array("d", [0.0]), 1) == Solution([0], float("inf"), 0.0, exact=True)
    assert solve(array("d", [0, 4, 2, 0]), 2, [1, 0]) == Solution([1, 0], 2.0, 0.75, exact=True)
    assert solve(array("d", [0, 4, 0, 0]), 2) is None
    assert evaluate(array("d", [0, 4, 0, 0]), [0, 1]) is None


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), 1e-9, RATE_MAX * 10])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="from member 0 to 2"):
        solve(array("d", [0, 1, rate, 1, 0, 1, 1, 1, 0]), 3)


@pytest.mark.parametrize("start", [[], [0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1], [0, 1, 2, 3]])
def test_what_is_no_ring_is_refused(start: list[int]) -> None:
    with pytest.raises(ValueError, match="names each member"):
        solve(array("d", [1.0] * 9), 3, start)


@pytest.mark.parametrize(("size", "count"), [(0, 0), (3, 2), (9, 2), (4, -2), (1, MEMBERS_MAX + 1)])
def test_what_is_no_table_is_refused(size: int, count: int) -> None:
    with pytest.raises(ValueError, match="members"):
        solve(array("d", [1.0] * size), count)


def test_the_diagonal_means_nothing() -> None:
    rates = scattered(5, 0)
    other = array("d", [float("nan") if at % 6 == 0 else rate for at, rate in enumerate(rates)])

    assert solve(other, 5) == solve(rates, 5)
    assert EXACT_MAX == 12
