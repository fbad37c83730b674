"""Deadlocks: found without false alarms, and explained so that the user can fix the program."""

from __future__ import annotations

from random import Random

import pytest

from pccl._core.master.deadlock import (
    BlockingCall,
    describe_missing,
    explain_stuck,
    find_knots,
    find_odd,
    find_stuck,
    name_peers,
)


def waiting(name: str, electorate: str, present: str) -> BlockingCall:
    return BlockingCall(name, frozenset(map(int, electorate)), frozenset(map(int, present)))


@pytest.mark.parametrize(
    ("calls", "stuck"),
    [
        ([], ""),
        # A peer is in no call and may still make the call that is waited for.
        ([waiting("a", "123", "12")], ""),
        # A peer is in no call, but whichever call it makes, these two wait for each other.
        ([waiting("a", "123", "1"), waiting("b", "123", "2")], "12"),
        # All peers wait, each in another call.
        ([waiting("a", "12", "1"), waiting("b", "12", "2")], "12"),
        ([waiting("a", "123", "12"), waiting("b", "123", "3")], "123"),
        # A complete call frees its callers.
        ([waiting("a", "12", "12"), waiting("b", "12", "2")], ""),
        # Two threads of peer 2: one of its calls completes once peer 1 is free, so no peer is stuck.
        ([waiting("a", "12", "12"), waiting("b", "12", "1")], ""),
        # Two groups do not affect each other.
        ([waiting("a", "12", "1"), waiting("b", "12", "2"), waiting("c", "34", "3")], "12"),
        # A chain: peer 3 is free, so c can complete, then b, then a.
        ([waiting("a", "12", "1"), waiting("b", "23", "2")], ""),
        # A circle of three.
        ([waiting("a", "12", "1"), waiting("b", "23", "2"), waiting("c", "31", "3")], "123"),
    ],
)
def test_who_waits_for_ever(calls: list[BlockingCall], stuck: str) -> None:
    """Goal: exactly the peers that can never go on are found, whichever calls other peers still make."""
    assert find_stuck(calls) == set(map(int, stuck))


@pytest.mark.parametrize(
    ("calls", "knots"),
    [
        ([waiting("a", "12", "1"), waiting("b", "12", "2")], ["12"]),
        # Two groups, each with a deadlock of its own.
        (
            [waiting("a", "12", "1"), waiting("b", "12", "2"), waiting("c", "34", "4"), waiting("d", "34", "3")],
            ["12", "34"],
        ),
        # A call of the whole run joins them.
        (
            [
                *(waiting("a", "12", "1"), waiting("b", "12", "2"), waiting("c", "34", "4"), waiting("d", "34", "3")),
                waiting("e", "12345", "5"),
            ],
            ["12345"],
        ),
    ],
)
def test_deadlocks_that_do_not_concern_each_other_are_apart(calls: list[BlockingCall], knots: list[str]) -> None:
    """Goal: a majority in one group says nothing about the peers of another group."""
    assert find_knots(calls, find_stuck(calls)) == [set(map(int, knot)) for knot in knots]


@pytest.mark.parametrize(
    ("calls", "odd"),
    [
        ([waiting("a", "123", "12"), waiting("b", "123", "3")], "3"),
        ([waiting("a", "1234", "1"), waiting("b", "1234", "234")], "1"),
        ([waiting("a", "12", "1"), waiting("b", "12", "2")], ""),
        ([waiting("a", "1234", "12"), waiting("b", "1234", "34")], ""),
        ([waiting("a", "1234", "12"), waiting("b", "1234", "3"), waiting("c", "1234", "4")], ""),
        ([waiting("a", "12345", "123"), waiting("b", "12345", "4"), waiting("c", "12345", "5")], "45"),
        # Peer 3 waits in the call of the majority too, by another thread.
        ([waiting("a", "1234", "123"), waiting("b", "1234", "34")], "4"),
        # Peer 5 is in another group: the majority does not wait for it.
        ([waiting("a", "1234", "123"), waiting("b", "12345", "45")], "4"),
    ],
)
def test_the_majority_of_a_deadlock_is_found(calls: list[BlockingCall], odd: str) -> None:
    """Goal: more than half of the stuck peers in one call; odd are only those that this call waits for."""
    [knot] = find_knots(calls, find_stuck(calls))

    assert set(find_odd(calls, knot)) == set(map(int, odd))


