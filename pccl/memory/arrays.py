"""numpy arrays in shared memory, which are reduced and synchronised in place.

Any other array works as well, but is copied in and out. numpy is imported when the first array is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from pccl.values import DataType

from .arena import default

if TYPE_CHECKING:
    from typing import SupportsIndex

    import numpy as np


def empty(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: np.dtype[Any] | type | str = "float32"
) -> np.ndarray[Any, Any]:
    """A C-contiguous array in shared memory with undefined contents.

    The default dtype is float32, as in torch and unlike numpy, because mostly gradients and parameters are reduced. The
    memory is reused when the array and all its views are gone. Raises ValueError for a dtype that cannot be reduced. A
    process forked from this one sees the same memory, not a copy.
    """
    import numpy as np

    datatype = DataType.from_numpy_dtype(dtype)  # type: ignore[arg-type]
    sizes = tuple(map(index, shape)) if isinstance(shape, Iterable) else (index(shape),)
    if any(size < 0 for size in sizes):
        raise ValueError(f"an array cannot have the shape {sizes}: sizes are at least 0")
    piece = default().allocate(prod(sizes) * datatype.itemsize)
    return np.ndarray(sizes, datatype.to_numpy_dtype(), buffer=piece.view)


def zeros(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: np.dtype[Any] | type | str = "float32"
) -> np.ndarray[Any, Any]:
    """The same as `empty`, all zero."""
    array = empty(shape, dtype)
    array.fill(0)
    return array
