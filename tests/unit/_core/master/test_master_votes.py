"""The master's votes: unanimous, withdrawable, watched, and explained when they can never be."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import SendTo
from pccl._core.protocol import messages as m

from .master_harness import INVALID_USAGE, LOST, of, sent

PENDING, TOPOLOGY = "are_peers_pending", "update_topology"


def test_pending_has_one_answer_for_all() -> None:
    """Goal: everybody who asked in a round hears the same, newcomers or not."""
    scene = of(1, 2)
    assert scene.say(1, m.VotePending(4)) == []
    assert scene.say(2, m.VotePending(5)) == [
        SendTo(1, m.PendingAnswer(4, False)),
        SendTo(2, m.PendingAnswer(5, False)),
    ]

    scene.come(3)
    scene.say(1, m.VotePending(6))
    assert scene.say(2, m.VotePending(7)) == [SendTo(1, m.PendingAnswer(6, True)), SendTo(2, m.PendingAnswer(7, True))]


def test_pending_is_answered_while_a_ring_is_wired() -> None:
    """Goal: asking overlaps everything; who is being admitted is still pending."""
    scene = of(1)
    scene.come(2)
    scene.say(1, m.VoteTopology(1, 0))

    assert scene.say(1, m.VotePending(2)) == [SendTo(1, m.PendingAnswer(2, True))]


def test_a_withdrawn_vote_does_not_count() -> None:
    """Goal: a caller that gave up is not taken to agree."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 0))
    scene.say(1, m.Withdraw(1))

    assert scene.say(2, m.VoteTopology(1, 0)) == []
    assert sent(scene.say(1, m.VoteTopology(2, 0)), m.TopologyDone)[1].call == 2


def test_a_withdrawal_that_comes_too_late_changes_nothing() -> None:
    """Goal: it crossed the answer on its way; the next vote of that peer is another one."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 0))
    scene.say(2, m.VoteTopology(1, 0))

    assert scene.say(1, m.Withdraw(1)) == []
    scene.say(1, m.VoteTopology(2, 0))
    assert scene.say(1, m.Withdraw(1)) == []
    assert scene.state.votes[TOPOLOGY][1].call == 2


def test_a_withdrawal_during_an_admission_does_not_stop_it() -> None:
    """Goal: the round is closed; only the answer to the one who gave up is spared."""
    scene = of(1, 2)
    scene.come(3)
    scene.say(1, m.VoteTopology(1, 0))
    orders = scene.say(2, m.VoteTopology(1, 0))
    scene.say(1, m.Withdraw(1))

    done = scene.wire(orders)

    assert set(sent(done, m.TopologyDone)) == {2}
    assert set(sent(done, m.Accepted)) == {3}


def test_voting_twice_breaks_the_protocol() -> None:
    """Goal: an actor that lost count of its calls is not trusted further."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 0))

    kick = sent(scene.say(1, m.VoteTopology(2, 0)), m.Kick)

    assert kick == {1: m.Kick(INVALID_USAGE, "voted twice in update_topology (calls 1 and 2)")}


# --- Waiting for a larger group ---------------------------------------------


def test_a_round_is_held_while_everybody_waits_for_more() -> None:
    """Goal: wait_for_world_size does not spin; nothing happens until somebody comes."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 3))

    assert scene.say(2, m.VoteTopology(2, 3)) == []
    assert scene.pass_time(100) == []

    assert set(sent(scene.come(3), m.RingOrder)) == {1, 2, 3}


def test_one_who_does_not_wait_releases_all() -> None:
    """Goal: a plain update_topology is a barrier, whatever the others wait for."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 3))

    assert set(sent(scene.say(2, m.VoteTopology(2, 0)), m.TopologyDone)) == {1, 2}


