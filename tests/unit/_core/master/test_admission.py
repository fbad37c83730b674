"""Admission: trials of newcomers, their gaps, and what happens to peers that cannot be reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pccl._core.master.events import DialBack, DialledBack, PeerWent, Save
from pccl._core.protocol import messages as m

from .master_harness import UNREACHABLE, MasterHarness, instance, is_sent, of, sent

if TYPE_CHECKING:
    from collections.abc import Collection

DEAD = "no answer within 5 s"


def tries(actions: list[Any]) -> set[tuple[int, int]]:
    """Return the trials that were ordered, as (source, target)."""
    return {(action.conn, action.message.target) for action in actions if is_sent(action, m.Try)}


def fails_back(harness: MasterHarness, peer: int, reason: str = DEAD) -> list[Any]:
    return harness.feed(DialledBack(peer, reason))


def tried(harness: MasterHarness, source: int, target: int, reason: str = "") -> list[Any]:
    return harness.say(source, m.Tried(target, reason))


def kicked(actions: list[Any]) -> dict[int, str]:
    return {peer: kick.reason for peer, kick in sent(actions, m.Kick).items()}


def play(
    harness: MasterHarness, actions: list[Any], deaf: Collection[int] = (), *, hidden: Collection[int] = ()
) -> list[Any]:
    """End all trials among these actions and those that follow, within two seconds; return all actions.

    Peers cannot reach the `deaf`; the master cannot reach the `hidden`.
    """
    seen = []
    for _ in range(3):
        while actions:
            seen += actions
            following = []
            for action in actions:
                if isinstance(action, DialBack):
                    following += harness.feed(DialledBack(action.conn, DEAD if action.conn in hidden else ""))
                elif is_sent(action, m.Try):
                    target = action.message.target
                    following += tried(harness, action.conn, target, DEAD if target in deaf else "")
            actions = following
        actions = harness.pass_time(1)
    return seen + actions


def vote(harness: MasterHarness) -> list[Any]:
    """All members vote on the topology; return what follows, wired."""
    actions = [a for voter in sorted(harness.state.members.accepted) for a in harness.say(voter, m.VoteTopology(9, 0))]
    return harness.wire(actions)


# ---------------------------------------------------------------------------------------------- the first peer


def test_a_first_peer_is_dialled_back_before_it_is_a_member() -> None:
    """Goal: nobody is a member who was not reached; whoever was is in at once."""
    harness = MasterHarness()

    actions = harness.register(1)

    assert DialBack(1, "host1", 1001, instance(1)) in actions
    assert not sent(actions, m.RingOrder)
    assert sent(harness.feed(DialledBack(1, "")), m.RingOrder)


def test_a_first_peer_that_cannot_be_dialled_is_told_at_once_and_waits() -> None:
    """Goal: it hears the address, the reason and the remedy, it is no member, and it is dialled again."""
    harness = MasterHarness()
    harness.register(1)

    actions = fails_back(harness, 1)

    line = sent(actions, m.Notice)[1].line
    assert "host1:1001" in line
    assert DEAD in line
    assert "firewall" in line
    assert "PCCL_ADVERTISE" in line
    assert not harness.state.members.accepted
    assert not kicked(actions)
    assert any(isinstance(action, DialBack) for action in harness.pass_time(6))


def test_a_peer_that_was_corrected_meanwhile_is_admitted() -> None:
    """Goal: when the firewall is open, the next dial-back admits the peer that waits."""
    harness = MasterHarness()
    harness.register(1)
    fails_back(harness, 1)

    assert sent(harness.wire(harness.feed(DialledBack(1, ""))), m.Accepted)


def test_an_unreachable_first_peer_makes_way() -> None:
    """Goal: two healthy peers begin the run, and the unreachable first one is kicked with every reason."""
    harness = MasterHarness()
    harness.register(1)
    fails_back(harness, 1)
    harness.register(2)
    orders = harness.feed(DialledBack(2, ""))
    assert sent(orders, m.RingOrder), "the healthy peer does not wait for the other one"
    harness.wire_only(orders)
    assert harness.state.members.accepted == {2}

    actions = tried(harness, 2, 1, "no machine answers there")

    reason = kicked(actions)[1]
    for part in ("host1:1001", "the master", "peer 2", "no machine answers there", "firewall", "PCCL_ADVERTISE"):
        assert part in reason
    assert harness.state.members.accepted == {2}


def test_peers_that_only_reach_each_other_begin_a_run() -> None:
    """Goal: behind one router, with the master outside, two peers show each other that they can be reached."""
    harness = MasterHarness()
    for peer in (1, 2):
        harness.register(peer)
        fails_back(harness, peer)

    tried(harness, 1, 2)
    actions = harness.wire(tried(harness, 2, 1))

    assert set(sent(actions, m.Accepted)) == {1, 2}


def test_healthy_peers_come_in_in_the_order_of_their_registration() -> None:
    """Goal: a slow dial-back of the first peer makes the others wait, so that ranks do not depend on the network."""
    harness = MasterHarness()
    ordered = [a for peer in (1, 2, 3) for a in harness.register(peer) if not isinstance(a, DialBack)]
    harness.feed(DialledBack(3, ""))
    assert not sent(harness.feed(DialledBack(2, "")), m.RingOrder)

    harness.wire(harness.feed(DialledBack(1, "")))
    harness.show(ordered)
    vote(harness)

    assert harness.state.members.groups[0].ring == [1, 2, 3]


def test_a_failed_dial_back_lets_the_next_peer_begin() -> None:
    """Goal: the healthy second peer is a member as soon as it is known that the first cannot be reached."""
    harness = MasterHarness()
    harness.register(1)
    harness.register(2)
    harness.feed(DialledBack(2, ""))

    harness.wire_only(fails_back(harness, 1))

    assert harness.state.members.accepted == {2}


# ---------------------------------------------------------------------------------------------- gaps


def test_a_newcomer_and_its_neighbours_try_each_other_beside_the_work() -> None:
    """Goal: the last member dials the newcomer and the newcomer dials the first; both know whom they must meet."""
    harness = of(1, 2, 3)

    actions = harness.register(4)

    assert tries(actions) == {(3, 4), (4, 1)}
    assert sent(actions, m.Try)[3] == m.Try(4, instance(4), 1004, "host4")


def test_nobody_waits_for_a_newcomer_that_was_not_shown() -> None:
    """Goal: a round closes without the newcomer, and the next one admits it when both its edges are shown."""
    harness = of(1, 2, 3)
    harness.register(4)

    done = sent(vote_only(harness), m.TopologyDone)

    assert {answer.global_world for answer in done.values()} == {3}
    tried(harness, 3, 4)
    tried(harness, 4, 1)
    assert set(sent(vote(harness), m.Accepted)) == {4}
    assert harness.state.members.groups[0].ring == [1, 2, 3, 4]


def vote_only(harness: MasterHarness) -> list[Any]:
    """All members vote on the topology; no trial ends."""
    return [a for voter in sorted(harness.state.members.accepted) for a in harness.say(voter, m.VoteTopology(9, 0))]


def test_are_peers_pending_means_that_a_vote_admits_one() -> None:
    """Goal: members that ask first are not told of a newcomer that the vote would not admit."""
    harness = of(1, 2)
    harness.register(3)

    def ask() -> set[bool]:
        answers = [a for peer in (1, 2) for a in harness.say(peer, m.VotePending(5))]
        return {answer.pending for answer in sent(answers, m.PendingAnswer).values()}

    assert ask() == {False}
    tried(harness, 2, 3)
    tried(harness, 3, 1)
    assert ask() == {True}


def test_a_crowd_is_admitted_in_one_round() -> None:
    """Goal: each newcomer tries the one before it and the first member, so one round admits all of them, in order."""
    harness = of(1, 2)
    actions = [action for peer in range(3, 23) for action in harness.register(peer)]
    assert (2, 3) in tries(actions)
    assert (3, 4) in tries(actions)
    assert (22, 1) in tries(actions)
    harness.show(actions)

    vote(harness)

    assert harness.state.members.groups[0].ring == list(range(1, 23))


def test_one_bad_newcomer_does_not_keep_the_crowd_out() -> None:
    """Goal: the newcomer behind it in the queue is tried by another peer, and admitted."""
    harness = of(1, 2)
    actions = [action for peer in (3, 4, 5) for action in harness.register(peer)]

    actions = play(harness, actions, {4}, hidden={4})

    assert set(kicked(actions)) == {4}
    assert (3, 5) in tries(actions)
    assert set(sent(vote(harness), m.Accepted)) == {3, 5}


def test_another_gap_is_tried_if_one_pair_cannot_connect() -> None:
    """Goal: a newcomer that the last member cannot reach comes in between two others."""
    harness = of(1, 2, 3)
    actions = harness.register(4)
    harness.show([a for a in actions if not is_sent(a, m.Try)])
    tried(harness, 4, 1)

    actions = tried(harness, 3, 4, DEAD)

    assert tries(actions) == {(2, 4), (4, 3)}
    harness.show(actions)
    vote(harness)
    assert harness.state.members.groups[0].ring == [1, 2, 4, 3]
    assert (3, 4) in harness.state.members.groups[0].marks, "rings avoid the pair from now on"


# ---------------------------------------------------------------------------------------------- unreachable


def test_a_newcomer_that_nobody_reaches_is_kicked_with_the_reasons() -> None:
    """Goal: the master and three members have tried; it is told who tried which address, and what to do."""
    harness = of(1, 2, 3, 4, 5, 6)
    asked = tries(harness.register(7))
    asked |= tries(fails_back(harness, 7))
    assert {pair for pair in asked if pair[1] == 7} == {(6, 7), (1, 7), (4, 7)}

    actions = [a for source in (6, 1, 4) for a in tried(harness, source, 7, DEAD)]

    reason = kicked(actions)[7]
    for part in ("host7:1007", "the master", "peer 6", "peer 1", DEAD, "firewall", "PCCL_ADVERTISE"):
        assert part in reason
    assert sent(actions, m.Kick)[7].result == UNREACHABLE
    assert harness.state.members.accepted == {1, 2, 3, 4, 5, 6}


def test_a_newcomer_that_only_the_master_reaches_is_kicked_too() -> None:
    """Goal: a peer that registered as 127.0.0.1 from the master's host finds no gap among peers of other hosts."""
    harness = of(1, 2)

    actions = play(harness, harness.register(3), {3})

    assert "host3:1003" in kicked(actions)[3]
    assert harness.state.members.accepted == {1, 2}


