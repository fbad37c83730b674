"""The master's side of collectives: who initiated what, what commences, and the one verdict for all."""

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
    Scene,
    failures,
    is_sent,
    lose,
    of,
    pairs,
    running,
    sent,
)


def say_all(scene: Scene, *said: tuple[int, Any]) -> list[Any]:
    return [action for peer, message in said for action in scene.say(peer, message)]


# --- From initiate to verdict -----------------------------------------------


def test_the_last_vote_commences_for_all() -> None:
    """Goal: the same order for everybody, at the epoch of the ring, and nothing before the last one is in."""
    scene = of(1, 2, 3)
    epoch = scene.state.members.groups[0].epoch

    assert scene.reduce(1, 5) == []
    assert scene.reduce(3, 5) == []
    assert scene.reduce(2, 5) == [SendTo(peer, m.Commence(epoch, pack_pairs([(5, 1)]))) for peer in (1, 2, 3)]


def test_success_needs_every_vote() -> None:
    """Goal: one verdict for all, with the last vote."""
    scene = running(1, 2)

    assert scene.say(1, m.Finished(1, True, "")) == []
    assert scene.say(2, m.Finished(1, True, "")) == [SendTo(1, m.ReduceDone(1)), SendTo(2, m.ReduceDone(1))]
    assert scene.state.members.groups[0].collectives.is_idle()


def test_several_tags_commence_in_one_message_with_growing_numbers() -> None:
    """Goal: one order per member and event, whatever the order of the votes."""
    scene = of(1, 2)
    scene.reduce(1, 7)
    scene.reduce(1, 3, 9)

    assert pairs(scene.reduce(2, 9, 3, 7)) == [[(9, 1), (3, 2), (7, 3)]]
    scene.reduce(1, 4)
    assert pairs(scene.reduce(2, 4)) == [[(4, 4)]]


def test_a_tag_can_be_used_again_after_its_verdict() -> None:
    """Goal: the loop of every training program; sequence numbers go on growing."""
    scene = running(1, 2)
    say_all(scene, (1, m.Finished(1, True, "")), (2, m.Finished(1, True, "")))
    scene.reduce(2, 5)

    assert pairs(scene.reduce(1, 5)) == [[(5, 2)]]


def test_more_tags_than_fit_one_message_commence_in_several() -> None:
    """Goal: after a rewiring hundreds may be ripe at once."""
    scene = of(1, 2, 3)
    orders = scene.feed(PeerWent(3, "reset"))
    for first in range(0, 100, 50):
        for peer in (1, 2):
            assert scene.reduce(peer, *range(first, first + 50)) == []

    batches = pairs(scene.wire(orders))

    assert [len(batch) for batch in batches] == [64, 36]
    assert [sequence for batch in batches for _, sequence in batch] == list(range(1, 101))


def test_groups_do_not_concern_each_other() -> None:
    """Goal: the same tag in two groups is two collectives, each with numbers of its own."""
    scene = of(1, 2)
    scene.admit(3, 4, group=7)
    for peer in (1, 3, 2):
        actions = scene.reduce(peer, 5)
    assert set(sent(actions, m.Commence)) == {1, 2}
    assert pairs(scene.reduce(4, 5)) == [[(5, 1)]]

    assert failures(lose(scene, 4)) == [(3, 5, 1, LOST)]
    assert set(scene.state.members.groups[0].collectives.running) == {1}


# --- What members must agree on ---------------------------------------------


def test_a_mismatch_fails_on_every_member_and_names_both_sides() -> None:
    """Goal: who said what, in words, so that the program can be mended; nobody is kicked."""
    scene = of(1, 2, 3)
    scene.reduce(1, 5)
    scene.reduce(3, 5)

    actions = scene.reduce(2, 5, count=2048)

    assert failures(actions) == [(peer, 5, 0, INVALID_ARGUMENT) for peer in (1, 2, 3)]
    reason = sent(actions, m.ReduceFailed)[1].reason
    assert "(tag 5)" in reason
    assert "peers 1, 3: 1,024 x FLOAT, SUM; peer 2: 2,048 x FLOAT, SUM" in reason
    assert not scene.reduce(1, 5)


