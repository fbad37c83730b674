"""The tables of phases: complete, printable, and equal to what the machine does."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master import (
    collectives,
    group_phases,
    master_check,
    master_state,
    optimizer,
    state_consensus,
    topology_round,
)
from pccl._core.master.events import PeerSaid, PeerWent, ProbesOver, RingsWired, VoteComplete
from pccl._core.master.master_check import check_transitions, observe
from pccl._core.master.membership import ACCEPTED, GONE, REGISTERED
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import Tick

from .master_harness import INVALID_USAGE, SCHEMA, SEND, MasterHarness, failures, lose, of, running, sent

PEERS = {REGISTERED, ACCEPTED, GONE}
CONSENSUS = {state_consensus.IDLE, state_consensus.VOTING, state_consensus.ASKING, state_consensus.TRANSFERRING}
TAGS = {collectives.OPEN, collectives.RUNNING, collectives.ABORTING, collectives.INTERRUPTED}
VERDICTS = {collectives.DONE, collectives.FAILED}
ROUND = {topology_round.VOTING, topology_round.HELD, topology_round.CLOSED}
SLOW = {(1, 2), (3, 4)}  # steps of the ring 1-2-3-4 that an optimisation goes around
OPTIMISATION = {optimizer.IDLE, optimizer.MEASURING, optimizer.WIRING}


def next_phases(table: dict[Any, tuple[Any, tuple[str, ...]]]) -> dict[Any, tuple[str, ...]]:
    return {key: following for key, (_, following) in table.items()}


@pytest.mark.parametrize(
    ("table", "phases", "ends"),
    [
        (next_phases(master_state.TRANSITIONS), PEERS - {GONE}, {GONE}),
        (next_phases(topology_round.TRANSITIONS), ROUND, set()),
        (next_phases(optimizer.TRANSITIONS), OPTIMISATION, set()),
        (group_phases.CONSENSUS, CONSENSUS, set()),
        (group_phases.COLLECTIVES, TAGS | {collectives.FREE}, VERDICTS),
    ],
    ids=["peers", "round", "optimisation", "consensus", "collectives"],
)
def test_a_table_is_a_closed_graph(table: dict[Any, tuple[str, ...]], phases: set[str], ends: set[str]) -> None:
    """Goal: a diagram can be printed from the table alone: every arrow leads to a known phase, every phase has one."""
    assert {phase for phase, _ in table} == phases
    first = next(phase for phase, _ in table)
    for pair, following in table.items():
        assert following, pair
        assert set(following) <= phases | ends, pair
    reached = {target for (phase, _), following in table.items() for target in following if target != phase}
    assert reached | {first} == phases | ends


@pytest.mark.parametrize("event", [PeerSaid(1, m.Leave("bye")), PeerWent(1, "closed")])
def test_a_phase_that_the_table_does_not_name_is_found(event: Any) -> None:
    """Goal: a wrong table makes a test fail."""
    harness = of(1, 2, check=False)
    before = observe(harness.state, event)
    harness.feed(event)

    check_transitions(harness.state, before, event, master_state.TRANSITIONS)
    kind = type(event.message) if isinstance(event, PeerSaid) else type(event)
    with pytest.raises(AssertionError, match=f"{kind.__name__} led from accepted to gone"):
        check_transitions(harness.state, before, event, {(ACCEPTED, kind): (print, (ACCEPTED,))})


def test_a_tick_is_compared_with_the_table_for_every_peer() -> None:
    """Goal: a peer that a sweep kicks for its silence is in the table, like one whose connection is closed."""
    harness = of(1, 2, check=False)
    harness.pass_time(9.5, silent=(1,))
    assert 1 in harness.state.members.peers
    harness.now_ns = harness.state.next_deadline_ns
    before = observe(harness.state, Tick())
    harness.feed(Tick())

    assert set(harness.state.members.peers) == {2}
    check_transitions(harness.state, before, Tick(), master_state.TRANSITIONS)
    with pytest.raises(AssertionError, match="Tick led from accepted to gone"):
        check_transitions(harness.state, before, Tick(), {(ACCEPTED, Tick): (print, (ACCEPTED,))})


def test_the_sender_of_a_message_without_a_row_must_be_gone() -> None:
    """Goal: an illegal message that does not end the connection is found."""
    harness = of(1, 2, check=False)
    event = PeerSaid(1, m.Beat(0))
    before = observe(harness.state, event)
    harness.feed(event)

    with pytest.raises(AssertionError, match="Beat led from accepted to accepted"):
        check_transitions(harness.state, before, event, {})


def test_a_step_of_the_consensus_that_the_table_does_not_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: likewise for a group's consensus."""
    table = {**group_phases.CONSENSUS, (state_consensus.IDLE, m.VoteSync): ()}
    monkeypatch.setattr(master_check, "CONSENSUS", table)

    with pytest.raises(AssertionError, match="VoteSync led the consensus from idle to voting"):
        of(1, 2).sync(1, 0, "a")


