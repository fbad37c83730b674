"""Enums and frozen values of the public interface.

Users see the names; messages carry the integers. numpy and torch are optional: they are imported only when a caller
asks for one of their types.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


class Result(Enum):
    """How a call ended; every PCCLError has one."""

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
    """How the values of all peers are combined into one."""

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class Attribute(Enum):
    """The numbers about the run that `get_attribute` returns; peers that are not accepted yet never count."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    PEER_GROUP_WORLD_SIZE = 2
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


class SharedStateSyncStrategy(Enum):
    """Which content wins when peers hold different shared states.

    ENFORCE_POPULAR: the content held by most up-to-date peers. SEND_ONLY: this peer sends its state and is never
    overwritten. RECEIVE_ONLY: this peer takes over the state of others and never sends its own. Peers of one sync can
    combine the last two with each other, but not with the first.
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
    """How values are encoded in fewer bits; `docs/quantization.md` says which to choose."""

    NONE = 0
    #: Codes span the values of a quantization group, from the least to the largest.
    MIN_MAX = 1
    #: Codes span the values and zero, and zero is exact.
    ZERO_POINT_SCALE = 2
    #: The same two algorithms with two codes per byte; the quantized type is UINT8.
    MIN_MAX_4BIT = 100
    ZERO_POINT_SCALE_4BIT = 101


class DeviceType(Enum):
    """The type of the device that holds a tensor."""

    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, name: str) -> DeviceType:
        """The device type that has this name in torch; ValueError if it is not supported."""
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

    _itemsize: int  # an attribute of each member, because a lookup in a dict would hash the member, which is slow

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self._itemsize

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
        # Byte order is part of a numpy dtype but not of its name, and elements are sent in native byte order.
        # Extension types may also be called bfloat16.
        if datatype is None or datatype is cls.BFLOAT16 or not native.isnative:
            raise ValueError(f"numpy dtype {native.str!r} ({native}) is not supported")
        return datatype

    def to_numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the same elements; ValueError for BFLOAT16."""
        import numpy as np

        if self is DataType.BFLOAT16:
            raise ValueError("numpy has no dtype for BFLOAT16")
        return np.dtype(_NAMES[self])


# numpy and torch use the same names for their types, so one table serves both.
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

for _datatype, _name in _NAMES.items():
    _datatype._itemsize = int(_name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8  # each name ends in its width in bits


@dataclass(frozen=True, slots=True)
class ReduceOperandDescriptor:
    """The data type and the distribution of the elements of a reduce."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """How the elements of a reduce are quantized."""

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
    """What a reduce did: how many members took part, and the bytes that this peer sent and received."""

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    #: Time that workers waited in the middle of a frame. This and the next two are sums over the lanes of this peer.
    network_seconds: float = 0.0
    #: Time that receivers waited for the previous peer to begin a frame.
    neighbour_seconds: float = 0.0
    #: Time that receivers spent on reducing.
    reduce_seconds: float = 0.0

    @property
    def world_size(self) -> int:
        """The older name of local_world_size."""
        return self.local_world_size


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """What a sync did: the payload bytes that this peer sent and received, and whether it was a divergent member.

    A divergent member was overwritten by a sync that was not its first one since it joined, and that it did not call
    with RECEIVE_ONLY: it computed something else than the others, or it missed a revision. `overwritten` has the names
    of the tensors that such a sync changed, in the order of the schema and without those that may differ, and is empty
    otherwise. `times_overwritten` counts such syncs since this peer joined. `docs/determinism.md`
    has a table of causes.
    """

    tx_bytes: int
    rx_bytes: int
    overwritten: tuple[str, ...] = ()
    times_overwritten: int = 0
