"""The master's side of reduces: votes of the members, commence, and one verdict for all."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import Dismiss, PeerWent, SendTo
from pccl._core.protocol import messages as m
from pccl._core.protocol.operations import ReduceSignature, pack_pairs, pack_signatures
from pccl.options import TAGS_MAX

from .master_harness import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    LOST,
    TOO_FEW,
    MasterHarness,
    failures,
    is_sent,
    lose,
    of,
    pairs,
    running,
    sent,
)


def say_all(harness: MasterHarness, *said: tuple[int, Any]) -> list[Any]:
    return [action for peer, message in said for action in harness.say(peer, message)]


# --- From initiate to verdict -----------------------------------------------


def test_the_last_vote_commences_for_all() -> None:
    """Goal: every member gets the same order, at the epoch of the ring, and not before the last vote."""
    harness = of(1, 2, 3)
    epoch = harness.state.members.groups[0].epoch

    assert harness.reduce(1, 5) == []
    assert harness.reduce(3, 5) == []
    assert harness.reduce(2, 5) == [SendTo(peer, m.Commence(epoch, pack_pairs([(5, 1)]))) for peer in (1, 2, 3)]


def test_success_needs_every_vote() -> None:
    """Goal: one verdict for all, with the last vote."""
    harness = running(1, 2)

    assert harness.say(1, m.Finished(1, True, "")) == []
    assert harness.say(2, m.Finished(1, True, "")) == [SendTo(1, m.ReduceDone(1)), SendTo(2, m.ReduceDone(1))]
    assert harness.state.members.groups[0].collectives.is_idle()


def test_several_tags_commence_in_one_message_with_growing_numbers() -> None:
    """Goal: one order per member and event, whatever the order of the votes."""
    harness = of(1, 2)
    harness.reduce(1, 7)
    harness.reduce(1, 3, 9)

    assert pairs(harness.reduce(2, 9, 3, 7)) == [[(9, 1), (3, 2), (7, 3)]]
    harness.reduce(1, 4)
    assert pairs(harness.reduce(2, 4)) == [[(4, 4)]]


def test_a_tag_can_be_used_again_after_its_verdict() -> None:
    """Goal: a tag can be reused, as every training loop does; sequences keep growing."""
    harness = running(1, 2)
    say_all(harness, (1, m.Finished(1, True, "")), (2, m.Finished(1, True, "")))
    harness.reduce(2, 5)

    assert pairs(harness.reduce(1, 5)) == [[(5, 2)]]


def test_more_tags_than_fit_one_message_commence_in_several() -> None:
    """Goal: after a rewiring hundreds of reduces may commence at once."""
    harness = of(1, 2, 3)
    orders = harness.feed(PeerWent(3, "reset"))
    for first in range(0, 100, 50):
        for peer in (1, 2):
            assert harness.reduce(peer, *range(first, first + 50)) == []

    batches = pairs(harness.wire(orders))

    assert [len(batch) for batch in batches] == [64, 36]
    assert [sequence for batch in batches for _, sequence in batch] == list(range(1, 101))


def test_groups_do_not_concern_each_other() -> None:
    """Goal: the same tag in two groups is two reduces, each with its own sequence."""
    harness = of(1, 2)
    harness.admit(3, 4, group=7)
    for peer in (1, 3, 2):
        actions = harness.reduce(peer, 5)
    assert set(sent(actions, m.Commence)) == {1, 2}
    assert pairs(harness.reduce(4, 5)) == [[(5, 1)]]

    assert failures(lose(harness, 4)) == [(3, 5, 1, LOST)]
    assert set(harness.state.members.groups[0].collectives.running) == {1}


# --- What members must agree on ---------------------------------------------


def test_a_mismatch_fails_on_every_member_and_names_both_sides() -> None:
    """Goal: without a majority the message names each peer's arguments in words, and no peer is kicked."""
    harness = of(1, 2, 3, 4)
    harness.reduce(1, 5)
    harness.reduce(3, 5)
    harness.reduce(4, 5, count=2048)

    actions = harness.reduce(2, 5, count=2048)

    assert failures(actions) == [(peer, 5, 0, INVALID_ARGUMENT) for peer in (1, 2, 3, 4)]
    reason = sent(actions, m.ReduceFailed)[1].reason
    assert "(tag 5)" in reason
    assert "peers 1, 3: 1,024 x FLOAT, SUM; peers 2, 4: 2,048 x FLOAT, SUM" in reason
    assert not sent(actions, m.Kick)
    assert not harness.reduce(1, 5)


