"""The peer's side of a sync: the caller's slots, the master's orders, and which process may use the memory."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.peer.events import (
    AddSources,
    Complete,
    DropSource,
    EndTransfer,
    FetchState,
    MasterDown,
    SendMaster,
    SendSchema,
    ServeFetched,
    ServeState,
    StateFetched,
    StateUnfetched,
    Stop,
    TransferEnded,
)
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import SYNCED
from pccl._core.protocol.sources import Source, pack_sources

from .peer_harness import (
    CANCELLED,
    COLLECTIVE,
    DESCRIBE,
    INVALID_USAGE,
    KICKED,
    LOST,
    MASTER_FAILED,
    MASTER_LOST,
    NEXT_ORDER,
    PENDING_ASYNC_OPS,
    PLAIN,
    SOURCES,
    SUCCESS,
    WORLD,
    PeerHarness,
    describe,
    ends,
    fetch,
    member,
    operation,
    reduce,
    sync,
    told,
    wired,
)

ASKED = Complete(5, 50, SUCCESS, DESCRIBE, b"")
FETCH = FetchState(1, 8, 500, 9, False, b"elected digest..", SOURCES)


def synced(slot: int, revision: int, tx_bytes: int = 0, rx_bytes: int = 0) -> Complete:
    return Complete(slot, 10 * slot, SUCCESS, PLAIN, SYNCED.pack(revision, tx_bytes, rx_bytes) + WORLD)


def voted() -> PeerHarness:
    """A peer in sync_shared_state, with slot 5 and call 1."""
    peer = wired()
    peer.call(sync())
    return peer


def described(order: Any) -> PeerHarness:
    """A peer that got the order and its caller's manifest; the caller waits in slot 6."""
    peer = voted()
    peer.hear(order)
    peer.call(describe())
    return peer


def fetching() -> PeerHarness:
    return described(fetch())


# --- The fast path ----------------------------------------------------------


def test_equal_states_take_one_message_each_way() -> None:
    """Goal: one vote and one answer; no manifest is made."""
    peer = wired()

    vote = m.VoteSync(1, 4, 0, False, 3, b"schema digest...", b"content digest..")
    assert peer.call(sync()) == [SendMaster(vote)]
    assert peer.hear(m.SyncDone(1, 4)) == [synced(5, 4)]


def test_a_torn_state_is_voted_as_such() -> None:
    """Goal: the training process's finding reaches the election."""
    (vote,) = told(wired().call(sync(torn=True)), m.VoteSync)

    assert vote.torn


def test_an_outdated_peer_takes_over_the_revision() -> None:
    """Goal: the payload is the new revision of the caller."""
    assert voted().hear(m.SyncDone(1, 77)) == [synced(5, 77)]


@pytest.mark.parametrize("result", [4, 9])
def test_a_failure_says_why(result: int) -> None:
    """Goal: the caller gets the master's reason."""
    assert voted().hear(m.CallFailed(1, result, "all RECEIVE_ONLY")) == [
        Complete(5, 50, result, COLLECTIVE, WORLD + b"all RECEIVE_ONLY")
    ]


# --- The slow path ----------------------------------------------------------


def test_the_first_order_asks_for_a_description() -> None:
    """Goal: the caller's slot completes once, whatever arrives before the caller has sent its manifest."""
    peer = voted()

    assert peer.hear(m.AskSchema(1)) == [ASKED]
    assert peer.hear(fetch()) == []
    assert peer.call(describe()) == [SendSchema(1, 8, 500), FETCH]


def test_what_comes_after_the_description_is_done_at_once() -> None:
    """Goal: one call may first send its schema, then take part in a transfer."""
    peer = described(m.AskSchema(1))

    assert peer.hear(m.Serve(1, 1)) == [ServeState(1, 8, 500, 9)]


def test_a_source_serves_until_the_call_is_answered() -> None:
    """Goal: the slot completes when no worker reads the memory any more, with the number of bytes sent."""
    peer = described(m.Serve(1, 1))

    assert peer.hear(m.SyncDone(1, 4)) == [EndTransfer(1)]
    assert peer.feed(TransferEnded(1, 640, 0)) == [synced(6, 4, 640, 0)]


