"""Ring links of a peer: which edges stay, which are connected again, and which connections are accepted."""

from __future__ import annotations

import pytest

from pccl._core.peer.events import (
    AnswerLink,
    AttachLink,
    Dial,
    DropLink,
    HangUp,
    KillLanes,
    LinkDown,
    LinkUp,
    MasterUp,
    SendMaster,
    SpawnLanes,
    WorkerDied,
)
from pccl._core.peer.ring_links import NO_PROOF
from pccl._core.protocol import hellos, mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import DEBUG, Log, Tick
from pccl._core.records import replace

from .peer_harness import ALONE, RUN, SECOND, dialling, ends, joining, lane, member, told, wire, wired


def dial(link: int, to: int, epoch: int, index: int = 0) -> Dial:
    return Dial(link, f"host{to}", 1000 + to, hellos.JoinLane(NO_PROOF, RUN, epoch, 2, to, index))


def test_an_order_is_wired_and_reported_once() -> None:
    """Goal: every lane to the next peer is dialled, those from the previous peer are awaited; the report comes last."""
    peer = member()

    assert peer.hear(wire(2, 3, 2, 1, 2, 2, 1)) == [SpawnLanes(2), dial(1, 3, 2, 0), dial(2, 3, 2, 1)]
    assert peer.feed(LinkUp(2)) == [AttachLink(2, True, 1)]
    assert peer.come(lane(1, 2, 2)) == (3, [AnswerLink(3), AttachLink(3, False, 0)])
    assert peer.feed(LinkUp(1)) == [AttachLink(1, True, 0), SendMaster(m.Wired(2))]


def test_a_standing_edge_stays() -> None:
    """Goal: an edge with the same peer and epoch is not changed; only the other edge is."""
    peer = wired()

    assert peer.hear(wire(3, 3, 2, 5, 3)) == [DropLink(2)]
    assert peer.come(lane(5, 2, 3))[1][-1] == SendMaster(m.Wired(3))


def test_an_order_that_changes_nothing_is_reported_at_once() -> None:
    """Goal: only other parts of the ring changed; this peer reports that it is wired."""
    assert wired().hear(wire(3, 3, 2, 1, 2)) == [SendMaster(m.Wired(3))]


def test_the_same_neighbour_under_a_new_epoch_is_a_new_edge() -> None:
    """Goal: after a loss both ends must use the same connection, so the old one is dropped even if it looks alive."""
    peer = wired()

    assert peer.hear(wire(3, 3, 3, 1, 2)) == [DropLink(1), dial(3, 3, 3)]


def test_who_is_left_alone_drops_everything() -> None:
    """Goal: a ring of one has no edge and is wired by definition."""
    peer = wired()

    assert peer.hear(replace(ALONE, epoch=3)) == [DropLink(1), DropLink(2), SendMaster(m.Wired(3))]


# --- Early, late, foreign ---------------------------------------------------


def test_a_lane_that_comes_before_its_order_waits_for_it() -> None:
    """Goal: the neighbour got its ring order first; its dial must not fail for that."""
    peer = member()
    link, actions = peer.come(lane(1, 2, 2))
    assert actions == []

    actions = peer.hear(wire(2, 3, 2, 1, 2))

    assert actions[2:] == [AnswerLink(link), AttachLink(link, False, 0)]


def test_a_lane_that_comes_before_the_name_waits_for_it() -> None:
    """Goal: a newcomer that is admitted at once may be dialled before it knows its peer id."""
    peer = dialling()
    before_master, _ = peer.come(lane(1, 2, 1))
    peer.feed(MasterUp())
    before_name, actions = peer.come(lane(1, 9, 1))
    assert actions == []

    refused = peer.hear(m.Registered(2, RUN, 1000, 10000))
    attached = peer.hear(wire(1, 1, 1, 1, 1))

    assert [(action.link, bool(action.reason)) for action in refused] == [(before_name, True)]
    assert AttachLink(before_master, False, 0) in attached


def test_an_early_lane_that_its_order_does_not_explain_is_refused() -> None:
    """Goal: the ring order names another neighbour."""
    peer = member()
    link, _ = peer.come(lane(1, 2, 2))

    actions = peer.hear(wire(3, 3, 3, 5, 3))

    assert AnswerLink(link, "epoch 2 is over: peer 2 is at epoch 3") in actions


