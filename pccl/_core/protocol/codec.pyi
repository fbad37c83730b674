from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")

# The Python type of each field type.
u8 = int
u16 = int
u32 = int
u64 = int
flag = bool
text = str
blob = bytes
bytes16 = bytes
bytes32 = bytes

PROTOCOL_VERSION: int
TEXT_BYTES_MAX: int
BLOB_BYTES_MAX: int
FIXED: dict[str, int]
SIZED: dict[str, int]

class CodecError(ValueError): ...

class MessageFormat:
    @property
    def cls(self) -> type[Any]: ...
    @property
    def opcode(self) -> int: ...
    @property
    def direction(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def types(self) -> tuple[str, ...]: ...
    @property
    def limit(self) -> int: ...
    def __init__(self, cls: type[Any], opcode: int, direction: str) -> None: ...

BY_OPCODE: dict[int, MessageFormat]
BY_CLASS: dict[type[Any], MessageFormat]

@dataclass_transform(frozen_default=True)
def message(opcode: int, direction: str) -> Callable[[type[T]], type[T]]: ...
def limits(*classes: type[Any]) -> dict[int, int]: ...
def encode(value: Any) -> tuple[int, bytes]: ...
def pack(value: Any) -> bytes: ...
def decode(opcode: int, body: bytes) -> Any: ...
def unpack(data: bytes) -> Any: ...
def cut_text(text: str, most: int = ...) -> bytes: ...
