"""`ReduceOpDescriptor`: one reduce as a value, for calls that take several of them. Checked when it is made.

Nothing here communicates, and nothing here imports numpy or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .reduce_request import validate_descriptor
from .tensors import TensorMemory

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pccl.values import ReduceDescriptor


@dataclass(frozen=True, slots=True)
class ReduceOpDescriptor:
    """One reduce with its memory; holds both tensors until it is dropped."""

    send: TensorMemory
    recv: TensorMemory
    reduce_descriptor: ReduceDescriptor

    def __post_init__(self) -> None:
        validate_descriptor(self.send, self.recv, self.reduce_descriptor)

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