def test_an_early_lane_for_a_later_order_goes_on_waiting() -> None:
    """Goal: two orders may be on their way; the first does not refuse lanes of the second."""
    peer = member()
    link, _ = peer.come(lane(1, 2, 3))

    peer.hear(wire(2, 3, 2, 5, 2))

    assert link in peer.state.ring_links.early


def test_an_early_lane_does_not_wait_for_ever() -> None:
    """Goal: a lane whose order never comes is closed after a time."""
    peer = member(wire_timeout=5.0)
    link, _ = peer.come(lane(1, 2, 9))

    assert peer.pass_time(4.9) == []
    assert peer.pass_time(0.2) == [AnswerLink(link, "no order for epoch 9 came")]


def test_an_early_lane_may_go_away() -> None:
    """Goal: if its dialler gave up or died, nothing is reported and nothing is kept."""
    peer = member()
    link, _ = peer.come(lane(1, 2, 9))

    assert peer.feed(LinkDown(link, "closed")) == []
    assert not peer.state.ring_links.early


def test_early_lanes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the number of early lanes that others can open is limited."""
    monkeypatch.setattr("pccl._core.peer.ring_links.EARLY_LINKS_MAX", 1)
    peer = member()
    peer.come(lane(1, 2, 9))

    assert peer.come(lane(1, 2, 9, 1)) == (2, [AnswerLink(2, "1 lanes already wait for their order")])


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (lane(1, 2, 1), "epoch 1 is over: peer 2 is at epoch 2"),
        (lane(4, 2, 2), "epoch 2 is over: peer 2 is at epoch 2"),
        (lane(1, 2, 2, 0), "lane 0 of this edge is not free"),
        (lane(1, 2, 2, 7), "lane 7 of this edge is not free"),
        (lane(1, 9, 3), "this port belongs to peer 2 now, maybe of another run"),
        (hellos.JoinLane(bytes(32), b"another run 1234", 2, 1, 2, 0), "this port belongs to peer 2 now"),
    ],
    ids=["past", "stranger", "taken", "beyond the pool", "another peer", "another run"],
)
def test_what_does_not_belong_here_is_refused_with_the_reason(hello: hellos.JoinLane, reason: str) -> None:
    """Goal: no new connection can replace a lane that is up."""
    peer = wired()

    link, (answer,) = peer.come(hello)

    assert answer.link == link
    assert answer.reason.startswith(reason)


def test_a_lane_of_an_edge_that_just_broke_waits_for_the_next_order() -> None:
    """Goal: the dialler is not refused only because this peer noticed the break first."""
    peer = wired(lanes=2)
    peer.feed(LinkDown(4, "reset"))

    link, actions = peer.come(lane(1, 2, 2, 1))

    assert actions == []
    assert AnswerLink(link, "epoch 2 is over: peer 2 is at epoch 3") in peer.hear(wire(3, 3, 2, 1, 3))


# --- Failure ----------------------------------------------------------------


def test_a_failed_dial_is_tried_again_and_then_reported() -> None:
    """Goal: two attempts with a pause; then the whole edge is dropped and reported to the master with the reason."""
    peer = member()
    peer.hear(wire(2, 3, 2, 1, 2, 2))

    assert peer.feed(LinkDown(1, "refused")) == []
    assert peer.pass_time(0.1) == [dial(3, 3, 2)]
    assert peer.feed(LinkDown(3, "refused")) == [
        DropLink(2),
        SendMaster(m.WireFailed(2, 3, "host3:1003: refused")),
    ]
    assert peer.state.ring_links.links == {}


def test_a_dial_without_an_answer_has_a_deadline() -> None:
    """Goal: a dial to a host that never answers ends by the peer's own deadline."""
    peer = member(connect_timeout=2.0)
    peer.hear(wire(2, 3, 2, 1, 2))

    assert peer.pass_time(2.0) == [DropLink(1)]
    assert peer.pass_time(0.1) == [dial(2, 3, 2)]
    actions = peer.pass_time(2.0)
    assert actions == [DropLink(2), SendMaster(m.WireFailed(2, 3, "host3:1003: no answer within 2 s"))]


