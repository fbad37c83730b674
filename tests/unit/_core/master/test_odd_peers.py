"""The odd one out: where more than half agree, the others are kicked with the reason, and the majority goes on."""

from __future__ import annotations

import pytest

from pccl._core.master.events import PeerWent
from pccl._core.protocol import messages as m
from pccl._core.protocol.operations import ReduceSignature, pack_signatures
from pccl._core.protocol.state_schema import pack_schema

from .master_harness import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    LOST,
    SCHEMA,
    agree,
    done,
    failed,
    failures,
    of,
    pairs,
    running,
    sent,
)
from .test_state_consensus import REST, answer

# --- Signatures -------------------------------------------------------------


@pytest.mark.parametrize("counts", [(10, 11, 11), (11, 10, 11), (11, 11, 10), (11, 11, 11, 10), (11, 11, 11, 10, 12)])
def test_the_odd_one_is_kicked_and_the_majority_tries_again(counts: tuple[int, ...]) -> None:
    """Goal: the kick says what it gave, what the majority gave, and what to do; the others fail once as lost."""
    members = range(1, len(counts) + 1)
    right = [peer for peer in members if counts[peer - 1] == 11]
    harness = of(*members)
    for peer in members:
        actions = harness.reduce(peer, 5, count=counts[peer - 1])

    kicks = sent(actions, m.Kick)
    assert {(peer, kick.result) for peer, kick in kicks.items()} == {
        (peer, INVALID_ARGUMENT) for peer in members if peer not in right
    }
    names = ", ".join(map(str, right))
    for peer, kick in kicks.items():
        given = f"what all_reduce (tag 5) is: it gave {counts[peer - 1]} x FLOAT, SUM; peers {names} gave 11 x FLOAT"
        assert given in kick.reason
        assert "Reduce the same count, dtype and op under a tag on every peer" in kick.reason
    verdicts = harness.wire(actions)
    assert failures(verdicts) == [(peer, 5, 0, LOST) for peer in right]
    reason = sent(verdicts, m.ReduceFailed)[right[0]].reason
    assert any(f"peer {peer} was kicked: {kick.reason}" == reason for peer, kick in kicks.items())
    for peer in right:
        actions = harness.reduce(peer, 5, count=11)
    assert pairs(actions) == [[(5, 1)]]


def test_a_newcomer_that_reduces_something_else_is_kicked_alone() -> None:
    """Goal: its first reduce after its admission ends its membership only; a vote before the ring is wired counts."""
    harness = of(1, 2, 3)
    harness.admit(4)
    harness.reduce(4, 5, count=1001)
    for peer in (1, 2, 3):
        actions = harness.reduce(peer, 5, count=1000)

    assert set(sent(actions, m.Kick)) == {4}
    assert failures(harness.wire(actions)) == [(peer, 5, 0, LOST) for peer in (1, 2, 3)]


def test_one_judgement_at_a_time() -> None:
    """Goal: each peer is alone with one of four tags; only the first tag is judged, and not everybody is kicked."""
    harness = of(1, 2, 3, 4)
    orders = harness.feed(PeerWent(4, "reset"))
    for peer in (1, 2, 3):
        for tag in (1, 2, 3):
            harness.reduce(peer, tag, count=7 if tag == peer else 8)

    actions = harness.wire(orders)

    assert set(sent(actions, m.Kick)) == {1}
    assert not sent(actions, m.Commence)
    assert failures(harness.wire(actions)) == [(peer, tag, 0, LOST) for tag in (1, 2, 3) for peer in (2, 3)]


def test_what_runs_and_what_is_open_beside_a_judgement_is_interrupted() -> None:
    """Goal: a running tag, an open one and one that would commence all end as lost, once each, after the wiring."""
    harness = running(1, 2, 3, tags=(9,))
    harness.reduce(1, 8)
    for peer in (1, 2):
        harness.reduce(peer, 5, 6)
    good, bad = ReduceSignature(5, 1024, 10, 0, 0, 0), ReduceSignature(6, 1024, 11, 0, 0, 0)

    actions = harness.say(3, m.Initiate(pack_signatures([good, bad])))

    assert set(sent(actions, m.Kick)) == {3}
    assert not sent(actions, m.Commence)
    assert not sent(actions, m.ReduceFailed)
    verdicts = failures(harness.wire(actions))
    assert sorted(verdicts) == [
        *((1, tag, sequence, LOST) for tag, sequence in ((5, 0), (6, 0), (8, 0), (9, 1))),
        *((2, tag, sequence, LOST) for tag, sequence in ((5, 0), (6, 0), (9, 1))),
    ]
    assert harness.state.members.groups[0].collectives.is_idle()


