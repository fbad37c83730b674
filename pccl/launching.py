"""One reduce as the training process holds it: where its memory lies, from launch to outcome.

Tensors in shared segments are reduced where they are. In place, they need a *backup* until the verdict: workers fill
it as they go, and after a failure the old bytes are put back from it. Any other tensor is *staged*: copied into a piece
of the arena at launch and back on success, so its original is its own backup. Whatever is held here, tensors and
pieces, is held until no worker can touch it any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._core.backup import backup_bytes, clear, restore
from ._core.board import FLAG_BACKED_UP
from ._core.copying import copy
from ._core.events import NUMBERS, REDUCED
from ._core.operations import Operation
from .memory.arena import default
from .outcomes import KIND_REDUCE, split
from .values import DeviceType, ReduceInfo

if TYPE_CHECKING:
    from .memory.arena import Piece
    from .memory.slots import Slot
    from .values import ReduceDescriptor, TensorMemory

NOTHING = ReduceInfo(0, 0, 0)


class Launched:
    """A reduce between its launch and its outcome."""

    __slots__ = ("_backup", "_count", "_places", "_recv", "_reduce", "_send", "_staging", "over", "slot", "tag")

    def __init__(
        self, slot: Slot, send: TensorMemory, recv: TensorMemory, reduce: ReduceDescriptor, world: int
    ) -> None:
        self.slot = slot
        self.tag = reduce.tag
        self.over = False  # it succeeded or failed
        self._send, self._recv = send, recv
        self._reduce = reduce
        self._count = reduce.count
        self._staging: Piece | None = None
        self._backup: Piece | None = None
        self._places = self._find_places(world)

    @property
    def _nbytes(self) -> int:
        return self._count * self._send.datatype.itemsize

    def _find_places(self, world: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Segment and offset of what is sent, of where the result goes, and of the backup."""
        arena, nbytes = default(), self._nbytes
        sent = received = None
        if nbytes and self._send.device_type is DeviceType.CPU:
            sent = arena.find(self._send.data_ptr, nbytes)
            received = sent if self._is_in_place else arena.find(self._recv.data_ptr, nbytes)
        if sent is None or received is None or self._overlaps:
            self._staging = arena.allocate(nbytes)
            self._copy_in(self._staging)
            place = self._staging.segment, self._staging.offset
            return place, place, (0, 0)
        if not self._is_in_place:
            return sent, received, (0, 0)
        itemsize = self._send.datatype.itemsize
        self._backup = arena.allocate(backup_bytes(self._count, itemsize, world))
        clear(self._backup.address, self._count, itemsize, world)
        return sent, received, (self._backup.segment, self._backup.offset)

    @property
    def _is_in_place(self) -> bool:
        return self._send.data_ptr == self._recv.data_ptr

    @property
    def _overlaps(self) -> bool:
        """Whether the tensors share some of their memory, but do not begin together."""
        return 0 < abs(self._send.data_ptr - self._recv.data_ptr) < self._nbytes

    @property
    def segments(self) -> set[int]:
        """The segments that the workers must know."""
        return {segment for segment, _ in self._places if segment}

    def operation(self) -> Operation:
        """What the actor is told."""
        quantization = self._reduce.quantization_options
        (sent, sent_offset), (received, received_offset), (backup, backup_offset) = self._places
        return Operation(
            self.slot.index,
            self.slot.sequence,
            self.tag,
            self._count,
            self._send.datatype.value,
            self._reduce.op.value,
            0 if quantization is None else quantization.algorithm.value,
            0 if quantization is None else quantization.quantized_datatype.value,
            FLAG_BACKED_UP if backup else 0,
            sent,
            sent_offset,
            received,
            received_offset,
            backup,
            backup_offset,
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
        if self._backup is not None:
            restore(self._recv.data_ptr, self._backup.address, self._count, self._send.datatype.itemsize)
        self.release()

    def release(self) -> None:
        """Give the pieces back."""
        for piece in (self._staging, self._backup):
            if piece is not None:
                piece.release()
        self._staging = self._backup = None

    def _copy_in(self, piece: Piece) -> None:
        if self._send.device_type is DeviceType.CUDA:
            from .torch.staging import copy_to_host

            copy_to_host(piece, self._send.owner, self._nbytes)
        else:
            copy(piece.address, self._send.data_ptr, self._nbytes)

    def _copy_out(self, piece: Piece) -> None:
        if self._recv.device_type is DeviceType.CUDA:
            from .torch.staging import copy_to_device

            copy_to_device(self._recv.owner, piece, self._nbytes)
        else:
            copy(self._recv.data_ptr, piece.address, self._nbytes)


def read_failure(outcome: int, payload: bytes) -> tuple[int, int, bytes, str]:
    """Result, kind, the world's numbers if the master sent them along, and the reason."""
    result, kind = split(outcome)
    numbers = b""
    if kind == KIND_REDUCE:
        numbers, payload = payload[: NUMBERS.size], payload[NUMBERS.size :]
    return result, kind, numbers, payload.decode("utf-8", "replace")