def test_a_receiver_reports_and_is_answered_with_the_others() -> None:
    """Goal: the peer fetches, reports, ends the transfer and completes the slot, with the number of bytes received."""
    peer = fetching()

    assert peer.feed(StateFetched(1)) == [SendMaster(m.Fetched(1, 1, True, ""))]
    assert peer.hear(m.SyncDone(1, 4)) == [EndTransfer(1)]
    assert peer.feed(TransferEnded(1, 0, 512)) == [synced(6, 4, 0, 512)]


def test_a_receiver_that_cannot_is_answered_by_the_master() -> None:
    """Goal: the peer reports the reason to the master; the call ends with it after the workers have ended."""
    peer = fetching()

    assert peer.feed(StateUnfetched(1, "no memory")) == [SendMaster(m.Fetched(1, 1, False, "no memory"))]
    assert peer.hear(m.CallFailed(1, LOST, "no memory")) == [EndTransfer(1)]
    assert peer.feed(TransferEnded(1, 0, 0)) == [Complete(6, 60, LOST, COLLECTIVE, WORLD + b"no memory")]


def test_a_lost_source_is_passed_on() -> None:
    """Goal: the transfer goes on with the other sources; after its end, a lost source is ignored."""
    peer = fetching()

    assert peer.hear(m.SourceGone(1, 1, 3)) == [DropSource(1, 3)]
    peer.feed(StateFetched(1))
    assert peer.hear(m.SourceGone(1, 1, 1)) == []


def test_a_source_that_is_lost_before_the_description_is_not_dialled() -> None:
    """Goal: a waiting order is updated; without any source left the transfer fails at once."""
    peer = voted()
    peer.hear(fetch())
    gone = []
    for source in SOURCES:
        assert peer.hear(m.SourceGone(1, 1, source.peer)) == []
        gone.append(source)

    (order,) = peer.call(describe())

    assert len(gone) == len(SOURCES) > 1
    assert order.sources == ()


def test_a_stranded_transfer_goes_on_with_those_who_have_finished() -> None:
    """Goal: a fetch may lose all sources and go on with new ones, any number of times, and still succeed."""
    peer = fetching()
    for number in (7, 8):
        heirs = (Source(number, "host", number),)
        assert peer.feed(StateUnfetched(1, "no source")) == [SendMaster(m.Fetched(1, 1, False, "no source"))]
        assert peer.hear(m.MoreSources(1, 1, pack_sources(heirs))) == [AddSources(1, heirs)]

    assert peer.feed(StateFetched(1)) == [SendMaster(m.Fetched(1, 1, True, ""))]
    assert peer.hear(m.SyncDone(1, 4)) == [EndTransfer(1)]
    assert peer.feed(TransferEnded(1, 0, 640)) == [synced(6, 4, 0, 640)]


def test_who_has_fetched_may_be_made_a_source() -> None:
    """Goal: in the same transfer, once, until the call is answered."""
    peer = fetching()
    peer.feed(StateFetched(1))

    assert peer.hear(m.Serve(1, 1)) == [ServeFetched(1)]
    assert peer.hear(m.SyncDone(1, 4)) == [EndTransfer(1)]
    assert peer.feed(TransferEnded(1, 320, 640)) == [synced(6, 4, 320, 640)]


@pytest.mark.parametrize("order", [m.AskSchema(1), m.Serve(1, 1)], ids=["layout", "serve"])
def test_an_answer_waits_for_the_description(order: Any) -> None:
    """Goal: the others finished first; the caller is answered when it waits again, and no transfer begins."""
    peer = voted()
    peer.hear(order)

    assert peer.hear(m.SyncDone(1, 4)) == []
    assert peer.call(describe()) == [synced(6, 4)]


def test_a_failure_waits_for_the_description() -> None:
    """Goal: the same for a call that cannot succeed any more."""
    peer = voted()
    peer.hear(fetch())

    assert peer.hear(m.CallFailed(1, LOST, "all sources were lost")) == []
    assert peer.call(describe()) == [Complete(6, 60, LOST, COLLECTIVE, WORLD + b"all sources were lost")]


