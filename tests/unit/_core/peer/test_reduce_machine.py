"""The peer's side of reduces: from the call to the completion of its slot, and which process may use the memory."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.peer.events import (
    AbortOperation,
    BeginOperation,
    Complete,
    Dial,
    DropLink,
    EndOperation,
    LinkDown,
    MasterSaid,
    ReduceDrained,
    ReduceEnded,
    SendMaster,
    Traffic,
    WorkerDied,
)
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import NUMBERS, REDUCED, Tick
from pccl._core.protocol.operations import pack_pairs, pack_signatures

from .peer_harness import (
    CANCELLED,
    COLLECTIVE,
    FAILED,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    LOST,
    NEXT_ORDER,
    PENDING_ASYNC_OPS,
    PLAIN,
    SECOND,
    SUCCESS,
    WORLD,
    PeerHarness,
    commence,
    ends,
    initiated,
    operation,
    phases,
    reduce,
    reducing,
    running,
    told,
    verdict,
    wire,
    wired,
)

# --- From the call to its completion ----------------------------------------


def test_the_short_way_action_by_action() -> None:
    """Goal: four steps; each but the last is one message or action."""
    peer = wired()
    mine = operation(5, 5)

    assert peer.call(reduce(mine)) == [SendMaster(m.Initiate(pack_signatures([mine])))]
    assert peer.hear(commence((5, 1))) == [BeginOperation(1, mine, 1, 3)]
    assert peer.feed(ReduceEnded(1, 10, 20, 30, 40, 50)) == [SendMaster(m.Finished(1, True, ""))]
    assert peer.hear(m.ReduceDone(1)) == [
        EndOperation(1),
        Complete(5, 50, SUCCESS, PLAIN, REDUCED.pack(3, 10, 20, 30, 40, 50) + WORLD),
    ]
    assert not peer.state.member.reduces.tags


def test_a_success_brings_the_numbers_of_the_world_in_which_it_commenced() -> None:
    """Goal: the numbers are neither older nor newer, however often the world changes during the reduce."""
    peer = initiated(5, 6)
    peer.hear(m.World(2, 7, 3, 3, 4, 1))
    peer.hear(commence((5, 1)))
    peer.hear(m.World(2, 6, 3, 2, 3, 1))
    peer.hear(commence((6, 2)))
    for sequence in (1, 2):
        peer.feed(ReduceEnded(sequence, 0, 0, 0, 0, 0))

    first, second = (peer.hear(m.ReduceDone(sequence))[-1].payload[REDUCED.size :] for sequence in (1, 2))
    assert NUMBERS.unpack(first) == (2, 1, 2, 7, 3, 3, 4)
    assert NUMBERS.unpack(second) == (2, 1, 2, 6, 3, 2, 3)


def test_a_round_that_was_given_up_still_brings_its_numbers() -> None:
    """Goal: the master sends the numbers once, so a peer keeps them even if no call waits for that answer."""
    peer = wired()
    peer.hear(m.TopologyDone(77, 8, 2, 6, 3, 2, 3))
    peer.call(reduce(operation(5, 5)))
    peer.hear(commence((5, 1)))
    peer.feed(ReduceEnded(1, 0, 0, 0, 0, 0))

    assert NUMBERS.unpack(peer.hear(m.ReduceDone(1))[-1].payload[REDUCED.size :]) == (2, 8, 2, 6, 3, 2, 3)


def test_a_list_is_one_vote_and_each_operation_has_its_slot() -> None:
    """Goal: lists of operations travel together and end one by one."""
    peer = wired()
    first, second = operation(5, 5), operation(6, 6)

    assert peer.call(reduce(first, second)) == [SendMaster(m.Initiate(pack_signatures([first, second])))]
    assert peer.hear(commence((6, 1), (5, 2))) == [BeginOperation(1, second, 1, 3), BeginOperation(2, first, 1, 3)]
    peer.feed(ReduceEnded(2, 0, 0, 0, 0, 0))
    assert ends(peer.hear(m.ReduceDone(2))) == [(5, SUCCESS, PLAIN)]
    assert phases(peer) == {6: "running"}


def test_a_tag_in_use_is_refused_and_the_rest_goes_on() -> None:
    """Goal: only the second use of the tag is wrong."""
    peer = initiated(5)
    other = operation(8, 8)

    actions = peer.call(reduce(operation(7, 5), other))

    assert ends(actions) == [(7, INVALID_ARGUMENT, PLAIN)]
    assert told(actions, m.Initiate) == [m.Initiate(pack_signatures([other]))]


def test_the_same_tag_twice_in_one_list_is_in_use() -> None:
    """Goal: the second use is refused here, because the master would treat it as a protocol violation."""
    peer = wired()

    actions = peer.call(reduce(operation(5, 5), operation(6, 5)))

    assert ends(actions) == [(6, INVALID_ARGUMENT, PLAIN)]
    assert told(actions, m.Initiate) == [m.Initiate(pack_signatures([operation(5, 5)]))]


def test_a_list_of_nothing_but_used_tags_votes_for_nothing() -> None:
    """Goal: no empty message is sent."""
    peer = initiated(5)

    assert not told(peer.call(reduce(operation(7, 5))), m.Initiate)


def test_no_topology_vote_with_reduces_under_way() -> None:
    """Goal: the call fails with PENDING_ASYNC_OPS; are_peers_pending may overlap any call."""
    peer = initiated(5)

    assert ends(peer.call(mailbox.CallTopology(1, 1, 0))) == [(1, PENDING_ASYNC_OPS, PLAIN)]
    assert told(peer.call(mailbox.CallPending(2, 2)), m.VotePending)


def test_no_reduce_during_a_topology_vote() -> None:
    """Goal: while another thread votes, each operation fails with that reason."""
    peer = wired()
    peer.call(mailbox.CallTopology(1, 1, 0))

    actions = peer.call(reduce(operation(5, 5), operation(6, 6)))

    assert ends(actions) == [(5, INVALID_USAGE, PLAIN), (6, INVALID_USAGE, PLAIN)]
    assert b"update_topology" in actions[0].payload


def test_without_a_membership_every_operation_of_the_list_is_told_why() -> None:
    """Goal: every slot is completed, so no caller waits for ever."""
    actions = PeerHarness().call(reduce(operation(5, 5), operation(6, 6)))

    assert ends(actions) == [(5, INVALID_USAGE, PLAIN), (6, INVALID_USAGE, PLAIN)]


def test_traffic_travels_with_the_heartbeat() -> None:
    """Goal: traffic counts need no message of their own."""
    peer = wired()
    peer.feed(Traffic(30, 40))
    peer.now_ns = SECOND

    assert told(peer.feed(Tick()), m.Beat) == [m.Beat(SECOND, 30, 40)]


# --- Failing without having begun -------------------------------------------


def test_a_failure_before_it_commenced_ends_it_at_once() -> None:
    """Goal: the memory was not used; the failure carries the world's numbers."""
    peer = initiated(5)

    assert peer.hear(verdict(5, 0)) == [Complete(5, 50, LOST, COLLECTIVE, FAILED)]
    assert told(peer.call(reduce(operation(6, 5))), m.Initiate)


