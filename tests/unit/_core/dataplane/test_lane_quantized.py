"""Quantized operations on lanes: all members end with the same bits, which are those of the reference."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl._core.dataplane.backup import backup_bytes, restore
from pccl._core.dataplane.plan import Cut
from pccl._core.dataplane.quantization import area_bytes, coded_size
from pccl.values import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp

from .loopback import (
    OTHER_HOST,
    SAME_HOST,
    SAME_HOST_READ,
    Member,
    eventually,
    frame,
    has_moved,
    lone_member,
    operation,
    reach,
    read_frame,
    ring_of,
)
from .quantization_reference import WAYS, coded, narrowed, ring_reduced, wide

Array = np.ndarray[Any, Any]

PLAIN_BYTES = QuantizationOptions()
NIBBLES = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX_4BIT)
SHORTS = QuantizationOptions(DataType.INT16, QuantizationAlgorithm.ZERO_POINT_SCALE)


class Tensors:
    """Inputs and outputs of one quantized operation on all members, in place or not."""

    def __init__(
        self,
        members: list[Member],
        count: int,
        *,
        how: QuantizationOptions = PLAIN_BYTES,
        datatype: DataType = DataType.FLOAT,
        in_place: bool = True,
        place: int = 0,
    ) -> None:
        self.members, self.datatype, self.count, self.in_place = members, datatype, count, in_place
        self.how, world, nbytes = how, len(members), count * datatype.itemsize
        self.quantization = how.algorithm.value, how.quantized_datatype.value
        self.numbers = range(1 + 4 * place, 5 + 4 * place)
        source = np.random.default_rng([place, count])
        drawn = [source.normal(size=count).astype(wide(datatype)) for _ in members]
        self.inputs = [narrowed(datatype, values) for values in drawn]
        send, recv, backup, area = self.numbers
        carrier = self.inputs[0].dtype
        self.sends = [member.memory(send, nbytes).view(carrier) for member in members]
        self.recvs, self.backups = self.sends, []
        self.fill()
        for member in members:
            member.memory(area, area_bytes(count, datatype.value, *self.quantization, world))
        if in_place:
            self.backups = [member.memory(backup, backup_bytes(count, datatype.itemsize, world)) for member in members]
        else:
            self.recvs = [member.memory(recv, nbytes).view(carrier) for member in members]

    def fill(self) -> None:
        for send, data in zip(self.sends, self.inputs, strict=True):
            send[:] = data

    def begin(self, rank: int, sequence: int, op: ReduceOp = ReduceOp.SUM) -> None:
        send, recv, backup, area = self.numbers
        what = operation(
            *(self.count, self.datatype, op),
            send=(send, 0),
            recv=(send if self.in_place else recv, 0),
            backup=(backup if self.in_place else 0, 0),
            quantization=self.quantization,
            area=(area, 0),
        )
        assert self.members[rank].board.begin(sequence, what, rank, len(self.members))

    def begin_all(self, sequence: int, op: ReduceOp = ReduceOp.SUM) -> None:
        for rank in range(len(self.members)):
            self.begin(rank, sequence, op)

    def end_all(self, sequence: int, op: ReduceOp = ReduceOp.SUM) -> None:
        """Wait until all members end, check the bits, and restore the inputs."""
        for member in self.members:
            member.finish(sequence)
        expected = ring_reduced(self.datatype, self.how, op, self.inputs).tobytes()
        for rank, member in enumerate(self.members):
            assert self.recvs[rank].tobytes() == expected, f"rank {rank}"
            assert self.in_place or self.sends[rank].tobytes() == self.inputs[rank].tobytes()
            assert member.board.statistics(sequence)[:2] == self.bytes_moved(rank)
            assert member.board.moved(sequence) == sum(self.bytes_moved(rank))
            member.board.release(sequence)
        self.restore()

    def restore(self) -> None:
        for rank, backup in enumerate(self.backups):
            if self.count:
                restore(self.sends[rank].ctypes.data, backup.ctypes.data, self.count, self.datatype.itemsize)
            assert self.sends[rank].tobytes() == self.inputs[rank].tobytes()
            backup[:] = 0

    def bytes_moved(self, rank: int) -> tuple[int, int]:
        """Return the bytes sent and received, as coded blocks."""
        world = len(self.members)
        cut = Cut(self.count, self.datatype.itemsize, world)
        sizes = [
            sum(coded_size(end - begin, self.datatype.value, *self.quantization) for begin, end in cut.blocks(chunk))
            for chunk in range(world)
        ]
        hops = range(2 * world - 2)
        return sum(sizes[cut.sent(rank, hop)] for hop in hops), sum(sizes[cut.received(rank, hop)] for hop in hops)


@pytest.fixture(params=[OTHER_HOST, SAME_HOST, SAME_HOST_READ])
def link(request: pytest.FixtureRequest) -> str:
    """The kind of connection between the members."""
    return str(request.param)


@pytest.mark.parametrize(("world", "lanes"), [(2, 1), (2, 3), (3, 1), (4, 2), (5, 1)])
@pytest.mark.parametrize("in_place", [False, True])
def test_awkward_counts(world: int, lanes: int, in_place: bool, link: str) -> None:
    with ring_of(world, lanes, link=link) as members:
        counts = [0, 1, 2, world - 1, world + 1, 511, 1000, 4097, 100_003, 300_001]
        for sequence, count in enumerate(counts, 1):
            how = (PLAIN_BYTES, NIBBLES, SHORTS)[sequence % 3]
            tensors = Tensors(members, count, how=how, in_place=in_place, place=sequence)
            tensors.begin_all(sequence)
            tensors.end_all(sequence)


@pytest.mark.parametrize("op", ReduceOp)
def test_every_way_with_every_operation(op: ReduceOp, link: str) -> None:
    with ring_of(3, link=link) as members:
        for sequence, ((datatype, how), in_place) in enumerate(itertools.product(WAYS, [False, True]), 1):
            tensors = Tensors(members, 9001, how=how, datatype=datatype, in_place=in_place, place=sequence)
            tensors.begin_all(sequence, op)
            tensors.end_all(sequence, op)


def test_constants_are_exact(link: str) -> None:
    """Goal: 42 and 43 make 85 everywhere."""
    with ring_of(2, link=link) as members:
        for sequence, (datatype, how) in enumerate(WAYS, 1):
            tensors = Tensors(members, 5000, how=how, datatype=datatype, place=sequence)
            for rank, tensor in enumerate(tensors.inputs):
                tensor[:] = narrowed(datatype, np.array([42 + rank], wide(datatype)))[0]
            tensors.fill()
            tensors.begin_all(sequence)
            for member in members:
                member.finish(sequence)
            total = narrowed(datatype, np.array([85], wide(datatype)))[0]
            assert all((recv == total).all() for recv in tensors.recvs)
            tensors.end_all(sequence)


def test_no_number_reaches_everybody_where_it_was(link: str) -> None:
    with ring_of(3, link=link) as members:
        tensors = Tensors(members, 10_000)
        tensors.inputs[0][77], tensors.inputs[1][5000], tensors.inputs[2][9999] = np.nan, np.inf, -np.inf
        tensors.fill()
        tensors.begin_all(1)
        for member in members:
            member.finish(1)
        assert np.isnan(tensors.recvs[1][77])
        assert (tensors.recvs[0][5000], tensors.recvs[2][9999]) == (np.inf, -np.inf)
        assert np.isfinite(tensors.recvs[0]).sum() == 10_000 - 3
        tensors.end_all(1)


def test_quantized_and_plain_ones_at_once(link: str) -> None:
    """Goal: they share lanes, scratch buffers and queues, and nothing else."""
    with ring_of(3, 2, link=link) as members:
        many = [
            Tensors(members, 10 + 30_011 * place, how=(PLAIN_BYTES, NIBBLES, SHORTS)[place % 3], place=place)
            for place in range(12)
        ]
        plain = [member.memory(100, 4 * 400_000).view(np.int32) for member in members]
        for rank, data in enumerate(plain):
            data[:] = np.arange(400_000) * (rank + 1)
        for sequence, tensors in enumerate(many, 1):
            tensors.begin_all(sequence)
        for rank, member in enumerate(members):
            what = operation(400_000, DataType.INT32, send=(100, 0), recv=(100, 0))
            assert member.board.begin(len(many) + 1, what, rank, 3)
        for sequence, tensors in reversed(list(enumerate(many, 1))):
            tensors.end_all(sequence)
        for member, data in zip(members, plain, strict=True):
            member.finish(len(many) + 1)
            assert np.array_equal(data, np.arange(400_000, dtype=np.int32) * 6)


def test_aborts_at_random_moments(link: str) -> None:
    """Goal: whenever an operation is aborted, its tensors have their old bits, and the next one is correct.

    Every fourth operation begins at the last rank only after the others have aborted it: it cannot have ended by then.
    The others are aborted when a random number of their bytes has moved.
    """
    source = random.Random(5)
    with ring_of(3, 2, link=link) as members:
        doomed = Tensors(members, 400_000, place=1)
        for sequence in range(1, 41):
            if sequence % 4 == 1:
                for rank in (0, 1):
                    doomed.begin(rank, sequence)
                eventually(partial(has_moved, members[:2], sequence), "a block moves")
                for member in members[:2]:
                    assert not member.board.has_ended(sequence)
                    member.board.abort(sequence)
                doomed.begin(2, sequence)
            else:
                doomed.begin_all(sequence)
                reach(members[0], sequence, source.randrange(sum(doomed.bytes_moved(0))))
            for member in source.sample(members, 3):
                member.abort(sequence)
            doomed.restore()
            for member in members:
                member.board.release(sequence)
                member.board.sweep()
        doomed.begin_all(41)
        doomed.end_all(41)


def test_an_abort_in_the_middle_of_a_coded_frame() -> None:
    """Goal: the sender continues from its own memory, so the frame is complete and the connection is kept."""
    with lone_member(buffer_bytes=4096) as (member, (out,), _):
        count = 400_000
        data = member.memory(1, 4 * count).view(np.float32)
        data[:] = np.random.default_rng(1).normal(size=count)
        first = data[: Cut(count, 4, 2).block].copy()
        what = operation(count, quantization=(1, 0), area=(4, 0), recv=(1, 0))
        assert member.board.begin(1, what, 0, 2)
        eventually(lambda: member.board.moved(1) > 0)
        member.abort(1)
        data[:] = 0
        assert read_frame(out)[4] == coded(DataType.FLOAT, PLAIN_BYTES, first)
        member.board.release(1)
        assert not member.problems


def test_what_is_final_is_forwarded_untouched() -> None:
    """Goal: coded bytes that this library would never produce are forwarded unchanged, and decoded here."""
    with lone_member() as (member, (out,), (into,)):
        count, world = 3000, 3
        cut = Cut(count, 4, world)
        for number in (1, 4):
            member.memory(number, 1 << 16)
        what = operation(count, quantization=(1, 0), area=(4, 0), recv=(1, 0))
        assert member.board.begin(1, what, 0, world)
        read_frame(out)  # the member's own chunk
        for hop in (0, 1):
            chunk = cut.received(0, hop)
            size = cut.chunk(chunk)[1] - cut.chunk(chunk)[0]
            into.sendall(frame(1, hop, chunk, 0, coded(DataType.FLOAT, PLAIN_BYTES, np.ones(size, np.float32))))
            read_frame(out)
        chunk = cut.received(0, 2)
        size = cut.chunk(chunk)[1] - cut.chunk(chunk)[0]
        odd = bytearray(coded(DataType.FLOAT, PLAIN_BYTES, np.arange(size, dtype=np.float32)))
        odd[6:20] = bytes(range(14))
        into.sendall(frame(1, 2, chunk, 0, bytes(odd)))
        assert read_frame(out) == (1, 3, chunk, 0, bytes(odd))


@pytest.mark.parametrize(("change", "length"), [("plain", 4 * 1500), ("one byte short", 1517), ("one too many", 1519)])
def test_a_length_that_does_not_fit_ends_the_connection(change: str, length: int) -> None:
    """Goal: in a quantized operation only coded blocks are accepted."""
    with lone_member() as (member, _, (into,)):
        for number in (1, 4):
            member.memory(number, 1 << 14)
        what = operation(3000, quantization=(1, 0), area=(4, 0), recv=(1, 0))
        assert member.board.begin(1, what, 0, 2)
        into.sendall(frame(1, 0, 1, 0, bytes(length)))
        eventually(lambda: member.problems, change)
        assert member.problems == ["a frame whose length does not fit its block"]


def test_what_has_no_quantizer_is_not_begun() -> None:
    with lone_member() as (member, _, _):
        for datatype, quantization in ((DataType.INT32, (1, 0)), (DataType.FLOAT, (1, 5)), (DataType.FLOAT, (7, 0))):
            with pytest.raises(ValueError, match="10 x .* cannot be quantized so"):
                member.board.begin(1, operation(10, datatype, quantization=quantization), 0, 2)