def test_a_mismatch_does_not_hold_up_other_tags() -> None:
    """Goal: a tag whose signatures match commences in the same event."""
    harness = of(1, 2)
    harness.reduce(1, 5, 6)
    good, bad = ReduceSignature(6, 1024, 10, 0, 0, 0), ReduceSignature(5, 1024, 11, 0, 0, 0)

    actions = harness.say(2, m.Initiate(pack_signatures([bad, good])))

    assert failures(actions) == [(1, 5, 0, INVALID_ARGUMENT), (2, 5, 0, INVALID_ARGUMENT)]
    assert pairs(actions) == [[(6, 1)]]


def test_alone_there_is_nothing_to_reduce() -> None:
    """Goal: the peer gets the failure at once, with the world's numbers."""
    harness = of(1)
    harness.admit(2, 3, group=1)

    (verdict,) = harness.reduce(1, 5)

    assert verdict.message.result == TOO_FEW
    numbers = verdict.message
    assert (numbers.global_world, numbers.group_world, numbers.groups, numbers.largest_group) == (3, 1, 2, 2)
    assert (numbers.epoch, numbers.round) == (harness.state.members.groups[0].epoch, harness.state.members.round)


# --- A member that fails ----------------------------------------------------


def test_one_that_fails_aborts_all_and_the_verdict_waits_for_the_last() -> None:
    """Goal: all members restore their memory before any of them gets the failure; the first reason is reported."""
    harness = running(1, 2, 3)
    harness.say(2, m.Finished(1, True, ""))

    abort = m.AbortReduce(1, "peer 1 gave up: stalled")
    assert harness.say(1, m.Finished(1, False, "stalled")) == [SendTo(2, abort), SendTo(3, abort)]
    assert harness.say(2, m.Finished(1, False, "told to")) == []
    actions = harness.say(3, m.Finished(1, False, "told to"))

    assert failures(actions) == [(peer, 5, 1, LOST) for peer in (1, 2, 3)]
    assert {verdict.reason for verdict in sent(actions, m.ReduceFailed).values()} == {"peer 1 gave up: stalled"}


def test_an_ok_that_crossed_the_abort_is_no_success() -> None:
    """Goal: the member reported success before it read the abort; its later report of failure ends the reduce."""
    harness = running(1, 2)
    harness.say(1, m.Finished(1, False, "stalled"))

    assert harness.say(2, m.Finished(1, True, "")) == []
    assert failures(harness.say(2, m.Finished(1, False, "told to"))) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]


def test_two_that_fail_at_once_need_no_second_abort() -> None:
    """Goal: both failed before they could hear of each other's failure."""
    harness = running(1, 2, 3)

    assert set(sent(harness.say(1, m.Finished(1, False, "stalled")), m.AbortReduce)) == {2, 3}
    assert harness.say(2, m.Finished(1, False, "stalled too")) == []
    assert len(failures(harness.say(3, m.Finished(1, False, "told to")))) == 3


def test_a_member_lost_while_others_restore_leaves_the_rest_to_the_ring() -> None:
    """Goal: the abort of one reduce becomes the abort of all, and the first reason stays."""
    harness = running(1, 2, 3)
    harness.say(1, m.Finished(1, False, "stalled"))

    actions = lose(harness, 3)

    assert failures(actions) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]
    assert sent(actions, m.ReduceFailed)[2].reason == "peer 1 gave up: stalled"


# --- A ring that changes ----------------------------------------------------


def test_a_lost_member_fails_what_runs_once_the_survivors_are_wired() -> None:
    """Goal: no verdict before the ring is whole, then one to each survivor, with fresh numbers and the first reason."""
    harness = running(1, 2, 3)
    harness.say(1, m.Finished(1, True, ""))
    orders = harness.feed(PeerWent(3, "connection reset"))
    epoch = harness.state.members.groups[0].epoch

    assert not [action for action in orders if is_sent(action, m.AbortReduce) or is_sent(action, m.ReduceFailed)]
    assert harness.say(1, m.Wired(epoch)) == []
    verdict = m.ReduceFailed(
        5, 1, LOST, "peer 3 was lost: connection reset", epoch, 2, 2, 1, 2, harness.state.members.round
    )
    assert harness.say(2, m.Wired(epoch)) == [SendTo(1, verdict), SendTo(2, verdict)]


def test_votes_that_were_not_unanimous_fail_too() -> None:
    """Goal: only the members that had initiated are told, with no sequence, because it never commenced."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5)
    harness.reduce(3, 5)

    assert failures(lose(harness, 3)) == [(1, 5, 0, LOST)]


def test_the_retry_meets_the_first_try_of_somebody_late() -> None:
    """Goal: peer 2 had not initiated when the ring changed; its first vote and peer 1's second belong together."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5)
    orders = harness.feed(PeerWent(3, "reset"))

    assert harness.reduce(2, 5) == []
    assert failures(harness.wire(orders)) == [(1, 5, 0, LOST)]
    assert pairs(harness.reduce(1, 5)) == [[(5, 1)]]