def test_an_order_leaves_what_has_not_commenced() -> None:
    """Goal: only the master knows whether the vote reached it before the ring changed."""
    peer = initiated(5, 6)

    assert not [action for action in peer.hear(NEXT_ORDER) if isinstance(action, AbortOperation)]
    assert ends(peer.hear(verdict(5, 0))) == [(5, LOST, COLLECTIVE)]
    assert phases(peer) == {6: "initiated"}


def test_giving_up_in_time() -> None:
    """Goal: the slot completes when the master confirms, not before; a second Ctrl-C changes nothing."""
    peer = initiated(5)

    assert peer.call(mailbox.CallCancel(5, 50)) == [SendMaster(m.WithdrawReduce(5))]
    assert peer.call(mailbox.CallCancel(5, 50)) == []
    assert peer.hear(verdict(5, 0, INVALID_USAGE, "given up")) == [
        Complete(5, 50, INVALID_USAGE, CANCELLED, b"given up")
    ]


def test_giving_up_too_late() -> None:
    """Goal: the commence crossed the withdrawal; other members rely on this peer, so the reduce runs to its verdict."""
    peer = initiated(5)
    peer.call(mailbox.CallCancel(5, 50))

    assert peer.hear(commence((5, 1))) == [BeginOperation(1, operation(5, 5), 1, 3)]
    peer.feed(ReduceEnded(1, 0, 0, 0, 0, 0))
    assert ends(peer.hear(m.ReduceDone(1))) == [(5, SUCCESS, PLAIN)]