def test_a_dial_outlasts_a_pause_of_the_dialler() -> None:
    """Goal: a peer that was stopped must not report its neighbour as unreachable; the answer may be unread."""
    peer = member(connect_timeout=2.0, dial_attempts=1)
    peer.hear(wire(2, 3, 2, 3, 2))
    peer.now_ns += 60 * SECOND

    actions = peer.feed(Tick())

    assert not [action for action in actions if isinstance(action, DropLink)]
    assert AttachLink(1, True, 0) in peer.feed(LinkUp(1))


def test_the_report_of_a_failure_names_the_edge() -> None:
    """Goal: an edge ordered at epoch 2 and still missing at epoch 5 is reported as that edge."""
    peer = member(dial_attempts=1)
    peer.hear(wire(2, 3, 2, 1, 2))
    peer.hear(wire(5, 3, 2, 4, 5))

    assert told(peer.feed(LinkDown(1, "refused")), m.WireFailed)[0].epoch == 2


@pytest.mark.parametrize(("link", "source", "target"), [(1, 2, 3), (2, 1, 2)], ids=["to the next", "from the previous"])
def test_a_lost_lane_breaks_its_edge_and_no_other(link: int, source: int, target: int) -> None:
    """Goal: the master is told which edge broke; the lost connection is not dropped again."""
    peer = wired()

    assert peer.feed(LinkDown(link, "reset")) == [SendMaster(m.EdgeLost(2, source, target, "reset"))]


def test_an_edge_breaks_as_a_whole() -> None:
    """Goal: the other lanes of the edge are closed with the lost one."""
    assert wired(lanes=3).feed(LinkDown(2, "reset")) == [
        DropLink(1),
        DropLink(3),
        SendMaster(m.EdgeLost(2, 2, 3, "reset")),
    ]


def test_a_dead_worker_costs_all_lanes_and_the_next_order_builds_them() -> None:
    """Goal: both edges are reported, all workers end, and the next order starts new ones."""
    peer = wired()

    assert peer.feed(WorkerDied("signal 9")) == [
        DropLink(1),
        SendMaster(m.EdgeLost(2, 2, 3, "signal 9")),
        DropLink(2),
        SendMaster(m.EdgeLost(2, 1, 2, "signal 9")),
        KillLanes(),
        Log(DEBUG, "lanes are rebuilt: signal 9"),
    ]
    assert SpawnLanes(1) in peer.hear(wire(3, 3, 3, 1, 3))


def test_late_news_of_a_dropped_lane_is_no_news() -> None:
    """Goal: late events of dropped connections do nothing."""
    peer = wired()
    peer.hear(replace(ALONE, epoch=3))

    assert peer.feed(LinkDown(1, "closed")) == []
    assert peer.feed(LinkUp(1)) == []


@pytest.mark.parametrize(
    "order",
    [
        *(wire(1, 3, 1, 1, 1), wire(0, 3, 1, 1, 1), wire(5, 3, 5, 1, 5, 3), wire(5, 3, 5, 1, 5, 1, 3)),
        *(replace(wire(5, 3, 5, 1, 5), rank=3), replace(wire(5, 3, 5, 1, 5), rank=0, world=1)),
        replace(ALONE, epoch=5, world=2),
    ],
    ids=[
        *("the same epoch", "a past epoch", "too many lanes out", "too many lanes in"),
        *("a place outside the ring", "a neighbour in a ring of one", "no neighbour in a ring of two"),
    ],
)
def test_an_order_that_no_honest_master_gives_ends_the_membership(order: m.RingOrder) -> None:
    """Goal: a bad order is refused before any part of it is used."""
    peer = member()
    peer.call(mailbox.CallTopology(0, 2, 0))

    actions = peer.hear(order)

    assert HangUp() in actions
    assert ends(actions) == [(0, 6, 2)]
    assert "broke the protocol" in peer.state.ending[2]


def test_a_newcomer_is_wired_before_it_is_accepted() -> None:
    """Goal: when connect() returns, the ring is wired."""
    peer = joining()

    assert peer.hear(wire(4, 1, 4, 1, 4)) == [SpawnLanes(1), dial(1, 1, 4)]
    peer.feed(LinkUp(1))
    assert peer.come(lane(1, 2, 4))[1][-1] == SendMaster(m.Wired(4))
