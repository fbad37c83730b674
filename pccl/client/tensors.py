"""The tensors that callers pass: their memory, and how their elements may be quantized.

Nothing here communicates, allocates or copies. Nothing here imports numpy or torch: both are optional, and a caller
that has a tensor has imported its library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pccl._core.kernels.tensor_copy import address_of
from pccl._core.records import record
from pccl.values import DataType, DeviceType, QuantizationAlgorithm, QuantizationOptions

if TYPE_CHECKING:
    import numpy as np
    import torch


@record
class TensorMemory:
    """The memory of one tensor, and a reference that keeps it alive.

    Every tensor of a caller is checked here once: views, alignment, foreign types. Two are equal if they are the same
    memory.
    """

    data_ptr: int
    numel: int
    datatype: DataType
    device_type: DeviceType
    #: Which of several devices of that type; 0 on the CPU.
    device_index: int
    #: False for read-only arrays: they may be sent but never written.
    writable: bool
    #: Keeps the memory alive; never read.
    owner: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorMemory) and self._location() == other._location()

    def __hash__(self) -> int:
        return hash(self._location())

    def __repr__(self) -> str:
        return f"<TensorMemory {self.numel} x {self.datatype.name} at {self.data_ptr:#x}, {self.device_type.name}>"

    def _location(self) -> tuple[object, ...]:
        return self.data_ptr, self.numel, self.datatype, self.device_type, self.device_index, self.writable

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.numel * self.datatype.itemsize

    @classmethod
    def of(cls, tensor: object) -> TensorMemory:
        """The memory of a torch tensor or a numpy array. Raises ValueError or AssertionError if it cannot be used."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(tensor, numpy.ndarray):
            return cls._of_array(tensor)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(tensor, torch.Tensor):
            return cls.from_torch(tensor)
        raise ValueError(f"expected a torch tensor or a numpy array, got {_kind(tensor)}")

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorMemory:
        """The memory of a torch tensor, which must be dense and contiguous."""
        # A caller that has a tensor has imported torch.
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected a torch tensor, got {_kind(tensor)}")
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            raise ValueError("a DTensor has no single memory; pass its local tensor (to_local())")
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensor layout {tensor.layout} is not supported; make it dense first")
        if not tensor.is_contiguous():
            raise AssertionError("the tensor must be contiguous; call .contiguous() first")
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
        """The memory of a numpy array, which must be C-contiguous."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(array, numpy.ndarray):
            raise ValueError(f"expected a numpy array, got {_kind(array)}")
        return cls._of_array(array)

    @classmethod
    def _of_array(cls, array: np.ndarray[Any, Any]) -> TensorMemory:
        flags = array.flags
        if not flags.c_contiguous:
            raise AssertionError("the array must be contiguous; call numpy.ascontiguousarray first")
        datatype = _KNOWN.get(array.dtype) or _remember(array.dtype, DataType.from_numpy_dtype(array.dtype))
        return cls(
            data_ptr=address_of(array),  # `array.ctypes` would take longer than the rest of this function
            numel=array.size,
            datatype=datatype,
            device_type=DeviceType.CPU,
            device_index=0,
            writable=flags.writeable,
            owner=array,
        )


# dtypes that were seen before: the name of a numpy dtype takes longer than all other checks of a launch.
_KNOWN: dict[Any, DataType] = {}


def _remember(dtype: Any, datatype: DataType) -> DataType:
    _KNOWN[dtype] = datatype
    return datatype


_FLOATS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)
_CODES = (DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16)
_PACKED = (QuantizationAlgorithm.MIN_MAX_4BIT, QuantizationAlgorithm.ZERO_POINT_SCALE_4BIT)


def check_quantization(datatype: DataType, options: QuantizationOptions | None) -> None:
    """Raise ValueError if elements of that type cannot be quantized with these options."""
    if options is None:
        return
    if not isinstance(options, QuantizationOptions):
        raise ValueError(f"quantization_options must be a QuantizationOptions or None, not {options!r}")
    algorithm, quantized = options.algorithm, options.quantized_datatype
    if not isinstance(algorithm, QuantizationAlgorithm):
        raise ValueError(f"the algorithm of quantization_options must be a QuantizationAlgorithm, not {algorithm!r}")
    if algorithm is QuantizationAlgorithm.NONE:
        return
    if not isinstance(quantized, DataType):
        raise ValueError(f"the quantized_datatype of quantization_options must be a DataType, not {quantized!r}")
    if datatype not in _FLOATS:
        raise ValueError(f"only floats can be quantized, not {datatype.name}; pass quantization_options=None")
    if quantized not in _CODES:
        raise ValueError(f"{quantized.name} cannot hold codes; choose UINT8, INT8, UINT16 or INT16")
    if quantized.itemsize >= datatype.itemsize:
        raise ValueError(f"{datatype.name} quantized to {quantized.name} would not be smaller; choose UINT8")
    if algorithm in _PACKED and quantized is not DataType.UINT8:
        raise ValueError(f"{algorithm.name} packs two codes into a UINT8, not into {quantized.name}")


def _kind(thing: object) -> str:
    """The name of an argument's class for error messages."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