@pytest.mark.parametrize("slot", [3, 4, 99])
def test_giving_up_what_runs_or_is_unknown_does_nothing(slot: int) -> None:
    """Goal: tag 3 runs, tag 4 is voted, slot 99 is not in use; a cancel of any of them is ignored."""
    assert reducing().call(mailbox.CallCancel(slot, 10 * slot)) == []


def test_the_slots_sequence_tells_an_old_call_from_a_new_one() -> None:
    """Goal: a cancel that comes after the end of its call does not affect the next user of the slot."""
    assert initiated(5).call(mailbox.CallCancel(5, 49)) == []


def test_awaiting_is_told_once_and_only_while_it_matters() -> None:
    """Goal: the master is told that a caller blocks, once, while other members are missing."""
    peer = initiated(5)

    assert peer.call(mailbox.CallAwait(5, 50)) == [SendMaster(m.Awaiting(5))]
    assert peer.call(mailbox.CallAwait(5, 50)) == []
    peer.hear(commence((5, 1)))
    assert peer.call(mailbox.CallAwait(5, 50)) == []
    assert peer.call(mailbox.CallAwait(9, 90)) == []


# --- Aborts -----------------------------------------------------------------


@pytest.mark.parametrize("voted", [False, True])
def test_an_abort_is_answered_when_the_memory_is_restored(voted: bool) -> None:
    """Goal: also after this peer has voted success; the slot waits for the verdict."""
    peer = running(5)
    if voted:
        peer.feed(ReduceEnded(1, 0, 0, 0, 0, 0))

    assert peer.hear(m.AbortReduce(1, "peer 1 gave up")) == [AbortOperation(1)]
    (answer,) = told(peer.feed(ReduceDrained(1)), m.Finished)
    assert (answer.sequence, answer.ok) == (1, False)
    assert peer.hear(verdict(5, 1)) == [EndOperation(1), Complete(5, 50, LOST, COLLECTIVE, FAILED)]


@pytest.mark.parametrize("sequence", [2, 9])
def test_what_is_voted_or_unknown_does_not_end_again(sequence: int) -> None:
    """Goal: this peer has voted; a late event changes nothing."""
    assert reducing().feed(ReduceEnded(sequence, 0, 0, 0, 0, 0)) == []


def test_a_second_abort_is_not_answered_twice() -> None:
    """Goal: this peer reported a stall, and the master's abort crossed that message."""
    peer = running(5)
    peer.hear(m.AbortReduce(1, "x"))

    assert peer.hear(m.AbortReduce(1, "x")) == []
    peer.feed(ReduceDrained(1))
    assert peer.hear(m.AbortReduce(1, "x")) == []
    assert peer.feed(ReduceDrained(1)) == []


def test_an_end_that_crossed_the_abort_is_no_vote() -> None:
    """Goal: the actor had reported the end before the machine told it to abort."""
    peer = running(5)
    peer.hear(m.AbortReduce(1, "x"))

    assert peer.feed(ReduceEnded(1, 0, 0, 0, 0, 0)) == []
    assert phases(peer) == {5: "aborting"}


def test_an_order_aborts_what_runs_before_it_touches_a_lane() -> None:
    """Goal: running and voted reduces are aborted first, and the master gets no answer."""
    peer = reducing()

    actions = peer.hear(NEXT_ORDER)

    assert actions[:2] == [AbortOperation(1), AbortOperation(2)]
    assert {type(action) for action in actions[2:]} == {DropLink, Dial}
    assert phases(peer) == {3: "abandoned", 4: "abandoned", 7: "initiated"}
    assert peer.feed(ReduceDrained(1)) == []


