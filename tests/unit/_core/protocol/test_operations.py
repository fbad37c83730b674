"""Operations and signatures: their bytes, and their description in words."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl import DataType, QuantizationAlgorithm, ReduceOp
from pccl._core.protocol import operations
from pccl._core.protocol.codec import encode
from pccl._core.protocol.mailbox import CallReduce
from pccl._core.protocol.messages import Commence, Initiate
from pccl._core.protocol.operations import (
    OPERATIONS_MAX,
    Operation,
    ReduceSignature,
    pack_operations,
    pack_pairs,
    pack_signatures,
    split_signatures,
    unpack_operations,
    unpack_pairs,
    unpack_signatures,
)

U8, U32, U64 = st.integers(0, 2**8 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SHAPES = st.builds(ReduceSignature, U64, U64, U8, U8, U8, U8)
OPERATIONS = st.builds(Operation, U32, U32, U64, U64, U8, U8, U8, U8, U32, U32, U64, U32, U64, U32, U64, U32, U64)


def test_the_bytes_of_an_operation_are_as_agreed() -> None:
    """Goal: training process and actor may be of different builds for a short time, so the format is fixed."""
    packed = pack_operations([Operation(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)])

    assert packed.hex() == (
        "0100000002000000030000000000000004000000000000000506070809000000"
        "0a0000000b000000000000000c0000000d000000000000000e0000000f00000000000000"
        "100000001100000000000000"
    )


def test_the_bytes_of_a_shape_are_as_agreed() -> None:
    """Goal: members of different builds compare them."""
    assert pack_signatures([ReduceSignature(1, 2, 3, 4, 5, 6)]).hex() == "0100000000000000020000000000000003040506"


@given(st.lists(OPERATIONS, min_size=1, max_size=OPERATIONS_MAX))
def test_operations_survive_the_trip(given_operations: list[Operation]) -> None:
    """Goal: packed operations are unpacked unchanged, and their signatures are those of the operations."""
    assert unpack_operations(pack_operations(given_operations)) == given_operations
    assert unpack_signatures(pack_signatures(given_operations)) == [
        operation.signature for operation in given_operations
    ]


@given(st.lists(SHAPES, min_size=1, max_size=OPERATIONS_MAX))
def test_split_shapes_are_the_shapes(shapes: list[ReduceSignature]) -> None:
    """Goal: the master's form, a tag and bytes, holds the same list."""
    parts = split_signatures(pack_signatures(shapes))

    assert [tag for tag, _ in parts] == [shape.tag for shape in shapes]
    assert [unpack_signatures(part) for _, part in parts] == [[shape] for shape in shapes]


@given(st.lists(st.tuples(U64, U64), min_size=1, max_size=OPERATIONS_MAX))
def test_pairs_survive_the_trip(pairs: list[tuple[int, int]]) -> None:
    """Goal: every tag finds its sequence number."""
    assert unpack_pairs(pack_pairs(pairs)) == pairs


@pytest.mark.parametrize("unpack", [unpack_operations, unpack_signatures, split_signatures, unpack_pairs])
@pytest.mark.parametrize("size", [0, 1, 19, 21, 81])
def test_what_is_no_list_is_refused(unpack: Any, size: int) -> None:
    """Goal: an empty list, half an entry, and one entry with some bytes more are refused."""
    with pytest.raises(ValueError, match="are not 1 to 64"):
        unpack(bytes(size))


@pytest.mark.parametrize(
    ("unpack", "size"), [(unpack_operations, 80), (unpack_signatures, 20), (split_signatures, 20), (unpack_pairs, 16)]
)
def test_a_list_has_a_largest_length(unpack: Any, size: int) -> None:
    """Goal: 64 entries are accepted, 65 are not."""
    assert len(unpack(bytes(64 * size))) == 64
    with pytest.raises(ValueError, match=f"{65 * size} bytes"):
        unpack(bytes(65 * size))


def test_the_longest_lists_fit_their_messages() -> None:
    """Goal: the limit is a number of operations, so callers need not know a limit in bytes."""
    shape, operation = ReduceSignature(1, 2, 3, 4, 5, 6), Operation(*range(17))

    for message in (
        CallReduce(pack_operations([operation] * OPERATIONS_MAX)),
        Initiate(pack_signatures([shape] * OPERATIONS_MAX)),
        Commence(1, pack_pairs([(1, 2)] * OPERATIONS_MAX)),
    ):
        assert len(encode(message)[1]) < 1 << 16


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ReduceSignature(5, 1024, 10, 0, 0, 0), "1,024 x FLOAT, SUM"),
        (ReduceSignature(5, 1, 9, 1, 2, 0), "1 x BFLOAT16, AVG, quantized to UINT8 by ZERO_POINT_SCALE"),
        (
            ReduceSignature(5, 7, 200, 99, 99, 201),
            "7 x unknown 200, unknown 99, quantized to unknown 201 by algorithm 99",
        ),
    ],
)
def test_a_shape_describes_itself(shape: ReduceSignature, words: str) -> None:
    """Goal: an error names what a peer asked for in words that its user wrote."""
    assert str(shape) == words


def test_the_names_are_those_of_the_enums() -> None:
    """Goal: the actors say in words what users know by name."""
    assert list(operations.DATATYPES) == [member.name for member in sorted(DataType, key=lambda one: one.value)]
    assert list(operations.OPS) == [member.name for member in sorted(ReduceOp, key=lambda one: one.value)]
    named = {member.value: member.name for member in QuantizationAlgorithm if member.value}
    assert named == operations.ALGORITHMS


def test_an_operation_lies_in_its_bytes_as_ever() -> None:
    """Goal: fields one after the other, little-endian, without gaps: the same as `struct` would write."""
    numbers = (1, 2, 3 << 60, 4 << 60, 5, 6, 7, 8, 9, 10, 11 << 50, 12, 13 << 50, 14, 15 << 50, 16, 17 << 50)
    assert pack_operations([Operation(*numbers)]) == struct.pack("<IIQQBBBBIIQIQIQIQ", *numbers)
    assert unpack_operations(pack_operations([Operation(*numbers)] * 2)) == [Operation(*numbers)] * 2


def test_an_operation_is_a_frozen_value() -> None:
    """Goal: it compares and hashes by content, prints every field, and takes fields by position or by name."""
    one = Operation(1, 2, 3, count=4, area_offset=17)

    assert (one.slot, one.generation, one.tag, one.count, one.flags, one.area_offset) == (1, 2, 3, 4, 0, 17)
    assert one == Operation(1, 2, 3, 4, area_offset=17)
    assert hash(one) == hash(Operation(1, 2, 3, 4, area_offset=17))
    assert one != Operation(1, 2, 3, 5, area_offset=17)
    assert one != (1, 2, 3)
    assert repr(one).startswith("Operation(slot=1, generation=2, tag=3, count=4, datatype=0, ")
    with pytest.raises(AttributeError):
        one.tag = 5  # type: ignore[misc]
    with pytest.raises(AttributeError, match="an Operation has no colour"):
        one.colour  # noqa: B018
    with pytest.raises(TypeError, match="an Operation has the fields slot, generation, tag"):
        Operation(colour=1)
    with pytest.raises(TypeError, match="an Operation has the fields"):
        Operation(*range(18))
    with pytest.raises(OverflowError):
        Operation(1 << 32)
