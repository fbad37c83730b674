"""Reduces that wait: calls that block on a tag that other members have not initiated, and the master's answer."""

from __future__ import annotations

from pccl._core.protocol import messages as m

from .master_harness import INVALID_USAGE, LOST, SECOND, failures, of, pairs, running, sent


def test_a_reduce_and_a_topology_vote_never_meet() -> None:
    """Goal: the contract's example; both callers get the explanation, and both may go on."""
    harness = of(1, 2, deadlock_timeout=3.0)
    harness.reduce(1, 5)
    harness.say(1, m.Awaiting(5))
    harness.say(2, m.VoteTopology(1, 0))

    actions = harness.pass_time(4.2)

    assert failures(actions) == [(1, 5, 0, INVALID_USAGE)]
    reason = sent(actions, m.CallFailed)[2].reason
    assert "peer 1 in all_reduce (tag 5); peer 2 in update_topology" in reason
    assert sent(actions, m.ReduceFailed)[1].reason == reason
    assert harness.state.members.counters["deadlocks"] == 1
    harness.reduce(1, 5)
    assert pairs(harness.reduce(2, 5)) == [[(5, 1)]]


def test_two_tags_that_never_meet() -> None:
    """Goal: each peer blocks on a tag that the other has not initiated."""
    harness = of(1, 2)
    for peer, tag in ((1, 5), (2, 6)):
        harness.reduce(peer, tag)
        harness.say(peer, m.Awaiting(tag))

    assert failures(harness.pass_time(5)) == [(1, 5, 0, INVALID_USAGE), (2, 6, 0, INVALID_USAGE)]


def test_who_does_not_block_is_not_stuck() -> None:
    """Goal: a peer that has launched and not awaited a reduce may still make any call."""
    harness = of(1, 2, vote_warning=0.0)
    harness.reduce(1, 5)
    harness.reduce(2, 6)
    harness.say(2, m.Awaiting(6))

    assert harness.pass_time(20) == []


def test_who_has_voted_without_blocking_is_not_missing() -> None:
    """Goal: tag 5 waits for peer 3 only, which is free; so peers 1 and 2 will go on."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5)
    harness.reduce(2, 5, 6)
    harness.say(1, m.Awaiting(5))
    harness.say(2, m.Awaiting(6))

    assert failures(harness.pass_time(20)) == []


def test_awaiting_what_has_commenced_is_nobodys_business() -> None:
    """Goal: an await that crossed the commence is ignored; the next vote on that tag does not count as blocking."""
    harness = running(1, 2)

    assert harness.say(1, m.Awaiting(5)) == []
    assert harness.say(1, m.Awaiting(99)) == []
    assert not harness.state.members.groups[0].collectives.open


def test_a_long_wait_names_the_missing() -> None:
    """Goal: a caller that blocks on a tag is told which peers are missing, and in which call they are."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5)
    harness.reduce(3, 5)
    harness.say(1, m.Awaiting(5))

    notices = sent(harness.pass_time(32), m.Notice)

    assert {peer: notice.line for peer, notice in notices.items()} == {
        1: "all_reduce (tag 5) has waited 20 s for peer 2 (in no call)"
    }
    assert not sent(harness.pass_time(7), m.Notice)


def test_a_straggler_of_a_reduce_is_kicked_when_there_is_a_limit() -> None:
    """Goal: the missing peers are kicked; the waiting ones get the outcome of their reduce."""
    harness = of(1, 2, 3, vote_timeout=20.0)
    harness.reduce(1, 5)
    harness.reduce(2, 5)
    harness.say(1, m.Awaiting(5))

    actions = harness.pass_time(22)

    assert sent(actions, m.Kick)[3].reason.startswith("straggler: peer 1 waited 20")
    assert failures(harness.wire(actions)) == [(1, 5, 0, LOST), (2, 5, 0, LOST)]


def test_a_tag_that_nobody_blocks_on_may_wait() -> None:
    """Goal: no warning and no kick for a reduce that runs in the background."""
    harness = of(1, 2, vote_timeout=20.0)
    harness.reduce(1, 5)

    assert harness.pass_time(100) == []


def test_the_two_calls_of_a_group_and_of_all_are_watched_together() -> None:
    """Goal: a deadlock in one group does not end a vote of another group that can still complete."""
    harness = of(1, 2)
    harness.admit(3, group=1)
    for peer, tag in ((1, 5), (2, 6)):
        harness.reduce(peer, tag)
        harness.say(peer, m.Awaiting(tag))
    harness.say(3, m.VotePending(1))

    actions = harness.pass_time(5)

    assert [peer for peer, _, _, _ in failures(actions)] == [1, 2]
    assert set(sent(actions, m.CallFailed)) == {3}


def test_traffic_is_kept_by_peer() -> None:
    """Goal: heartbeats carry the bytes that the lanes have moved."""
    harness = of(1)
    harness.now_ns += SECOND
    harness.say(1, m.Beat(1, 30, 40))

    assert (harness.state.members.peers[1].tx_bytes, harness.state.members.peers[1].rx_bytes) == (30, 40)
