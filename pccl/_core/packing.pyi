from typing import Final

OPERATION_BYTES: Final[int]

def pack_operation(
    slot: int,
    sequence: int,
    tag: int,
    count: int,
    datatype: int,
    op: int,
    algorithm: int,
    quantized: int,
    flags: int,
    send_segment: int,
    send_offset: int,
    recv_segment: int,
    recv_offset: int,
    backup_segment: int,
    backup_offset: int,
    area_segment: int,
    area_offset: int,
) -> bytes: ...
def unpack_operation(
    data: bytes, offset: int
) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]: ...
