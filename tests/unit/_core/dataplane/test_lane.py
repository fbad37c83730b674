"""Lanes without failures: rings of real senders and receivers compute the documented result, bit for bit."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl._core.dataplane.backup import backup_bytes, restore
from pccl._core.dataplane.plan import Cut
from pccl.values import DataType, ReduceOp

from .loopback import (
    BACKUP,
    OTHER_HOST,
    RECV,
    SAME_HOST,
    SAME_HOST_READ,
    SEND,
    Member,
    connect,
    eventually,
    has_moved,
    lone_member,
    operation,
    reach,
    read_frame,
    ring_of,
)

Array = np.ndarray[Any, Any]

SMALL_BYTES_MAX = 1 << 20
OPERATIONS_MAX = 256


def carrier(datatype: DataType) -> np.dtype[Any]:
    """Return the numpy type that holds the elements; bfloat16 is held as two bytes."""
    return np.dtype(np.uint16) if datatype is DataType.BFLOAT16 else datatype.to_numpy_dtype()


def widened(datatype: DataType, values: Array) -> Array:
    """Convert half-precision values to floats, exactly."""
    if datatype is DataType.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if datatype is DataType.FLOAT16 else values


def narrowed(datatype: DataType, values: Array) -> Array:
    """Convert floats back, rounded to nearest, ties to even."""
    if datatype is DataType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(carrier(datatype))


def drawn(datatype: DataType, count: int, seed: int) -> Array:
    """Return finite values of all magnitudes that do not overflow, and no zeros."""
    source = np.random.default_rng(seed)
    if carrier(datatype).kind == "f" or datatype is DataType.BFLOAT16:
        values = source.uniform(0.5, 2, count) * source.choice([-1, 1], count)
        return narrowed(datatype, values.astype(np.float32 if datatype.itemsize == 2 else carrier(datatype)))
    info = np.iinfo(carrier(datatype))
    return source.integers(info.min, info.max, count, carrier(datatype), endpoint=True)


def combined(op: ReduceOp, one: Array, other: Array) -> Array:
    with np.errstate(over="ignore"):
        if op in {ReduceOp.SUM, ReduceOp.AVG}:
            return one + other
        if op is ReduceOp.PROD:
            return one * other
    return np.maximum(one, other) if op is ReduceOp.MAX else np.minimum(one, other)


def divided(values: Array, divisor: int) -> Array:
    """Divide; integers are rounded towards zero."""
    if values.dtype.kind == "f":
        return values / values.dtype.type(divisor)
    whole = [abs(value) // divisor * (-1 if value < 0 else 1) for value in values.tolist()]
    return np.array(whole, values.dtype)


def reduced(datatype: DataType, op: ReduceOp, inputs: list[Array]) -> Array:
    """Return the result: chunk c starts at rank c, each next rank adds its part, and the last divides an average."""
    world = len(inputs)
    cut = Cut(len(inputs[0]), datatype.itemsize, world)
    result = inputs[0].copy()
    for chunk in range(world):
        begin, end = cut.chunk(chunk)
        so_far = inputs[chunk][begin:end]
        for step in range(1, world):
            own = widened(datatype, inputs[(chunk + step) % world][begin:end])
            total = combined(op, widened(datatype, so_far), own)
            if op is ReduceOp.AVG and step == world - 1:
                total = divided(total, world)
            so_far = narrowed(datatype, total)
        result[begin:end] = so_far
    return result


class Tensors:
    """Inputs and outputs of one operation on all members, in place or not."""

    def __init__(
        self, members: list[Member], datatype: DataType, count: int, *, in_place: bool, place: int = 0
    ) -> None:
        self.members, self.datatype, self.count, self.in_place = members, datatype, count, in_place
        nbytes, world = count * datatype.itemsize, len(members)
        self.numbers = SEND + 3 * place, RECV + 3 * place, BACKUP + 3 * place
        self.inputs = [drawn(datatype, count, seed=100 * place + rank) for rank in range(world)]
        self.sends = [member.memory(self.numbers[0], nbytes).view(carrier(datatype)) for member in members]
        self.recvs, self.backups = self.sends, []
        for send, data in zip(self.sends, self.inputs, strict=True):
            send[:] = data
        if in_place:
            room = backup_bytes(count, datatype.itemsize, world)
            self.backups = [member.memory(self.numbers[2], room) for member in members]
        else:
            self.recvs = [member.memory(self.numbers[1], nbytes).view(carrier(datatype)) for member in members]

    def begin(self, rank: int, sequence: int, op: ReduceOp) -> None:
        send, recv, backup = self.numbers
        what = operation(
            *(self.count, self.datatype, op),
            send=(send, 0),
            recv=(send if self.in_place else recv, 0),
            backup=(backup if self.in_place else 0, 0),
        )
        assert self.members[rank].board.begin(sequence, what, rank, len(self.members))

    def begin_all(self, sequence: int, op: ReduceOp) -> None:
        for rank in range(len(self.members)):
            self.begin(rank, sequence, op)

    def end_all(self, sequence: int, op: ReduceOp) -> None:
        """Wait until all members end, check the bits, and restore the inputs."""
        for member in self.members:
            member.finish(sequence)
        expected = reduced(self.datatype, op, self.inputs).tobytes()
        for rank, member in enumerate(self.members):
            assert self.recvs[rank].tobytes() == expected, f"rank {rank}"
            assert self.in_place or self.sends[rank].tobytes() == self.inputs[rank].tobytes()
            *moved, network_ns, neighbour_ns, reduce_ns = member.board.statistics(sequence)
            assert tuple(moved) == self.bytes_moved(rank)
            assert all(0 <= nanoseconds < 60e9 for nanoseconds in (network_ns, neighbour_ns, reduce_ns))
            member.board.release(sequence)
        self.restore()

    def restore(self) -> None:
        for rank, backup in enumerate(self.backups):
            if self.count:
                restore(self.sends[rank].ctypes.data, backup.ctypes.data, self.count, self.datatype.itemsize)
            assert self.sends[rank].tobytes() == self.inputs[rank].tobytes()

    def bytes_moved(self, rank: int) -> tuple[int, int]:
        """Return what a member sends and receives: all bytes of the tensor pass twice, except one chunk each time."""
        world = len(self.members)
        cut = Cut(self.count, self.datatype.itemsize, world)
        sizes = [end - begin for begin, end in map(cut.chunk, range(world))]
        sent = sum(sizes[cut.sent(rank, hop)] for hop in range(2 * world - 2)) * self.datatype.itemsize
        received = sum(sizes[cut.received(rank, hop)] for hop in range(2 * world - 2)) * self.datatype.itemsize
        return sent, received


@pytest.fixture(params=[OTHER_HOST, SAME_HOST, SAME_HOST_READ])
def link(request: pytest.FixtureRequest) -> str:
    """The kind of connection between the members."""
    return str(request.param)


@pytest.mark.parametrize(("world", "lanes"), [(2, 1), (2, 3), (3, 1), (3, 3), (5, 1), (8, 1)])
@pytest.mark.parametrize("in_place", [False, True])
def test_awkward_counts(world: int, lanes: int, in_place: bool, link: str) -> None:
    with ring_of(world, lanes, link=link) as members:
        counts = [0, 1, 2, world - 1, world + 1, 63, 1000, 4097, 100_003, 300_001]
        for sequence, count in enumerate(counts, 1):
            tensors = Tensors(members, DataType.FLOAT, count, in_place=in_place, place=sequence)
            tensors.begin_all(sequence, ReduceOp.SUM)
            tensors.end_all(sequence, ReduceOp.SUM)


@pytest.mark.parametrize("datatype", DataType)
def test_every_type_and_operation(datatype: DataType, link: str) -> None:
    with ring_of(3, link=link) as members:
        cases = list(itertools.product(ReduceOp, [5, 9001], [False, True]))
        for sequence, (op, count, in_place) in enumerate(cases, 1):
            tensors = Tensors(members, datatype, count, in_place=in_place, place=sequence)
            tensors.begin_all(sequence, op)
            tensors.end_all(sequence, op)


def test_a_tensor_of_many_blocks_over_many_lanes(link: str) -> None:
    """Goal: the sum does not depend on the lane of a block, and all lanes together moved all bytes."""
    with ring_of(2, 3, link=link) as members:
        tensors = Tensors(members, DataType.DOUBLE, 1_000_003, in_place=True)
        tensors.begin_all(1, ReduceOp.AVG)
        for member in members:
            member.finish(1)
        for member in members:
            assert member.board.totals() == member.board.statistics(1)[:2]
            assert member.board.moved(1) == sum(member.board.totals())
            frames = sum(member.board.lane_statistics(sends, lane)[1] for sends in (True, False) for lane in range(3))
            assert frames == Cut(1_000_003, 8, 2).handled(members.index(member))
        tensors.end_all(1, ReduceOp.AVG)


def test_many_operations_at_once(link: str) -> None:
    with ring_of(3, 2, link=link) as members:
        many = [
            Tensors(members, DataType.INT32, 10 + 3001 * place, in_place=place % 2 == 0, place=place)
            for place in range(40)
        ]
        for sequence, tensors in enumerate(many, 1):
            tensors.begin_all(sequence, ReduceOp.SUM)
        for sequence, tensors in reversed(list(enumerate(many, 1))):
            tensors.end_all(sequence, ReduceOp.SUM)


def test_sequences_come_round(link: str) -> None:
    """Goal: the board entry of an operation is used again as soon as it is released, and not before."""
    with ring_of(2, link=link) as members:
        first = Tensors(members, DataType.UINT8, 100, in_place=False, place=0)
        second = Tensors(members, DataType.UINT8, 3000, in_place=True, place=1)
        for sequence in range(1, 2 * OPERATIONS_MAX + 50, 2):
            for one, number in ((first, sequence), (second, sequence + 1)):
                one.begin_all(number, ReduceOp.SUM)
            for one, number in ((first, sequence), (second, sequence + 1)):
                one.end_all(number, ReduceOp.SUM)
            for backup in second.backups:
                backup[:] = 0
            for rank, send in enumerate(second.sends):
                send[:] = second.inputs[rank]


def test_frames_of_an_operation_that_has_not_begun_here_wait(link: str) -> None:
    """Goal: one member begins late, all others already send; no frame is lost or dropped."""
    with ring_of(3, link=link) as members:
        tensors = Tensors(members, DataType.FLOAT, 50_000, in_place=True)
        for rank in (0, 2):
            tensors.begin(rank, 1, ReduceOp.SUM)
        # The next member cannot send more than the late one lets pass.
        eventually(lambda: members[0].board.lane_statistics(True, 0)[1] > 0)
        assert members[1].board.lane_statistics(False, 0)[1] == 0
        tensors.begin(1, 1, ReduceOp.SUM)
        tensors.end_all(1, ReduceOp.SUM)


def test_several_early_frames_wait_in_turn(link: str) -> None:
    """Goal: a lane waits at the first early frame; later frames may be of older operations, so all must begin."""
    with ring_of(2, link=link) as members:
        many = [Tensors(members, DataType.INT64, 500, in_place=False, place=place) for place in range(5)]
        for sequence, tensors in enumerate(many, 1):
            tensors.begin(0, sequence, ReduceOp.MAX)
        for sequence, tensors in enumerate(many, 1):
            tensors.begin(1, sequence, ReduceOp.MAX)
        for sequence, tensors in enumerate(many, 1):
            tensors.end_all(sequence, ReduceOp.MAX)


def test_small_operations_go_ahead_of_large_ones() -> None:
    with lone_member(buffer_bytes=4096) as (member, (out,), _):
        large, small = 4 * SMALL_BYTES_MAX, 1000
        member.memory(SEND, large)
        assert member.board.begin(1, operation(large, DataType.UINT8), 0, 2)
        eventually(lambda: member.board.moved(1) > 0)
        assert member.board.begin(2, operation(small, DataType.UINT8), 0, 2)
        order = [read_frame(out)[0] for _ in range(3)]
        # The frame that was under way is finished first.
        assert order == [1, 2, 1]


def test_a_fast_link_wakes_one_lane_only() -> None:
    with lone_member(lanes=3) as (member, outs, _):
        member.memory(SEND, 64)
        member.wait_until_idle(0, 1, 2)
        for sequence in range(1, 101):
            assert member.board.begin(sequence, operation(16), 0, 2)
            assert read_frame(outs[0])[:4] == (sequence, 0, 0, 0)
        # A lane counts a block after it was sent, so the last one may arrive before it is counted.
        eventually(lambda: member.board.lane_statistics(True, 0)[1] == 100)
        assert [member.board.lane_statistics(True, lane)[1] for lane in (1, 2)] == [0, 0]


def test_a_full_socket_recruits_the_next_lane() -> None:
    """Goal: the first lane is not read, so the second sends the rest, except the blocks that the first holds."""
    with lone_member(lanes=2, buffer_bytes=4096) as (member, outs, _):
        count = 1 << 20
        data = member.memory(SEND, count)
        data[:] = np.random.default_rng(1).integers(0, 255, count)
        cut = Cut(count, 1, 2)
        member.wait_until_idle(0, 1)
        assert member.board.begin(1, operation(count, DataType.UINT8), 0, 2)
        blocks = len(cut.blocks(0))
        got = {}
        for _ in range(blocks - 1):
            _, _, _, block, payload = read_frame(outs[1])
            got[block] = payload
        _, _, _, block, payload = read_frame(outs[0])
        got[block] = payload
        assert b"".join(got[block] for block in sorted(got)) == data[: cut.chunk(0)[1]].tobytes()
        eventually(lambda: member.board.lane_statistics(True, 1)[1] == blocks - 1)


def test_a_lane_that_goes_hands_its_work_to_a_sleeper() -> None:
    """Goal: the only active lane is detached; a sleeping lane takes the waiting blocks."""
    with lone_member(lanes=2) as (member, outs, _):
        member.memory(SEND, 4096)
        senders = [
            worker for worker in member.workers if worker.connection and worker.lane.__class__.__name__ == "Sender"
        ]
        senders[0].detach()
        assert member.board.begin(1, operation(16), 0, 2)
        assert read_frame(outs[1])[0] == 1
        near, far = connect()
        with far:
            senders[0].attach(near)
            member.wait_until_idle(0, 1)
            assert member.board.begin(2, operation(16), 0, 2)
            assert read_frame(far)[0] == 2


def test_segments_are_asked_for_when_a_block_needs_them() -> None:
    with ring_of(2) as members:
        tensors = Tensors(members, DataType.FLOAT, 1000, in_place=True)
        for sequence in (1, 2):
            tensors.begin_all(sequence, ReduceOp.SUM)
            for member in members:
                member.finish(sequence)
        for member in members:
            wanted = [worker.wanted for worker in member.workers]
            assert sorted(wanted) == [[SEND, BACKUP], [SEND, BACKUP]]


def test_aborts_at_random_moments_touch_nothing_else(link: str) -> None:
    """Goal: whenever an operation is aborted, its tensors have their old bits, and other operations are correct.

    Every fourth operation begins at the last rank only after the others have aborted it: it cannot have ended by then.
    The others are aborted when a random number of their bytes has moved.
    """
    source = random.Random(5)
    with ring_of(3, 2, link=link) as members:
        kept = Tensors(members, DataType.INT32, 200_000, in_place=True, place=0)
        doomed = Tensors(members, DataType.FLOAT, 300_000, in_place=True, place=1)
        for sequence in range(1, 2 * 40, 2):
            late = sequence % 8 == 1
            for rank in range(3):
                kept.begin(rank, sequence, ReduceOp.SUM)
                if rank < 2 or not late:
                    doomed.begin(rank, sequence + 1, ReduceOp.SUM)
            if late:
                eventually(partial(has_moved, members[:2], sequence + 1), "a block moves")
                for member in members[:2]:
                    assert not member.board.has_ended(sequence + 1)
                    member.board.abort(sequence + 1)
                doomed.begin(2, sequence + 1, ReduceOp.SUM)
            else:
                reach(members[0], sequence + 1, source.randrange(sum(doomed.bytes_moved(0))))
            for member in source.sample(members, 3):
                member.abort(sequence + 1)
            doomed.restore()
            for member in members:
                member.board.release(sequence + 1)
                member.board.sweep()
            kept.end_all(sequence, ReduceOp.SUM)
            for backup in (*kept.backups, *doomed.backups):
                backup[:] = 0
