"""The master's machine: peers join and are lost, and rings are wired. The test names say the hazard."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import Dismiss, PeerSaid, PeerWent, Save, SendTo
from pccl._core.master.master_state import MasterState
from pccl._core.master.membership import IDS_AT_ONCE
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import INFO, Log, Tick
from pccl._core.protocol.state_schema import digest_schema
from pccl.options import EDGE_LOSSES_MAX, Options

from .master_harness import LOST, RUN, SCHEMA, SECOND, UNREACHABLE, MasterHarness, digest, of, sent

# --- Joining ----------------------------------------------------------------


def test_the_first_peer_is_in_at_once() -> None:
    """Goal: in a run without members no vote is needed; a ring of one still has an order and a report."""
    harness = MasterHarness()

    assert harness.come(1) == [
        SendTo(1, m.Registered(1, RUN, 1000, 10000, Options().of_master())),
        Log(INFO, "peer=1 registered group=0 lanes=1 at=host1:1001"),
        SendTo(1, m.RingOrder(1, 0, 1, 0, 0, 0, 0, 0, 0, 0, "")),
        Log(INFO, "group=0 epoch=1 ring=[1]"),
    ]
    assert harness.say(1, m.Wired(1)) == [
        SendTo(1, m.Accepted(1, 1, 1, 1, 1, 1)),
        Log(INFO, "admitted peer 1 world=1 groups={0: 1}"),
    ]


def test_a_newcomer_waits_for_everybody_and_everybody_gets_the_same_numbers() -> None:
    """Goal: admission is unanimous over all groups; one round admits all newcomers."""
    harness = of(1)
    harness.admit(2, group=1)
    harness.come(3, lanes=4)

    assert harness.say(1, m.VoteTopology(7, 0)) == []
    orders = sent(harness.say(2, m.VoteTopology(8, 0)), m.RingOrder)

    assert orders == {
        1: m.RingOrder(2, 0, 2, 3, 2, 1, 3, 2, 1, 1003, "host3"),
        3: m.RingOrder(2, 1, 2, 1, 2, 1, 1, 2, 1, 1001, "host1"),
    }, "only the ring that grew is ordered, with as many lanes as both ends have"
    assert harness.say(1, m.Wired(2)) == []
    assert harness.say(3, m.Wired(2))[:3] == [
        SendTo(3, m.Accepted(3, 2, 3, 2, 2, 2)),
        SendTo(1, m.TopologyDone(7, 3, 2, 3, 2, 2, 2)),
        SendTo(2, m.TopologyDone(8, 3, 1, 3, 1, 2, 2)),
    ]


def test_a_settled_round_is_a_barrier_and_nothing_else() -> None:
    """Goal: without a newcomer there is no order and no new epoch, only the same numbers for all."""
    harness = of(1, 2)

    assert harness.say(1, m.VoteTopology(5, 0)) == []
    assert harness.say(2, m.VoteTopology(6, 0)) == [
        SendTo(1, m.TopologyDone(5, 3, 2, 2, 2, 1, 2)),
        SendTo(2, m.TopologyDone(6, 3, 2, 2, 2, 1, 2)),
    ]


def test_who_comes_during_an_admission_waits_for_the_next() -> None:
    """Goal: a round whose ring is being wired admits no further newcomer."""
    harness = of(1)
    harness.come(2)
    orders = harness.say(1, m.VoteTopology(1, 0))
    harness.come(3)

    done = harness.wire(orders)

    assert set(sent(done, m.Accepted)) == {2}
    assert harness.state.members.registered == {3}


def test_an_empty_run_takes_those_who_wait() -> None:
    """Goal: when the last member is gone, the first registered peer becomes a member without a vote.

    Another one joins it by a vote: nobody knew before whether these two reach each other.
    """
    harness = of(1)
    harness.come(2)
    harness.come(3)

    actions = harness.wire(harness.feed(PeerWent(1, "gone")))

    assert set(sent(actions, m.Accepted)) == {2}
    assert set(sent(harness.wire(harness.say(2, m.VoteTopology(1, 0))), m.Accepted)) == {3}


def test_too_many_groups_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a program that uses ever new groups is refused, and other peers are not affected."""
    monkeypatch.setattr("pccl._core.master.membership.GROUPS_MAX", 1)
    harness = of(1)

    actions = harness.come(2, group=5)

    assert [type(getattr(action, "message", action)) for action in actions] == [m.Kick, Dismiss]
    assert set(harness.state.members.peers) == {1}


# --- Loss -------------------------------------------------------------------


