"""optimize_topology at the master: probe, solve, wire and answer, and the loss of a peer in each of these phases."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import BeginMoonshot, CancelMoonshot, MoonshotFound, PeerWent
from pccl._core.master.optimizer import IDLE
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import Log

from .master_harness import INVALID_USAGE, SECOND, MasterHarness, failed, is_sent, of, sent

OPTIMIZE = "optimize_topology"
Rates = dict[tuple[int, int], int]


def vote(harness: MasterHarness, *peers: int, call: int = 7) -> list[Any]:
    return [action for peer in peers for action in harness.say(peer, m.VoteOptimize(call))]


def probes(actions: list[Any]) -> dict[int, m.Probe]:
    return sent(actions, m.Probe)


def measure(harness: MasterHarness, actions: list[Any], rates: Rates, usual: int = 100) -> list[Any]:
    """Report every probe that was ordered, round after round; return what follows from the last report."""
    orders = probes(actions)
    while orders:
        actions = []
        for peer, order in sorted(orders.items()):
            if peer in harness.state.members.peers:
                rate = rates.get((peer, order.target), usual)
                actions += harness.say(peer, m.Probed(order.round, order.target, rate, "" if rate else "refused"))
        orders = probes(actions)
    return actions


def answered(actions: list[Any]) -> set[int]:
    return set(sent(actions, m.OptimizeDone))


def complete(harness: MasterHarness, actions: list[Any], rates: Rates, usual: int = 100) -> list[Any]:
    """Report all probes and wire the new ring; return all actions."""
    after = measure(harness, actions, rates, usual)
    return after + harness.wire(after)


# The ring 1-2-3-4 has slow steps; 1-3-2-4 has none.
SLOW: Rates = {(1, 2): 10, (3, 4): 10}


def test_an_optimisation_measures_solves_wires_and_answers() -> None:
    """Goal: nothing before the last vote, every edge once, the better ring, one answer with the world's numbers."""
    harness = of(1, 2, 3, 4)
    assert vote(harness, 1, 2, 3) == []
    first = vote(harness, 4)

    assert {peer: order.target for peer, order in probes(first).items()} == {1: 2, 2: 3, 3: 4, 4: 1}
    assert probes(first)[1] == m.Probe(1, 2, 1, 1000, 1002, "host2")
    after = measure(harness, first, SLOW)
    assert not answered(after)
    ring = harness.state.members.groups[0].ring
    assert all((source, target) not in SLOW for source, target in zip(ring, ring[1:] + ring[:1], strict=True))
    done = harness.wire(after)
    epoch = harness.state.members.groups[0].epoch
    assert sent(done, m.OptimizeDone) == {peer: m.OptimizeDone(7, 2, epoch, 4, 4, 1, 4) for peer in (1, 2, 3, 4)}
    assert harness.state.optimizer.probe_round == 4
    assert harness.state.optimizer.phase == IDLE


def test_fresh_edges_are_not_measured_again() -> None:
    """Goal: a second optimisation is only a vote, until the rates are too old."""
    harness = of(1, 2, 3)
    complete(harness, vote(harness, 1, 2, 3), {})

    assert answered(vote(harness, 1, 2, 3)) == {1, 2, 3}
    harness.pass_time(601)
    assert len(probes(vote(harness, 1, 2, 3))) == 3


def test_a_ring_that_is_hardly_better_is_not_taken() -> None:
    """Goal: measurement noise does not rewire a ring."""
    harness = of(1, 2, 3, 4)
    before = list(harness.state.members.groups[0].ring)
    after = measure(harness, vote(harness, 1, 2, 3, 4), dict.fromkeys(SLOW, 96))

    assert answered(after) == {1, 2, 3, 4}
    assert harness.state.members.groups[0].ring == before
    assert not sent(after, m.RingOrder)


def test_an_edge_that_fails_is_gone_around_and_forgiven() -> None:
    """Goal: an edge that cannot be measured is not used, and is probed again sooner than other edges."""
    harness = of(1, 2, 3)
    done = complete(harness, vote(harness, 1, 2, 3), {(1, 2): 0})

    assert answered(done) == {1, 2, 3}
    assert harness.state.members.groups[0].ring in ([1, 3, 2], [3, 2, 1], [2, 1, 3])
    assert any(isinstance(action, Log) and "not measured" in action.line for action in measure_log(harness))
    harness.pass_time(61)
    assert list(probes(vote(harness, 1, 2, 3))) == [1]


