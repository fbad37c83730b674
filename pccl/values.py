"""Enums and frozen values of the public interface.

Here live the names and integers that users and the wire agree on, and the
descriptors that carry a caller's tensors into the library.  Nothing here
communicates, allocates or copies, and nothing here imports numpy or torch
until a caller hands over one of theirs: both are optional.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


class Result(Enum):
    """What became of a call; carried by every PCCLError."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_USAGE = 4
    TOO_FEW_PEERS = 5
    MASTER_CONNECTION_FAILED = 6
    RANK_CONNECTION_FAILED = 7
    RANK_CONNECTION_LOST = 8
    NO_SHARED_STATE_AVAILABLE = 9
    PENDING_ASYNC_OPS = 10
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12


class ReduceOp(Enum):
    """How the contributions of all peers become one value."""

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class Attribute(Enum):
    """What a communicator knows about the run; peers not yet accepted never count."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    PEER_GROUP_WORLD_SIZE = 2
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


class SharedStateSyncStrategy(Enum):
    """Whose content may win when peers hold different shared state.

    ENFORCE_POPULAR: what most of those hold who are up to date. SEND_ONLY: gives its state and is never overwritten.
    RECEIVE_ONLY: takes it over and never gives. The last two go together, and not with the first.
    """

    ENFORCE_POPULAR = 0
    RECEIVE_ONLY = 1
    SEND_ONLY = 2


class DistributionHint(Enum):
    """What the caller knows about the values of an operand."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class QuantizationAlgorithm(Enum):
    """How values are made smaller for the wire; `docs/quantization.md` says which to choose."""

    NONE = 0
    #: Codes span the values of a group, from the least to the largest.
    MIN_MAX = 1
    #: Codes span the values and zero, and zero is exact.
    ZERO_POINT_SCALE = 2
    #: The same with two codes to a byte; the quantized type is UINT8.
    MIN_MAX_4BIT = 100
    ZERO_POINT_SCALE_4BIT = 101


class DeviceType(Enum):
    """Where the memory of a tensor lies."""

    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, name: str) -> DeviceType:
        """The device type that torch calls by this name."""
        if name == "cpu":
            return cls.CPU
        if name == "cuda":
            return cls.CUDA
        raise ValueError(f"device type {name!r} is not supported; use 'cpu' or 'cuda'")