@pytest.mark.parametrize("event", [PeerWent(2, "reset"), PeerSaid(2, m.Leave("close"))], ids=["lost", "left"])
def test_a_lost_member_costs_its_own_group_one_order(event: Any) -> None:
    """Goal: survivors are rewired at once, without a call; unchanged edges keep their epoch; no other group is told."""
    harness = of(1, 2, 3)
    harness.admit(4, group=1)
    epoch = harness.state.members.groups[0].epoch

    orders = sent(harness.feed(event), m.RingOrder)

    assert orders == {
        1: m.RingOrder(epoch + 1, 0, 2, 3, epoch + 1, 1, 3, epoch, 1, 1003, "host3"),
        3: m.RingOrder(epoch + 1, 1, 2, 1, epoch, 1, 1, epoch + 1, 1, 1001, "host1"),
    }


def test_a_member_lost_during_an_admission_does_not_stop_it() -> None:
    """Goal: the remaining peers get a new ring order, and the round completes with them."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(2, m.VoteTopology(1, 0))

    orders = harness.feed(PeerWent(2, "reset"))
    done = harness.wire(orders)

    assert set(sent(orders, m.RingOrder)) == {1, 3}
    assert sent(done, m.Accepted)[3].global_world == sent(done, m.TopologyDone)[1].global_world == 2


def test_a_newcomer_lost_while_it_is_admitted_leaves_the_others_as_they_were() -> None:
    """Goal: the call of the old members still succeeds, and counts only the peers that are left."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(2, m.VoteTopology(1, 0))

    done = harness.wire(harness.feed(PeerWent(3, "reset")))

    assert {peer: numbers.global_world for peer, numbers in sent(done, m.TopologyDone).items()} == {1: 2, 2: 2}


def test_the_missing_vote_of_the_dead_is_not_waited_for() -> None:
    """Goal: when the only peer that has not voted dies, the round closes."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))
    harness.say(1, m.VotePending(2))

    actions = harness.feed(PeerWent(2, "reset"))

    assert sent(actions, m.PendingAnswer) == {1: m.PendingAnswer(2, False)}
    assert sent(harness.wire(actions), m.TopologyDone)[1].global_world == 1


def test_a_silent_peer_is_kicked_and_told_why() -> None:
    """Goal: missed heartbeats end a membership after the agreed time, not before; other peers are not affected."""
    harness = of(1, 2)

    assert harness.pass_time(9.9, silent=(2,)) == []
    actions = harness.pass_time(1.2, silent=(2,))

    assert actions[:2] == [SendTo(2, m.Kick(LOST, "nothing heard for 10 s (heartbeat_timeout)")), Dismiss(2)]
    assert harness.state.members.accepted == {1}


def test_the_masters_own_pause_is_nobodys_silence() -> None:
    """Goal: a master that was stopped for a minute kicks no peer, and later still finds peers that are silent."""
    harness = of(1, 2)
    harness.now_ns += 60 * SECOND

    assert not sent(harness.feed(Tick()), m.Kick)
    assert not sent(harness.pass_time(5, silent=(2,)), m.Kick)
    assert set(sent(harness.pass_time(6, silent=(2,)), m.Kick)) == {2}


def test_reports_that_lie_unread_after_a_pause_count() -> None:
    """Goal: a master that was stopped while a ring was wired reads the waiting reports before it kicks slow peers."""
    harness = of(1)
    harness.come(2)
    harness.say(1, m.VoteTopology(1, 0))
    harness.now_ns += 60 * SECOND

    assert not sent(harness.feed(Tick()), m.Kick)
    harness.say(1, m.Wired(2))
    assert set(sent(harness.say(2, m.Wired(2)), m.Accepted)) == {2}


def test_a_master_that_is_always_late_still_judges() -> None:
    """Goal: an overloaded master ignores its own pauses, and still kicks silent peers."""
    harness = of(1, 2)
    for _ in range(30):
        harness.now_ns = harness.state.next_deadline_ns + 1_100_000_000
        harness.say(1, m.Beat(1))
        harness.wire(harness.feed(Tick()))

    assert harness.state.members.accepted == {1}


# --- Wiring -------------------------------------------------------------------


def test_a_pair_that_cannot_connect_is_routed_around() -> None:
    """Goal: the same members in another order; no member is kicked while there is a ring."""
    harness = of(1, 2, 3)
    ring, epoch = harness.state.members.groups[0].ring, harness.state.members.groups[0].epoch
    harness.say(1, m.EdgeLost(epoch, 1, ring[(ring.index(1) + 1) % 3], "reset"))
    target = ring[(ring.index(1) + 1) % 3]

    actions = harness.say(1, m.WireFailed(epoch + 1, target, "no route"))

    assert set(sent(actions, m.RingOrder)) == {1, 2, 3}
    assert not sent(actions, m.Kick)
    assert (1, target) not in harness.state.members.groups[0].edges


def test_the_mark_of_an_unreachable_pair_expires() -> None:
    """Goal: routes and firewalls change; after a minute the pair may be tried again."""
    harness = of(1, 2, 3, unreachable_expiry=5.0)
    group = harness.state.members.groups[0]
    source, target = group.ring[0], group.ring[1]
    harness.wire(harness.say(source, m.WireFailed(group.edges[source, target], target, "no route")))
    assert (source, target) in group.marks

    harness.pass_time(6)
    harness.wire(harness.say(source, m.EdgeLost(*edge_from(group, source), "reset")))

    assert not group.marks


def edge_from(group: Any, source: int) -> tuple[int, int, int]:
    return next((epoch, *pair) for pair, epoch in group.edges.items() if pair[0] == source)


def test_without_a_ring_the_newcomer_goes_and_not_the_veteran() -> None:
    """Goal: a newcomer that no member can reach is refused with the reason; the round completes without it."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteTopology(1, 0))
    orders = harness.say(2, m.VoteTopology(1, 0))
    actions: list[Any] = orders
    for _ in range(4):
        if sent(actions, m.Kick):
            break
        source = next(pair[0] for pair in harness.state.members.groups[0].edges if pair[1] == 3)
        actions = harness.say(source, m.WireFailed(harness.state.members.groups[0].edges[source, 3], 3, "refused"))

    kick = sent(actions, m.Kick)
    assert set(kick) == {3}
    assert kick[3].result == UNREACHABLE
    assert "cannot reach peer 3 (refused)" in kick[3].reason
    assert set(sent(harness.wire(actions), m.TopologyDone)) == {1, 2}