def test_a_mismatch_does_not_hold_up_other_tags() -> None:
    """Goal: what agrees commences in the same event."""
    scene = of(1, 2)
    scene.reduce(1, 5, 6)
    good, bad = ReduceSignature(6, 1024, 10, 0, 0, 0), ReduceSignature(5, 1024, 11, 0, 0, 0)

    actions = scene.say(2, m.Initiate(pack_signatures([bad, good])))

    assert failures(actions) == [(1, 5, 0, INVALID_ARGUMENT), (2, 5, 0, INVALID_ARGUMENT)]
    assert pairs(actions) == [[(6, 1)]]


def test_alone_there_is_nothing_to_reduce() -> None:
    """Goal: told at once, with the numbers of the world."""
    scene = of(1)
    scene.admit(2, 3, group=1)

    (verdict,) = scene.reduce(1, 5)

    assert verdict.message.result == TOO_FEW
    numbers = verdict.message
    assert (numbers.global_world, numbers.group_world, numbers.groups, numbers.largest_group) == (3, 1, 2, 2)
    assert (numbers.epoch, numbers.round) == (scene.state.members.groups[0].epoch, scene.state.members.round)


# --- A member that fails ----------------------------------------------------


def test_one_that_fails_aborts_all_and_the_verdict_waits_for_the_last() -> None:
    """Goal: everybody restores its memory before anybody hears that it failed; the first reason wins."""
    scene = running(1, 2, 3)
    scene.say(2, m.Finished(1, True, ""))

    abort = m.AbortReduce(1, "peer 1 gave up: stalled")
    assert scene.say(1, m.Finished(1, False, "stalled")) == [SendTo(2, abort), SendTo(3, abort)]
    assert scene.say(2, m.Finished(1, False, "told to")) == []
    actions = scene.say(3, m.Finished(1, False, "told to"))

    assert failures(actions) == [(peer, 5, 1, LOST) for peer in (1, 2, 3)]
    assert {verdict.reason for verdict in sent(actions, m.ReduceFailed).values()} == {"peer 1 gave up: stalled"}


def test_an_ok_that_crossed_the_abort_is_no_success() -> None:
    """Goal: the member said ok before it read the abort; it will say that it failed, and only that ends it."""
    scene = running(1, 2)
    scene.say(1, m.Finished(1, False, "stalled"))

    assert scene.say(2, m.Finished(1, True, "")) == []
    assert failures(scene.say(2, m.Finished(1, False, "told to"))) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]


def test_two_that_fail_at_once_need_no_second_abort() -> None:
    """Goal: both gave up before they heard of each other."""
    scene = running(1, 2, 3)

    assert set(sent(scene.say(1, m.Finished(1, False, "stalled")), m.AbortReduce)) == {2, 3}
    assert scene.say(2, m.Finished(1, False, "stalled too")) == []
    assert len(failures(scene.say(3, m.Finished(1, False, "told to")))) == 3


def test_a_member_lost_while_others_restore_leaves_the_rest_to_the_ring() -> None:
    """Goal: the abort of one goes over into the abort of all, and the first reason stays."""
    scene = running(1, 2, 3)
    scene.say(1, m.Finished(1, False, "stalled"))

    actions = lose(scene, 3)

    assert failures(actions) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]
    assert sent(actions, m.ReduceFailed)[2].reason == "peer 1 gave up: stalled"


# --- A ring that changes ----------------------------------------------------


def test_a_lost_member_fails_what_runs_once_the_survivors_are_wired() -> None:
    """Goal: no verdict before the ring is whole, then one to each survivor, with fresh numbers and the first reason."""
    scene = running(1, 2, 3)
    scene.say(1, m.Finished(1, True, ""))
    orders = scene.feed(PeerWent(3, "connection reset"))
    epoch = scene.state.members.groups[0].epoch

    assert not [action for action in orders if is_sent(action, m.AbortReduce) or is_sent(action, m.ReduceFailed)]
    assert scene.say(1, m.Wired(epoch)) == []
    verdict = m.ReduceFailed(
        5, 1, LOST, "peer 3 was lost: connection reset", epoch, 2, 2, 1, 2, scene.state.members.round
    )
    assert scene.say(2, m.Wired(epoch)) == [SendTo(1, verdict), SendTo(2, verdict)]


def test_votes_that_were_not_unanimous_fail_too() -> None:
    """Goal: only those who had initiated are told, as of something that never commenced."""
    scene = of(1, 2, 3)
    scene.reduce(1, 5)
    scene.reduce(3, 5)

    assert failures(lose(scene, 3)) == [(1, 5, 0, LOST)]


