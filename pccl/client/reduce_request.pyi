from typing import Any, final

from pccl.memory.arena import Piece
from pccl.memory.completion_slots import Slot
from pccl.values import QuantizationOptions, ReduceInfo, ReduceOp, ReduceOperandDescriptor

from .tensors import ReduceOpDescriptor, TensorMemory

NOTHING: ReduceInfo

@final
class Request:
    @property
    def tag(self) -> int: ...
    @property
    def elements(self) -> int: ...
    def __init__(
        self,
        send: TensorMemory,
        recv: TensorMemory,
        elements: int,
        op: ReduceOp,
        tag: int,
        quantization: QuantizationOptions | None,
    ) -> None: ...

def request(
    send: Any,
    recv: Any,
    op: ReduceOp,
    tag: int,
    operand: ReduceOperandDescriptor | None,
    quantization: QuantizationOptions | None,
) -> Request: ...
def request_of(descriptor: ReduceOpDescriptor) -> Request: ...

@final
class Kind: ...

@final
class Launched:
    _staging: Piece | None
    @property
    def slot(self) -> Slot: ...
    @property
    def tag(self) -> int: ...
    @property
    def over(self) -> bool: ...
    def __init__(self, slot: Slot, request: Request, world: int) -> None: ...
    @property
    def segments(self) -> tuple[int, int, int, int]: ...
    def operation(self) -> bytes: ...
    def message(self) -> bytes: ...
    def succeed(self, payload: bytes) -> ReduceInfo: ...
    def fail(self) -> None: ...
    def release(self) -> None: ...

def read_failure(outcome: int, payload: bytes) -> tuple[int, int, bytes, str]: ...