def test_who_cannot_reach_the_silent_does_not_pay_for_them() -> None:
    """Goal: the only living peer of a ring stays, though its pairs are the ones that cannot connect."""
    harness = of(1, 2)
    group = harness.state.members.groups[0]
    harness.pass_time(4, silent=(1,))

    actions = harness.say(2, m.WireFailed(group.edges[2, 1], 1, "no answer"))

    assert set(sent(actions, m.Kick)) == {1}
    assert harness.state.members.accepted == {2}


def test_an_unreachable_pair_is_believed_whatever_else_changes_in_its_group() -> None:
    """Goal: a report names its edge, so that changes elsewhere in the ring do not make it stale."""
    harness = of(1, 2, 3, 4)
    group = harness.state.members.groups[0]
    source, target = group.ring[0], group.ring[1]
    edge_epoch = group.edges[source, target]
    harness.feed(PeerWent(group.ring[3], "gone"))
    assert group.edges[source, target] == edge_epoch < group.epoch

    harness.say(source, m.WireFailed(edge_epoch, target, "no route"))

    assert (source, target) in group.marks


def test_an_edge_that_never_holds_is_gone_around() -> None:
    """Goal: a lane that connects and breaks at once must not prevent the ring from ever being wired."""
    harness = of(1, 2, 3)
    group = harness.state.members.groups[0]
    source, target = group.ring[0], group.ring[1]
    for _ in range(EDGE_LOSSES_MAX):
        assert not group.marks
        harness.say(source, m.EdgeLost(group.edges[source, target], source, target, "reset"))

    assert set(group.marks) == {(source, target)}
    assert (source, target) not in group.edges


def test_an_edge_that_held_for_a_while_starts_from_scratch() -> None:
    """Goal: rare losses, such as a worker that dies once an hour, do not make a pair unreachable."""
    harness = of(1, 2, 3)
    group = harness.state.members.groups[0]
    source, target = group.ring[0], group.ring[1]
    for _ in range(3 * EDGE_LOSSES_MAX):
        harness.wire(harness.say(source, m.EdgeLost(group.edges[source, target], source, target, "worker died")))

    assert not group.marks
    assert not group.losses


def test_an_edge_that_breaks_is_ordered_anew_once() -> None:
    """Goal: both ends report the same loss; the first report counts, the second is ignored."""
    harness = of(1, 2)
    epoch = harness.state.members.groups[0].epoch

    first = harness.say(1, m.EdgeLost(epoch, 1, 2, "reset"))
    second = harness.say(2, m.EdgeLost(epoch, 1, 2, "reset"))

    assert {peer: (order.next_epoch, order.previous_epoch) for peer, order in sent(first, m.RingOrder).items()} == {
        1: (epoch + 1, epoch),
        2: (epoch, epoch + 1),
    }
    assert second == []