def test_the_retry_meets_the_first_try_of_somebody_late() -> None:
    """Goal: peer 2 had not initiated when the ring changed; its first vote and peer 1's second belong together."""
    scene = of(1, 2, 3)
    scene.reduce(1, 5)
    orders = scene.feed(PeerWent(3, "reset"))

    assert scene.reduce(2, 5) == []
    assert failures(scene.wire(orders)) == [(1, 5, 0, LOST)]
    assert pairs(scene.reduce(1, 5)) == [[(5, 1)]]


def test_the_retry_also_meets_one_who_comes_after_it() -> None:
    """Goal: the same, the other way round."""
    scene = of(1, 2, 3)
    scene.reduce(1, 5)
    lose(scene, 3)

    assert scene.reduce(1, 5) == []
    assert pairs(scene.reduce(2, 5)) == [[(5, 1)]]


def test_a_new_tag_waits_until_the_ring_is_wired() -> None:
    """Goal: it was sent before its peer saw the order, and counts for the new ring."""
    scene = running(1, 2, 3)
    orders = scene.feed(PeerWent(3, "reset"))
    assert scene.reduce(1, 6) == []
    assert scene.reduce(2, 6) == []

    actions = scene.wire(orders)

    assert failures(actions) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]
    assert pairs(actions) == [[(6, 2)]]
    assert sent(actions, m.Commence)[1].epoch == scene.state.members.groups[0].epoch


def test_what_was_said_before_the_order_was_read_is_about_the_past() -> None:
    """Goal: late votes of an aborted collective cost nobody anything."""
    scene = running(1, 2, 3)
    orders = scene.feed(PeerWent(3, "reset"))

    assert scene.say(1, m.Finished(1, True, "")) == []
    assert scene.say(2, m.Finished(1, False, "stalled")) == []
    assert failures(scene.wire(orders)) == [(1, 5, 1, LOST), (2, 5, 1, LOST)]


def test_a_second_loss_before_the_ring_is_whole() -> None:
    """Goal: one verdict, not two; who is gone gets none; what was initiated in between fails as well."""
    scene = running(1, 2, 3, 4)
    scene.feed(PeerWent(4, "reset"))
    scene.reduce(1, 6)

    actions = lose(scene, 3)

    assert sorted(failures(actions)) == [(1, 5, 1, LOST), (1, 6, 0, LOST), (2, 5, 1, LOST)]
    reasons = {verdict.message.tag: verdict.message.reason for verdict in actions if is_sent(verdict, m.ReduceFailed)}
    assert reasons == {5: "peer 4 was lost: reset", 6: "peer 3 was lost: connection reset"}


def test_a_group_that_falls_to_one_is_told_the_same() -> None:
    """Goal: the running one lost its peers; only the next one finds itself alone."""
    scene = running(1, 2)

    assert failures(lose(scene, 2)) == [(1, 5, 1, LOST)]
    assert failures(scene.reduce(1, 5)) == [(1, 5, 0, TOO_FEW)]


def test_a_group_that_is_remembered_without_members_remembers_no_reduce() -> None:
    """Goal: what was agreed outlives the last member, what was under way does not."""
    scene = of(1, 2)
    scene.admit(3, group=1)
    scene.sync(1, 7, "a")
    scene.sync(2, 7, "a")
    scene.reduce(1, 5)
    scene.reduce(2, 5)
    scene.feed(PeerWent(2, "reset"))
    scene.feed(PeerWent(1, "reset"))

    collectives = scene.state.members.groups[0].collectives
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
    """Goal: the reason that every survivor hears is what happened."""
    scene = running(1, 2, 3)
    edge_epoch = scene.state.members.groups[0].edges[1, 2]

    actions = scene.wire(scene.say(1, said(edge_epoch)))

    assert {tag for _, tag, _, _ in failures(actions)} == {5}
    assert sent(actions, m.ReduceFailed)[3].reason.startswith(reason)
    assert scene.state.members.groups[0].collectives.is_idle()


def test_a_failure_waits_for_no_other_group_and_counts_nobody_who_is_being_admitted() -> None:
    """Goal: the withdrawal came too late for the round; the reduce after it fails in the middle of the admission."""
    scene = of(1, 2, 3)
    scene.come(4)
    scene.come(5, group=1)
    for peer in (1, 2, 3):
        scene.say(peer, m.VoteTopology(1, 0))
    scene.say(1, m.Withdraw(1))
    assert scene.reduce(1, 5) == []

    (verdict,) = lose(scene, 3)  # peer 5 never reports, so the round stays open

    assert (verdict.message.tag, verdict.message.global_world, verdict.message.group_world) == (5, 2, 2)
    assert (verdict.message.groups, verdict.message.largest_group) == (1, 2)