class DataType(Enum):
    """The type of one element."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    UINT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZES[self]

    @classmethod
    def from_torch_dtype(cls, dtype: torch.dtype) -> DataType:
        """The data type of a torch dtype; ValueError if there is none."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype!r} is not a torch dtype")
        datatype = _BY_NAME.get(str(dtype).removeprefix("torch."))
        if datatype is None:
            raise ValueError(f"torch dtype {dtype} is not supported")
        return datatype

    def to_torch_dtype(self) -> torch.dtype:
        """The torch dtype of the same elements; ValueError if this torch has none."""
        import torch

        # Unsigned types wider than a byte are recent additions to torch.
        dtype = getattr(torch, _NAMES[self], None)
        if dtype is None:
            raise ValueError(f"torch {torch.__version__} has no dtype for {self.name}")
        return dtype

    @classmethod
    def from_numpy_dtype(cls, dtype: np.dtype[Any] | type) -> DataType:
        """The data type of a numpy dtype or scalar type; ValueError if there is none."""
        import numpy as np

        if dtype is None:
            # numpy would read None as float64, which no caller means.
            raise ValueError("None is not a numpy dtype")
        try:
            native = np.dtype(dtype)
        except TypeError as error:
            raise ValueError(f"{dtype!r} is not a numpy dtype") from error
        datatype = _BY_NAME.get(native.name)
        # Byte order is part of a numpy dtype but not of its name, and the wire
        # carries native elements.  Extension types may also be called bfloat16.
        if datatype is None or datatype is cls.BFLOAT16 or not native.isnative:
            raise ValueError(f"numpy dtype {native.str!r} ({native}) is not supported")
        return datatype

    def to_numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the same elements; ValueError for BFLOAT16."""
        import numpy as np

        if self is DataType.BFLOAT16:
            raise ValueError("numpy has no dtype for BFLOAT16")
        return np.dtype(_NAMES[self])


# numpy and torch call all their types alike, so one table of names serves both.
_NAMES = {
    DataType.UINT8: "uint8",
    DataType.INT8: "int8",
    DataType.INT16: "int16",
    DataType.UINT16: "uint16",
    DataType.UINT32: "uint32",
    DataType.INT32: "int32",
    DataType.UINT64: "uint64",
    DataType.INT64: "int64",
    DataType.FLOAT16: "float16",
    DataType.BFLOAT16: "bfloat16",
    DataType.FLOAT: "float32",
    DataType.DOUBLE: "float64",
}
_BY_NAME = {name: datatype for datatype, name in _NAMES.items()}

# Each name ends in its width in bits.
_ITEMSIZES = {datatype: int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8 for datatype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class ReduceOperandDescriptor:
    """What the elements of a reduce are."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """How the elements of a reduce travel."""

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX


@dataclass(frozen=True, slots=True)
class ReduceDescriptor:
    """One reduce, without its memory."""

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor
    quantization_options: QuantizationOptions | None


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """What a reduce did: how many took part, and the bytes it moved here."""

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    #: Where the time of this peer's workers went, summed over its lanes: in the middle of a frame,
    network_seconds: float = 0.0
    #: for the previous peer to send one,
    neighbour_seconds: float = 0.0
    #: and adding what had come.
    reduce_seconds: float = 0.0

    @property
    def world_size(self) -> int:
        """The older name of local_world_size."""
        return self.local_world_size


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """The payload bytes that a synchronisation moved here."""

    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """The memory of one tensor, and a reference that keeps it alive.

    Whatever a caller hands in passes through here once, so that views, odd
    alignments and foreign types are judged in one place.
    """

    data_ptr: int
    numel: int
    datatype: DataType
    device_type: DeviceType
    #: Which of several devices of that type; 0 on the CPU.
    device_index: int
    #: False for read-only arrays: they may be sent but never written.
    writable: bool
    #: Never read, only held: the memory lives as long as this does.
    owner: object = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.numel * self.datatype.itemsize

    @classmethod
    def of(cls, tensor: object) -> TensorMemory:
        """The memory of a torch tensor or a numpy array, whichever it is."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(tensor, torch.Tensor):
            return cls.from_torch(tensor)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(tensor, numpy.ndarray):
            return cls.from_numpy(tensor)
        raise ValueError(f"expected a torch tensor or a numpy array, got {_kind(tensor)}")

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorMemory:
        """The memory of a torch tensor; any dense, contiguous view will do."""
        # Whoever has a tensor has imported torch; so we need not.
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected a torch tensor, got {_kind(tensor)}")
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            raise ValueError("a DTensor has no single memory; pass its local tensor (to_local())")
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensor layout {tensor.layout} is not supported; make it dense first")
        assert tensor.is_contiguous(), "the tensor must be contiguous; call .contiguous() first"
        return cls(
            data_ptr=tensor.data_ptr(),
            numel=tensor.numel(),
            datatype=_KNOWN.get(tensor.dtype) or _remember(tensor.dtype, DataType.from_torch_dtype(tensor.dtype)),
            device_type=DeviceType.from_torch_device_type(tensor.device.type),
            device_index=tensor.device.index or 0,
            writable=True,
            owner=tensor,
        )

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any]) -> TensorMemory:
        """The memory of a numpy array; any C-contiguous view will do."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(array, numpy.ndarray):
            raise ValueError(f"expected a numpy array, got {_kind(array)}")
        assert array.flags.c_contiguous, "the array must be contiguous; call numpy.ascontiguousarray first"
        return cls(
            data_ptr=array.ctypes.data,
            numel=array.size,
            datatype=_KNOWN.get(array.dtype) or _remember(array.dtype, DataType.from_numpy_dtype(array.dtype)),
            device_type=DeviceType.CPU,
            device_index=0,
            writable=array.flags.writeable,
            owner=array,
        )


# dtypes that were judged before: asking numpy for a name takes longer than all the rest of a launch's checks.
_KNOWN: dict[Any, DataType] = {}


def _remember(dtype: Any, datatype: DataType) -> DataType:
    _KNOWN[dtype] = datatype
    return datatype


def check_operands(send: TensorMemory, recv: TensorMemory, datatype: DataType, count: int) -> None:
    """AssertionError if these cannot be reduced as so many elements of that type."""
    if recv is not send:
        assert send.datatype is recv.datatype, f"send is {send.datatype.name} but recv is {recv.datatype.name}"
        assert send.numel == recv.numel, f"send has {send.numel} elements but recv has {recv.numel}"
        assert send.device_type is recv.device_type, "send and recv are on different devices"
        assert send.device_index == recv.device_index, "send and recv are on different devices"
    assert recv.writable, "recv is read-only"
    assert datatype is send.datatype, f"the descriptor says {datatype.name} but the tensors are {send.datatype.name}"
    assert count <= send.numel, f"the descriptor counts {count} elements but the tensors have {send.numel}"


_FLOATS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)
_CODES = (DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16)
_PACKED = (QuantizationAlgorithm.MIN_MAX_4BIT, QuantizationAlgorithm.ZERO_POINT_SCALE_4BIT)


def check_quantization(datatype: DataType, options: QuantizationOptions | None) -> None:
    """ValueError if elements of that type cannot travel like this."""
    if options is None or options.algorithm is QuantizationAlgorithm.NONE:
        return
    quantized = options.quantized_datatype
    if datatype not in _FLOATS:
        raise ValueError(f"only floats can be quantized, not {datatype.name}; pass quantization_options=None")
    if quantized not in _CODES:
        raise ValueError(f"{quantized.name} cannot hold codes; choose UINT8, INT8, UINT16 or INT16")
    if quantized.itemsize >= datatype.itemsize:
        raise ValueError(f"{datatype.name} quantized to {quantized.name} would not be any smaller; choose UINT8")
    if options.algorithm in _PACKED and quantized is not DataType.UINT8:
        raise ValueError(f"{options.algorithm.name} packs two codes into a UINT8, not into {quantized.name}")


@dataclass(frozen=True, slots=True)
class ReduceOpDescriptor:
    """One reduce with its memory; holds both tensors until it is dropped."""

    send: TensorMemory
    recv: TensorMemory
    reduce_descriptor: ReduceDescriptor

    def __post_init__(self) -> None:
        reduce = self.reduce_descriptor
        check_operands(self.send, self.recv, reduce.operand_descriptor.datatype, reduce.count)
        check_quantization(self.send.datatype, reduce.quantization_options)

    @classmethod
    def from_torch(
        cls, send: torch.Tensor, recv: torch.Tensor, reduce_descriptor: ReduceDescriptor
    ) -> ReduceOpDescriptor:
        """A reduce of torch tensors; the same tensor twice reduces in place."""
        return cls(TensorMemory.from_torch(send), TensorMemory.from_torch(recv), reduce_descriptor)

    @classmethod
    def from_numpy(
        cls,
        send: np.ndarray[Any, Any],
        recv: np.ndarray[Any, Any],
        reduce_descriptor: ReduceDescriptor,
    ) -> ReduceOpDescriptor:
        """A reduce of numpy arrays; the same array twice reduces in place."""
        return cls(TensorMemory.from_numpy(send), TensorMemory.from_numpy(recv), reduce_descriptor)


def _kind(thing: object) -> str:
    """How an error names something that should not have been passed."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
