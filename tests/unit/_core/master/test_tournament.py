"""Probe rounds: every edge once, no peer sends or receives twice in a round, and no round more than needed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl._core.master.tournament import rounds_needed, schedule

EDGES = st.sets(st.tuples(st.integers(1, 14), st.integers(1, 14)).filter(lambda pair: pair[0] != pair[1]))


def check(rounds: list[list[tuple[int, int]]], edges: set[tuple[int, int]]) -> None:
    measured = [edge for probes in rounds for edge in probes]
    assert len(measured) == len(set(measured))
    assert set(measured) == edges
    for probes in rounds:
        assert len({source for source, _ in probes}) == len(probes), "somebody sends to two"
        assert len({target for _, target in probes}) == len(probes), "somebody receives from two"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 16, 33, 64])
def test_all_edges_take_one_round_less_than_there_are_peers(count: int) -> None:
    """Goal: for odd and even n there are n - 1 rounds, and every peer sends and receives in each of them."""
    peers = [7 * index + 3 for index in range(count)]
    edges = {(a, b) for a in peers for b in peers if a != b}

    rounds = schedule(edges)

    check(rounds, edges)
    assert len(rounds) == count - 1
    assert all(len(probes) == count for probes in rounds)


@settings(max_examples=300, deadline=None)
@given(EDGES)
def test_some_edges_take_as_many_rounds_as_the_busiest_peer_has(edges: set[tuple[int, int]]) -> None:
    """Goal: the bound below which no schedule exists is always met."""
    rounds = schedule(edges)

    check(rounds, edges)
    busiest = max((max(sum(edge[side] == peer for edge in edges) for side in (0, 1)) for peer in range(15)), default=0)
    assert len(rounds) == rounds_needed(edges) == busiest
    assert [len(probes) for probes in rounds] == sorted(map(len, rounds), reverse=True)


def test_a_newcomer_is_measured_with_everybody() -> None:
    """Goal: with ninety others, its edges in both directions are measured at the same time, one of each per round."""
    edges = {(99, old) for old in range(1, 91)} | {(old, 99) for old in range(1, 91)}

    rounds = schedule(edges)

    check(rounds, edges)
    assert len(rounds) == 90


def test_a_large_sparse_set() -> None:
    random = Random(1)
    edges = {tuple(random.sample(range(300), 2)) for _ in range(3000)}

    rounds = schedule(edges)  # type: ignore[arg-type]

    check(rounds, edges)  # type: ignore[arg-type]
    assert len(rounds) == rounds_needed(edges)  # type: ignore[arg-type]


def test_the_order_of_the_question_does_not_matter() -> None:
    """Goal: the same set of edges gives the same rounds; an edge that is named twice is measured once."""
    edges = [(a, b) for a in range(9) for b in range(9) if (a * b) % 3 != 1 and a != b]

    assert schedule(edges) == schedule([*reversed(edges), *edges])
    assert schedule([]) == []


def test_nobody_measures_the_way_to_itself() -> None:
    with pytest.raises(ValueError, match="to itself"):
        schedule([(1, 2), (3, 3)])