def test_verdicts_of_the_last_ring_wait_for_the_ring_without_the_odd_one() -> None:
    """Goal: a lost peer's tags and a mismatch come due together: the verdicts are sent when the retry can work."""
    harness = running(1, 2, 3, 4)
    orders = harness.feed(PeerWent(4, "reset"))
    for peer in (1, 2, 3):
        harness.reduce(peer, 6, count=peer // 3)

    actions = harness.wire(orders)

    assert set(sent(actions, m.Kick)) == {3}
    assert not sent(actions, m.ReduceFailed)
    assert failures(harness.wire(actions)) == [
        (peer, tag, seq, LOST) for tag, seq in ((5, 1), (6, 0)) for peer in (1, 2)
    ]


def test_a_vote_that_was_given_up_is_not_compared() -> None:
    """Goal: the odd signature is withdrawn and given again as the others have it: nobody is odd."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5, count=7)
    harness.reduce(2, 5)
    harness.say(1, m.WithdrawReduce(5))
    harness.reduce(3, 5)

    assert pairs(harness.reduce(1, 5)) == [[(5, 1)]]


# --- Calls that never meet --------------------------------------------------


def test_a_majority_in_another_call_goes_on() -> None:
    """Goal: one of four reduces while the others hold a round: it is kicked, and the round completes."""
    harness = of(1, 2, 3, 4, deadlock_timeout=3.0)
    harness.reduce(4, 5)
    harness.say(4, m.Awaiting(5))
    for peer in (1, 2, 3):
        harness.say(peer, m.VoteTopology(1, 0))

    actions = harness.pass_time(4.2)

    kicks = sent(actions, m.Kick)
    assert set(kicks) == {4}
    assert kicks[4].result == INVALID_USAGE
    assert "waits in all_reduce (tag 5), and the majority (peers 1, 2, 3) in update_topology" in kicks[4].reason
    assert not sent(actions, m.CallFailed)
    assert set(sent(harness.wire(actions), m.TopologyDone)) == {1, 2, 3}
    assert harness.state.members.counters["deadlocks"] == 1


def test_a_majority_that_reduces_tries_again() -> None:
    """Goal: a kick changes the ring, so the majority's reduce fails as lost, with the reason of the kick."""
    harness = of(1, 2, 3, 4)
    for peer in (1, 2, 3):
        harness.reduce(peer, 5)
        harness.say(peer, m.Awaiting(5))
    harness.say(4, m.VoteTopology(1, 0))

    actions = harness.pass_time(5)
    verdicts = harness.wire(actions)

    assert set(sent(actions, m.Kick)) == {4}
    assert failures(verdicts) == [(peer, 5, 0, LOST) for peer in (1, 2, 3)]
    assert "peer 4 was kicked: it waits in update_topology" in sent(verdicts, m.ReduceFailed)[1].reason
    for peer in (1, 2, 3):
        actions = harness.reduce(peer, 5)
    assert pairs(actions) == [[(5, 1)]]


def test_a_majority_that_syncs_completes() -> None:
    """Goal: a ring that changes does not end a sync: the votes of the majority stay and are decided."""
    harness = of(1, 2, 3)
    for peer in (1, 2):
        harness.sync(peer, 0, "a")
    harness.reduce(3, 5)
    harness.say(3, m.Awaiting(5))

    actions = harness.pass_time(5)

    assert set(sent(actions, m.Kick)) == {3}
    assert done(actions) == {1: 0, 2: 0}


def test_half_is_no_majority() -> None:
    """Goal: two against two: all four get the explanation, and nobody is kicked."""
    harness = of(1, 2, 3, 4)
    for peer in (1, 2):
        harness.reduce(peer, 5)
        harness.say(peer, m.Awaiting(5))
        harness.say(peer + 2, m.VoteTopology(1, 0))

    actions = harness.pass_time(5)

    assert not sent(actions, m.Kick)
    assert failures(actions) == [(peer, 5, 0, INVALID_USAGE) for peer in (1, 2)]
    assert set(sent(actions, m.CallFailed)) == {3, 4}


def test_a_second_thread_in_the_call_of_the_majority_saves_a_peer() -> None:
    """Goal: peer 3 waits in both calls: only peer 4, which is in neither of the majority's, is kicked."""
    harness = of(1, 2, 3, 4)
    for peer in (1, 2, 3):
        harness.say(peer, m.VotePending(1))
    for peer in (3, 4):
        harness.reduce(peer, 5)
        harness.say(peer, m.Awaiting(5))

    actions = harness.pass_time(5)

    assert set(sent(actions, m.Kick)) == {4}
    assert set(sent(actions, m.PendingAnswer)) == {1, 2, 3}


def test_a_peer_whose_other_thread_computes_is_in_no_deadlock() -> None:
    """Goal: a thread that asks for newcomers beside a long inner step costs its peer nothing, and nobody else."""
    harness = of(1, 2, 3)
    harness.say(1, m.Threads(2))
    harness.say(1, m.VotePending(1))
    for peer in (2, 3):
        harness.reduce(peer, 5)
        harness.say(peer, m.Awaiting(5))

    actions = harness.pass_time(8)

    assert not sent(actions, m.Kick)
    assert not sent(actions, m.ReduceFailed)
    harness.reduce(1, 5)
    harness.say(1, m.Awaiting(5))
    assert list(harness.state.members.groups[0].collectives.running) == [1], "the thread came back"


def test_a_peer_with_all_its_threads_in_calls_is_in_a_deadlock() -> None:
    """Goal: two threads that both wait can make no other call."""
    harness = of(1, 2, 3)
    harness.say(1, m.Threads(2))
    harness.say(1, m.VotePending(1))
    harness.say(1, m.VoteTopology(2, 0))
    for peer in (2, 3):
        harness.reduce(peer, 5)
        harness.say(peer, m.Awaiting(5))

    assert set(sent(harness.pass_time(8), m.Kick)) == {1}


def test_two_deadlocks_in_one_group_cost_one_minority_at_most() -> None:
    """Goal: a kick interrupts all tags of the group, so the other deadlock is over too; nobody is kicked for it."""
    harness = of(*range(1, 7))
    tags = {1: 5, 2: 5, 3: 6, 4: 7, 5: 7, 6: 8}
    for peer, tag in tags.items():
        others = (7, 8) if peer <= 3 else (5, 6)  # launched and not awaited: these members are not missing there
        harness.reduce(peer, tag, *others)
        harness.say(peer, m.Awaiting(tag))

    actions = harness.pass_time(5)
    kicked = set(sent(actions, m.Kick))

    assert kicked == {3}
    assert {peer for peer, *_ in failures(harness.wire(actions))} == {1, 2, 4, 5, 6}


def test_a_deadlock_of_one_group_costs_no_peer_of_another() -> None:
    """Goal: peer 6 is stuck for reasons of its own group; the majority of the first group is not about it."""
    harness = of(1, 2, 3, 4)
    harness.admit(5, 6, group=1)
    for peer, tag in ((1, 5), (2, 5), (3, 5), (4, 6), (5, 5), (6, 6)):
        harness.reduce(peer, tag)
        harness.say(peer, m.Awaiting(tag))

    actions = harness.pass_time(5)

    assert set(sent(actions, m.Kick)) == {4}
    assert failures(actions) == [(5, 5, 0, INVALID_USAGE), (6, 6, 0, INVALID_USAGE)]
    assert harness.state.members.counters["deadlocks"] == 2


def test_a_majority_in_another_group_goes_on() -> None:
    """Goal: a round of the whole run waits for one peer of another group, which waits for its own group."""
    harness = of(1, 2, 3)
    harness.admit(4, 5, group=1)
    for peer in (1, 2, 3, 4):
        harness.say(peer, m.VoteTopology(1, 0))
    harness.sync(5, 0, "a")

    actions = harness.pass_time(5)

    assert set(sent(actions, m.Kick)) == {5}
    assert set(sent(harness.wire(actions), m.TopologyDone)) == {1, 2, 3, 4}


# --- Schemas ----------------------------------------------------------------


def test_a_newcomer_with_another_schema_is_kicked_alone() -> None:
    """Goal: three members that have agreed on a state go on in the same sync."""
    odd = pack_schema(REST)
    harness = agree(of(1, 2, 3), 5, "a")
    harness.admit(4)
    harness.sync(4, 0, "x", packed=odd)
    for peer in (1, 2):
        harness.sync(peer, 6, "b")

    actions = answer(harness, harness.sync(3, 6, "b"), {1: SCHEMA, 4: odd})

    assert set(sent(actions, m.Kick)) == {4}
    assert done(actions) == {1: 6, 2: 6, 3: 6}


@pytest.mark.parametrize(("members", "odd_ones"), [((1, 2), (2,)), ((1, 2, 3, 4), (2, 4))])
def test_without_a_majority_a_schema_is_explained_to_all(members: tuple[int, ...], odd_ones: tuple[int, ...]) -> None:
    """Goal: before the first agreed state nobody is kicked if no schema has a majority; the next sync works."""
    odd = pack_schema(REST)
    harness = of(*members)
    asked = []
    for peer in members:
        asked = harness.sync(peer, 0, "a", packed=odd if peer in odd_ones else SCHEMA)

    actions = answer(harness, asked, {1: SCHEMA, 2: odd})

    ends = failed(actions)
    assert {(peer, end.result) for peer, end in ends.items()} == {(peer, INVALID_ARGUMENT) for peer in members}
    assert len({end.reason for end in ends.values()}) == 1
    assert "'bias' is missing" in ends[1].reason
    assert not sent(actions, m.Kick)
    for peer in members:
        actions = harness.sync(peer, 0, "a")
    assert done(actions) == dict.fromkeys(members, 0)
