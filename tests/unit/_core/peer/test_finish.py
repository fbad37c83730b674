"""The end of a run at one peer: finish() is a vote, and its answer ends the membership."""

from __future__ import annotations

from pccl._core.peer.events import Complete, HangUp, MasterDown, SendMaster
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.outcomes import KIND_FINISHED, PENDING_ASYNC_OPS

from .peer_harness import INVALID_USAGE, PLAIN, ends, joining, member, operation, reduce, running, sync


def test_a_finished_run_ends_connect_at_once() -> None:
    """Goal: a peer that comes too late does not wait and does not try again."""
    actions = joining().hear(m.RunFinished(0, "the run is finished"))

    assert actions == [HangUp(), Complete(0, 1, INVALID_USAGE, KIND_FINISHED, b"the run is finished")]


def test_finish_is_a_vote_whose_answer_ends_the_membership() -> None:
    """Goal: the caller of finish() succeeds; every other and every later call is told that the run is finished."""
    peer = member()
    assert peer.call(mailbox.CallFinish(3, 30)) == [SendMaster(m.VoteFinish(1))]
    peer.call(mailbox.CallPending(4, 40))

    actions = peer.hear(m.RunFinished(1, "over"))

    assert actions[0] == Complete(3, 30, 0, PLAIN, b"")
    assert Complete(4, 40, INVALID_USAGE, KIND_FINISHED, b"over") in actions
    assert HangUp() in actions
    later = Complete(5, 50, INVALID_USAGE, KIND_FINISHED, b"over")
    assert peer.call(mailbox.CallTopology(5, 50, 0)) == [later]
    assert peer.feed(MasterDown("closed")) == []


def test_finish_waits_for_nothing_of_this_process() -> None:
    """Goal: with reduces under way, or beside another call of all members, finish fails at once."""
    assert ends(running(7).call(mailbox.CallFinish(3, 30))) == [(3, PENDING_ASYNC_OPS, PLAIN)]
    for other in (mailbox.CallTopology(4, 40, 0), mailbox.CallOptimize(4, 40), sync(4)):
        peer = member()
        peer.call(other)
        assert ends(peer.call(mailbox.CallFinish(3, 30))) == [(3, INVALID_USAGE, PLAIN)]
        peer = member()
        peer.call(mailbox.CallFinish(3, 30))
        assert ends(peer.call(other)) == [(4, INVALID_USAGE, PLAIN)]
    assert ends(peer.call(reduce(operation(5, 6)))) == [(5, INVALID_USAGE, PLAIN)]


def test_a_given_up_finish_is_withdrawn_and_may_still_come_true() -> None:
    """Goal: after Ctrl-C the vote is taken back; if the answer was on its way, the membership is over all the same."""
    peer = member()
    peer.call(mailbox.CallFinish(3, 30))
    assert SendMaster(m.Withdraw(1)) in peer.call(mailbox.CallCancel(3, 30))

    assert peer.hear(m.RunFinished(1, "over"))[-1] == HangUp()
    assert peer.state.ending == (INVALID_USAGE, KIND_FINISHED, "over")