def measure_log(harness: MasterHarness) -> list[Any]:
    return [action for _, _, actions in harness.state.story for action in actions]


def test_no_ring_keeps_the_present_one() -> None:
    """Goal: without any measured ring there is still a ring."""
    harness = of(1, 2, 3)
    after = measure(harness, vote(harness, 1, 2, 3), {}, usual=0)

    assert answered(after) == {1, 2, 3}
    assert harness.state.members.groups[0].ring == [1, 2, 3]


def test_rounds_per_call_have_a_bound_and_the_rest_comes_next_time() -> None:
    """Goal: a call of many peers ends in bounded time; the steps of the present ring are known after the first."""
    harness = of(1, 2, 3, 4, 5, probe_rounds=2)
    after = complete(harness, vote(harness, 1, 2, 3, 4, 5), {})

    assert answered(after) == {1, 2, 3, 4, 5}
    assert harness.state.optimizer.probe_round == 2
    bandwidths = harness.state.members.groups[0].bandwidths
    assert all(bandwidths.get(*edge) is not None for edge in harness.state.members.groups[0].edges)
    assert len(bandwidths.missing([1, 2, 3, 4, 5], harness.now_ns)) == 10
    complete(harness, vote(harness, 1, 2, 3, 4, 5), {})
    assert not bandwidths.missing([1, 2, 3, 4, 5], harness.now_ns)


def test_groups_go_beside_each_other_and_are_answered_together() -> None:
    """Goal: each group measures its own edges; a group of one has nothing to do; all groups are answered together."""
    harness = of(1, 2)
    harness.admit(3, 4, 5, group=1)
    harness.admit(6, group=2)
    first = vote(harness, 1, 2, 3, 4, 5, 6)

    assert set(probes(first)) == {1, 3, 4, 5}, "of two peers, one measures at a time"
    of_one = [action for action in first if not is_sent(action, m.Probe) or action.conn in (1, 2)]
    assert not answered(measure(harness, of_one, {}))
    others = [action for action in first if is_sent(action, m.Probe) and action.conn in (3, 4, 5)]
    assert answered(complete(harness, others, {})) == {1, 2, 3, 4, 5, 6}


def test_alone_there_is_nothing_to_optimise() -> None:
    """Goal: a single peer gets an error that says so, and may go on."""
    harness = of(1)

    assert failed(vote(harness, 1))[1].result == INVALID_USAGE
    assert failed(vote(harness, 1, call=8))[1].call == 8


def test_two_groups_of_one_are_a_world() -> None:
    """Goal: the run has two peers, so the call is legal, though no ring can be better."""
    harness = of(1)
    harness.admit(2, group=1)

    assert answered(vote(harness, 1, 2)) == {1, 2}


def test_a_vote_waits_for_wiring() -> None:
    """Goal: nothing is measured while a ring is being wired."""
    harness = of(1, 2, 3)
    wires = harness.feed(PeerWent(3, "died"))
    assert vote(harness, 1, 2) == []

    assert set(probes(harness.wire(wires))) == {1}


@pytest.mark.parametrize("phase", ["vote", "probing", "last report", "adopting"])
def test_a_loss_in_any_phase_disturbs_nobody(phase: str) -> None:
    """Goal: the survivors measure the remaining edges, are wired and answered, and do not wait for the lost peer."""
    harness = of(1, 2, 3, 4)
    actions: list[Any] = vote(harness, 1, 2, 4)
    if phase != "vote":
        actions = vote(harness, 3)
    if phase == "last report":
        orders = probes(actions)
        while harness.state.optimizer.probe_round < 3:
            actions = [a for p, o in orders.items() for a in harness.say(p, m.Probed(o.round, o.target, 100, ""))]
            orders = probes(actions)
        for peer in (1, 2, 4):
            harness.say(peer, m.Probed(orders[peer].round, orders[peer].target, 100, ""))
        actions = []
    if phase == "adopting":
        actions = measure(harness, actions, SLOW)
        assert sent(actions, m.RingOrder)
    lost = harness.feed(PeerWent(3, "died"))
    follow = harness.wire(lost)
    after = complete(harness, [*(a for a in actions if is_sent(a, m.Probe)), *lost, *follow], {})

    assert answered(lost + follow + after) == {1, 2, 4}
    assert sorted(harness.state.members.groups[0].ring) == [1, 2, 4]
    assert 3 not in harness.state.members.groups[0].bandwidths.report(harness.now_ns)["peers"]


