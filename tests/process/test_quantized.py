"""Quantized reduces over rings of real processes: the expected bits at all peers, and fewer bytes moved.

`tests.unit._core.dataplane.quantization_reference` computes the expected bits hop by hop, with the quantizer alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import pccl
import pccl.torch
from pccl import (
    Communicator,
    DataType,
    MasterNode,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
)
from pccl.errors import PCCLError, PeerLostError, UsageError
from tests.unit._core.dataplane.quantization_reference import WAYS, bits_of, narrowed, ring_reduced, wide

from .helpers import (
    Peers,
    actor_pid,
    background,
    bytes_in_use,
    children,
    eventually,
    everybody,
    peers_of,
    ring_order,
    running_master,
)

Array = np.ndarray[Any, Any]

RINGS = [(2, 1), (2, 3), (3, 1), (4, 3), (5, 1)]  # members, connections to each neighbour
COUNTS = [0, 1, 7, 1009, 40_009]  # none, fewer than there are peers, primes, and more than a block
BYTES = QuantizationOptions()
NIBBLES = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX_4BIT)


@pytest.fixture(scope="module", params=RINGS, ids=[f"{world}x{lanes}" for world, lanes in RINGS])
def ring(request: pytest.FixtureRequest) -> Iterator[Peers]:
    world, lanes = request.param
    with running_master() as node, peers_of(node.address, *[0] * world, lanes=lanes) as peers:
        yield peers


@pytest.fixture(scope="module")
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture(scope="module")
def pair(master: MasterNode) -> Iterator[Peers]:
    with peers_of(master.address, 0, 0) as peers:
        yield peers


def drawn(datatype: DataType, count: int, seed: int) -> Array:
    values = np.random.default_rng([seed, count]).normal(0, 3, count).astype(wide(datatype))
    return narrowed(datatype, values)


def as_array(values: Array, *, shared: bool) -> Array:
    made = pccl.empty(values.shape, values.dtype) if shared else np.empty_like(values)
    made[:] = values
    return made


@dataclass(frozen=True)
class Case:
    """One reduce that all members make."""

    datatype: DataType
    how: QuantizationOptions | None
    op: ReduceOp
    count: int
    shared: bool
    in_place: bool

    def expected(self, given: list[Array]) -> bytes:
        if self.how is None:  # integers, whose sums do not depend on any order
            return np.add.reduce(given, dtype=np.int32).tobytes()
        return ring_reduced(self.datatype, self.how, self.op, given).tobytes()


def cases() -> list[Case]:
    """Return cases of every quantization and operation, with varying counts and memory; some without quantization."""
    found: list[Any] = []
    for number, (datatype, how) in enumerate(way for way in WAYS if way[0] is not DataType.BFLOAT16):
        for op in ReduceOp:
            index = number + op.value
            shared, in_place = bool(len(found) & 1), bool(len(found) & 2)
            found.append(Case(datatype, how, op, COUNTS[index % len(COUNTS)], shared, in_place))
        found.append(Case(DataType.INT32, None, ReduceOp.SUM, 30_011 * (number % 3) + 5, True, number % 2 == 0))
    return found


def test_every_peer_has_the_same_bits(ring: Peers) -> None:
    """Goal: all quantizations, operations and counts; shared or staged, in place or not; all at once."""
    chosen = cases()
    world = len(ring)
    given = [
        [
            drawn(case.datatype, case.count, 1000 * number + rank)
            if case.how
            else np.arange(case.count, dtype=np.int32) * (rank + number)
            for number, case in enumerate(chosen)
        ]
        for rank in range(world)
    ]
    before = bytes_in_use()

    def act(peer: Communicator, rank: int) -> list[tuple[bytes, bytes, tuple[bool, int, ReduceInfo]]]:
        flights = []
        for tag, (case, array) in enumerate(zip(chosen, given[rank], strict=True)):
            send = as_array(array, shared=case.shared)
            recv = send if case.in_place else as_array(np.zeros_like(array), shared=case.shared)
            handle = peer.all_reduce_async(send, recv, op=case.op, tag=tag, quantization_options=case.how)
            flights.append((send, recv, handle))
        ends = [handle.wait() for _, _, handle in flights]
        return [(send.tobytes(), recv.tobytes(), end) for (send, recv, _), end in zip(flights, ends, strict=True)]

    results = everybody(ring, act, timeout=60)

    for number, case in enumerate(chosen):
        expected = case.expected([arrays[number] for arrays in given])
        for rank, result in enumerate(results):
            send, recv, (ok, _, info) = result[number]
            assert ok, (rank, case)
            assert recv == expected, (rank, case)
            assert case.in_place or send == given[rank][number].tobytes()
            assert info.local_world_size == world
    assert bytes_in_use() == before


@pytest.mark.parametrize("shared", [False, True], ids=["staged", "shared"])
def test_torch_tensors_of_bfloat16(ring: Peers, shared: bool) -> None:
    given = [drawn(DataType.BFLOAT16, 50_003, rank) for rank in range(len(ring))]

    def act(peer: Communicator, rank: int) -> bytes:
        size, kind = given[rank].size, torch.bfloat16
        tensor = pccl.torch.empty(size, dtype=kind) if shared else torch.empty(size, dtype=kind)
        tensor.view(torch.uint8).numpy()[:] = given[rank].view(np.uint8)
        peer.all_reduce(tensor, tensor, op=ReduceOp.AVG, quantization_options=BYTES)
        found: Array = tensor.view(torch.uint8).numpy()
        return found.tobytes()

    expected = ring_reduced(DataType.BFLOAT16, BYTES, ReduceOp.AVG, given).tobytes()
    assert everybody(ring, act) == [expected] * len(ring)


@pytest.mark.parametrize("how", [BYTES, NIBBLES, QuantizationOptions(DataType.UINT16)], ids=["8", "4", "16"])
def test_only_what_travels_is_counted(ring: Peers, how: QuantizationOptions) -> None:
    """Goal: the bytes of ReduceInfo are within 3 % of the codes alone; the error is within the bound of the hops."""
    count, world = 500_000, len(ring)
    given = [drawn(DataType.FLOAT, count, rank) for rank in range(world)]

    def act(peer: Communicator, rank: int) -> tuple[ReduceInfo, Array]:
        array = as_array(given[rank], shared=True)
        return peer.all_reduce(array, array, op=ReduceOp.SUM, quantization_options=how), array

    results = everybody(ring, act)
    ideal = 2 * (world - 1) * count * bits_of(how) / 8
    total = np.add.reduce(given, dtype=np.float64)
    for info, array in results:
        assert 0.95 * ideal / world < info.tx_bytes < 1.05 * ideal / world
        assert np.abs(array - total).max() < world * np.ptp(total) / (1 << bits_of(how))
    for received in (False, True):
        moved = sum(info.rx_bytes if received else info.tx_bytes for info, _ in results)
        assert ideal < moved < 1.03 * ideal


def test_42_and_43_are_85(pair: Peers) -> None:
    def act(peer: Communicator, rank: int) -> bool:
        for how in (BYTES, NIBBLES, QuantizationOptions(DataType.INT16, QuantizationAlgorithm.ZERO_POINT_SCALE)):
            array = np.full(10_007, 42.0 + rank, np.float32)
            peer.all_reduce(array, array, op=ReduceOp.SUM, quantization_options=how)
            assert (array == 85).all()
        return True

    assert all(everybody(pair, act))


def test_no_algorithm_is_no_quantization(pair: Peers) -> None:
    """Goal: algorithm NONE, with any type, is the same reduce as one without quantization, also for integers."""
    nothing = QuantizationOptions(DataType.INT8, QuantizationAlgorithm.NONE)

    def act(peer: Communicator, rank: int) -> list[int]:
        array = np.arange(10) * (rank + 1)
        peer.all_reduce(array, array, op=ReduceOp.SUM, quantization_options=nothing if rank else None)
        return [int(value) for value in array]

    assert everybody(pair, act) == [[3 * value for value in range(10)]] * 2


def test_a_list_of_reduces(pair: Peers) -> None:
    def act(peer: Communicator, rank: int) -> tuple[ReduceInfo, list[Array]]:
        arrays = [as_array(drawn(DataType.DOUBLE, 5000, 10 * tag + rank), shared=True) for tag in range(6)]
        operand = ReduceOperandDescriptor(DataType.DOUBLE)
        reduces = [ReduceDescriptor(5000, ReduceOp.SUM, tag, operand, BYTES) for tag in range(6)]
        descriptors = [ReduceOpDescriptor.from_numpy(a, a, r) for a, r in zip(arrays, reduces, strict=True)]
        return peer.all_reduce_multiple_with_retry(descriptors), arrays

    for info, arrays in everybody(pair, act):
        assert 6 * 5000 < info.tx_bytes < 1.03 * 6 * 5000
        for tag, array in enumerate(arrays):
            given = [drawn(DataType.DOUBLE, 5000, 10 * tag + rank) for rank in range(2)]
            assert array.tobytes() == ring_reduced(DataType.DOUBLE, BYTES, ReduceOp.SUM, given).tobytes()


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (None, "10 x FLOAT, SUM; "),
        (QuantizationOptions(DataType.INT8), "quantized to INT8 by MIN_MAX"),
        (QuantizationOptions(DataType.UINT16), "quantized to UINT16 by MIN_MAX"),
        (QuantizationOptions(algorithm=QuantizationAlgorithm.ZERO_POINT_SCALE), "to UINT8 by ZERO_POINT_SCALE"),
        (NIBBLES, "quantized to UINT8 by MIN_MAX_4BIT"),
    ],
    ids=["none", "sign", "width", "algorithm", "packed"],
)
def test_members_that_do_not_agree(pair: Peers, others: QuantizationOptions | None, words: str) -> None:
    """Goal: INVALID_ARGUMENT for both, with a message that names both sides; nothing changed."""

    def act(peer: Communicator, rank: int) -> str:
        array = np.ones(10, np.float32)
        with pytest.raises(UsageError) as caught:
            peer.all_reduce(array, array, op=ReduceOp.SUM, quantization_options=BYTES if rank else others)
        assert caught.value.result is Result.INVALID_ARGUMENT
        assert (array == 1).all()
        return str(caught.value)

    first, second = everybody(pair, act)
    assert first == second
    assert "quantized to UINT8 by MIN_MAX" in first
    assert words.removesuffix("; ") in first


@pytest.mark.parametrize(
    ("array", "how", "words"),
    [
        (np.ones(5, np.int32), BYTES, "only floats can be quantized, not INT32"),
        (np.ones(5, np.uint8), NIBBLES, "only floats can be quantized, not UINT8"),
        (np.ones(5, np.float32), QuantizationOptions(DataType.INT32), "INT32 cannot hold codes"),
        (np.ones(5, np.float32), QuantizationOptions(DataType.FLOAT16), "FLOAT16 cannot hold codes"),
        (np.ones(5, np.float16), QuantizationOptions(DataType.UINT16), "would not be smaller"),
        (
            np.ones(5),
            QuantizationOptions(DataType.INT8, QuantizationAlgorithm.MIN_MAX_4BIT),
            "MIN_MAX_4BIT packs two codes into a UINT8, not into INT8",
        ),
    ],
    ids=["integers", "bytes", "wide", "float", "no smaller", "packed"],
)
def test_what_makes_no_sense_is_refused_at_launch(
    pair: Peers, array: Array, how: QuantizationOptions, words: str
) -> None:
    """Goal: every form of the call is refused at launch; no message is sent to others."""
    before = bytes_in_use()
    operand = ReduceOperandDescriptor(DataType.from_numpy_dtype(array.dtype))
    for peer in pair:
        with pytest.raises(ValueError, match=words):
            peer.all_reduce(array, array, op=ReduceOp.SUM, quantization_options=how)
        with pytest.raises(ValueError, match=words):
            peer.all_reduce_async(array, array, op=ReduceOp.SUM, quantization_options=how)
    with pytest.raises(ValueError, match=words):
        ReduceOpDescriptor.from_numpy(array, array, ReduceDescriptor(5, ReduceOp.SUM, 0, operand, how))
    assert bytes_in_use() == before


# ---------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("shared", [False, True], ids=["staged", "shared"])
def test_a_lost_peer_leaves_every_bit_as_it_was(shared: bool) -> None:
    """Goal: a peer is killed while a reduce is halfway; the others have their old bits, and their retry works."""
    count = 1 << 20
    given = [drawn(DataType.FLOAT, count, rank) for rank in range(3)]
    with running_master() as node, peers_of(node.address, 0, 0, 0) as peers:
        first, second, victim = ring_order(peers)
        arrays = [as_array(values, shared=shared or rank == 1) for rank, values in enumerate(given)]
        # The victim's sender is stopped, so the blocks that it should send never arrive, and all others come to a halt.
        sender = eventually(lambda: children(actor_pid(victim)).get("pccl-send-0"), "the sender has its name")
        os.kill(sender, signal.SIGSTOP)

        def reduce(peer: Communicator, rank: int) -> ReduceInfo:
            return peer.all_reduce(arrays[rank], arrays[rank], op=ReduceOp.SUM, quantization_options=BYTES)

        calls = [background(lambda p=p, r=r: reduce(p, r)) for r, p in enumerate((first, second, victim))]
        eventually(lambda: not np.array_equal(arrays[1], given[1]), "the second peer adds")
        os.kill(actor_pid(victim), signal.SIGKILL)
        for rank in (0, 1):
            assert isinstance(calls[rank].error(), PeerLostError)
            assert arrays[rank].tobytes() == given[rank].tobytes()
        assert isinstance(calls[2].error(), PCCLError)
        assert arrays[2].tobytes() == given[2].tobytes()

        expected = ring_reduced(DataType.FLOAT, BYTES, ReduceOp.SUM, given[:2]).tobytes()
        retries = [background(lambda p=p, r=r: reduce(p, r)) for r, p in enumerate((first, second))]
        for rank, retry in enumerate(retries):
            assert retry.result().local_world_size == 2
            assert arrays[rank].tobytes() == expected
