"""The short ways of a call: what is out of the ordinary goes to whoever derives from the line."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pccl._core.protocol.codec import unpack
from pccl._core.protocol.mailbox import CallCancel, CallPending
from pccl._core.protocol.outcomes import KIND_COLLECTIVE, KIND_KICKED, join
from pccl.client.call_slots import Line
from pccl.errors import MasterLostError, UsageError
from pccl.memory.completion_slots import SlotTable
from pccl.values import Result


class Points:
    """A fault that only notes where it could have struck."""

    def __init__(self) -> None:
        self.visited: list[str] = []

    def visit(self, point: str) -> None:
        self.visited.append(point)


class Probe(Line):
    """A line whose other end is in the test."""

    def __init__(self, slots: SlotTable) -> None:
        fault: Any = Points()
        super().__init__(slots, fault, look_ns=0, notice_ns=1 << 60)
        self.points = fault
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.fd = self.near.fileno()
        self.received: list[Any] = []
        self.looked = 0

    def receive(self) -> None:
        """Take one message out of the mailbox."""
        self.received.append(unpack(self.far.recv(4096)))

    def close(self) -> None:
        self.near.close()
        self.far.close()

    def _wait_for_room(self, name: str) -> None:
        self.receive()

    def _look_around(self, name: str, slot: object) -> None:
        self.looked += 1

    def _dead(self, name: str) -> MasterLostError:
        return MasterLostError(Result.INTERNAL_ERROR, name, "dead")


@pytest.fixture
def line() -> Iterator[Probe]:
    with SlotTable.create(2) as slots:
        probe = Probe(slots)
        yield probe
        probe.close()


def test_a_full_mailbox_is_waited_for_and_no_message_is_lost(line: Probe) -> None:
    for number in range(2000):
        line.post("call", CallPending(number, 7))
    assert line.received  # there was no room for all of them
    while len(line.received) < 2000:
        line.receive()
    assert line.received == [CallPending(number, 7) for number in range(2000)]


def test_every_message_is_a_point_where_a_test_may_interfere(line: Probe) -> None:
    line.post("call", CallPending(1, 2))
    line.post("call", CallCancel(1, 2))
    assert line.points.visited == ["training.CallPending", "training.CallCancel"]


@pytest.mark.parametrize("how", ["the actor is gone", "closed here"])
def test_a_message_to_nobody_is_an_error(line: Probe, how: str) -> None:
    if how == "closed here":
        line.fd = -1  # whatever the number means by now, nothing is written to it
    else:
        line.far.close()
    with pytest.raises(MasterLostError, match="dead"):
        line.post("call", CallPending(1, 2))


def test_a_call_that_ends_gives_its_outcome_and_its_slot_back(line: Probe) -> None:
    slot = line.acquire("call")
    assert not line.wait("call", slot, 0)
    assert line.looked == 1
    line.slots.complete(slot.index, slot.sequence, join(8, KIND_COLLECTIVE), b"why")
    assert line.wait("call", slot, 0)
    assert line.take(slot) == (join(8, KIND_COLLECTIVE), b"why")
    assert (line.looked, line.over, line.slots.idle_slots) == (1, False, 2)


def test_a_membership_that_ended_is_over(line: Probe) -> None:
    slot = line.acquire("call")
    line.slots.complete(slot.index, slot.sequence, join(4, KIND_KICKED))
    line.take(slot)
    assert line.over


def test_no_slot_is_an_error_that_says_what_to_do(line: Probe) -> None:
    held = [line.acquire("call") for _ in range(2)]
    with pytest.raises(UsageError, match="await some before launching more"):
        line.acquire("call")
    assert len(held) == 2
    line.slots.close()
    with pytest.raises(MasterLostError, match="dead"):
        line.acquire("call")
