"""The tables of phases: complete, printable, and equal to what the machine does."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master import collectives, group_phases, master_check, master_state, state_consensus
from pccl._core.master.events import PeerSaid, PeerWent
from pccl._core.master.master_check import check_transitions, observe
from pccl._core.master.membership import ACCEPTED, GONE, REGISTERED
from pccl._core.protocol import messages as m

from .master_harness import SCHEMA, SEND, MasterHarness, lose, of, running

PEERS = {REGISTERED, ACCEPTED, GONE}
CONSENSUS = {state_consensus.IDLE, state_consensus.VOTING, state_consensus.ASKING, state_consensus.TRANSFERRING}
TAGS = {collectives.OPEN, collectives.RUNNING, collectives.ABORTING, collectives.INTERRUPTED}
VERDICTS = {collectives.DONE, collectives.FAILED}


@pytest.mark.parametrize(
    ("table", "phases", "ends"),
    [
        (master_state.TRANSITIONS, PEERS - {GONE}, {GONE}),
        (group_phases.CONSENSUS, CONSENSUS, set()),
        (group_phases.COLLECTIVES, TAGS | {collectives.FREE}, VERDICTS),
    ],
    ids=["peers", "consensus", "collectives"],
)
def test_a_table_is_a_closed_graph(table: dict[Any, Any], phases: set[str], ends: set[str]) -> None:
    """Goal: a diagram can be printed from the table alone: every arrow leads to a known phase."""
    assert {phase for phase, _ in table} == phases
    for (phase, kind), (handler, following) in table.items():
        assert callable(handler), (phase, kind)
        assert isinstance(following, tuple), (phase, kind)
        assert set(following) <= phases | ends, (phase, kind)
    reached = {phase for _, following in table.values() for phase in following}
    assert ends <= reached


def test_a_phase_that_the_table_does_not_name_is_found() -> None:
    """Goal: a wrong table makes a test fail."""
    harness = of(1, 2, check=False)
    event = PeerSaid(1, m.Leave("bye"))
    before = observe(harness.state, event)
    harness.feed(event)

    assert before is not None
    check_transitions(before, event, master_state.TRANSITIONS)
    with pytest.raises(AssertionError, match="Leave led from accepted to gone"):
        check_transitions(before, event, {(ACCEPTED, m.Leave): (print, (ACCEPTED,))})


def test_a_step_of_the_consensus_that_the_table_does_not_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: likewise for a group's consensus."""
    table = {**group_phases.CONSENSUS, (state_consensus.IDLE, m.VoteSync): (None, ())}
    monkeypatch.setattr(master_check, "CONSENSUS", table)

    with pytest.raises(AssertionError, match="VoteSync led the consensus from idle to voting"):
        of(1, 2).sync(1, 0, "a")


def test_a_step_of_a_tag_that_the_table_does_not_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: likewise for a tag, whether it goes on or ends."""
    table = {**group_phases.COLLECTIVES, (collectives.RUNNING, m.Finished): (None, ())}
    harness = running(1, 2)
    monkeypatch.setattr(master_check, "COLLECTIVES", table)
    harness.say(1, m.Finished(1, True, ""))

    with pytest.raises(AssertionError, match="Finished ended tag 5 of peer"):
        harness.say(2, m.Finished(1, True, ""))

    with pytest.raises(AssertionError, match="Finished led tag 5 of peer . from running to aborting"):
        fail_one(running(1, 2))


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