@pytest.mark.parametrize("drained_first", [True, False])
def test_the_slot_waits_for_both_drain_and_verdict(drained_first: bool) -> None:
    """Goal: when the call returns, the memory is restored and the ring is wired."""
    peer = running(5)
    peer.hear(NEXT_ORDER)
    steps = [ReduceDrained(1), MasterSaid(verdict(5, 1))]
    first, second = steps if drained_first else reversed(steps)

    assert peer.feed(first) == []
    assert peer.feed(second) == [EndOperation(1), Complete(5, 50, LOST, COLLECTIVE, FAILED)]


def test_an_order_during_an_abort_takes_the_answer_back() -> None:
    """Goal: once this peer is wired, the master accepts no message about the old ring any more."""
    peer = running(5)
    peer.hear(m.AbortReduce(1, "x"))
    peer.hear(NEXT_ORDER)

    assert peer.feed(ReduceDrained(1)) == []


def test_two_orders_abort_once() -> None:
    """Goal: one AbortOperation, one ReduceDrained."""
    peer = running(5)
    peer.hear(NEXT_ORDER)

    assert AbortOperation(1) not in peer.hear(wire(4, 3, 4, 1, 4))


@pytest.mark.parametrize("event", [LinkDown(1, "reset"), WorkerDied("signal 9")], ids=["link", "worker"])
def test_a_broken_edge_alone_aborts_nothing(event: Any) -> None:
    """Goal: the master decides; the peer waits for its order."""
    peer = running(5)

    actions = peer.feed(event)

    assert told(actions, m.EdgeLost)
    assert not [action for action in actions if isinstance(action, AbortOperation)]
    assert AbortOperation(1) in peer.hear(NEXT_ORDER)


def test_what_commences_over_a_broken_ring_is_not_begun() -> None:
    """Goal: the lanes are gone and the new ring order is on its way; only the verdict ends the reduce."""
    peer = initiated(5)
    peer.feed(WorkerDied("signal 9"))

    assert peer.hear(commence((5, 1))) == []
    assert not [action for action in peer.hear(NEXT_ORDER) if isinstance(action, AbortOperation)]
    assert peer.hear(verdict(5, 1)) == [Complete(5, 50, LOST, COLLECTIVE, FAILED)]


def test_a_retry_is_not_mistaken_for_the_attempt_before_it() -> None:
    """Goal: the same tag is used again at once; late events of the old sequence change nothing."""
    peer = running(5)
    peer.hear(NEXT_ORDER)
    peer.feed(ReduceDrained(1))
    peer.hear(verdict(5, 1))
    peer.call(reduce(operation(6, 5)))

    assert peer.feed(ReduceEnded(1, 0, 0, 0, 0, 0)) == []
    assert peer.feed(ReduceDrained(1)) == []
    assert phases(peer) == {5: "initiated"}


# --- A master that breaks the protocol --------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        commence((99, 9)),  # unknown tag
        commence((3, 9)),  # already runs
        commence((7, 2)),  # a sequence that was used
        commence((7, 9), epoch=1),  # another ring
        m.Commence(2, b"nonsense"),
        m.ReduceDone(1),  # this peer has not voted
        m.ReduceDone(9),
        m.AbortReduce(9, "x"),
        verdict(3, 1),  # it runs and was not aborted
        verdict(4, 2),
        verdict(7, 9),
        verdict(3, 0),
        verdict(99, 0),
    ],
    ids=str,
)
def test_what_no_honest_master_says_ends_the_membership(message: Any) -> None:
    """Goal: the reason names what was wrong; what runs is aborted first."""
    peer = reducing()

    actions = peer.hear(message)

    assert peer.state.phase == "gone"
    assert "broke the protocol" in peer.state.ending[2]
    assert actions[0] == AbortOperation(1)


def test_a_commence_in_part_wrong_is_aborted_as_a_whole() -> None:
    """Goal: operations that began before the mistake was found are aborted with the rest."""
    peer = initiated(5)

    actions = peer.hear(m.Commence(2, pack_pairs([(5, 1), (99, 2)])))

    assert actions[:2] == [BeginOperation(1, operation(5, 5), 1, 3), AbortOperation(1)]
