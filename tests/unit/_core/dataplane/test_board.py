"""The board: which operations are admitted, which workers are woken, and every ready block is taken exactly once."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from pccl._core.dataplane.board import BOARD_BYTES, BOARD_LANES, Board
from pccl._core.dataplane.plan import Cut
from pccl._core.protocol.operations import Operation
from pccl.options import LANES_MAX
from pccl.values import DataType

from .loopback import (
    HEADER_BYTES,
    SEND,
    Member,
    connect,
    eventually,
    frame,
    lone_member,
    operation,
    read_frame,
)

OPERATIONS_MAX = 256
BLOCKS_ADMITTED = 1 << 16
QUEUE_CELLS = 1 << 17
HUGE = 1 << 32  # elements: as many blocks as one operation may have
RING_OF_ONE = 0, 1
RING_OF_TWO = 0, 2


@pytest.fixture
def member() -> Iterator[Member]:
    """A member without workers: no block moves unless a test moves it."""
    alone = Member()
    yield alone
    alone.close()


def rung(member: Member) -> bool:
    """Return whether the actor's bell was rung since the last check."""
    try:
        return os.eventfd_read(member.bell) > 0
    except BlockingIOError:
        return False


# --- The actor's part ---------------------------------------------------------------------------------------------


def test_an_operation_waits_for_its_place(member: Member) -> None:
    board = member.board
    for sequence in range(1, OPERATIONS_MAX + 1):
        assert board.begin(sequence, operation(8), *RING_OF_TWO)
    assert not board.begin(OPERATIONS_MAX + 1, operation(8), *RING_OF_TWO)
    board.release(2)
    assert not board.begin(OPERATIONS_MAX + 1, operation(8), *RING_OF_TWO)
    board.release(1)
    assert board.begin(OPERATIONS_MAX + 1, operation(8), *RING_OF_TWO)
    # An earlier operation in the same board entry is not taken for it.
    assert not board.has_ended(1)
    assert board.is_drained(1)
    board.release(1)
    assert not board.begin(2 * OPERATIONS_MAX + 1, operation(8), *RING_OF_TWO)


def test_an_operation_waits_for_room(member: Member) -> None:
    """Goal: no more blocks are admitted than the queues can hold; aborted operations count until they are released."""
    board = member.board
    blocks = Cut(HUGE, 4, 2).blocks_numbered
    fitting = BLOCKS_ADMITTED // blocks
    for sequence in range(1, fitting + 1):
        assert board.begin(sequence, operation(HUGE), *RING_OF_TWO)
    assert not board.begin(fitting + 1, operation(HUGE), *RING_OF_TWO)
    assert board.abort(1)
    assert not board.begin(fitting + 1, operation(HUGE), *RING_OF_TWO)
    board.release(1)
    board.release(1)
    assert board.begin(fitting + 1, operation(HUGE), *RING_OF_TWO)
    assert not board.begin(fitting + 2, operation(HUGE), *RING_OF_TWO)


def test_the_largest_operation_is_admitted_when_it_is_alone(member: Member) -> None:
    world = 1 << 14
    assert member.board.begin(1, operation(1 << 40, DataType.DOUBLE), 5, world)


@pytest.mark.parametrize("ring", [RING_OF_ONE, RING_OF_TWO])
def test_nothing_to_do_has_ended_at_once(member: Member, ring: tuple[int, int]) -> None:
    count = 0 if ring == RING_OF_TWO else 1000
    assert member.board.begin(3, operation(count), *ring)
    assert rung(member)
    assert member.board.take_finished() == [3]
    assert member.board.take_finished() == []
    assert member.board.has_ended(3)
    assert member.board.statistics(3) == (0, 0, 0, 0, 0)


def test_an_aborted_operation_has_not_ended(member: Member) -> None:
    board = member.board
    assert board.begin(1, operation(1000), *RING_OF_ONE)
    assert board.has_ended(1)
    assert board.abort(1)
    assert not board.has_ended(1)
    assert board.is_drained(1)


def test_what_is_unknown_is_quiet_and_still(member: Member) -> None:
    board = member.board
    assert board.abort(7)
    assert board.is_drained(7)
    assert not board.has_ended(7)
    assert board.moved(7) == 0
    assert board.statistics(7) == (0, 0, 0, 0, 0)
    board.release(7)
    board.sweep()
    assert not rung(member)


@pytest.mark.parametrize(
    ("datatype", "ring"), [(12, (0, 2)), (255, (0, 2)), (10, (2, 2)), (10, (0, 0)), (10, (0, 1 << 15))]
)
def test_what_cannot_be_cut_is_refused(member: Member, datatype: int, ring: tuple[int, int]) -> None:
    nonsense = Operation(0, 1, 2, 10, datatype, *[0] * 10)
    with pytest.raises(ValueError, match="cannot be reduced"):
        member.board.begin(1, nonsense, *ring)


def test_only_operations_are_put_up(member: Member) -> None:
    """Goal: the fields of an operation are read by their offsets, so any other object must be refused."""
    with pytest.raises(TypeError, match="expected pccl._core.protocol.operations.Operation, got str"):
        member.board.begin(1, "one", 0, 2)  # type: ignore[arg-type]
    assert member.board.begin(1, operation(10), *RING_OF_TWO)


