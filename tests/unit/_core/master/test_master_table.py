"""The master's table: a message that it allows is harmless, any other ends the connection and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import Dismiss, PeerWent, SendTo
from pccl._core.master.master_state import TRANSITIONS
from pccl._core.master.membership import ACCEPTED, REGISTERED
from pccl._core.protocol import messages as m
from pccl._core.protocol.codec import BY_OPCODE
from pccl._core.protocol.events import WARNING, Log, Tick
from pccl._core.protocol.operations import ReduceSignature, pack_signatures

from .master_harness import INVALID_USAGE, MasterHarness, of, sent

MESSAGES = {
    m.VoteTopology: m.VoteTopology(1, 0),
    m.VotePending: m.VotePending(1),
    m.VoteOptimize: m.VoteOptimize(1),
    m.VoteFinish: m.VoteFinish(1),
    m.Probed: m.Probed(1, 2, 3, ""),
    m.Tried: m.Tried(2, ""),
    m.Threads: m.Threads(2),
    m.Withdraw: m.Withdraw(1),
    m.Wired: m.Wired(77),
    m.WireFailed: m.WireFailed(77, 2, "x"),
    m.EdgeLost: m.EdgeLost(77, 3, 4, "x"),
    m.Leave: m.Leave("bye"),
    m.Beat: m.Beat(1),
    m.Initiate: m.Initiate(pack_signatures([ReduceSignature(5, 1, 10, 0, 0, 0)])),
    m.Awaiting: m.Awaiting(5),
    m.WithdrawReduce: m.WithdrawReduce(5),
    m.Finished: m.Finished(1, True, ""),
    m.VoteSync: m.VoteSync(1, 0, 0, False, 1, bytes(16), bytes(16)),
    m.Schema: m.Schema(1, 0, 1, b""),
    m.Fetched: m.Fetched(1, 0, True, ""),
}
EVENTS = {PeerWent: PeerWent(3, "closed"), Tick: Tick()}  # that concern a peer, and are no messages of it


def in_phase(phase: str) -> MasterHarness:
    """Peer 3 is registered (and being admitted) or accepted, beside two old members."""
    harness = of(1, 2)
    harness.come(3)
    orders = [*harness.say(1, m.VoteTopology(1, 0)), *harness.say(2, m.VoteTopology(1, 0))]
    if phase is ACCEPTED:
        harness.wire(orders)
    assert harness.state.members.peers[3].phase == phase
    return harness


@pytest.mark.parametrize(("phase", "kind"), TRANSITIONS, ids=lambda part: getattr(part, "__name__", part))
def test_every_row_of_the_table_is_legal(phase: str, kind: type[Any]) -> None:
    """Goal: a message that the table allows ends no connection."""
    harness = in_phase(phase)
    if kind is m.Finished:
        for peer in (1, 2, 3):
            harness.reduce(peer, 4)

    actions = harness.feed(EVENTS[kind]) if kind in EVENTS else harness.say(3, MESSAGES[kind])

    assert not sent(actions, m.Kick)
    assert (3 in harness.state.members.peers) == (kind not in (m.Leave, PeerWent))


ILLEGAL = [
    (phase, layout.cls)
    for phase in (REGISTERED, ACCEPTED)
    for layout in BY_OPCODE.values()
    if (phase, layout.cls) not in TRANSITIONS
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL, ids=lambda part: getattr(part, "__name__", part))
def test_what_is_not_in_the_table_costs_the_connection(phase: str, kind: type[Any]) -> None:
    """Goal: the reason is sent, then the connection ends; no other peer is kicked and no vote is lost."""
    harness = in_phase(phase)
    layout = next(layout for layout in BY_OPCODE.values() if layout.cls is kind)
    values = {"text": "", "blob": b"", "bytes16": bytes(16), "bytes32": bytes(32), "flag": False}
    votes = dict(harness.state.votes["update_topology"])

    actions = harness.say(3, kind(*[values.get(wire_type, 1) for wire_type in layout.types]))

    reason = f"{kind.__name__} is not legal while {phase}"
    assert actions[:2] == [SendTo(3, m.Kick(INVALID_USAGE, reason)), Dismiss(3)]
    assert actions[2] == Log(WARNING, f"peer=3 kicked group=0 reason={reason!r}")
    assert harness.state.members.accepted == {1, 2}
    assert harness.state.votes["update_topology"] == votes


def test_last_words_of_the_dismissed_are_ignored() -> None:
    """Goal: messages that were on their way when a connection was closed change nothing."""
    harness = of(1)

    assert harness.say(9, m.VoteTopology(1, 0)) == []
    assert harness.feed(PeerWent(9, "closed")) == []


def test_an_unknown_event_is_our_own_mistake() -> None:
    """Goal: an actor that feeds an unknown event gets an error."""
    with pytest.raises(TypeError, match="knows no event"):
        of(1).feed("something")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (m.Wired(1), "reported on a ring that it was never ordered into"),
        (m.WireFailed(1, 1, "x"), "reported on a ring that it was never ordered into"),
        (m.EdgeLost(1, 1, 9, "x"), "reported on a ring that it was never ordered into"),
    ],
)
def test_reports_of_who_was_never_ordered_are_lies(message: Any, reason: str) -> None:
    """Goal: a newcomer that only waits has nothing to report."""
    harness = of(1)
    harness.come(2)

    assert harness.say(2, message)[0] == SendTo(2, m.Kick(INVALID_USAGE, reason))


def test_an_edge_of_others_is_none_of_its_business() -> None:
    """Goal: a peer can only break its own edges."""
    harness = of(1, 2, 3)

    kick = sent(harness.say(1, m.EdgeLost(harness.state.members.groups[0].epoch, 2, 3, "x")), m.Kick)

    assert "not its own" in kick[1].reason