def test_the_retry_also_meets_one_who_comes_after_it() -> None:
    """Goal: the same as above, with the order of the two votes exchanged."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5)
    lose(harness, 3)

    assert harness.reduce(1, 5) == []
    assert pairs(harness.reduce(2, 5)) == [[(5, 1)]]


def test_a_new_tag_waits_until_the_ring_is_wired() -> None:
    """Goal: the vote was sent before its peer saw the order, and counts for the new ring."""
    harness = running(1, 2, 3)
    orders = harness.feed(PeerWent(3, "reset"))
    assert harness.reduce(1, 6) == []
    assert harness.reduce(2, 6) == []

    actions = harness.wire(orders)

    assert failures(actions) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]
    assert pairs(actions) == [[(6, 2)]]
    assert sent(actions, m.Commence)[1].epoch == harness.state.members.groups[0].epoch


def test_what_was_said_before_the_order_was_read_is_about_the_past() -> None:
    """Goal: late votes of an aborted reduce are ignored."""
    harness = running(1, 2, 3)
    orders = harness.feed(PeerWent(3, "reset"))

    assert harness.say(1, m.Finished(1, True, "")) == []
    assert harness.say(2, m.Finished(1, False, "stalled")) == []
    assert failures(harness.wire(orders)) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]


def test_a_second_loss_before_the_ring_is_whole() -> None:
    """Goal: one verdict, not two; lost peers get none; reduces that were initiated in between fail as well."""
    harness = running(1, 2, 3, 4)
    harness.feed(PeerWent(4, "reset"))
    harness.reduce(1, 6)

    actions = lose(harness, 3)

    assert sorted(failures(actions)) == [(1, 5, 1, LOST), (1, 6, 0, LOST), (2, 5, 1, LOST)]
    reasons = {verdict.message.tag: verdict.message.reason for verdict in actions if is_sent(verdict, m.ReduceFailed)}
    assert reasons == {5: "peer 4 was lost: reset", 6: "peer 3 was lost: connection reset"}


def test_a_group_that_falls_to_one_is_told_the_same() -> None:
    """Goal: the running reduce fails because its peers were lost; only the next one fails for being alone."""
    harness = running(1, 2)

    assert failures(lose(harness, 2)) == [(1, 5, 1, LOST)]
    assert failures(harness.reduce(1, 5)) == [(1, 5, 0, TOO_FEW)]


def test_a_group_that_is_remembered_without_members_remembers_no_reduce() -> None:
    """Goal: the agreed state is kept after the last member, running reduces are not."""
    harness = of(1, 2)
    harness.admit(3, group=1)
    harness.sync(1, 7, "a")
    harness.sync(2, 7, "a")
    harness.reduce(1, 5)
    harness.reduce(2, 5)
    harness.feed(PeerWent(2, "reset"))
    harness.feed(PeerWent(1, "reset"))

    collectives = harness.state.members.groups[0].collectives
    assert (collectives.open, collectives.running, collectives.aborted, collectives.held) == ({}, {}, [], {})


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (lambda epoch: m.EdgeLost(epoch, 1, 2, "reset"), "the connection from peer 1 to peer 2 broke: reset"),
        (lambda epoch: m.WireFailed(epoch, 2, "refused"), "peer 1 cannot reach peer 2: refused"),
        (lambda _: m.Leave("close"), "peer 1 left: close"),
        (lambda _: m.VoteTopology(1, 0), "peer 1 was kicked: voted on the topology while"),
    ],
    ids=["edge lost", "wire failed", "left", "kicked"],
)
def test_whatever_changes_the_ring_ends_what_runs(said: Any, reason: str) -> None:
    """Goal: every survivor is told the actual reason."""
    harness = running(1, 2, 3)
    edge_epoch = harness.state.members.groups[0].edges[1, 2]

    actions = harness.wire(harness.say(1, said(edge_epoch)))

    assert {tag for _, tag, _, _ in failures(actions)} == {5}
    assert sent(actions, m.ReduceFailed)[3].reason.startswith(reason)
    assert harness.state.members.groups[0].collectives.is_idle()


def test_a_failure_waits_for_no_other_group_and_counts_nobody_who_is_being_admitted() -> None:
    """Goal: the withdrawal came too late for the round; the reduce after it fails during the admission."""
    harness = of(1, 2, 3)
    harness.come(4)
    harness.come(5, group=1)
    for peer in (1, 2, 3):
        harness.say(peer, m.VoteTopology(1, 0))
    harness.say(1, m.Withdraw(1))
    assert harness.reduce(1, 5) == []

    (verdict,) = lose(harness, 3)  # peer 5 never reports, so the round stays open

    assert (verdict.message.tag, verdict.message.global_world, verdict.message.group_world) == (5, 2, 2)
    assert (verdict.message.groups, verdict.message.largest_group) == (1, 2)


def test_a_reduce_during_an_admission_waits_for_the_newcomer() -> None:
    """Goal: the reduce will run over the ring that has the newcomer in it."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteTopology(1, 0))
    orders = harness.say(2, m.VoteTopology(1, 0))
    harness.say(1, m.Withdraw(1))
    harness.say(2, m.Withdraw(1))
    harness.reduce(1, 5)
    assert harness.reduce(2, 5) == []

    assert not sent(harness.wire(orders), m.Commence)
    assert pairs(harness.reduce(3, 5)) == [[(5, 1)]]