def test_a_report_of_a_past_epoch_is_ignored() -> None:
    """Goal: a report that was sent before a newer order arrived is not about that order."""
    harness = of(1, 2)
    harness.say(1, m.EdgeLost(harness.state.members.groups[0].epoch, 1, 2, "reset"))
    stale = harness.state.members.groups[0].epoch - 1

    assert harness.say(1, m.Wired(stale)) == []
    assert harness.state.members.groups[0].waiting == {1, 2}


def test_slow_wiring_ends_the_newcomer_first() -> None:
    """Goal: a peer that has not reported in time is kicked, a newcomer before an old member."""
    harness = of(1, wire_timeout=5.0)
    harness.come(2)
    harness.say(1, m.VoteTopology(1, 0))

    kick = sent(harness.pass_time(6), m.Kick)

    assert set(kick) == {2}
    assert "wire_timeout" in kick[2].reason


def test_slow_wiring_ends_a_veteran_when_there_is_no_newcomer() -> None:
    """Goal: the wait for a ring's reports has a bound."""
    harness = of(1, 2, wire_timeout=5.0)
    epoch = harness.state.members.groups[0].epoch
    harness.say(1, m.EdgeLost(epoch, 1, 2, "reset"))
    harness.say(1, m.Wired(epoch + 1))

    assert set(sent(harness.pass_time(6), m.Kick)) == {2}


# --- The story and the durable part -----------------------------------------


def test_the_durable_part_survives_a_restart() -> None:
    """Goal: a restarted master knows run, names and agreed states; peer ids are never given twice."""
    harness = of(1, 2)
    harness.sync(1, 7, "a")
    harness.sync(2, 7, "a")
    saved = harness.state.snapshot()
    assert saved["groups"][0] == {
        "epoch": 2,
        "revision": 7,
        "content": digest("a").hex(),
        "schema": digest_schema(SCHEMA).hex(),
    }

    state = MasterState.restore(saved, Options(check=True), 5)

    assert {**state.snapshot(), "next_id": 0} == {**saved, "next_id": 0}
    assert (state.members.run, state.members.next_id, state.members.peers) == (RUN, IDS_AT_ONCE + 1, {})
    assert state.snapshot()["next_id"] == 2 * IDS_AT_ONCE + 1
    harness.state, harness.now_ns = state, 5
    orders = sent(harness.come(3), m.RingOrder)
    assert orders[3].epoch == saved["groups"][0]["epoch"] + 1, "epochs go on"


def test_peer_ids_are_set_aside_before_they_are_given_out() -> None:
    """Goal: a restarted master never gives an id twice, though it does not save its state for every newcomer."""
    harness = MasterHarness()
    saves = [
        peer
        for peer in range(1, 2 * IDS_AT_ONCE + 2)
        if Save() in harness.come(peer) + harness.feed(PeerWent(peer, ""))
    ]

    assert saves == [IDS_AT_ONCE + 1, 2 * IDS_AT_ONCE + 1]
    assert harness.state.snapshot()["next_id"] == 3 * IDS_AT_ONCE + 1


def test_what_was_agreed_outlives_the_last_member() -> None:
    """Goal: a group with an agreed state is kept, a group without one is deleted."""
    harness = of(1)
    harness.admit(2, group=1)
    harness.sync(2, 3, "a")
    harness.feed(PeerWent(1, "gone"))
    harness.feed(PeerWent(2, "gone"))

    assert set(harness.state.members.groups) == {1}


def test_an_error_inside_carries_the_story() -> None:
    """Goal: an internal error is reported with the events that led to it, not only with its line."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))

    with pytest.raises(TypeError, match="no event") as caught:
        harness.state.handle("nonsense", 0)

    (note,) = caught.value.__notes__
    assert note.startswith("while handling 'nonsense'; before that:")
    assert "PeerSaid(conn=1, message=VoteTopology(call=1, wanted=0))" in note


def test_a_story_can_be_replayed() -> None:
    """Goal: the same events at the same times give the same actions, so a saved story reproduces a bug."""
    harness = of(1, 2, 3)
    harness.say(2, m.VoteTopology(1, 0))
    harness.pass_time(40)
    again = MasterState(RUN, harness.state.options, 0)

    for now_ns, event, actions in harness.state.story:
        assert again.handle(event, now_ns) == actions


def test_the_story_is_kept_and_bounded() -> None:
    """Goal: an internal error can carry the events that led to it."""
    harness = of(1)
    for _ in range(1000):
        harness.say(1, m.Beat(1))

    assert len(harness.state.story) == 256
    assert harness.state.story[-1] == (0, PeerSaid(1, m.Beat(1)), [])
