"""Move existing tensors into shared memory.

A tensor object stays the same object; only its memory changes. The optimizer, the module and the autograd engine hold
those objects, so all of them continue with the new memory.

Theory of operation. Every tensor covers a range of addresses. Ranges that overlap are *entangled*: tied parameters,
views of one storage. A cluster of entangled ranges moves as a whole, byte by byte. Each of its tensors has the same
offset and strides in the new memory as in the old, so tensors that shared bytes still share them. All clusters of one
call are in one piece of the arena, so a module of a thousand parameters needs one file descriptor.

All tensors are checked before any is changed: a call that raises has moved nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from pccl.memory.arena import ALIGNMENT, default

from .shared_tensors import storage_on

T = TypeVar("T", bound="torch.Tensor | torch.nn.Module | Iterable[torch.Tensor | torch.nn.Module]")


class _Cluster:
    """Entangled tensors, and the range of addresses that they cover together."""

    __slots__ = ("end", "start", "tensors")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.tensors: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def add(self, tensor: torch.Tensor, end: int) -> None:
        distance = tensor.data_ptr() - self.start
        if distance % tensor.element_size():
            raise ValueError(
                f"cannot share a tensor of {tensor.dtype} that overlaps another one {distance} bytes after its start:"
                " that is not a multiple of its element size; clone one of them first"
            )
        self.tensors.append(tensor)
        self.end = max(self.end, end)

    def move(self, storage: torch.UntypedStorage) -> None:
        """Copy the bytes, and make every tensor point to the copy."""
        for tensor in self.tensors:
            # Each tensor is copied through its own storage: two storages may overlap, and neither may cover both.
            source, nbytes = tensor.untyped_storage(), _extent(tensor)
            distance = tensor.data_ptr() - self.start
            old = _bytes_of(source, tensor.data_ptr() - source.data_ptr(), nbytes)
            _bytes_of(storage, distance, nbytes).copy_(old)
            moved = torch.empty(0, dtype=tensor.dtype, device="cpu")
            position = distance // tensor.element_size()
            tensor.data = moved.set_(storage, position, tensor.size(), tensor.stride())


def share_(x: T) -> T:
    """Move a tensor, the parameters and buffers of a module, or an iterable of these into shared memory; return it.

    The objects stay the same, and so do contents, strides, `requires_grad` and hooks; dense gradients move too.
    Gradients stay in shared memory if you call `zero_grad(set_to_none=False)`; torch's default removes them.
    Tensors that overlap still share memory if all are passed here; views that are not passed keep the old memory.
    Tensors that are in shared memory already do not move. During the call both copies exist.

    A process that is forked later sees the same memory, not a copy: this process reads what the child writes.

    Raises ValueError, and changes nothing, for tensors that have no plain memory on the CPU: CUDA tensors need no
    sharing, because they are staged automatically; sparse, quantized, meta and distributed ones cannot be shared.
    """
    clusters = _entangle(_tensors(x))
    if clusters:
        offsets, nbytes = [], 0
        for cluster in clusters:
            offsets.append(nbytes)
            nbytes += -(-cluster.nbytes // ALIGNMENT) * ALIGNMENT
        piece = default().allocate(nbytes)
        for cluster, offset in zip(clusters, offsets, strict=True):
            cluster.move(storage_on(piece, offset, cluster.nbytes))
    return x


def _tensors(x: object) -> Iterator[torch.Tensor]:
    """Yield each tensor of `x` and its gradient, checked; a tensor may come several times."""
    if isinstance(x, torch.Tensor):
        _check(x)
        yield x
        # torch warns if the gradient of a tensor that is no leaf is read.
        if x.is_leaf and x.grad is not None and x.grad.layout is torch.strided:
            yield from _tensors(x.grad)
    elif isinstance(x, torch.nn.Module):
        for tensor in (*x.parameters(), *x.buffers()):
            yield from _tensors(tensor)
    elif isinstance(x, Iterable) and not isinstance(x, str | bytes | Mapping):
        for item in x:
            if not isinstance(item, torch.Tensor | torch.nn.Module):
                raise TypeError(f"cannot share {type(item).__qualname__}; every item must be a tensor or a module")
            yield from _tensors(item)
    else:
        advice = "; pass its values()" if isinstance(x, Mapping) else ""
        raise TypeError(f"cannot share {type(x).__qualname__}; pass a tensor, a module or an iterable of them{advice}")


def _check(tensor: torch.Tensor) -> None:
    """Raise ValueError, which says what to do, if the tensor has no plain memory on the CPU."""
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError("cannot share a parameter of a lazy module before its first forward pass")
    if hasattr(tensor, "to_local"):
        raise ValueError("cannot share a DTensor, which has no single memory; share its local tensor (to_local())")
    if tensor.layout is not torch.strided:
        raise ValueError(f"cannot share a tensor of layout {tensor.layout}; make it dense first")
    if tensor.is_cuda:
        raise ValueError("cannot share a CUDA tensor, and it is not needed: pccl stages it through pinned memory")
    if tensor.is_meta:
        raise ValueError("cannot share a meta tensor, which has no contents; create it on the CPU first (to_empty)")
    if tensor.device.type != "cpu":
        raise ValueError(f"cannot share a tensor on {tensor.device}; move it to the CPU first")
    if tensor.is_quantized:
        raise ValueError("cannot share a quantized tensor; share its int_repr()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("cannot share a view that is conjugated or negated lazily; call resolve_conj().resolve_neg()")
    if tensor.is_inference():
        raise ValueError("cannot share a tensor made in inference mode, which torch does not let us change; clone it")


def _entangle(tensors: Iterable[torch.Tensor]) -> list[_Cluster]:
    """Clusters of tensors to move, by address; without tensors that are empty, shared already or repeated."""
    arena = default()
    ranges = {}
    for tensor in tensors:
        start, nbytes = tensor.data_ptr(), _extent(tensor)
        if nbytes and arena.find(start, nbytes) is None:
            ranges[id(tensor)] = (start, start + nbytes, tensor)
    clusters: list[_Cluster] = []
    for start, end, tensor in sorted(ranges.values(), key=lambda entry: entry[:2]):
        if not clusters or start >= clusters[-1].end:
            clusters.append(_Cluster(start))
        clusters[-1].add(tensor, end)
    return clusters


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last in memory; torch has no negative strides."""
    if tensor.numel() == 0:
        return 0
    last: int = sum((length - 1) * stride for length, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * int(tensor.element_size())


def _bytes_of(storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, offset, (nbytes,))
