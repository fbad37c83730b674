"""New torch tensors in shared memory, and the function that makes a storage from a piece of the arena.

Other tensors work as well, but are copied in and out of shared memory with every operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pccl.memory.arena import default
from pccl.values import DataType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pccl.memory.arena import Piece


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, requires_grad: bool = False) -> torch.Tensor:
    """A contiguous CPU tensor in shared memory with undefined contents; sizes are given as for `torch.empty`.

    The memory is reused when the tensor and all its views are gone. Raises ValueError for a dtype that cannot be
    reduced. A process forked from this one sees the same memory, not a copy.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    itemsize = DataType.from_torch_dtype(dtype).itemsize
    shape = _shape(size)
    nbytes = shape.numel() * itemsize
    storage = storage_on(default().allocate(nbytes), 0, nbytes)
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)
    return tensor.requires_grad_() if requires_grad else tensor


def zeros(*size: int | Sequence[int], dtype: torch.dtype | None = None, requires_grad: bool = False) -> torch.Tensor:
    """The same as `empty`, all zero."""
    tensor = empty(*size, dtype=dtype).zero_()
    return tensor.requires_grad_() if requires_grad else tensor


def storage_on(piece: Piece, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage on `nbytes` bytes of a piece; it keeps the whole piece in use as long as it exists.

    It has only the requested bytes, because `torch.save` writes storages as a whole.
    """
    # torch refuses empty buffers; an empty tensor gets a storage of one byte.
    return torch.frombuffer(piece, dtype=torch.uint8, offset=offset, count=max(1, nbytes)).untyped_storage()


def _shape(size: tuple[int | Sequence[int], ...]) -> torch.Size:
    """The shape, as torch reads its arguments: sizes one by one, or all of them in one sequence."""
    shape = torch.Size(size[0] if len(size) == 1 and not hasattr(size[0], "__index__") else size)
    if any(length < 0 for length in shape):
        raise ValueError(f"a tensor cannot have the shape {tuple(shape)}: sizes are at least 0")
    return shape