def test_the_reason_of_an_odd_peer_names_both_calls() -> None:
    """Goal: the kicked peer reads where it was, where the majority was, and what to do."""
    calls = [waiting("update_topology", "123", "12"), waiting("all_reduce (tag 5)", "123", "3")]

    assert find_odd(calls, {1, 2, 3}) == {
        3: "it waits in all_reduce (tag 5), and the majority (peers 1, 2) in update_topology: these calls can never "
        "meet. Let all peers make the same blocking calls in the same order."
    }


@pytest.mark.parametrize("seed", range(300))
def test_the_majority_goes_on_without_the_odd_ones(seed: int) -> None:
    """Goal: whatever the calls and groups, fewer than half of a deadlock are odd, and without them it is none."""
    random = Random(seed)
    calls = []
    for number in range(random.randint(2, 5)):
        electorate = frozenset(random.sample(range(8), random.randint(2, 8)))
        present = frozenset(random.sample(sorted(electorate), random.randint(1, len(electorate))))
        calls.append(BlockingCall(f"call {number}", electorate, present))
    for knot in find_knots(calls, find_stuck(calls)):
        odd = find_odd(calls, knot).keys()
        assert 2 * len(odd) < len(knot)
        if odd:
            rest = [BlockingCall(call.name, call.electorate - odd, call.present - odd) for call in calls]
            majority = max(calls, key=lambda call: len(call.present & knot)).present & knot
            assert not find_stuck(rest) & majority


def test_the_explanation_names_calls_peers_and_the_remedy() -> None:
    """Goal: the explanation that every stuck caller gets is enough to fix the program."""
    calls = [waiting("update_topology", "123", "12"), waiting("are_peers_pending", "123", "3")]

    text = explain_stuck(calls, find_stuck(calls))

    assert text.startswith("these calls can never meet: peer 3 in are_peers_pending; peers 1, 2 in update_topology.")
    assert "same blocking calls in the same order" in text


def test_a_call_without_stuck_peers_is_not_named() -> None:
    """Goal: the explanation only names calls of stuck peers."""
    calls = [waiting("a", "12", "1"), waiting("b", "12", "2"), waiting("c", "34", "3")]

    assert "in c" not in explain_stuck(calls, {1, 2})


def test_missing_peers_are_described_by_what_they_do() -> None:
    """Goal: a warning names the missing peers and the calls that they are in."""
    votes = {"update_topology": {1: None}, "are_peers_pending": {2: None}}

    assert describe_missing(votes, [2, 3]) == "peer 2 (in are_peers_pending), peer 3 (in no call)"
    assert describe_missing(votes, []) == "nobody"


def test_names_stay_readable_in_a_large_run() -> None:
    """Goal: a message about a hundred peers still fits a line."""
    assert name_peers([4]) == "peer 4"
    assert name_peers([1, 2]) == "peers 1, 2"
    assert name_peers(list(range(1, 101))) == "peers 1, 2, 3, 4, 5, 6, 7, 8 and 92 more"


def test_a_thread_that_computes_may_still_call() -> None:
    """Goal: no false alarm: peer 1 waits in one thread, and its other thread may make the call that 2 and 3 wait in."""
    calls = [waiting("are_peers_pending", "123", "1"), waiting("all_reduce", "123", "23")]

    assert find_stuck(calls) == {1, 2, 3}
    assert find_stuck(calls, {1}) == set()
