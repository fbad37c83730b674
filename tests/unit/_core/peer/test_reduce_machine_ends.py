"""Reduces of a peer that end without a verdict: by a stall, or with the membership."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.peer.events import (
    AbortOperation,
    AppGone,
    Complete,
    EndOperation,
    HangUp,
    KillLanes,
    LinkDown,
    MasterDown,
    MasterSaid,
    ReduceDrained,
    ReduceEnded,
    ReduceProgress,
    SendMaster,
    Stop,
)
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import Tick

from .peer_harness import (
    CANCELLED,
    COLLECTIVE,
    FAILED,
    INVALID_USAGE,
    KICKED,
    LOST,
    MASTER_FAILED,
    MASTER_LOST,
    NEXT_ORDER,
    PLAIN,
    SECOND,
    SUCCESS,
    PeerHarness,
    ends,
    member,
    operation,
    reduce,
    reducing,
    running,
    told,
    verdict,
)

# --- Stalls -----------------------------------------------------------------


def pass_time(peer: PeerHarness, seconds: float, moved: list[int] | None = None) -> list[Any]:
    """Let time pass in ticks of at most a second; before each tick, report the progress of sequence 1."""
    actions = []
    end_ns = peer.now_ns + int(seconds * SECOND)
    while peer.now_ns < end_ns and peer.state.ring_links.is_whole():
        peer.now_ns = min(peer.state.next_deadline_ns, end_ns)
        peer.hear(m.Beat(1))
        peer.feed(ReduceProgress(1, moved.pop(0) if moved else -1))
        actions += peer.feed(Tick())
    return [action for action in actions if not told([action], m.Beat)]


def test_a_stall_lets_go_of_everything() -> None:
    """Goal: after the limit the operation is aborted, then both edges and all workers are dropped."""
    peer = running(5)
    peer.feed(ReduceProgress(1, -1))

    assert pass_time(peer, 9.9) == []
    actions = pass_time(peer, 2)

    assert actions[0] == AbortOperation(1)
    assert [lost.reason for lost in told(actions, m.EdgeLost)] == 2 * [
        "no byte of tag 5 moved for 10.0 s (stall_timeout)"
    ]
    assert KillLanes() in actions
    assert told(peer.feed(ReduceDrained(1)), m.Finished) == [
        m.Finished(1, False, "no byte of tag 5 moved for 10.0 s (stall_timeout)")
    ]


def test_who_moves_now_and_then_is_not_stalled() -> None:
    """Goal: the limit is eight times the longest pause of the reduce, if that is longer than the option."""
    peer = running(5, stall_timeout=2.0)

    assert pass_time(peer, 1.0, [1]) == []
    assert pass_time(peer, 1.9, [2]) == []
    assert pass_time(peer, 7.9) == []
    assert pass_time(peer, 2.0)[0] == AbortOperation(1)


def test_a_reduce_that_is_voted_cannot_stall() -> None:
    """Goal: this peer has nothing more to move; a peer that has will find the stall."""
    peer = running(5)
    peer.feed(ReduceEnded(1, 0, 0, 0, 0, 0))

    assert pass_time(peer, 60) == []


def test_its_own_stop_is_no_stall() -> None:
    """Goal: a process that was stopped for a minute saw nothing move, which is no sign of broken lanes."""
    peer = running(5)
    peer.feed(ReduceProgress(1, -1))
    peer.now_ns += 60 * SECOND
    peer.feed(ReduceProgress(1, -1))

    assert not [action for action in peer.feed(Tick()) if isinstance(action, AbortOperation)]
    assert pass_time(peer, 8.9) == []
    assert pass_time(peer, 2)[0] == AbortOperation(1)


def test_its_own_stop_is_no_pause_either() -> None:
    """Goal: a stop of one minute does not raise the limit to eight minutes."""
    peer = running(5)
    peer.feed(ReduceProgress(1, -1))
    peer.now_ns += 60 * SECOND
    peer.feed(ReduceProgress(1, 7))
    peer.feed(Tick())

    assert AbortOperation(1) in pass_time(peer, 12, 12 * [7])


def test_a_broken_ring_cannot_stall() -> None:
    """Goal: a new ring order is on its way; a second report would be about the old edges."""
    peer = running(5)
    peer.feed(LinkDown(1, "reset"))

    assert peer.pass_time(60) == []


# --- The end ----------------------------------------------------------------

ENDS = [
    (MasterSaid(m.Kick(8, "straggler")), 8, KICKED),
    (MasterDown("reset"), MASTER_FAILED, MASTER_LOST),
]


@pytest.mark.parametrize(("event", "result", "kind"), ENDS, ids=["kicked", "master lost"])
def test_the_end_aborts_what_runs_and_its_slots_wait_for_the_drain(event: Any, result: int, kind: int) -> None:
    """Goal: a reduce that has not begun ends at once; others when no worker uses their memory any more."""
    peer = reducing()

    actions = peer.feed(event)

    assert actions[:2] == [AbortOperation(1), AbortOperation(2)]
    assert ends(actions) == [(7, result, kind)]
    assert HangUp() in actions
    assert peer.feed(ReduceDrained(2))[0] == EndOperation(2)
    assert ends(peer.feed(ReduceDrained(1))) == [(3, result, kind)]
    assert ends(peer.call(reduce(operation(9, 9)))) == [(9, result, kind)]


def test_a_verdict_that_was_there_first_is_the_one() -> None:
    """Goal: a reduce that had failed but not drained keeps its verdict when the membership ends."""
    peer = running(5)
    peer.hear(NEXT_ORDER)
    peer.hear(verdict(5, 1))
    assert ends(peer.feed(MasterDown("reset"))) == []

    assert peer.feed(ReduceDrained(1)) == [EndOperation(1), Complete(5, 50, LOST, COLLECTIVE, FAILED)]


def test_what_has_drained_already_ends_with_the_membership() -> None:
    """Goal: a drained reduce that waits for its verdict ends with the membership's reason."""
    peer = running(5)
    peer.hear(NEXT_ORDER)
    peer.feed(ReduceDrained(1))

    assert ends(peer.feed(MasterDown("reset"))) == [(5, MASTER_FAILED, MASTER_LOST)]


