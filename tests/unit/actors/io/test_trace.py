"""The debug log of an actor: which lines it writes at which level, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import PeerSaid, SendTo
from pccl._core.peer.events import Called, Complete, LinkUp, MasterSaid, SendMaster, SpawnLanes
from pccl._core.protocol import hellos, mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import DEBUG, INFO, Log, Tick
from pccl.actors.io.trace import LINE_CHARS_MAX, TRACE, Trace, describe


class Written:
    """A trace, and the lines that it wrote."""

    def __init__(self, level: int) -> None:
        self.phases: dict[str, str] = {}
        self.lines: list[tuple[int, str]] = []
        self._trace = Trace(
            level, lambda level, line: self.lines.append((level, line)), self._now, lambda conn: f"{conn}"
        )

    def _now(self) -> dict[str, str]:
        return dict(self.phases)

    def handle(self, event: Any, *actions: Any) -> list[tuple[int, str]]:
        """Return the lines for one event."""
        self.lines.clear()
        self._trace(event, list(actions))
        return list(self.lines)


def test_a_line_says_direction_kind_and_fields() -> None:
    """Goal: a reader, or grep, finds who said what to whom."""
    written = Written(DEBUG)

    assert written.handle(PeerSaid(3, m.VoteTopology(1, 2)), SendTo(4, m.World(1, 2, 3, 4, 5, 6)), LinkUp(7)) == [
        (DEBUG, "from=3 VoteTopology call=1 wanted=2"),
        (DEBUG, "action LinkUp link=7"),
    ]
    assert written.handle(MasterSaid(m.Wired(4)), SendMaster(m.Leave("close")), SpawnLanes(2)) == [
        (DEBUG, "from=master Wired epoch=4"),
        (DEBUG, "to=master Leave reason='close'"),
        (DEBUG, "action SpawnLanes lanes=2"),
    ]
    assert written.handle(Called(mailbox.CallTopology(1, 2, 3))) == [
        (DEBUG, "call CallTopology slot=1 generation=2 wanted=3")
    ]


def test_collectives_are_shown_by_trace_only() -> None:
    """Goal: a debug log of a training run is not a line for every step; heartbeats are in neither."""
    events = [
        PeerSaid(1, m.Initiate(bytes(20))),
        MasterSaid(m.Commence(1, bytes(16))),
        MasterSaid(m.ReduceDone(1)),
        Called(mailbox.CallReduce(b"")),
        Tick(),
        PeerSaid(1, m.Beat(1)),
    ]
    debug, trace = Written(DEBUG), Written(TRACE)

    assert [debug.handle(event, Complete(1, 2, 0, 0, b""), Log(INFO, "x")) for event in events] == [[]] * 6
    shown = [[line for _, line in trace.handle(event)] for event in events]
    assert shown == [
        ["from=1 Initiate signatures=<20 bytes>"],
        ["from=master Commence epoch=1 pairs=" + "00" * 16],
        ["from=master ReduceDone sequence=1"],
        ["call CallReduce operations=empty"],
        [],
        [],
    ]


def test_a_new_phase_is_shown() -> None:
    """Goal: the states of the machines can be followed, those of a sync too."""
    written = Written(DEBUG)
    written.phases["membership"] = "dialling"

    assert written.handle(Tick()) == [(DEBUG, "membership phase=dialling was=None")]
    assert written.handle(Tick()) == []
    written.phases["membership"] = "joining"
    assert written.handle(Tick()) == [(DEBUG, "membership phase=joining was=dialling")]


@pytest.mark.parametrize(
    "record",
    [
        mailbox.CallConnect(0, 1, 3, 0, 2, b"host 7", "", 0, b"token=hunter2"),
        hellos.Register(b"hunter2" * 4, 0, 1, "", 7, bytes(16)),
    ],
)
def test_secrets_are_left_out(record: Any) -> None:
    """Goal: a debug log can be sent to a stranger."""
    assert "hunter2" not in describe(record)
    assert b"hunter2".hex() not in describe(record)


def test_a_line_has_a_bound() -> None:
    """Goal: it fits into one message of the mailbox, whatever a record carries."""
    assert len(describe(m.Leave("x" * 10_000))) == LINE_CHARS_MAX + 3
