"""The backup of an in-place tensor: whenever a worker dies, the old bits can be restored."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from contextlib import suppress

import numpy as np
import pytest

from pccl._core.dataplane.backup import backup_bytes, clear, restore
from pccl._core.dataplane.plan import Cut
from pccl._core.dataplane.receiver import Receiver
from pccl.values import DataType, ReduceOp

from .loopback import (
    BACKUP,
    HEADER_BYTES,
    PATIENCE,
    SEND,
    Member,
    connect,
    eventually,
    frame,
    lone_member,
    operation,
    read_frame,
)

COUNT = 600_001
KILLS = 200


def all_frames(sequence: int, count: int) -> list[bytes]:
    """Return the frames that rank 0 of two receives: the blocks to be added, then the final ones."""
    cut = Cut(count, 1, 2)
    return [
        frame(sequence, hop, chunk, block, bytes([77]) * (end - begin))
        for hop, chunk in ((0, 1), (1, 0))
        for block, (begin, end) in enumerate(cut.blocks(chunk))
    ]


def read_own_blocks(out: socket.socket, sequence: int, count: int) -> None:
    """Read until this member has sent its own chunk; only then does a neighbour have final blocks of it to send."""
    missing = len(list(Cut(count, 1, 2).blocks(0)))
    while missing:
        number, hop, *_ = read_frame(out)
        missing -= number == sequence and hop == 0


class Tensor:
    """A tensor of bytes that is reduced in place, with its backup."""

    def __init__(self, member: Member, count: int = COUNT) -> None:
        self.count = count
        self.bits = member.memory(SEND, count)
        self.backup = member.memory(BACKUP, backup_bytes(count, 1, 2))
        self.bits[:] = np.random.default_rng(count).integers(0, 99, count)
        self.old = self.bits.copy()
        self.operation = operation(count, DataType.UINT8, recv=(SEND, 0), backup=(BACKUP, 0))

    @property
    def changed(self) -> bool:
        return not np.array_equal(self.bits, self.old)

    def restore(self) -> None:
        restore(self.bits.ctypes.data, self.backup.ctypes.data, self.count, 1)
        assert not self.changed


def test_a_cleared_backup_restores_nothing() -> None:
    nbytes = backup_bytes(1000, 4, 5)
    backup = np.full(nbytes + 64, 0xA5, np.uint8)
    tensor = np.arange(1000, dtype=np.float32)
    clear(backup.ctypes.data, 1000, 4, 5)
    restore(tensor.ctypes.data, backup.ctypes.data, 1000, 4)

    assert (tensor == np.arange(1000)).all()
    assert (backup[nbytes:] == 0xA5).all()  # nothing beyond its size was written
    assert (backup[:4000] == 0xA5).all()  # nor the room for the blocks


@pytest.mark.parametrize("count", [1, 2, 1000, 16_384, 16_385, 100_000, COUNT])
def test_every_prefix_of_an_operation_is_undone(count: int) -> None:
    """Goal: after each frame, and in the middle of the next, the old bits can be restored."""
    with lone_member() as (member, (out,), (into,)):
        tensor = Tensor(member, count)
        frames = all_frames(1, count)
        for sequence in range(1, min(len(frames), 12) + 1):
            assert member.board.begin(sequence, tensor.operation, 0, 2)
            read_own_blocks(out, sequence, count)
            received = 0
            for data in all_frames(sequence, count)[:sequence]:
                into.sendall(data)
                received += len(data) - HEADER_BYTES
            eventually(lambda number=sequence, target=received: member.board.statistics(number)[1] == target)
            assert tensor.changed
            member.abort(sequence)
            tensor.restore()
            member.board.release(sequence)
            clear(tensor.backup.ctypes.data, count, 1, 2)


def test_a_backup_is_good_after_success_as_well() -> None:
    """Goal: the verdict may still be a failure when everything has arrived."""
    with lone_member() as (member, (out,), (into,)):
        tensor = Tensor(member, 50_000)
        assert member.board.begin(1, tensor.operation, 0, 2)
        read_own_blocks(out, 1, 50_000)
        for data in all_frames(1, 50_000):
            into.sendall(data)
        for _ in range(len(all_frames(1, 50_000)) // 2):
            assert read_frame(out)[1:3] == (1, 1)
        member.finish(1)
        final = Cut(50_000, 1, 2).chunk(0)
        assert (tensor.bits[final[0] : final[1]] == 77).all()
        tensor.restore()


@pytest.mark.parametrize("count", [1000, COUNT])
def test_the_own_chunk_is_saved_before_it_is_sent(count: int) -> None:
    """Goal: the chunk is read for sending anyway, and not again before its result overwrites it."""
    with lone_member() as (member, (out,), _):
        tensor = Tensor(member, count)
        assert member.board.begin(1, tensor.operation, 0, 2)
        begin, end = Cut(count, 1, 2).chunk(0)
        for _ in range(len(all_frames(1, count)) // 2):
            assert read_frame(out)[1:3] == (0, 0)
        tensor.bits[begin:end] = 77  # like its result
        assert tensor.changed
        member.abort(1)
        tensor.restore()


def test_restoring_twice_is_harmless() -> None:
    with lone_member() as (member, _, (into,)):
        tensor = Tensor(member, 1000)
        assert member.board.begin(1, tensor.operation, 0, 2)
        into.sendall(all_frames(1, 1000)[0])
        eventually(lambda: tensor.changed)
        member.abort(1)
        tensor.restore()
        tensor.restore()


def receive_in_child(member: Member, connection: socket.socket) -> int:
    """Fork a receiver, as the actor does; it serves until it is killed. Return its process id."""
    mailbox, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            receiver = Receiver(member.board, 0, False, theirs.fileno(), member.receiver_bells[0])
            for segment, (fd, nbytes) in member.segments.items():
                receiver.segments.add(segment, fd, nbytes)
            receiver.attach(connection.fileno())
            receiver.serve()
        finally:
            os._exit(0)
    mailbox.close()
    theirs.close()
    return pid


def test_a_receiver_may_be_killed_at_any_moment() -> None:
    """Goal: hundreds of kills during copying, marking, adding and receiving, and never a wrong bit."""
    source = random.Random(1)
    data = b"".join(all_frames(1, COUNT))
    torn = 0
    for _ in range(KILLS):
        member = Member()
        near, far = connect(buffer_bytes=16_384)
        with near, far:
            tensor = Tensor(member)
            assert member.board.begin(1, tensor.operation, 0, 2)
            pid = receive_in_child(member, far)
            try:
                send_some(near, data, source.randrange(len(data) + 1))
                time.sleep(source.choice([0, 0, 1e-5, 1e-4]))  # so that the kill comes at any point of a block
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            torn += tensor.changed
            tensor.restore()
        member.close()
    assert torn > KILLS // 2


def send_some(sock: socket.socket, data: bytes, nbytes: int) -> None:
    """Send only a little more than the other side has read; its buffers are small."""
    sock.setblocking(False)
    sent, deadline = 0, time.monotonic() + PATIENCE
    while sent < nbytes:
        assert time.monotonic() < deadline
        with suppress(BlockingIOError):
            sent += sock.send(data[sent : min(nbytes, sent + 20_000)])


def test_an_average_is_saved_before_it_is_divided() -> None:
    with lone_member() as (member, _, (into,)):
        tensor = Tensor(member, 10)
        what = operation(10, DataType.UINT8, ReduceOp.AVG, recv=(SEND, 0), backup=(BACKUP, 0))
        assert member.board.begin(1, what, 0, 2)
        into.sendall(all_frames(1, 10)[0])
        eventually(lambda: tensor.changed)
        assert (tensor.bits[5:] == (tensor.old[5:] + 77) // 2).all()
        member.abort(1)
        tensor.restore()