def test_a_step_of_a_tag_that_the_table_does_not_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: likewise for a tag, whether it goes on or ends."""
    table = {**group_phases.COLLECTIVES, (collectives.RUNNING, m.Finished): ()}
    harness = running(1, 2)
    monkeypatch.setattr(master_check, "COLLECTIVES", table)
    harness.say(1, m.Finished(1, True, ""))

    with pytest.raises(AssertionError, match="Finished ended tag 5 of peer"):
        harness.say(2, m.Finished(1, True, ""))

    with pytest.raises(AssertionError, match="Finished led tag 5 of peer . from running to aborting"):
        fail_one(running(1, 2))


def crossed(**options: Any) -> MasterHarness:
    """Peer 1 blocks on a reduce, peer 2 in a sync: a deadlock, which a sweep breaks."""
    harness = of(1, 2, **options)
    harness.reduce(1, 5)
    harness.say(1, m.Awaiting(5))
    harness.sync(2, 0, "a")
    return harness


def test_a_sweep_that_breaks_a_deadlock_is_in_the_tables() -> None:
    """Goal: what a Tick does to a tag and to a consensus is allowed."""
    assert failures(crossed().pass_time(60)) == [(1, 5, 0, INVALID_USAGE)]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("COLLECTIVES", "Tick ended tag 5 of peer 1, which was open"),
        ("CONSENSUS", "Tick led the consensus from voting to idle"),
    ],
)
def test_a_sweep_is_compared_with_the_tables(monkeypatch: pytest.MonkeyPatch, name: str, found: str) -> None:
    """Goal: a table without the Tick makes a test fail."""
    rows = {key: row for key, row in getattr(group_phases, name).items() if key[1] is not Tick}
    monkeypatch.setattr(master_check, name, rows)

    with pytest.raises(AssertionError, match=found):
        crossed().pass_time(60)


def test_many_tags_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a run with hundreds of tags in flight is not slowed down; the bound is over all groups."""
    harness = of(1, 2)
    harness.admit(3, 4, group=1)
    for tag in range(master_check.PAIRS_MAX + 1):
        harness.reduce(3, tag)
    monkeypatch.setattr(master_check, "COLLECTIVES", {})
    with pytest.raises(AssertionError, match="Initiate led tag 7 of peer 1 from free to open"):
        of(1, 2).reduce(1, 7)

    harness.reduce(1, 7)

    assert [group.tags for group in observe(harness.state, Tick()).groups] == [None, None]


def test_an_event_that_a_table_does_not_have_is_an_error() -> None:
    """Goal: the topology round and the optimisation name the event and the phase."""
    state: Any = of(1, 2).state

    with pytest.raises(AssertionError, match="RingsWired is not in the table of a topology round that is voting"):
        state.topology_round._step(RingsWired)
    with pytest.raises(AssertionError, match="ProbesOver is not in the table of an optimisation that is idle"):
        state.optimizer._step(ProbesOver, 0)


