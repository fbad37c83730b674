"""Rings that avoid pairs that cannot connect: one is found if it exists, and a legal ring is kept."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from pccl._core.master.ring import EXHAUSTIVE_MAX, choose_victim, find_ring, is_legal, steps_of


def exists(members: list[int], forbidden: set[tuple[int, int]]) -> bool:
    """Brute force: whether any order of these members is legal."""
    first, *rest = members
    return any(is_legal([first, *order], forbidden) for order in permutations(rest))


def random_pairs(random: Random, members: list[int], share: float) -> set[tuple[int, int]]:
    return {(a, b) for a in members for b in members if a != b and random.random() < share}


def test_steps_go_round() -> None:
    """Goal: each member appears once as source and once as target; a ring of one has no step."""
    assert steps_of([]) == []
    assert steps_of([5]) == []
    assert steps_of([5, 6]) == [(6, 5), (5, 6)]
    assert steps_of([1, 2, 3]) == [(3, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("count", range(1, 8))
def test_a_ring_is_found_exactly_when_there_is_one(count: int) -> None:
    """Goal: for small groups the answer equals brute force, on thousands of random sets of forbidden pairs."""
    random = Random(count)
    members = [10 * index for index in range(1, count + 1)]
    for _ in range(60 if count == 7 else 500):
        forbidden = random_pairs(random, members, random.choice((0.1, 0.3, 0.5, 0.7)))

        ring = find_ring(members, forbidden)

        assert (ring is not None) == exists(members, forbidden), forbidden
        if ring is not None:
            assert sorted(ring) == members
            assert is_legal(ring, forbidden)


def test_a_legal_order_is_kept() -> None:
    """Goal: no connection changes without need."""
    assert find_ring([3, 1, 2], {(1, 3), (7, 8)}) == [3, 1, 2]


def test_it_is_deterministic() -> None:
    """Goal: the same ring and the same marked pairs give the same answer; replaying a story needs this."""
    members = list(range(1, 11))
    forbidden = random_pairs(Random(5), members, 0.3)

    assert find_ring(members, forbidden) == find_ring(list(members), set(forbidden))


@pytest.mark.parametrize("count", [EXHAUSTIVE_MAX + 1, 30, 100])
def test_large_rings_go_around_some_pairs(count: int) -> None:
    """Goal: with the few dead pairs of a real network a ring is found, and most of the old ring is kept."""
    members = list(range(1, count + 1))
    random = Random(count)
    for dead in (1, 3, 10):
        forbidden = {(members[i], members[(i + 1) % count]) for i in random.sample(range(count), dead)}
        forbidden |= {tuple(random.sample(members, 2)) for _ in range(dead)}

        ring = find_ring(members, forbidden)

        assert ring is not None
        assert sorted(ring) == members
        assert is_legal(ring, forbidden)
        kept = len(set(steps_of(ring)) & set(steps_of(members)))
        assert kept >= count - 4 * dead, f"{kept} of {count} steps kept around {dead} dead pairs"


def test_a_peer_that_reaches_nobody_has_no_ring() -> None:
    """Goal: also for a large group the search ends in bounded time without a ring."""
    for count in (5, 40):
        members = list(range(1, count + 1))
        assert find_ring(members, {(3, other) for other in members}) is None


def test_who_has_to_go() -> None:
    """Goal: a silent peer, else a newcomer if that is enough, else the peer with most dead pairs, or the youngest."""
    order = [1, 2, 3, 4]
    dead = {(1, 2), (2, 3)}

    assert choose_victim(order, set(), dead, set()) == 2
    assert choose_victim(order, {3}, dead, set()) == 3, "a guilty newcomer before a guiltier veteran"
    assert choose_victim(order, {4}, dead, set()) == 4, "an innocent newcomer before a veteran"
    assert choose_victim(order, {3, 4}, dead, set()) == 3, "the guilty one of two newcomers"
    assert choose_victim(order, {3}, dead, {1}) == 1, "who fell silent before anybody else"
    assert choose_victim(order, set(), dead, {4}) == 2, "silence alone is no guilt"
    assert choose_victim(order, set(), {(1, 2), (3, 4)}, set()) == 4, "the youngest of equals"
    assert choose_victim(order, set(), {(7, 8)}, set()) == 4, "dead pairs of others do not count"


def test_the_larger_set_goes_on() -> None:
    """Goal: a member that three newcomers cannot reach goes, because without it they have a ring; none of them goes."""
    dead = {(newcomer, 1) for newcomer in (2, 3, 4)}

    assert choose_victim([1, 2, 3, 4], {2, 3, 4}, dead, set()) == 1
    crowd = list(range(1, 30))
    assert choose_victim(crowd, set(crowd[1:]), {(newcomer, 1) for newcomer in crowd[1:]}, set()) == 1


def test_a_living_peer_does_not_pay_for_the_dead() -> None:
    """Goal: a peer that cannot reach two silent neighbours stays, though it has most dead pairs."""
    assert choose_victim([1, 2, 3], set(), {(2, 1), (2, 3)}, {1, 3}) in (1, 3)