def test_who_gives_up_waiting_may_come_back_content() -> None:
    """Goal: a held round is judged again with every new vote."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 3))
    scene.say(2, m.VoteTopology(1, 3))
    scene.say(2, m.Withdraw(1))

    assert set(sent(scene.say(2, m.VoteTopology(2, 2)), m.TopologyDone)) == {1, 2}


def test_the_wish_counts_the_own_group_only() -> None:
    """Goal: three members elsewhere do not make a pair a trio."""
    scene = of(1)
    scene.admit(2, 3, group=1)
    scene.say(1, m.VoteTopology(1, 2))
    scene.say(2, m.VoteTopology(1, 3))

    assert scene.say(3, m.VoteTopology(1, 3)) == []


# --- Long waits -------------------------------------------------------------


def test_a_long_vote_names_the_missing_once() -> None:
    """Goal: after half a minute every waiting caller hears who is missing and where they are, and then no more."""
    scene = of(1, 2, 3)
    scene.say(1, m.VoteTopology(1, 0))
    scene.say(2, m.VotePending(1))

    assert scene.pass_time(2.5) == []
    scene.say(2, m.Withdraw(1))
    actions = scene.pass_time(29)
    notices = sent(actions, m.Notice)

    assert set(notices) == {1}
    assert notices[1].line == "update_topology waits since 30 s for peers 2, 3 (in no call)"
    assert not sent(scene.pass_time(100), m.Notice)


def test_each_round_has_a_warning_of_its_own() -> None:
    """Goal: the next long wait is news again."""
    scene = of(1, 2)
    for call in (1, 2):
        scene.say(1, m.VoteTopology(call, 0))
        assert set(sent(scene.pass_time(31), m.Notice)) == {1}
        scene.say(2, m.VoteTopology(call, 0))
        scene.pass_time(1)


def test_a_newcomer_is_told_whom_it_waits_for() -> None:
    """Goal: connect() that takes long says why, once; and the member that keeps it waiting is told what to do."""
    scene = of(1)
    scene.come(2)

    notices = sent(scene.pass_time(31), m.Notice)

    waits = "update_topology waits for peer 1 (in no call)"
    assert notices[2].line == f"not admitted yet: {waits}. Members admit newcomers by update_topology()"
    assert notices[1].line == f"peer 2 cannot join: {waits}. Call update_topology() on every member"
    assert not sent(scene.pass_time(100), m.Notice)


def test_no_straggler_is_kicked_by_default() -> None:
    """Goal: inner training steps may be long."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 0))

    assert not sent(scene.pass_time(3600), m.Kick)


def test_a_straggler_is_kicked_when_there_is_a_limit() -> None:
    """Goal: the missing go, with the reason; those who waited go on."""
    scene = of(1, 2, vote_timeout=20.0)
    scene.say(1, m.VoteTopology(1, 0))

    actions = scene.pass_time(21)

    assert sent(actions, m.Kick)[2].result == LOST
    assert sent(actions, m.Kick)[2].reason.startswith("straggler: peer 1 waited 20")
    assert set(sent(scene.wire(actions), m.TopologyDone)) == {1}


def test_a_newcomer_is_no_straggler_of_a_vote_before_its_time() -> None:
    """Goal: a question that was open before a peer was accepted is not held against it."""
    scene = of(1, 2, vote_timeout=20.0)
    scene.say(1, m.VotePending(1))
    scene.pass_time(15)
    scene.say(2, m.VotePending(1))
    scene.say(1, m.VotePending(2))
    scene.pass_time(15)
    scene.admit(3)
    scene.say(2, m.VotePending(2))

    assert not sent(scene.pass_time(19), m.Kick)
    assert set(sent(scene.pass_time(2), m.Kick)) == {3}


# --- Calls that never meet --------------------------------------------------


@pytest.mark.parametrize("timeout", [1.0, 3.0])
def test_calls_that_never_meet_are_explained_in_time(timeout: float) -> None:
    """Goal: both callers get the sentence, within the option's time and one sweep, and may call again."""
    scene = of(1, 2, deadlock_timeout=timeout)
    scene.say(1, m.VoteTopology(1, 0))
    scene.say(2, m.VotePending(1))

    assert scene.pass_time(timeout - 0.1) == []
    failed = sent(scene.pass_time(1.2), m.CallFailed)

    assert set(failed) == {1, 2}
    assert failed[1] == failed[2]
    assert failed[1].result == INVALID_USAGE
    assert "peer 2 in are_peers_pending; peer 1 in update_topology" in failed[1].reason
    scene.say(1, m.VoteTopology(2, 0))
    assert set(sent(scene.say(2, m.VoteTopology(2, 0)), m.TopologyDone)) == {1, 2}


def test_two_threads_of_one_peer_are_no_deadlock() -> None:
    """Goal: who is in both calls completes one of them sooner or later."""
    scene = of(1, 2)
    scene.say(1, m.VoteTopology(1, 0))
    scene.say(1, m.VotePending(2))

    assert not sent(scene.pass_time(20), m.CallFailed)


def test_a_vote_that_just_arrived_is_given_its_time() -> None:
    """Goal: the clock starts with the last one's arrival."""
    scene = of(1, 2, deadlock_timeout=3.0)
    scene.say(1, m.VoteTopology(1, 0))
    scene.pass_time(10)
    scene.say(2, m.VotePending(1))

    assert not sent(scene.pass_time(2.9), m.CallFailed)
    assert set(sent(scene.pass_time(1.2), m.CallFailed)) == {1, 2}


def test_heartbeats_do_not_look_at_held_votes_again() -> None:
    """Goal: while thousands wait for a larger group, a heartbeat costs no more than otherwise."""
    scene = of(*range(1, 6), check=False)
    for peer in range(1, 6):
        scene.say(peer, m.VoteTopology(1, 9))
    looked: list[Any] = []

    class Counting(dict[int, Any]):
        def items(self) -> Any:
            looked.append(1)
            return super().items()

    scene.state.votes[TOPOLOGY] = Counting(scene.state.votes[TOPOLOGY])
    for peer in range(1, 6):
        scene.say(peer, m.Beat(1))

    assert not looked
