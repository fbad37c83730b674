"""Unanimous calls at the master: votes, withdrawals, warnings, and calls that can never complete."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import SendTo
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import WARNING, Log

from .master_harness import INVALID_USAGE, LOST, of, sent

PENDING, TOPOLOGY = "are_peers_pending", "update_topology"


def test_pending_has_one_answer_for_all() -> None:
    """Goal: all peers that ask in a round get the same answer, with or without newcomers."""
    harness = of(1, 2)
    assert harness.say(1, m.VotePending(4)) == []
    assert harness.say(2, m.VotePending(5)) == [
        SendTo(1, m.PendingAnswer(4, False)),
        SendTo(2, m.PendingAnswer(5, False)),
    ]

    harness.come(3)
    harness.say(1, m.VotePending(6))
    assert harness.say(2, m.VotePending(7)) == [
        SendTo(1, m.PendingAnswer(6, True)),
        SendTo(2, m.PendingAnswer(7, True)),
    ]


def test_pending_is_answered_while_a_ring_is_wired() -> None:
    """Goal: are_peers_pending may overlap any call; a newcomer whose ring is being wired is still pending."""
    harness = of(1)
    harness.come(2)
    harness.say(1, m.VoteTopology(1, 0))

    assert harness.say(1, m.VotePending(2)) == [SendTo(1, m.PendingAnswer(2, True))]


def test_a_withdrawn_vote_does_not_count() -> None:
    """Goal: the vote of a caller that gave up does not count."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(1, m.Withdraw(1))

    assert harness.say(2, m.VoteTopology(1, 0)) == []
    assert sent(harness.say(1, m.VoteTopology(2, 0)), m.TopologyDone)[1].call == 2


def test_a_withdrawal_that_comes_too_late_changes_nothing() -> None:
    """Goal: a withdrawal that crossed the answer is ignored; the next vote of that peer is a new one."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(2, m.VoteTopology(1, 0))

    assert harness.say(1, m.Withdraw(1)) == []
    harness.say(1, m.VoteTopology(2, 0))
    assert harness.say(1, m.Withdraw(1)) == []
    assert harness.state.votes[TOPOLOGY][1].call == 2


def test_a_withdrawal_during_an_admission_does_not_stop_it() -> None:
    """Goal: the round goes on; only the peer that gave up gets no answer."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteTopology(1, 0))
    orders = harness.say(2, m.VoteTopology(1, 0))
    harness.say(1, m.Withdraw(1))

    done = harness.wire(orders)

    assert set(sent(done, m.TopologyDone)) == {2}
    assert set(sent(done, m.Accepted)) == {3}


def test_voting_twice_breaks_the_protocol() -> None:
    """Goal: an actor that votes twice has an internal error and is kicked."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))

    kick = sent(harness.say(1, m.VoteTopology(2, 0)), m.Kick)

    assert kick == {1: m.Kick(INVALID_USAGE, "voted twice in update_topology (calls 1 and 2)")}


# --- Waiting for a larger group ---------------------------------------------


def test_a_round_is_held_while_everybody_waits_for_more() -> None:
    """Goal: wait_for_world_size does not poll; nothing happens until a newcomer arrives."""
    harness = of(1, 2, vote_warning=0.0)
    harness.say(1, m.VoteTopology(1, 3))

    assert harness.say(2, m.VoteTopology(2, 3)) == []
    assert harness.pass_time(100) == []

    assert set(sent(harness.come(3), m.RingOrder)) == {1, 2, 3}


def test_one_who_does_not_wait_releases_all() -> None:
    """Goal: a plain update_topology is a barrier, whatever the others wait for."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 3))

    assert set(sent(harness.say(2, m.VoteTopology(2, 0)), m.TopologyDone)) == {1, 2}