def test_a_reduce_during_an_admission_waits_for_the_newcomer() -> None:
    """Goal: the ring it will run over has the newcomer in it."""
    scene = of(1, 2)
    scene.come(3)
    scene.say(1, m.VoteTopology(1, 0))
    orders = scene.say(2, m.VoteTopology(1, 0))
    scene.say(1, m.Withdraw(1))
    scene.say(2, m.Withdraw(1))
    scene.reduce(1, 5)
    assert scene.reduce(2, 5) == []

    assert not sent(scene.wire(orders), m.Commence)
    assert pairs(scene.reduce(3, 5)) == [[(5, 1)]]


# --- Giving up --------------------------------------------------------------


def test_a_withdrawal_in_time_is_confirmed() -> None:
    """Goal: the peer keeps the memory until the master says that it will not commence."""
    scene = of(1, 2)
    scene.reduce(1, 5)

    (verdict,) = scene.say(1, m.WithdrawReduce(5))

    assert (verdict.message.sequence, verdict.message.reason) == (0, "given up by its caller")
    assert scene.reduce(2, 5) == []
    assert pairs(scene.reduce(1, 5)) == [[(5, 1)]]


def test_a_withdrawal_that_comes_too_late_changes_nothing() -> None:
    """Goal: it crossed the order to commence, the failure, or was never a vote."""
    scene = running(1, 2)

    assert scene.say(1, m.WithdrawReduce(5)) == []
    assert scene.say(1, m.WithdrawReduce(99)) == []
    orders = scene.feed(PeerWent(2, "reset"))
    assert scene.say(1, m.WithdrawReduce(5)) == []
    assert failures(scene.wire(orders)) == [(1, 5, 1, LOST)]


def test_a_withdrawal_leaves_the_others_votes() -> None:
    """Goal: only the one who gave up has to come again."""
    scene = of(1, 2, 3)
    scene.reduce(1, 5)
    scene.reduce(2, 5)
    scene.say(1, m.WithdrawReduce(5))
    scene.reduce(3, 5)

    assert pairs(scene.reduce(1, 5)) == [[(5, 1)]]


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
    """Goal: the offender goes, with the reason; the others are rewired and their reduce fails."""
    scene = running(1, 2, 3)

    actions = scene.say(1, message)

    assert actions[0].message.result == INVALID_USAGE
    assert reason in actions[0].message.reason
    assert actions[1] == Dismiss(1)
    assert failures(scene.wire(actions)) == [(2, 5, 1, LOST), (3, 5, 1, LOST)]


@pytest.mark.parametrize("again", [True, False])
def test_finishing_twice_costs_the_connection(again: bool) -> None:
    """Goal: an actor that lost count is not trusted further."""
    scene = running(1, 2, 3)
    scene.say(1, m.Finished(1, again, ""))

    assert "twice" in sent(scene.say(1, m.Finished(1, again, "")), m.Kick)[1].reason


def test_a_tag_is_taken_until_its_verdict_also_while_the_ring_is_wired() -> None:
    """Goal: a peer cannot retry what it has not been told to have failed."""
    scene = running(1, 2, 3)
    scene.feed(PeerWent(3, "reset"))

    assert "initiated tag 5 twice" in sent(scene.reduce(1, 5), m.Kick)[1].reason


def test_who_votes_on_the_topology_cannot_reduce() -> None:
    """Goal: no round ever closes over a reduce."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 0))

    assert "while it votes on the topology" in sent(scene.reduce(1, 5), m.Kick)[1].reason


def test_finished_after_it_said_wired_has_no_excuse() -> None:
    """Goal: once the new ring stands nothing of the old one is under way any more."""
    scene = running(1, 2, 3)
    lose(scene, 3)

    assert "no part in" in sent(scene.say(1, m.Finished(1, True, "")), m.Kick)[1].reason


def test_tags_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: nobody fills the master's memory with votes."""
    assert TAGS_MAX >= 1 << 16
    monkeypatch.setattr("pccl._core.master.collectives.TAGS_MAX", 3)
    scene = of(1, 2)
    scene.reduce(1, 1, 2, 3)

    assert "more than 3 tags" in sent(scene.reduce(1, 4), m.Kick)[1].reason
