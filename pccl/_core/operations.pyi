from collections.abc import Sequence

from pccl.records import record

OPERATIONS_MAX: int
DATATYPES: tuple[str, ...]
OPS: tuple[str, ...]
ALGORITHMS: dict[int, str]

@record
class Shape:
    tag: int
    count: int
    datatype: int
    op: int
    algorithm: int
    quantized: int

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
    def shape(self) -> Shape: ...

def pack_operations(operations: Sequence[Operation]) -> bytes: ...
def unpack_operations(data: bytes) -> list[Operation]: ...
def pack_shapes(shapes: Sequence[Shape | Operation]) -> bytes: ...
def unpack_shapes(data: bytes) -> list[Shape]: ...
def split_shapes(data: bytes) -> list[tuple[int, bytes]]: ...
def pack_pairs(pairs: Sequence[tuple[int, int]]) -> bytes: ...
def unpack_pairs(data: bytes) -> list[tuple[int, int]]: ...