def test_a_member_that_fell_silent_is_not_held_against_a_newcomer() -> None:
    """Goal: a newcomer that cannot reach a dead member waits until that member is lost, and is admitted then."""
    harness = of(1, 2)
    harness.register(3)
    harness.feed(DialledBack(3, ""))
    harness.feed(PeerWent(2, "gone"))
    harness.now_ns += 5_000_000_000
    tried(harness, 1, 3)
    harness.say(3, m.Beat(1))

    actions = tried(harness, 3, 1, DEAD)

    assert not kicked(actions)
    assert 3 in harness.state.members.registered


def test_a_report_that_never_comes_is_no_verdict() -> None:
    """Goal: a member that does not report keeps no newcomer out of the other gaps, and condemns none."""
    harness = of(1, 2, 3)
    harness.register(4)
    harness.feed(DialledBack(4, ""))
    tried(harness, 4, 1)

    actions = harness.pass_time(8)

    assert not kicked(actions)
    assert (2, 4) in tries(actions)


def test_what_was_shown_is_shown_again_while_a_newcomer_waits() -> None:
    """Goal: an edge that was tried a minute ago is tried once more, and counts until the report comes."""
    harness = of(1, 2, unreachable_expiry=3.0)
    harness.come(3)
    assert harness.state.admission.fitting == {3}

    again = tries(harness.pass_time(5))

    assert {(2, 3), (3, 1)} <= again
    assert harness.state.admission.fitting == {3}


