"""The fast path of a peer actor: what it reads from the mailbox, which actions it performs, and which it passes on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pccl._core.peer.events import Called, DialMaster
from pccl._core.peer.peer_state import PeerState
from pccl._core.protocol.codec import pack
from pccl._core.protocol.mailbox import CallShare
from pccl._core.protocol.operations import Operation
from pccl._core.protocol.outcomes import INVALID_USAGE, KIND_PLAIN, join
from pccl._core.system.futex import monotonic_ns
from pccl.actors.io.loop import IDLE_NS, Loop
from pccl.actors.peer.peer_fastpath import PERFORMED_HERE, PeerFastpath
from pccl.memory.completion_slots import SlotTable
from pccl.options import Options
from tests.unit._core.peer.peer_harness import SECOND, connect, operation, reduce


class Actor:
    """An owner of a fast path that records what its callbacks are given."""

    def __init__(self, mailbox: socket.socket) -> None:
        self.loop = Loop()
        self.slots = SlotTable.create(8)
        self.seen: list[Any] = []
        self.fastpath = PeerFastpath(
            self.loop,
            mailbox,
            self.slots,
            None,
            perform=self.seen.append,
            receive=self._receive,
            app_gone=self._app_gone,
        )
        self.slots.beat(monotonic_ns())
        self.loop.watch(mailbox.fileno(), self.fastpath)

    def _receive(self, call: Any, descriptor: int) -> None:
        self.seen.append((call, descriptor))
        self.loop.stop()

    def _app_gone(self, reason: str) -> None:
        self.seen.append(reason)
        self.loop.stop()

    def serve(self) -> list[Any]:
        """Run the loop until a callback stops it; return what was recorded. Fail after a second without any."""
        self.loop.run(lambda: self.slots.last_beat_ns + SECOND, lambda _: pytest.fail("nothing came"))
        return self.seen

    def begin(self) -> PeerState:
        """Give the fast path a machine, as the first call does."""
        self.fastpath.state = PeerState(Options(), monotonic_ns())
        return self.fastpath.state


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Actor]]:
    """The training process's end of the mailbox, and the actor at the other end."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        actor = Actor(far)
        yield near, actor
        actor.loop.close()
        actor.slots.close()


Ends = tuple[socket.socket, Actor]


def test_a_call_before_there_is_a_machine_is_mail(ends: Ends) -> None:
    """Goal: also a reduce goes to the callback, because only the first call brings what a machine needs."""
    mailbox, actor = ends
    mailbox.send(pack(reduce(operation(3, 7))))

    ((call, descriptor),) = actor.serve()
    assert call == reduce(operation(3, 7))
    assert descriptor == -1


def test_a_descriptor_comes_with_its_message(ends: Ends) -> None:
    """Goal: the descriptor of a segment arrives with the segment's number, and child programs do not inherit it."""
    mailbox, actor = ends
    read, write = os.pipe()
    socket.send_fds(mailbox, [pack(CallShare(5, 4096))], [write])
    os.close(write)

    ((call, descriptor),) = actor.serve()
    assert call == CallShare(5, 4096)
    assert not os.get_inheritable(descriptor)
    os.write(descriptor, b"same pipe")
    assert os.read(read, 100) == b"same pipe"
    os.close(read)
    os.close(descriptor)


def test_the_end_of_the_mailbox_is_the_end_of_the_training_process(ends: Ends) -> None:
    mailbox, actor = ends
    mailbox.close()

    assert actor.serve() == ["the training process closed its mailbox"]


def test_a_reduce_goes_through_the_machine_to_its_slot(ends: Ends) -> None:
    """Goal: the peer is not connected, so the machine refuses: the slot gets the outcome, and the callback nothing."""
    mailbox, actor = ends
    actor.begin()
    slot = actor.slots.acquire()
    mailbox.send(pack(reduce(Operation(slot.index, slot.generation, 7, count=1024, datatype=10))))
    mailbox.close()

    assert actor.serve() == ["the training process closed its mailbox"]
    assert slot.done
    assert slot.result == join(INVALID_USAGE, KIND_PLAIN)
    assert b"call connect() first" in slot.payload


def test_rare_actions_go_to_the_callback(ends: Ends) -> None:
    """Goal: the fast path performs what is in PERFORMED_HERE, and its owner everything else."""
    _, actor = ends
    actor.begin()
    actor.fastpath.feed(Called(connect()))

    assert [type(action) for action in actor.seen] == [DialMaster]
    assert DialMaster not in PERFORMED_HERE


def test_the_next_tick_is_the_earliest_of_beat_and_machine(ends: Ends) -> None:
    """Goal: the training process sees a beat in every interval, and the machine is never late."""
    _, actor = ends
    beat_ns = actor.slots.last_beat_ns
    assert actor.fastpath.deadline() == beat_ns + IDLE_NS

    actor.fastpath.rhythm_ns = SECOND // 4
    assert actor.fastpath.deadline() == beat_ns + SECOND // 4

    state = actor.begin()
    actor.fastpath.rhythm_ns = 1 << 60
    assert actor.fastpath.deadline() == min(state.next_deadline_ns, beat_ns + (1 << 60))
