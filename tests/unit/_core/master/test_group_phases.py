"""Steps of a group's consensus and tags that the tables name and that no ordinary run takes.

The simulation takes the others. A row that neither it nor a test reaches is too broad: it would hide a wrong step.
"""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.collectives import ABORTING, INTERRUPTED, OPEN, RUNNING
from pccl._core.master.events import PeerWent
from pccl._core.master.state_consensus import ASKING, IDLE, TRANSFERRING, VOTING
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import Tick
from pccl._core.protocol.state_schema import SchemaRow, pack_schema

from .master_harness import SCHEMA, MasterHarness, agree, of, sent

ODD = pack_schema([SchemaRow("weight", 10, False, 64)])
NO_REPORT = {(1, 2), (3, 4)}  # edges of the ring 1-2-3-4 that are never measured, so that another ring is chosen
LAST = (3, 1)  # an edge that is measured in the last round


def consensus_of(harness: MasterHarness) -> str:
    return harness.state.members.groups[0].consensus.phase()


def tags_of(harness: MasterHarness) -> set[str]:
    return set(harness.state.members.groups[0].collectives.phases().values())


# --- Consensus --------------------------------------------------------------


def asking(*odd: int, peers: tuple[int, ...] = (1, 2, 3)) -> MasterHarness:
    """All members have voted, these with another schema; the calls have the numbers of their peers."""
    harness = of(*peers)
    harness.calls = 0
    for peer in peers:
        harness.sync(peer, 0, "a", packed=ODD if peer in odd else SCHEMA)
    assert consensus_of(harness) == ASKING
    return harness


def test_the_loss_of_the_last_voter_shows_that_schemas_differ() -> None:
    """Goal: from voting to asking."""
    harness = of(1, 2, 3)
    harness.sync(1, 0, "a")
    harness.sync(2, 0, "a", packed=ODD)
    assert consensus_of(harness) == VOTING

    harness.feed(PeerWent(3, "closed"))

    assert consensus_of(harness) == ASKING


@pytest.mark.parametrize(("content", "after"), [("a", IDLE), ("b", TRANSFERRING)])
def test_a_second_vote_with_the_right_schema_decides(content: str, after: str) -> None:
    """Goal: the odd one withdraws and votes again, before the master has the schemas that it asked for."""
    harness = asking(2, peers=(1, 2))
    harness.say(2, m.Withdraw(2))
    assert consensus_of(harness) == ASKING

    harness.sync(2, 0, content)

    assert consensus_of(harness) == after


def test_the_loss_of_the_odd_one_decides() -> None:
    """Goal: from asking to transferring: the schemas of the others are equal, their contents are not."""
    harness = of(1, 2, 3)
    for peer, content in ((1, "a"), (2, "b")):
        harness.sync(peer, 0, content)
    harness.sync(3, 0, "a", packed=ODD)
    assert consensus_of(harness) == ASKING

    harness.feed(PeerWent(3, "closed"))

    assert consensus_of(harness) == TRANSFERRING


def test_the_others_vote_on_when_the_one_that_was_asked_is_lost() -> None:
    """Goal: from asking to voting, because a member that withdrew has not voted again."""
    harness = asking(2)
    harness.say(1, m.Schema(1, 0, 1, SCHEMA))
    harness.say(3, m.Withdraw(3))
    assert consensus_of(harness) == ASKING

    harness.feed(PeerWent(2, "closed"))

    assert consensus_of(harness) == VOTING


@pytest.mark.parametrize(("voters", "after"), [((3,), VOTING), ((3, 4), ASKING)])
def test_the_end_of_a_transfer_leaves_the_votes_that_came_meanwhile(voters: tuple[int, ...], after: str) -> None:
    """Goal: members that gave a transfer up vote again, with schemas that differ; its last member is lost."""
    harness = agree(of(1, 2, 3, 4), 4, "z")
    harness.calls = 0
    for peer, content in ((1, "a"), (2, "b"), (3, "a"), (4, "a")):
        harness.sync(peer, 5, content)
    for peer in (3, 4):
        harness.say(peer, m.Withdraw(peer))
    for peer in voters:
        harness.sync(peer, 5, "a", packed=ODD if peer == 4 else SCHEMA)
    harness.feed(PeerWent(1, "closed"))
    assert consensus_of(harness) == TRANSFERRING

    harness.feed(PeerWent(2, "closed"))

    assert consensus_of(harness) == after