# ---------------------------------------------------------------------------------------------- the larger set


def test_a_lone_member_that_nobody_reaches_makes_way_for_two() -> None:
    """Goal: the larger set goes on; the culprit hears who could not reach it, where, and what to set."""
    harness = of(1)

    actions = play(harness, harness.register(2), {1})

    assert not kicked(actions), "one against one: the member stays"
    told = sent(actions, m.Notice)
    assert set(told) == {1, 2}, "both are told"
    assert "host1:1001" in told[1].line

    actions = play(harness, harness.register(3), {1})

    reason = kicked(actions)[1]
    for part in ("peers 2, 3", "host1:1001", DEAD, "PCCL_ADVERTISE"):
        assert part in reason
    assert set(sent(harness.wire(actions), m.Accepted)) == {2, 3}


def test_a_member_that_others_have_reached_stays() -> None:
    """Goal: the last member of a run holds its state; newcomers that cannot reach it are the ones to go."""
    harness = of(1, 2)
    harness.wire(harness.feed(PeerWent(2, "gone")))

    actions = play(harness, [a for peer in (3, 4, 5) for a in harness.register(peer)], {1})

    assert set(kicked(actions)) == {3, 4, 5}
    assert harness.state.members.accepted == {1}


@pytest.mark.parametrize("together", [False, True])
def test_what_a_bricked_member_agreed_alone_is_forgotten(together: bool) -> None:
    """Goal: the newcomers begin anew, because nobody else ever had that state; what two agreed on is kept."""
    harness = of(1, 2) if together else of(1)
    revision = 1
    for peer in sorted(harness.state.members.accepted):
        harness.sync(peer, revision, "alone")
    if together:
        harness.wire(harness.feed(PeerWent(2, "gone")))
    consensus = harness.state.members.groups[0].consensus

    assert consensus.forget_if_only(1) is not together
    assert consensus.revision == (revision if together else -1)


def test_a_takeover_is_saved() -> None:
    """Goal: a restarted master knows that what the lone member agreed on is forgotten."""
    harness = of(1)
    harness.sync(1, 1, "alone")

    actions = play(harness, [a for peer in (2, 3) for a in harness.register(peer)], {1})

    assert 1 in kicked(actions)
    assert Save() in actions
    assert harness.state.snapshot()["groups"] == {}


def test_a_late_report_of_a_trial_changes_nothing() -> None:
    """Goal: reports that nobody asked for, also about unknown peers, are ignored."""
    harness = of(1, 2)

    assert tried(harness, 1, 2) == []
    assert tried(harness, 1, 77, "lies") == []
    assert harness.feed(DialledBack(55, "gone long ago")) == []