def test_a_round_without_a_report_ends_at_its_deadline() -> None:
    """Goal: a peer that never reports does not block the others; its edge counts as failed."""
    harness = of(1, 2, 3)
    first = probes(vote(harness, 1, 2, 3))
    for peer in (1, 2):
        harness.say(peer, m.Probed(first[peer].round, first[peer].target, 100, ""))
    assert not probes(harness.pass_time(6))

    second = harness.pass_time(2)
    assert set(probes(second)) == {1, 2, 3}
    edge = harness.state.members.groups[0].bandwidths.get(3, 1)
    assert edge is not None
    assert edge.rate == 0
    assert harness.say(3, m.Probed(first[3].round, first[3].target, 100, "")) == [], "too late"
    assert harness.state.members.groups[0].bandwidths.get(3, 1) == edge


def test_who_gives_up_is_not_answered_but_measures_on() -> None:
    """Goal: a caller that withdrew gets no answer and may make other calls; the others get theirs."""
    harness = of(1, 2, 3)
    first = vote(harness, 1, 2, 3)
    assert harness.say(1, m.Withdraw(7)) == []
    assert harness.reduce(1, 5) == []

    assert answered(complete(harness, first, {})) == {2, 3}
    assert 1 in harness.state.members.accepted


def test_nobody_is_left_who_waits() -> None:
    """Goal: when all peers have given up, the optimisation ends, and the next one starts from the beginning."""
    harness = of(1, 2)
    first = vote(harness, 1, 2)
    harness.say(1, m.Withdraw(7))
    harness.say(2, m.Withdraw(7))

    assert harness.state.optimizer.phase == IDLE
    assert measure(harness, first, {}) == []
    assert set(probes(vote(harness, 1, 2, call=8))) == {1}


def test_a_topology_round_waits_for_the_optimisation() -> None:
    """Goal: no newcomer is admitted into a ring that is being optimised; the two kinds of votes exclude each other."""
    harness = of(1, 2)
    first = vote(harness, 1, 2)
    harness.come(3)
    harness.say(1, m.Withdraw(7))
    harness.say(1, m.VoteTopology(8, 0))
    done = complete(harness, first, {})
    assert answered(done) == {2}

    assert sent(harness.say(2, m.VoteTopology(8, 0)), m.RingOrder)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (m.VoteTopology(1, 0), m.VoteOptimize(2)),
        (m.VoteOptimize(1), m.VoteTopology(2, 0)),
        (m.VoteOptimize(1), m.VoteOptimize(2)),
    ],
)
def test_two_votes_of_one_peer_cost_it_its_membership(first: Any, second: Any) -> None:
    """Goal: a peer in one of the calls cannot be in the other."""
    harness = of(1, 2)
    harness.say(1, first)

    assert set(sent(harness.say(1, second), m.Kick)) == {1}


def test_a_second_vote_while_edges_are_measured_is_named_by_its_call() -> None:
    """Goal: the reason says which call the peer is in, which is not a vote on the topology."""
    harness = of(1, 2)
    vote(harness, 1, 2)

    assert f"while it is in {OPTIMIZE}" in sent(harness.say(1, m.VoteOptimize(2)), m.Kick)[1].reason


def test_a_vote_beside_a_reduce_or_a_sync_costs_the_membership() -> None:
    """Goal: the same rule as for update_topology, in both directions."""
    for prepare in (lambda harness: harness.reduce(1, 5), lambda harness: harness.sync(1, 1, "a")):
        harness = of(1, 2)
        prepare(harness)
        assert set(sent(vote(harness, 1), m.Kick)) == {1}
        harness = of(1, 2)
        vote(harness, 1)
        assert set(sent(prepare(harness), m.Kick)) == {1}
        harness = of(1, 2)
        vote(harness, 1, 2)
        assert set(sent(prepare(harness), m.Kick)) == {1}, "while it is measured"