# --- Tags -------------------------------------------------------------------


def in_phase(harness: MasterHarness, phase: str) -> MasterHarness:
    """Let the members 1 to 4 of group 0 have one tag in this phase."""
    for peer in (1,) if phase == OPEN else (1, 2, 3, 4):
        harness.reduce(peer, 5)
    if phase == ABORTING:
        harness.say(1, m.Finished(1, False, "x"))
    assert tags_of(harness) == {phase}
    return harness


def optimising() -> tuple[MasterHarness, list[Any]]:
    """Members 1 to 4 gave an optimisation up, member 5 of another group waits for it; also return the first probes."""
    harness = of(1, 2, 3, 4)
    harness.admit(5, group=1)
    probes = [action for peer in (1, 2, 3, 4, 5) for action in harness.say(peer, m.VoteOptimize(7))]
    for peer in (1, 2, 3, 4):
        harness.say(peer, m.Withdraw(7))
    return harness, probes


def report(harness: MasterHarness, probes: list[Any], missing: set[tuple[int, int]]) -> list[Any]:
    """Report all probes of a round but the missing ones; return what follows."""
    orders = [(peer, order) for peer, order in sent(probes, m.Probe).items() if (peer, order.target) not in missing]
    return [a for peer, order in orders for a in harness.say(peer, m.Probed(order.round, order.target, 9, ""))]


@pytest.mark.parametrize("last", [m.Probed, Tick])
@pytest.mark.parametrize("phase", [OPEN, RUNNING, ABORTING])
def test_an_optimisation_that_ends_late_interrupts(phase: str, last: type[Any]) -> None:
    """Goal: the last probe is reported, or ended by a Tick; the new ring interrupts members that had given it up."""
    harness, probes = optimising()
    in_phase(harness, phase)
    missing = NO_REPORT | {LAST} if last is Tick else NO_REPORT
    for _ in range(3):
        probes = report(harness, probes, NO_REPORT) or harness.pass_time(10)
    assert sent(probes, m.Probe)[LAST[0]].target == LAST[1]
    assert tags_of(harness) == {phase}

    report(harness, probes, missing)
    assert tags_of(harness) == {phase if last is Tick else INTERRUPTED}
    harness.pass_time(10)
    assert tags_of(harness) == {INTERRUPTED}


def test_a_ring_that_is_optimised_once_it_is_wired_interrupts() -> None:
    """Goal: the probes end while the ring is wired after a loss; the last report changes the ring once more."""
    harness, probes = optimising()
    for _ in range(3):
        probes = report(harness, probes, NO_REPORT) or harness.pass_time(10)
    orders = harness.say(1, m.EdgeLost(harness.state.members.groups[0].epoch, 1, 2, "reset"))
    report(harness, probes, NO_REPORT)
    in_phase(harness, OPEN)

    harness.wire(orders)

    assert tags_of(harness) == {INTERRUPTED}


@pytest.mark.parametrize("phase", [RUNNING, ABORTING])
@pytest.mark.parametrize("message", [m.WireFailed, m.EdgeLost])
def test_only_an_edge_of_this_ring_interrupts(phase: str, message: type[Any]) -> None:
    """Goal: a report on an edge of an older ring changes nothing, whatever the tag does."""
    harness = in_phase(of(1, 2, 3, 4), phase)
    epoch = harness.state.members.groups[0].epoch
    reports = {
        old: m.WireFailed(epoch - old, 2, "refused") if message is m.WireFailed else m.EdgeLost(epoch - old, 1, 2, "x")
        for old in (0, 1)
    }

    harness.say(1, reports[1])
    assert tags_of(harness) == {phase}
    harness.say(1, reports[0])
    assert tags_of(harness) == {INTERRUPTED}
