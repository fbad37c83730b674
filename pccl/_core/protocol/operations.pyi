from collections.abc import Sequence
from typing import final

from pccl._core.records import record

OPERATIONS_MAX: int
DATATYPES: tuple[str, ...]
OPS: tuple[str, ...]
ALGORITHMS: dict[int, str]

@final
@record
class ReduceSignature:
    tag: int
    count: int
    datatype: int
    op: int
    algorithm: int
    quantized: int

@final
@record
class Operation:
    slot: int
    sequence: int
    tag: int
    count: int
    datatype: int
    op: int
    algorithm: int
    quantized: int
    flags: int
    send_segment: int
    send_offset: int
    recv_segment: int
    recv_offset: int
    backup_segment: int
    backup_offset: int
    area_segment: int = 0
    area_offset: int = 0
    @property
    def shape(self) -> ReduceSignature: ...

def pack_operations(operations: Sequence[Operation]) -> bytes: ...
def unpack_operations(data: bytes) -> list[Operation]: ...
def pack_signatures(shapes: Sequence[ReduceSignature | Operation]) -> bytes: ...
def unpack_signatures(data: bytes) -> list[ReduceSignature]: ...
def split_signatures(data: bytes) -> list[tuple[int, bytes]]: ...
def pack_pairs(pairs: Sequence[tuple[int, int]]) -> bytes: ...
def unpack_pairs(data: bytes) -> list[tuple[int, int]]: ...