def test_who_gives_up_waiting_may_come_back_content() -> None:
    """Goal: a held round is checked again with every new vote."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 3))
    harness.say(2, m.VoteTopology(1, 3))
    harness.say(2, m.Withdraw(1))

    assert set(sent(harness.say(2, m.VoteTopology(2, 2)), m.TopologyDone)) == {1, 2}


def test_the_wish_counts_the_own_group_only() -> None:
    """Goal: members of other groups do not count."""
    harness = of(1)
    harness.admit(2, 3, group=1)
    harness.say(1, m.VoteTopology(1, 2))
    harness.say(2, m.VoteTopology(1, 3))

    assert harness.say(3, m.VoteTopology(1, 3)) == []


# --- Long waits -------------------------------------------------------------


def test_a_long_vote_names_the_missing() -> None:
    """Goal: after five seconds every waiting caller is told which peers are missing and what they do."""
    harness = of(1, 2, 3)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(2, m.VotePending(1))

    assert harness.pass_time(2.5) == []
    harness.say(2, m.Withdraw(1))
    actions = harness.pass_time(3)
    notices = sent(actions, m.Notice)

    assert set(notices) == {1}
    assert notices[1].line == "update_topology has waited 5 s for peers 2, 3 (in no call)"
    assert Log(WARNING, notices[1].line) in actions


def test_each_round_has_a_warning_of_its_own() -> None:
    """Goal: a second long wait is logged again."""
    harness = of(1, 2)
    for call in (1, 2):
        harness.say(1, m.VoteTopology(call, 0))
        assert set(sent(harness.pass_time(31), m.Notice)) == {1}
        harness.say(2, m.VoteTopology(call, 0))
        harness.pass_time(1)


def test_a_newcomer_is_told_whom_it_waits_for() -> None:
    """Goal: connect() that takes long says why; and the member that keeps it waiting is told what to do."""
    harness = of(1)
    harness.come(2)

    notices = sent(harness.pass_time(6), m.Notice)

    waits = "update_topology waits for peer 1 (in no call)"
    assert notices[2].line == f"not admitted yet: {waits}. Members admit newcomers by update_topology()"
    assert notices[1].line == f"peer 2 cannot join: {waits}. Call update_topology() on every member"
    assert not sent(harness.pass_time(3), m.Notice)


def test_no_straggler_is_kicked_by_default() -> None:
    """Goal: inner training steps may be long."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))

    assert not sent(harness.pass_time(3600), m.Kick)


def test_a_straggler_is_kicked_when_there_is_a_limit() -> None:
    """Goal: the missing peers are kicked with the reason; the waiting ones go on."""
    harness = of(1, 2, vote_timeout=20.0)
    harness.say(1, m.VoteTopology(1, 0))

    actions = harness.pass_time(21)

    assert sent(actions, m.Kick)[2].result == LOST
    assert sent(actions, m.Kick)[2].reason.startswith("straggler: peer 1 waited 20")
    assert set(sent(harness.wire(actions), m.TopologyDone)) == {1}


def test_a_newcomer_is_no_straggler_of_a_vote_before_its_time() -> None:
    """Goal: a vote that began before a peer was accepted does not count as late for that peer."""
    harness = of(1, 2, vote_timeout=20.0)
    harness.say(1, m.VotePending(1))
    harness.pass_time(15)
    harness.say(2, m.VotePending(1))
    harness.say(1, m.VotePending(2))
    harness.pass_time(15)
    harness.admit(3)
    harness.say(2, m.VotePending(2))

    assert not sent(harness.pass_time(19), m.Kick)
    assert set(sent(harness.pass_time(2), m.Kick)) == {3}


# --- Calls that never meet --------------------------------------------------


@pytest.mark.parametrize("timeout", [1.0, 3.0])
def test_calls_that_never_meet_are_explained_in_time(timeout: float) -> None:
    """Goal: both callers get the explanation within the option's time and one sweep, and may call again."""
    harness = of(1, 2, deadlock_timeout=timeout)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(2, m.VotePending(1))

    assert harness.pass_time(timeout - 0.1) == []
    failed = sent(harness.pass_time(1.2), m.CallFailed)

    assert set(failed) == {1, 2}
    assert failed[1] == failed[2]
    assert failed[1].result == INVALID_USAGE
    assert "peer 2 in are_peers_pending; peer 1 in update_topology" in failed[1].reason
    harness.say(1, m.VoteTopology(2, 0))
    assert set(sent(harness.say(2, m.VoteTopology(2, 0)), m.TopologyDone)) == {1, 2}


def test_two_threads_of_one_peer_are_no_deadlock() -> None:
    """Goal: a peer that is in both calls completes one of them sooner or later."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(1, m.VotePending(2))

    assert not sent(harness.pass_time(20), m.CallFailed)


def test_a_vote_that_just_arrived_is_given_its_time() -> None:
    """Goal: the time starts with the arrival of the last vote."""
    harness = of(1, 2, deadlock_timeout=3.0)
    harness.say(1, m.VoteTopology(1, 0))
    harness.pass_time(10)
    harness.say(2, m.VotePending(1))

    assert not sent(harness.pass_time(2.9), m.CallFailed)
    assert set(sent(harness.pass_time(1.2), m.CallFailed)) == {1, 2}


def test_heartbeats_do_not_look_at_held_votes_again() -> None:
    """Goal: while thousands wait for a larger group, a heartbeat costs no more than otherwise."""
    harness = of(*range(1, 6), check=False)
    for peer in range(1, 6):
        harness.say(peer, m.VoteTopology(1, 9))
    looked: list[Any] = []

    class Counting(dict[int, Any]):
        def items(self) -> Any:
            looked.append(1)
            return super().items()

    harness.state.votes[TOPOLOGY] = Counting(harness.state.votes[TOPOLOGY])
    for peer in range(1, 6):
        harness.say(peer, m.Beat(1))

    assert not looked