def test_close_is_answered_after_every_reduce() -> None:
    """Goal: a thread that waits for a reduce gets its completion, and only then does the actor end."""
    peer = reducing()

    actions = peer.call(mailbox.CallLeave(8, 80))

    assert actions[0] == SendMaster(m.Leave("close"))
    assert ends(actions) == [(7, INVALID_USAGE, CANCELLED)]
    assert Stop() not in actions
    assert ends(peer.feed(ReduceDrained(1))) == [(3, INVALID_USAGE, CANCELLED)]
    assert peer.feed(ReduceDrained(2))[-2:] == [Complete(8, 80, SUCCESS, PLAIN, b""), Stop()]


def test_close_after_the_end_waits_for_the_drain_too() -> None:
    """Goal: a close() after a kick waits until the reduces have drained."""
    peer = running(5)
    peer.hear(m.Kick(8, "straggler"))

    assert peer.call(mailbox.CallLeave(8, 80)) == []
    assert ends(peer.feed(ReduceDrained(1))) == [(5, 8, KICKED), (8, SUCCESS, PLAIN)]


@pytest.mark.parametrize("closing", [False, True])
def test_without_a_training_process_nobody_waits(closing: bool) -> None:
    """Goal: the memory is gone with the training process, so the actor ends at once, also during a close()."""
    peer = running(5)
    if closing:
        peer.call(mailbox.CallLeave(8, 80))

    assert peer.feed(AppGone("killed"))[-1] == Stop()


def test_a_membership_that_ends_with_nothing_under_way_ends_as_before() -> None:
    """Goal: without a reduce, the end of the membership waits for nothing."""
    assert member().call(mailbox.CallLeave(8, 80))[-2:] == [Complete(8, 80, SUCCESS, PLAIN, b""), Stop()]