def test_a_board_has_room_for_the_largest_pool() -> None:
    """Goal: the board is compiled for a number of lanes, and the options allow that number."""
    assert BOARD_LANES == LANES_MAX


def test_a_pool_is_described_in_full(member: Member) -> None:
    memory = memoryview(bytearray(BOARD_BYTES))
    with pytest.raises(ValueError, match=f"a board needs {BOARD_BYTES} bytes, not 100"):
        Board(memory[:100], [1], [1], 1)
    for senders, receivers in (([], []), ([1], []), ([1], [1, 2]), ([1] * 257, [1] * 257)):
        with pytest.raises(ValueError, match=f"given for {len(senders)} senders and {len(receivers)} receivers"):
            Board(memory, senders, receivers, 1)


# --- Ready blocks -------------------------------------------------------------------------------------------------


def test_what_was_aborted_is_swept_out_and_the_rest_is_kept() -> None:
    with ExitStack() as stack:
        member = Member()
        stack.callback(member.close)
        member.memory(SEND, 100)
        near, far = connect()
        receiver = member.worker(False, 0, far)
        stack.enter_context(near)
        for sequence in (1, 2, 3):
            place = SEND, 10 * sequence
            assert member.board.begin(sequence, operation(2, DataType.UINT8, send=place, recv=place), *RING_OF_TWO)
            near.sendall(frame(sequence, 0, 1, 0, b"\x01"))
        eventually(lambda: member.board.totals() == (0, 3))
        # A block is counted before it is pushed; a receiver that reads its mail has pushed it.
        receiver.look()
        member.abort(2)
        member.board.release(2)
        member.board.sweep()
        out_near, out_far = connect()
        member.worker(True, 0, out_near)
        with out_far:
            # Forwarded blocks come first, in order; then this peer's own blocks.
            assert [read_frame(out_far)[:2] for _ in range(4)] == [(1, 1), (3, 1), (1, 0), (3, 0)]


WORLD, ROUNDS, OPERATIONS, LANES = 800, 2, 50, 4
EXCHANGE_SECONDS_MAX = 60.0  # only against hanging: eighty thousand frames take a second on an idle machine
HOPS = 2 * WORLD - 2
FRAME = np.dtype(
    [
        *(("magic", "<u4"), ("hop", "<u2"), ("kind", "<u2"), ("sequence", "<u8"), ("offset", "<u8")),
        *(("segment", "<u4"), ("chunk", "<u4"), ("block", "<u4"), ("length", "<u4"), ("crc", "<u4")),
        *(("header_crc", "<u4"), ("payload", "u1")),
    ]
)


def test_every_block_is_taken_once_however_many_push_and_pop() -> None:
    """Goal: four receivers push, four senders pop, the queue wraps around, and each block is sent exactly once."""
    assert ROUNDS * OPERATIONS * (HOPS - 1) > QUEUE_CELLS
    with lone_member(LANES) as (member, outs, intos):
        member.memory(SEND, WORLD * OPERATIONS)
        for first in range(1, ROUNDS * OPERATIONS, OPERATIONS):
            sequences = range(first, first + OPERATIONS)
            for sequence in sequences:
                place = SEND, (sequence - first) * WORLD
                assert member.board.begin(sequence, operation(WORLD, DataType.UINT8, send=place, recv=place), 0, WORLD)
            frames = np.frombuffer(exchange(outs, intos, sequences), FRAME)
            for sequence in sequences:
                member.finish(sequence)
                member.board.release(sequence)
            keys = frames["sequence"] * HOPS + frames["hop"]
            assert (np.sort(keys) == np.arange(first * HOPS, (first + OPERATIONS) * HOPS)).all()
        assert not member.problems


def exchange(outs: list[socket.socket], intos: list[socket.socket], sequences: range) -> bytes:
    """Send all frames of these operations to a member, over all lanes at once; return all that it sends."""
    cut = Cut(WORLD, 1, WORLD)
    blobs = [bytearray() for _ in intos]
    for sequence in sequences:
        for hop in range(HOPS):
            blobs[(sequence + hop) % LANES] += frame(sequence, hop, cut.received(0, hop), 0, b"\x01")
    assert FRAME.itemsize == HEADER_BYTES + 1
    enough = len(sequences) * HOPS * FRAME.itemsize
    got = [bytearray() for _ in outs]
    threads = [
        threading.Thread(target=read_all, args=(out, into, got, enough)) for out, into in zip(outs, got, strict=True)
    ]
    threads += [threading.Thread(target=into.sendall, args=(blob,)) for into, blob in zip(intos, blobs, strict=True)]
    for into in intos:
        into.settimeout(EXCHANGE_SECONDS_MAX)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(EXCHANGE_SECONDS_MAX)
    assert sum(map(len, got)) == enough
    return b"".join(got)


def read_all(out: socket.socket, into: bytearray, everybody: list[bytearray], enough: int) -> None:
    """Read until all readers together have enough."""
    out.settimeout(0.01)
    deadline = time.monotonic() + EXCHANGE_SECONDS_MAX
    while sum(map(len, everybody)) < enough and time.monotonic() < deadline:
        try:
            into += out.recv(1 << 16)
        except TimeoutError:
            continue