def test_a_rewired_ring_does_not_concern_it() -> None:
    """Goal: a ring order ends reduces, not a sync."""
    peer = fetching()

    assert not ends(peer.hear(NEXT_ORDER))
    assert peer.feed(StateFetched(1)) == [SendMaster(m.Fetched(1, 1, True, ""))]


# --- Giving up --------------------------------------------------------------


def test_a_vote_is_withdrawn() -> None:
    """Goal: the caller returns at once; a late answer is dropped."""
    peer = voted()

    assert peer.call(mailbox.CallCancel(5, 50)) == [
        SendMaster(m.Withdraw(1)),
        Complete(5, 50, INVALID_USAGE, CANCELLED, b"given up by its caller"),
    ]
    for late in (
        m.SyncDone(1, 4),
        m.AskSchema(1),
        m.Serve(1, 1),
        fetch(),
        m.SourceGone(1, 1, 3),
        m.CallFailed(1, 4, "x"),
    ):
        assert peer.hear(late) == []
    assert peer.state.phase == "member"


def test_giving_up_instead_of_describing() -> None:
    """Goal: the slot is already complete; the vote is withdrawn and another call can be made."""
    peer = voted()
    peer.hear(fetch())

    assert peer.call(mailbox.CallCancel(5, 50)) == [SendMaster(m.Withdraw(1))]
    assert told(peer.call(sync()), m.VoteSync)[0].call == 2


def test_giving_up_what_is_already_answered() -> None:
    """Goal: a vote that the master has answered is not withdrawn."""
    peer = voted()
    peer.hear(m.AskSchema(1))
    peer.hear(m.SyncDone(1, 4))

    assert peer.call(mailbox.CallCancel(5, 50)) == []
    assert peer.state.member.syncs.sync is None


def test_a_transfer_is_given_up_when_the_workers_have_let_go() -> None:
    """Goal: after Ctrl-C during a transfer no worker uses the caller's memory."""
    peer = fetching()

    assert peer.call(mailbox.CallCancel(6, 60)) == [SendMaster(m.Withdraw(1)), EndTransfer(1)]
    assert peer.feed(StateFetched(1)) == [], "too late: the master has been told otherwise"
    assert peer.call(mailbox.CallCancel(6, 60)) == []
    assert ends(peer.feed(TransferEnded(1, 0, 64))) == [(6, INVALID_USAGE, CANCELLED)]


@pytest.mark.parametrize("cancel", [(5, 49), (4, 50), (6, 60)])
def test_another_calls_cancel_is_not_meant(cancel: tuple[int, int]) -> None:
    """Goal: slot and generation must both match."""
    assert voted().call(mailbox.CallCancel(*cancel)) == []


# --- The end of the membership ----------------------------------------------

ENDS = [
    (MasterDown("reset"), (MASTER_FAILED, MASTER_LOST)),
    (m.Kick(4, "its shared state is laid out differently"), (4, KICKED)),
    (mailbox.CallLeave(9, 90), (INVALID_USAGE, CANCELLED)),
]


def finish(peer: PeerHarness, end: Any) -> list[Any]:
    if isinstance(end, MasterDown):
        return peer.feed(end)
    return peer.hear(end) if isinstance(end, m.Kick) else peer.call(end)


@pytest.mark.parametrize(("end", "outcome"), ENDS, ids=["master lost", "kicked", "closed"])
def test_a_vote_ends_with_the_membership(end: Any, outcome: tuple[int, int]) -> None:
    """Goal: no call waits for a master that is gone."""
    assert (5, *outcome) in ends(finish(voted(), end))


@pytest.mark.parametrize(("end", "outcome"), ENDS, ids=["master lost", "kicked", "closed"])
@pytest.mark.parametrize("order", [m.Serve(1, 1), fetch()], ids=["serving", "fetching"])
def test_a_transfer_ends_before_its_slot(order: Any, end: Any, outcome: tuple[int, int]) -> None:
    """Goal: EndTransfer comes first; the slot, and then close(), complete when no worker uses the memory."""
    peer = described(order)

    actions = finish(peer, end)
    assert EndTransfer(1) in actions
    assert not ends(actions)
    actions = peer.feed(TransferEnded(1, 0, 0))

    assert ends(actions)[0] == (6, *outcome)
    if isinstance(end, mailbox.CallLeave):
        assert [*ends(actions[1:]), actions[-1]] == [(9, SUCCESS, PLAIN), Stop()]
    assert peer.feed(TransferEnded(1, 0, 0)) == [], "an echo"