# --- Giving up --------------------------------------------------------------


def test_a_withdrawal_in_time_is_confirmed() -> None:
    """Goal: the peer keeps the memory until the master confirms that the reduce will not commence."""
    harness = of(1, 2)
    harness.reduce(1, 5)

    (verdict,) = harness.say(1, m.WithdrawReduce(5))

    assert (verdict.message.sequence, verdict.message.reason) == (0, "given up by its caller")
    assert harness.reduce(2, 5) == []
    assert pairs(harness.reduce(1, 5)) == [[(5, 1)]]


def test_a_withdrawal_that_comes_too_late_changes_nothing() -> None:
    """Goal: a withdrawal is ignored after the commence, after the failure, and without a vote."""
    harness = running(1, 2)

    assert harness.say(1, m.WithdrawReduce(5)) == []
    assert harness.say(1, m.WithdrawReduce(99)) == []
    orders = harness.feed(PeerWent(2, "reset"))
    assert harness.say(1, m.WithdrawReduce(5)) == []
    assert failures(harness.wire(orders)) == [(1, 5, 1, LOST)]


def test_a_withdrawal_leaves_the_others_votes() -> None:
    """Goal: only the peer that withdrew has to vote again."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5)
    harness.reduce(2, 5)
    harness.say(1, m.WithdrawReduce(5))
    harness.reduce(3, 5)

    assert pairs(harness.reduce(1, 5)) == [[(5, 1)]]


# --- What breaks the protocol -----------------------------------------------

BROKEN = [
    (m.Initiate(pack_signatures([ReduceSignature(5, 1, 10, 0, 0, 0)])), "initiated tag 5 twice"),
    (m.Initiate(b"nonsense"), "initiated nonsense"),
    (m.Initiate(b""), "initiated nonsense"),
    (m.Finished(77, True, ""), "which it has no part in"),
    (m.Finished(0, True, ""), "which it has no part in"),
    (m.VoteTopology(1, 0), "while a reduce of its own has no verdict"),
]


@pytest.mark.parametrize(("message", "reason"), BROKEN, ids=lambda part: type(part).__name__)
def test_what_no_honest_peer_says_costs_the_connection(message: Any, reason: str) -> None:
    """Goal: the peer is kicked with the reason; the others are rewired and their reduce fails."""
    harness = running(1, 2, 3)

    actions = harness.say(1, message)

    assert actions[0].message.result == INVALID_USAGE
    assert reason in actions[0].message.reason
    assert actions[1] == Dismiss(1)
    assert failures(harness.wire(actions)) == [(2, 5, 1, LOST), (3, 5, 1, LOST)]


@pytest.mark.parametrize("again", [True, False])
def test_finishing_twice_costs_the_connection(again: bool) -> None:
    """Goal: an actor that reports twice has an internal error and is kicked."""
    harness = running(1, 2, 3)
    harness.say(1, m.Finished(1, again, ""))

    assert "twice" in sent(harness.say(1, m.Finished(1, again, "")), m.Kick)[1].reason


def test_a_tag_is_taken_until_its_verdict_also_while_the_ring_is_wired() -> None:
    """Goal: a peer cannot retry a reduce before it was told that the reduce failed."""
    harness = running(1, 2, 3)
    harness.feed(PeerWent(3, "reset"))

    assert "initiated tag 5 twice" in sent(harness.reduce(1, 5), m.Kick)[1].reason


def test_who_votes_on_the_topology_cannot_reduce() -> None:
    """Goal: a topology round never completes during a reduce."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))

    assert "while it votes on the topology" in sent(harness.reduce(1, 5), m.Kick)[1].reason


def test_finished_after_it_said_wired_has_no_excuse() -> None:
    """Goal: once the new ring is wired, no reduce of the old ring is running any more."""
    harness = running(1, 2, 3)
    lose(harness, 3)

    assert "no part in" in sent(harness.say(1, m.Finished(1, True, "")), m.Kick)[1].reason


def test_tags_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a peer cannot fill the master's memory with votes."""
    assert TAGS_MAX >= 1 << 16
    monkeypatch.setattr("pccl._core.master.collectives.TAGS_MAX", 3)
    harness = of(1, 2)
    harness.reduce(1, 1, 2, 3)

    assert "more than 3 tags" in sent(harness.reduce(1, 4), m.Kick)[1].reason
