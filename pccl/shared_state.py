"""The shared state that peers keep identical: named tensors and a revision.

This file has only the description of the state: it never reads or writes the content of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pccl._core.protocol.state_schema import SchemaRow, digest_schema, pack_schema
from pccl.client.tensors import TensorMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import torch

    from .values import DataType, DeviceType

# The revision is sent as an unsigned 64-bit integer.
_REVISION_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One named tensor of a shared state; it keeps the tensor alive."""

    name: str
    memory: TensorMemory
    #: True if peers may differ in it; then only outdated peers receive it.
    allow_content_inequality: bool = False

    @classmethod
    def from_torch(cls, tensor: torch.Tensor, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Give a name to a torch tensor, on the CPU or on a CUDA device."""
        return cls(_checked(name), TensorMemory.from_torch(tensor), allow_content_inequality)

    @classmethod
    def from_numpy(
        cls, tensor: np.ndarray[Any, Any], name: str, *, allow_content_inequality: bool = False
    ) -> TensorInfo:
        """Give a name to a numpy array."""
        return cls(_checked(name), TensorMemory.from_numpy(tensor), allow_content_inequality)

    @property
    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.memory.data_ptr

    @property
    def address(self) -> int:
        """The present address of the content: torch may have moved it, as `pccl.torch.share_` does."""
        owner: Any = self.memory.owner
        if not hasattr(owner, "data_ptr"):
            return self.memory.data_ptr
        if owner.numel() != self.memory.numel:
            raise AssertionError(f"{self.name!r} has changed its size; make a new SharedState")
        return int(owner.data_ptr())

    @property
    def numel(self) -> int:
        """Number of elements; a 0-dim tensor has one."""
        return self.memory.numel

    @property
    def nbytes(self) -> int:
        """Size of the content."""
        return self.memory.nbytes

    @property
    def dtype(self) -> DataType:
        """Type of one element."""
        return self.memory.datatype

    @property
    def device_type(self) -> DeviceType:
        """The type of the device that holds the content."""
        return self.memory.device_type


class SharedState:
    """Tensors that all peers of a group hold identically, and their revision.

    The application adds one to the revision between two syncs; a sync sets the revision of an outdated peer.
    """

    __slots__ = ("_infos", "_revision", "compared", "ordered", "schema_digest", "torn")

    def __init__(self, tensor_infos: Iterable[TensorInfo]) -> None:
        infos = tuple(tensor_infos)
        if not infos:
            raise AssertionError("a shared state needs at least one tensor; pass a list of TensorInfo")
        names: set[str] = set()
        for info in infos:
            if not isinstance(info, TensorInfo):
                raise ValueError(f"expected a TensorInfo, got {type(info).__qualname__}")
            if info.name in names:
                raise ValueError(f"two tensors of the shared state are called {info.name!r}")
            names.add(info.name)
        self._infos = infos
        self._revision = 0
        #: The content digest of a torn state, which a transfer left when it ended in the middle; or None.
        self.torn: bytes | None = None
        #: The tensors in the order in which peers compare them.
        self.ordered = tuple(sorted(infos, key=lambda info: info.name.encode()))
        #: For each of them, whether peers compare its content.
        self.compared = tuple(not info.allow_content_inequality for info in self.ordered)
        #: The digest of names, data types and sizes in a vote.
        self.schema_digest = digest_schema(pack_schema([_schema_row(info) for info in self.ordered]))

    @property
    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        """The tensors, in the order they were given."""
        return self._infos

    @property
    def revision(self) -> int:
        """The number of this version of the state; starts at 0."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        if not hasattr(revision, "__index__") or not 0 <= revision <= _REVISION_MAX:
            raise ValueError(f"revision {revision!r} is not an unsigned 64-bit integer")
        self._revision = revision

    def push_revision(self) -> None:
        """Add one to the revision, after the content has changed."""
        self.revision = self._revision + 1

    def __repr__(self) -> str:
        names = ", ".join(info.name for info in self._infos)
        return f"SharedState(revision={self._revision}, tensors=[{names}])"


def _schema_row(info: TensorInfo) -> SchemaRow:
    return SchemaRow(info.name, info.dtype.value, info.allow_content_inequality, info.nbytes)


def _checked(name: str) -> str:
    """Return the name, by which peers find the same tensor. Raises ValueError if it is not a str."""
    if not isinstance(name, str):
        raise ValueError(
            f"a tensor's name must be a str, not {type(name).__qualname__}; the arguments are (tensor, name)"
        )
    return name