def test_the_end_comes_while_the_state_is_described() -> None:
    """Goal: the caller is told with its next command that the membership has ended."""
    peer = voted()
    peer.hear(fetch())
    assert not ends(peer.feed(MasterDown("reset")))

    assert ends(peer.call(describe())) == [(6, MASTER_FAILED, MASTER_LOST)]


def test_the_end_does_not_change_an_answer_that_waits_for_the_workers() -> None:
    """Goal: the first outcome stays: an agreed state stays agreed."""
    peer = described(m.Serve(1, 1))
    peer.hear(m.SyncDone(1, 4))
    peer.feed(MasterDown("reset"))

    assert peer.feed(TransferEnded(1, 7, 0)) == [synced(6, 4, 7, 0)]


# --- What does not fit together ---------------------------------------------


def test_one_call_at_a_time() -> None:
    """Goal: a second thread gets an error for every call that cannot overlap."""
    peer = voted()

    assert ends(peer.call(sync(slot=7))) == [(7, INVALID_USAGE, PLAIN)]
    assert ends(peer.call(mailbox.CallTopology(8, 80, 0))) == [(8, INVALID_USAGE, PLAIN)]
    assert ends(peer.call(reduce(operation(9, 9)))) == [(9, INVALID_USAGE, PLAIN)]
    assert told(peer.call(mailbox.CallPending(4, 40)), m.VotePending), "this one may overlap anything"


def test_not_beside_a_topology_vote() -> None:
    """Goal: neither call is allowed during the other."""
    peer = member()
    peer.call(mailbox.CallTopology(8, 80, 0))

    assert ends(peer.call(sync())) == [(5, INVALID_USAGE, PLAIN)]


def test_not_with_reduces_under_way() -> None:
    """Goal: PENDING_ASYNC_OPS, and nothing reaches the master."""
    peer = wired()
    peer.call(reduce(operation(9, 9)))

    actions = peer.call(sync())

    assert ends(actions) == [(5, PENDING_ASYNC_OPS, PLAIN)]
    assert b"1 reduces of this process are under way" in actions[0].payload


def test_a_description_that_nobody_asked_for_is_refused() -> None:
    """Goal: a training process that sends an unexpected manifest gets an error."""
    assert ends(wired().call(describe())) == [(6, INVALID_USAGE, PLAIN)]
    assert ends(voted().call(describe())) == [(6, INVALID_USAGE, PLAIN)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([fetch(), m.SyncDone(1, 4)], "SyncDone in transfer 1, in which this peer still fetches"),
        ([fetch(), m.Serve(1, 1)], "Serve while ordered"),
        ([m.Serve(1, 1), m.SourceGone(1, 1, 3)], "in which this peer fetches nothing"),
        ([m.SourceGone(1, 1, 3)], "SourceGone while voted"),
        ([fetch(), m.SourceGone(1, 2, 3)], "SourceGone of transfer 2"),
        ([fetch(), m.MoreSources(1, 1, b"")], "MoreSources while ordered"),
        ([m.Serve(1, 1), m.MoreSources(1, 1, b"")], "MoreSources while ordered"),
        ([m.Serve(1, 1), m.AskSchema(1)], "AskSchema while ordered"),
        ([m.Fetch(1, 1, False, 4, bytes(16), b"")], "Fetch with sources that cannot be read: Fetch("),
    ],
)
def test_what_no_honest_master_says_ends_the_membership(words: list[Any], reason: str) -> None:
    """Goal: memory is not shared after an illegal message of the master."""
    peer = voted()
    for word in words:
        peer.hear(word)

    assert peer.state.phase == "gone"
    assert reason in peer.state.ending[2]


def test_who_is_owed_an_answer() -> None:
    """Goal: the actor can tell a cancel that came too late from one that came too early."""
    peer = voted()
    assert peer.state.owes(5, 50)
    peer.hear(fetch())
    assert not peer.state.owes(5, 50)
    peer.call(describe())
    assert peer.state.owes(6, 60)
    assert not peer.state.owes(6, 61)
    assert peer.state.is_busy()
