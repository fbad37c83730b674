"""One reduce as its caller asked for it, and what members must agree on before it may begin.

An *operation* is what the training process hands to its actor: which completion slot waits for it, what is reduced, and
where in shared memory. Its *shape* is the part that every member of the ring must give alike; only that travels to the
master, which compares bytes and never needs to know what they mean. Lists of both are fixed little-endian structs, one
after the other, at most OPERATIONS_MAX to a message; `packing` knows how the fields of an operation lie. A leaf: pure,
and without the enums, which would cost the actors their quick start; a test holds the names together.
"""

from __future__ import annotations

import struct

from pccl.records import record

from .packing import OPERATION_BYTES, pack_operation, unpack_operation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

OPERATIONS_MAX = 64  # per message: several times what a loop keeps in flight, and a message of a few kilobytes

# By number, as in the public enums.
DATATYPES = (
    *("UINT8", "INT8", "INT16", "UINT16", "UINT32", "INT32", "UINT64", "INT64"),
    *("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"),
)
OPS = ("SUM", "AVG", "PROD", "MAX", "MIN")
ALGORITHMS = {1: "MIN_MAX", 2: "ZERO_POINT_SCALE", 100: "MIN_MAX_4BIT", 101: "ZERO_POINT_SCALE_4BIT"}

_SHAPE = struct.Struct("<QQBBBB")
_PAIR = struct.Struct("<QQ")
SHAPE_BYTES = _SHAPE.size


@record
class Shape:
    """What all members must give alike for one tag."""

    tag: int
    count: int  # elements
    datatype: int
    op: int
    algorithm: int  # of quantization; 0: none
    quantized: int  # datatype on the wire; 0 without quantization

    def __str__(self) -> str:
        words = f"{self.count:,} x {_name(DATATYPES, self.datatype)}, {_name(OPS, self.op)}"
        if self.algorithm:
            algorithm = ALGORITHMS.get(self.algorithm, f"algorithm {self.algorithm}")
            words += f", quantized to {_name(DATATYPES, self.quantized)} by {algorithm}"
        return words


@record
class Operation:
    """One reduce of this peer: who waits for it, its shape, and where its memory lies."""

    slot: int
    sequence: int  # of the completion slot, not of the collective
    tag: int
    count: int
    datatype: int
    op: int
    algorithm: int
    quantized: int
    flags: int  # belong to the data plane
    send_segment: int
    send_offset: int
    recv_segment: int
    recv_offset: int
    backup_segment: int  # 0: none
    backup_offset: int
    area_segment: int = 0  # of a quantized reduce, where coded blocks wait to be sent on
    area_offset: int = 0

    @property
    def shape(self) -> Shape:
        """What the other members must give alike."""
        return Shape(self.tag, self.count, self.datatype, self.op, self.algorithm, self.quantized)


def pack_operations(operations: Sequence[Operation]) -> bytes:
    """A list of operations for the mailbox."""
    return b"".join(
        [
            pack_operation(
                *(o.slot, o.sequence, o.tag, o.count, o.datatype, o.op, o.algorithm, o.quantized, o.flags),
                *(o.send_segment, o.send_offset, o.recv_segment, o.recv_offset, o.backup_segment, o.backup_offset),
                *(o.area_segment, o.area_offset),
            )
            for o in operations
        ]
    )


def unpack_operations(data: bytes) -> list[Operation]:
    """The inverse of `pack_operations`. ValueError if that is no list of operations."""
    _check_length(data, OPERATION_BYTES, "operations")
    return [Operation(*unpack_operation(data, offset)) for offset in range(0, len(data), OPERATION_BYTES)]


def pack_shapes(shapes: Sequence[Shape | Operation]) -> bytes:
    """The shapes of these, for the master."""
    return b"".join([_SHAPE.pack(s.tag, s.count, s.datatype, s.op, s.algorithm, s.quantized) for s in shapes])


def unpack_shapes(data: bytes) -> list[Shape]:
    """The inverse of `pack_shapes`. ValueError if that is no list of shapes."""
    _check_length(data, SHAPE_BYTES, "shapes")
    return [Shape(*fields) for fields in _SHAPE.iter_unpack(data)]


def split_shapes(data: bytes) -> list[tuple[int, bytes]]:
    """(tag, packed shape) of each: equal shapes are equal bytes. ValueError as above."""
    _check_length(data, SHAPE_BYTES, "shapes")
    parts = [data[offset : offset + SHAPE_BYTES] for offset in range(0, len(data), SHAPE_BYTES)]
    return [(int.from_bytes(part[:8], "little"), part) for part in parts]


def pack_pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    """Which tag commences under which sequence number."""
    return b"".join([_PAIR.pack(tag, sequence) for tag, sequence in pairs])


def unpack_pairs(data: bytes) -> list[tuple[int, int]]:
    """The inverse of `pack_pairs`. ValueError if that is no list of pairs."""
    _check_length(data, _PAIR.size, "pairs")
    return list(_PAIR.iter_unpack(data))


def _check_length(data: bytes, size: int, what: str) -> None:
    count, rest = divmod(len(data), size)
    if rest or not 1 <= count <= OPERATIONS_MAX:
        raise ValueError(f"{len(data)} bytes are not 1 to {OPERATIONS_MAX} {what} of {size} bytes each")


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"unknown {number}"
