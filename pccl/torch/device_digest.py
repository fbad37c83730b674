"""Digests of CUDA tensors, computed on the device: only DIGEST_BYTES for each block are copied to the host.

This module builds and calls `digest.cu`. It is built when the first CUDA tensor is digested, by nvcc of the machine's
CUDA toolkit; torch keeps the result for later processes, which open it in milliseconds. `digest.pyx` computes the same
digests for tensors on the host. The tests never run this on a GPU: they compile the kernels for devices, run their
logic on the CPU, and call this module with a fake library and fake tensors.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from pccl._core.kernels.digest import DIGEST_BYTES, STATE_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence


def block_digests(tensor: torch.Tensor) -> bytes:
    """The digests of the blocks of a contiguous CUDA tensor, DIGEST_BYTES each in little endian order.

    Runs on the current stream of the tensor's device, after earlier work on it, and waits for its end.
    """
    return block_digests_many([tensor])[0]


def block_digests_many(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The same for many tensors; waits once for each device. Raises ValueError if a tensor is not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError("only a contiguous tensor has a digest on its device; call .contiguous() on it first")
    positions: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault(tensor.device, []).append(position)
    launched = {device: _launch(device, [tensors[index] for index in found]) for device, found in positions.items()}
    digests_of = [b""] * len(tensors)
    for device, digests in launched.items():
        host = digests.cpu()  # waits for the stream
        packed, begin = ctypes.string_at(host.data_ptr(), host.numel() * DIGEST_BYTES), 0
        for index in positions[device]:
            end = begin + _blocks(tensors[index]) * DIGEST_BYTES
            digests_of[index], begin = packed[begin:end], end
    return digests_of


def _launch(device: torch.device, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Start to digest tensors of one device; returns all digests, one after the other, which the stream will fill."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        digests = torch.empty(sum(map(_blocks, tensors)), dtype=torch.int64, device=device)
        target = digests.data_ptr()
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            code = _library().pccl_digest_blocks(tensor.data_ptr(), _nbytes(tensor), target, stream)
            if code != 0:
                raise RuntimeError(f"CUDA refused to digest {_nbytes(tensor)} bytes on {device}: error {code}")
            target += _blocks(tensor) * DIGEST_BYTES
    return digests


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _blocks(tensor: torch.Tensor) -> int:
    return -(-_nbytes(tensor) // STATE_BLOCK_BYTES)


@cache
def _library() -> ctypes.CDLL:
    """Build the kernels if necessary, and open them."""
    if not torch.cuda.is_available():
        raise RuntimeError("a CUDA tensor can be digested only if torch sees a CUDA device, but torch.cuda sees none")
    return open_library(_build())


def open_library(path: str) -> ctypes.CDLL:
    """Open the library that was built from `digest.cu`."""
    library = ctypes.CDLL(path)
    library.pccl_digest_blocks.restype = ctypes.c_int
    library.pccl_digest_blocks.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_void_p]
    return library


def _build() -> str:
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError(
            "digests of CUDA tensors need the CUDA toolkit to be built once: install it with nvcc on PATH, or set"
            " CUDA_HOME to it. Tensors on the host do not need it"
        )
    source = files("pccl._core.kernels").joinpath("digest.cu")
    try:
        return str(cpp_extension.load("pccl_digest", [str(source)], extra_cuda_cflags=["-O3"], is_python_module=False))
    except (OSError, RuntimeError, ImportError) as error:
        raise RuntimeError(
            f"digest.cu could not be built with the CUDA toolkit in {cpp_extension.CUDA_HOME}: {error}"
        ) from error
