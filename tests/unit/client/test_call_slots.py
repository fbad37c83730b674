"""The fast path of a call: everything unusual goes to the callbacks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pccl._core.protocol.codec import unpack
from pccl._core.protocol.mailbox import CallCancel, CallPending
from pccl._core.protocol.outcomes import KIND_COLLECTIVE, KIND_KICKED, join
from pccl.client.call_slots import Callbacks, CallSlots
from pccl.errors import MasterLostError, UsageError
from pccl.memory.completion_slots import SlotTable
from pccl.values import Result


class Points:
    """Fault points that only record their names."""

    def __init__(self) -> None:
        self.visited: list[str] = []

    def visit(self, point: str) -> None:
        self.visited.append(point)


class Probe:
    """A fast path whose callbacks, and whose other end of the mailbox, are in the test."""

    def __init__(self, table: SlotTable) -> None:
        fault: Any = Points()
        callbacks = Callbacks(
            gone=lambda name: MasterLostError(Result.INTERNAL_ERROR, name, "gone"),
            full=lambda _: self.receive(),
            check=self.check,
            catch_up=self.catch_up,
            send_descriptors=self.send_descriptors,
            share=self.share,
        )
        self.calls = CallSlots(table, fault, callbacks, look_ns=0, notice_ns=1 << 60)
        self.points = fault
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.calls.fd = self.near.fileno()
        self.received: list[Any] = []
        self.checked = 0
        self.descriptors: list[tuple[str, Any, tuple[int, ...]]] = []

    def receive(self) -> None:
        """Read one message from the mailbox."""
        self.received.append(unpack(self.far.recv(4096)))

    def check(self, name: str, slot: object) -> None:
        self.checked += 1

    def catch_up(self) -> bool:
        raise AssertionError("notices are due in 36 years")

    def send_descriptors(self, name: str, data: bytes, fds: tuple[int, ...]) -> None:
        self.descriptors.append((name, unpack(data), fds))

    def share(self, name: str, segments: object, descriptor: object) -> None:
        raise AssertionError("nobody shares memory here")

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def probe() -> Iterator[Probe]:
    with SlotTable.create(2) as table:
        made = Probe(table)
        yield made
        made.close()


def test_a_full_mailbox_is_waited_for_and_no_message_is_lost(probe: Probe) -> None:
    for number in range(2000):
        probe.calls.post("call", CallPending(number, 7))
    assert probe.received  # the mailbox had no room for all messages
    while len(probe.received) < 2000:
        probe.receive()
    assert probe.received == [CallPending(number, 7) for number in range(2000)]


def test_every_message_is_a_point_where_a_test_may_interfere(probe: Probe) -> None:
    probe.calls.post("call", CallPending(1, 2))
    probe.calls.post("call", CallCancel(1, 2))
    assert probe.points.visited == ["training.CallPending", "training.CallCancel"]


@pytest.mark.parametrize("how", ["the actor is gone", "closed here"])
def test_a_message_to_nobody_is_an_error(probe: Probe, how: str) -> None:
    if how == "closed here":
        probe.calls.fd = -1  # the old number may be in use by another file, so nothing is written to it
    else:
        probe.far.close()
    with pytest.raises(MasterLostError, match="gone"):
        probe.calls.post("call", CallPending(1, 2))


def test_a_call_that_ends_gives_its_outcome_and_its_slot_back(probe: Probe) -> None:
    slot = probe.calls.acquire("call")
    assert not probe.calls.wait("call", slot, 0)
    assert probe.checked == 1
    probe.calls.table.complete(slot.index, slot.generation, join(8, KIND_COLLECTIVE), b"why")
    assert probe.calls.wait("call", slot, 0)
    assert probe.calls.take(slot) == (join(8, KIND_COLLECTIVE), b"why")
    assert (probe.checked, probe.calls.over, probe.calls.table.idle_slots) == (1, False, 2)


def test_a_membership_that_ended_is_over(probe: Probe) -> None:
    slot = probe.calls.acquire("call")
    probe.calls.table.complete(slot.index, slot.generation, join(4, KIND_KICKED))
    probe.calls.take(slot)
    assert probe.calls.over


def test_no_slot_is_an_error_that_says_what_to_do(probe: Probe) -> None:
    held = [probe.calls.acquire("call") for _ in range(2)]
    with pytest.raises(UsageError, match="await some before launching more"):
        probe.calls.acquire("call")
    assert len(held) == 2
    probe.calls.table.close()
    with pytest.raises(MasterLostError, match="gone"):
        probe.calls.acquire("call")


def test_a_message_with_descriptors_goes_another_way(probe: Probe) -> None:
    probe.calls.post("call", CallPending(1, 2), (0,))
    assert probe.descriptors == [("call", CallPending(1, 2), (0,))]