def test_an_event_that_leads_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: likewise for the phase that follows."""
    harness = of(1, 2)
    for module, phase in ((topology_round, topology_round.VOTING), (optimizer, optimizer.IDLE)):
        handler, _ = module.TRANSITIONS[phase, VoteComplete]
        monkeypatch.setitem(module.TRANSITIONS, (phase, VoteComplete), (handler, ()))

    with pytest.raises(AssertionError, match="VoteComplete while voting led the topology round to closed"):
        MasterHarness().come(1)
    with pytest.raises(AssertionError, match="VoteComplete while idle led the optimisation to measuring"):
        optimise(harness)


def optimise(harness: MasterHarness) -> list[Any]:
    return [action for peer in (1, 2) for action in harness.say(peer, m.VoteOptimize(7))]


def test_the_life_of_a_topology_round() -> None:
    """Goal: each phase is seen, and seen under its name."""
    harness = of(1, 2)
    state = harness.state.topology_round
    assert state.phase == topology_round.VOTING
    harness.say(1, m.VoteTopology(1, 3))
    assert state.phase == topology_round.VOTING
    harness.say(2, m.VoteTopology(2, 3))
    assert state.phase == topology_round.HELD
    harness.say(2, m.Withdraw(2))
    assert state.phase == topology_round.VOTING
    harness.say(2, m.VoteTopology(3, 3))
    assert state.phase == topology_round.HELD
    orders = harness.come(3)
    assert state.phase == topology_round.CLOSED
    assert set(sent(harness.wire(orders), m.TopologyDone)) == {1, 2}
    assert state.phase == topology_round.VOTING


def test_a_held_round_ends_with_its_last_member() -> None:
    """Goal: a round is not held for members that are gone, and an empty run admits the next newcomer at once."""
    harness = of(1)
    harness.say(1, m.VoteTopology(1, 3))
    assert harness.state.topology_round.phase == topology_round.HELD
    harness.feed(PeerWent(1, "closed"))
    assert harness.state.topology_round.phase == topology_round.VOTING
    assert sent(harness.wire(harness.come(2)), m.Accepted)


def test_the_life_of_an_optimisation() -> None:
    """Goal: each phase is seen, and seen under its name."""
    harness = of(1, 2)
    state = harness.state.optimizer
    assert state.phase == optimizer.IDLE
    first = optimise(harness)
    assert state.phase == optimizer.MEASURING
    harness.feed(PeerWent(2, "closed"))  # nothing is left to measure, and the ring is ordered anew
    assert state.phase == optimizer.MEASURING
    assert set(sent(harness.say(1, m.Wired(harness.state.members.groups[0].epoch)), m.OptimizeDone)) == {1}
    assert state.phase == optimizer.IDLE
    assert sent(first, m.Probe)


def wiring() -> tuple[MasterHarness, list[Any]]:
    """Return a harness in which all members wait for an optimised ring, and the actions that ordered the ring."""
    harness = of(1, 2, 3, 4)
    actions = [action for peer in (1, 2, 3, 4) for action in harness.say(peer, m.VoteOptimize(7))]
    while orders := sent(actions, m.Probe):
        reports = [(peer, order, 10 if (peer, order.target) in SLOW else 100) for peer, order in orders.items()]
        actions = [
            action
            for peer, order, rate in reports
            for action in harness.say(peer, m.Probed(order.round, order.target, rate, ""))
        ]
    assert harness.state.optimizer.phase == optimizer.WIRING
    return harness, actions


def test_an_optimised_ring_is_wired_before_the_answer() -> None:
    """Goal: the phase between the choice of the rings and the answer has a name, and ignores late reports."""
    harness, orders = wiring()

    assert harness.say(1, m.Probed(1, 2, 10, "")) == []
    assert set(sent(harness.wire(orders), m.OptimizeDone)) == {1, 2, 3, 4}
    assert harness.state.optimizer.phase == optimizer.IDLE


def test_an_optimisation_without_callers_ends_while_its_rings_are_wired() -> None:
    """Goal: when all callers give up, the ring is wired all the same, and no member is answered."""
    harness, orders = wiring()
    for peer in (1, 2, 3, 4):
        assert harness.state.optimizer.phase == optimizer.WIRING
        harness.say(peer, m.Withdraw(7))

    assert harness.state.optimizer.phase == optimizer.IDLE
    assert harness.wire(orders) == []


def test_a_sweep_may_accept_a_newcomer() -> None:
    """Goal: the round of a newcomer is completed by the Tick that kicks the last peer that had not reported."""
    harness = of(1)
    harness.come(2)
    harness.come(3, group=1)
    orders = sent(harness.say(1, m.VoteTopology(1, 0)), m.RingOrder)
    for peer in (1, 2):
        harness.say(peer, m.Wired(orders[peer].epoch))
    assert harness.state.members.peers[2].phase == REGISTERED

    assert set(sent(harness.pass_time(11, silent=(3,)), m.Accepted)) == {2}
    assert harness.state.members.peers[2].phase == ACCEPTED


def fail_one(harness: MasterHarness) -> None:
    harness.say(1, m.Finished(1, False, "x"))


def phases_of(harness: MasterHarness) -> set[str]:
    return set(harness.state.members.groups[0].collectives.phases().values())


def test_the_life_of_a_tag() -> None:
    """Goal: each phase is seen, and seen under its name."""
    harness = of(1, 2, 3)
    group = harness.state.members.groups[0]
    harness.reduce(1, 5)
    assert group.collectives.phases() == {(1, 5): collectives.OPEN}
    harness.reduce(2, 5)
    harness.reduce(3, 5)
    assert phases_of(harness) == {collectives.RUNNING}
    harness.say(1, m.Finished(1, False, "x"))
    assert phases_of(harness) == {collectives.ABORTING}
    harness.feed(PeerWent(3, "closed"))
    assert group.collectives.phases() == {(1, 5): collectives.INTERRUPTED, (2, 5): collectives.INTERRUPTED}
    for peer in (1, 2):
        harness.say(peer, m.Wired(group.epoch))
    assert group.collectives.phases() == {}


def test_the_life_of_a_consensus() -> None:
    """Goal: each phase is seen, and seen under its name."""
    harness = of(1, 2)
    consensus = harness.state.members.groups[0].consensus
    assert consensus.phase() == state_consensus.IDLE
    harness.sync(1, 0, "a")
    assert consensus.phase() == state_consensus.VOTING
    harness.sync(2, 0, "b")
    assert consensus.phase() == state_consensus.TRANSFERRING
    harness.say(2, m.Fetched(harness.calls, 1, True, ""))
    assert consensus.phase() == state_consensus.IDLE


def test_schemas_that_differ_are_asked_for() -> None:
    """Goal: the phase between a complete vote and its decision has a name."""
    harness = of(1, 2)
    consensus = harness.state.members.groups[0].consensus
    harness.sync(1, 0, "a", strategy=SEND)
    harness.sync(2, 0, "a", strategy=SEND, packed=SCHEMA[:-1] + b"\x07")

    assert consensus.phase() == state_consensus.ASKING
    lose(harness, 2)
    assert consensus.phase() == state_consensus.IDLE
