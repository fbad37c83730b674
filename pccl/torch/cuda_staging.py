"""Staging of CUDA tensors through shared memory.

Workers cannot access a device, so a CUDA tensor is copied into a piece of the arena and back. The piece's segment is
page-locked once, so that the device can copy directly; it stays so until the arena drops the segment. Copies run on
the caller's current stream and are complete when these functions return. The tests never run this on a GPU: they run
the copies with tensors on the CPU, and the locking with a fake driver that records its calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pccl.memory.arena import default

if TYPE_CHECKING:
    from pccl._core.system.mapping import Mapping
    from pccl.memory.arena import Piece

_locked: dict[int, Mapping] = {}  # page-locked segments; held, so that none is unmapped before it is unlocked


def copy_to_host(piece: Piece, tensor: torch.Tensor, nbytes: int) -> None:
    """Copy the first bytes of a device tensor into the piece."""
    if nbytes:
        _lock(piece, tensor)
        _host_bytes(piece, nbytes).copy_(_bytes_of(tensor)[:nbytes])


def copy_to_device(tensor: torch.Tensor, piece: Piece, nbytes: int) -> None:
    """Copy the piece into the first bytes of a device tensor."""
    if nbytes:
        _bytes_of(tensor)[:nbytes].copy_(_host_bytes(piece, nbytes))


def read_bytes(piece: memoryview, tensor: torch.Tensor, begin: int) -> None:
    """Fill host memory with the bytes of a device tensor from `begin` on."""
    torch.frombuffer(piece, dtype=torch.uint8).copy_(_bytes_of(tensor)[begin : begin + len(piece)])


def write_bytes(tensor: torch.Tensor, begin: int, piece: memoryview) -> None:
    """Copy host memory into a device tensor from byte `begin` on."""
    _bytes_of(tensor)[begin : begin + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))


def _host_bytes(piece: Piece, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(piece.view, dtype=torch.uint8, count=nbytes)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _lock(piece: Piece, tensor: torch.Tensor) -> None:
    """Page-lock the piece's segment, if it is not locked. If the driver refuses, copies are only slower."""
    if tensor.device.type != "cuda" or piece.segment in _locked:
        return
    mapping = default().mapping(piece.segment)
    if int(torch.cuda.cudart().cudaHostRegister(mapping.address, mapping.nbytes, 0)) == 0:
        if not _locked:
            default().watch(_unlock)
        _locked[piece.segment] = mapping


def _unlock(segment: int) -> None:
    mapping = _locked.pop(segment, None)
    if mapping is not None:
        torch.cuda.cudart().cudaHostUnregister(mapping.address)
