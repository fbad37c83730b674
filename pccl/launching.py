"""One reduce as the training process holds it: where its memory lies, from launch to outcome.

Tensors in shared segments are reduced where they are. In place, they need a *backup* until the verdict: workers fill
it as they go, and after a failure the old bytes are put back from it. Any other tensor is *staged*: copied into a piece
of the arena at launch and back on success, so its original is its own backup. Whatever is held here, tensors and
pieces, is held until no worker can touch it any more. A quantized reduce has an *area* besides, for coded blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ._core.backup import backup_bytes, clear, restore
from ._core.board import FLAG_BACKED_UP
from ._core.codec import area_bytes
from ._core.copying import copy
from ._core.events import NUMBERS, REDUCED
from ._core.operations import pack_operation
from .memory.arena import default
from .outcomes import KIND_REDUCE, split
from .tensors import TensorMemory, check_operands, check_quantization
from .values import DeviceType, QuantizationAlgorithm, ReduceInfo

if TYPE_CHECKING:
    from .memory.arena import Piece
    from .memory.slots import Slot
    from .tensors import ReduceOpDescriptor
    from .values import QuantizationOptions, ReduceOp, ReduceOperandDescriptor

NOTHING = ReduceInfo(0, 0, 0)


class Request(NamedTuple):
    """A reduce that was asked for, its arguments checked."""

    send: TensorMemory
    recv: TensorMemory
    elements: int
    op: ReduceOp
    tag: int
    quantization: QuantizationOptions | None


def request(
    send: Any,
    recv: Any,
    *,
    op: ReduceOp,
    tag: int,
    operand: ReduceOperandDescriptor | None,
    quantization: QuantizationOptions | None,
) -> Request:
    """The arguments of a call, checked."""
    if not 0 <= tag < 1 << 64:
        raise ValueError(f"a tag is 0 to {(1 << 64) - 1}, not {tag}")
    sent = received = TensorMemory.of(send)
    if recv is not send:
        received = TensorMemory.of(recv)
        if _kind(send) != _kind(recv):
            raise ValueError(f"send is a {_kind(send)} tensor but recv is a {_kind(recv)} one; pass two of a kind")
    check_operands(sent, received, sent.datatype if operand is None else operand.datatype, sent.numel)
    check_quantization(sent.datatype, quantization)
    return Request(sent, received, sent.numel, op, tag, quantization)


def request_of(descriptor: ReduceOpDescriptor) -> Request:
    """What a descriptor asks for; it was checked when it was made."""
    reduce = descriptor.reduce_descriptor
    return Request(descriptor.send, descriptor.recv, reduce.count, reduce.op, reduce.tag, reduce.quantization_options)


def _kind(tensor: object) -> str:
    return type(tensor).__module__.partition(".")[0]


class Launched:
    """A reduce between its launch and its outcome."""

    __slots__ = ("_area", "_backup", "_nbytes", "_numbers", "_places", "_request", "_staging", "over", "slot", "tag")

    def __init__(self, slot: Slot, request: Request, world: int) -> None:
        self.slot = slot
        self.tag = request.tag
        self.over = False  # it succeeded or failed
        self._request = request
        self._nbytes = request.elements * request.send.datatype.itemsize
        self._numbers = _numbers(request)
        self._staging: Piece | None = None
        self._backup: Piece | None = None
        self._area: Piece | None = None
        try:
            self._places = self._find_places(world)
            if self._numbers[2]:
                datatype, _, algorithm, quantized = self._numbers
                self._area = default().allocate(area_bytes(request.elements, datatype, algorithm, quantized, world))
        except BaseException:
            self.release()
            raise

    def _find_places(self, world: int) -> tuple[int, int, int, int, int, int]:
        """Segment and offset of what is sent, of where the result goes, and of the backup."""
        arena, nbytes = default(), self._nbytes
        send, recv = self._request.send, self._request.recv
        distance = abs(send.data_ptr - recv.data_ptr)
        sent = received = None
        if nbytes and send.device_type is DeviceType.CPU:
            sent = arena.find(send.data_ptr, nbytes)
            received = sent if distance == 0 else arena.find(recv.data_ptr, nbytes)
        if sent is None or received is None or 0 < distance < nbytes:
            piece = self._staging = arena.allocate(nbytes)
            self._copy_in(piece)
            return piece.segment, piece.offset, piece.segment, piece.offset, 0, 0
        if distance:
            return *sent, *received, 0, 0
        count, itemsize = self._request.elements, send.datatype.itemsize
        piece = self._backup = arena.allocate(backup_bytes(count, itemsize, world))
        clear(piece.address, count, itemsize, world)
        return *sent, *received, piece.segment, piece.offset

    @property
    def segments(self) -> tuple[int, int, int, int]:
        """The segments that the workers must know; 0 is none."""
        places = self._places
        return places[0], places[2], places[4], 0 if self._area is None else self._area.segment

    def operation(self) -> bytes:
        """What the actor is told: an `Operation`."""
        asked, places, area = self._request, self._places, self._area
        return pack_operation(
            self.slot.index,
            self.slot.sequence,
            asked.tag,
            asked.elements,
            *self._numbers,
            FLAG_BACKED_UP if places[4] else 0,
            *places,
            *((0, 0) if area is None else (area.segment, area.offset)),
        )

    def succeed(self, payload: bytes) -> ReduceInfo:
        """The verdict is success: hand the result over."""
        self.over = True
        if self._staging is not None:
            self._copy_out(self._staging)
        self.release()
        world, sent, received, network_ns, neighbour_ns, reduce_ns = REDUCED.unpack(payload)
        return ReduceInfo(world, sent, received, network_ns / 1e9, neighbour_ns / 1e9, reduce_ns / 1e9)

    def fail(self) -> None:
        """It failed, and no worker touches its memory: what was overwritten in place is as it was before."""
        self.over = True
        backup = self._backup
        if backup is not None:
            recv = self._request.recv
            restore(recv.data_ptr, backup.address, self._request.elements, recv.datatype.itemsize)
        self.release()

    def release(self) -> None:
        """Give the pieces back."""
        for piece in (self._staging, self._backup, self._area):
            if piece is not None:
                piece.release()
        self._staging = self._backup = self._area = None

    def _copy_in(self, piece: Piece) -> None:
        if self._request.send.device_type is DeviceType.CUDA:
            from .torch.staging import copy_to_host

            copy_to_host(piece, self._request.send.owner, self._nbytes)
        else:
            copy(piece.address, self._request.send.data_ptr, self._nbytes)

    def _copy_out(self, piece: Piece) -> None:
        if self._request.recv.device_type is DeviceType.CUDA:
            from .torch.staging import copy_to_device

            copy_to_device(self._request.recv.owner, piece, self._nbytes)
        else:
            copy(self._request.recv.data_ptr, piece.address, self._nbytes)


def _numbers(request: Request) -> tuple[int, int, int, int]:
    """Datatype, operation, algorithm and quantized datatype; no algorithm has no quantized datatype either."""
    how = request.quantization
    if how is None or how.algorithm is QuantizationAlgorithm.NONE:
        return request.send.datatype._value_, request.op._value_, 0, 0  # `value` is a property, and a slow one
    return request.send.datatype.value, request.op.value, how.algorithm.value, how.quantized_datatype.value


def read_failure(outcome: int, payload: bytes) -> tuple[int, int, bytes, str]:
    """Result, kind, the world's numbers if the master sent them along, and the reason."""
    result, kind = split(outcome)
    numbers = b""
    if kind == KIND_REDUCE:
        numbers, payload = payload[: NUMBERS.size], payload[NUMBERS.size :]
    return result, kind, numbers, payload.decode("utf-8", "replace")