def test_a_rate_that_nothing_can_carry_costs_the_membership() -> None:
    """Goal: numbers of peers are checked before they are believed."""
    harness = of(1, 2)
    order = probes(vote(harness, 1, 2))[1]

    assert set(sent(harness.say(1, m.Probed(order.round, 2, (1 << 64) - 1, "")), m.Kick)) == {1}


def test_calls_that_never_meet_are_explained() -> None:
    """Goal: a peer in optimize_topology and one in update_topology would wait for ever, and are told why."""
    harness = of(1, 2)
    vote(harness, 1)
    harness.say(2, m.VoteTopology(3, 0))
    stuck = failed(harness.pass_time(5))

    assert {peer: failure.result for peer, failure in stuck.items()} == {1: INVALID_USAGE, 2: INVALID_USAGE}
    assert OPTIMIZE in stuck[1].reason


def test_a_long_vote_names_who_is_missing() -> None:
    harness = of(1, 2)
    vote(harness, 1)

    assert sent(harness.pass_time(6), m.Notice)[1].line.startswith(f"{OPTIMIZE} has waited 5 s for peer 2")


def test_beats_tell_what_reduces_have_shown() -> None:
    """Goal: passive rates are kept for edges of the ring; those of an old ring are ignored."""
    harness = of(1, 2, 3)
    harness.say(2, m.Beat(0, 0, 0, 1, 5000, True))
    harness.say(3, m.Beat(0, 0, 0, 1, 5000, True))

    bandwidths = harness.state.members.groups[0].bandwidths
    assert [(e["source"], e["target"], e["origin"]) for e in bandwidths.report(0)["edges"]] == [(1, 2, "passive")]
    assert set(sent(harness.say(2, m.Beat(0, 0, 0, 1, 0, True)), m.Kick)) == {2}
    assert bandwidths.report(0)["edges"] == []


def moonshot_harness() -> tuple[MasterHarness, list[Any]]:
    harness = of(*range(1, 15))
    return harness, complete(harness, vote(harness, *range(1, 15)), {})


def test_a_large_group_is_searched_for_in_the_background() -> None:
    """Goal: one moonshot, with the ring and the measured rates; the next optimisation uses its result."""
    harness, done = moonshot_harness()
    (question,) = [action for action in done if isinstance(action, BeginMoonshot)]
    assert question.ring == tuple(range(1, 15))
    assert answered(done) == set(range(1, 15))

    better = (1, *range(14, 1, -1))
    assert not sent(harness.feed(MoonshotFound(0, better)), m.RingOrder), "not before everybody is in the call"
    ring = harness.state.members.groups[0].ring
    for source, target in zip(ring, ring[1:] + ring[:1], strict=True):
        harness.state.members.groups[0].bandwidths.put(source, target, 10, harness.now_ns)
    after = vote(harness, *range(1, 15))
    assert sent(after, m.RingOrder)


@pytest.mark.parametrize("change", ["lost", "joined"])
def test_a_moonshot_is_cancelled_with_its_members(change: str) -> None:
    """Goal: a result for other members is of no use, and is ignored."""
    harness, _ = moonshot_harness()
    if change == "lost":
        actions = harness.feed(PeerWent(5, "died"))
    else:
        harness.come(15)
        actions = [action for peer in range(1, 15) for action in harness.say(peer, m.VoteTopology(9, 0))]

    assert CancelMoonshot(0) in actions
    harness.feed(MoonshotFound(0, tuple(range(1, 15))))
    assert harness.state.optimizer.found == ()


def test_a_newcomer_that_leaves_cancels_nothing() -> None:
    """Goal: a newcomer that was never in the ring does not change its members."""
    harness, _ = moonshot_harness()
    harness.come(15)

    assert CancelMoonshot(0) not in harness.feed(PeerWent(15, "died"))


def test_time_passes_while_edges_are_measured() -> None:
    """Goal: the machine asks to be woken at the deadline of a round, and never in the past."""
    harness = of(1, 2)
    vote(harness, 1, 2)
    harness.pass_time(3)
    assert harness.state.next_deadline_ns > harness.now_ns
    after = harness.pass_time(20)
    assert answered(after) == {1, 2}
    assert harness.now_ns == 23 * SECOND
