"""Digests of tensors on a device, computed there: what travels to the host is 8 bytes for each block.

Here live building and calling `digest.cu`. It is built when the first CUDA tensor is digested, by nvcc of the machine's
CUDA toolkit and kept by torch for later processes; then it takes milliseconds to open. Tensors of the host are the
business of `digest.pyx`, which gives the same digests. Our tests never run it on a GPU: they compile the kernels
for devices, run their logic on the CPU, and call this module with a fake library and fake tensors.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from pccl._core.kernels.digest import STATE_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_BYTES = 8


def block_digests(tensor: torch.Tensor) -> bytes:
    """The digests of the blocks of a contiguous CUDA tensor, 8 bytes each in little endian order.

    Runs on the current stream of the tensor's device, after what was put there before, and waits for its end.
    """
    return block_digests_many([tensor])[0]


def block_digests_many(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The same for each of many tensors; every device is waited for once, whatever their number."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError("only a contiguous tensor has a digest on its device; call .contiguous() on it first")
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    launched = {device: _launch(device, [tensors[place] for place in there]) for device, there in places.items()}
    found = [b""] * len(tensors)
    for device, digests in launched.items():
        host = digests.cpu()  # waits for the stream
        packed, begin = ctypes.string_at(host.data_ptr(), host.numel() * DIGEST_BYTES), 0
        for place in places[device]:
            end = begin + _blocks(tensors[place]) * DIGEST_BYTES
            found[place], begin = packed[begin:end], end
    return found


def _launch(device: torch.device, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Start digesting tensors of one device; all digests, one behind the other, once its stream gets there."""
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
    """The kernels, built if they were not, and opened."""
    if not torch.cuda.is_available():
        raise RuntimeError("tensors can only be digested on a device where torch sees one; torch.cuda sees none")
    return open_library(_build())


def open_library(path: str) -> ctypes.CDLL:
    """Open what was built from `digest.cu`."""
    library = ctypes.CDLL(path)
    library.pccl_digest_blocks.restype = ctypes.c_int
    library.pccl_digest_blocks.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_void_p]
    return library


def _build() -> str:
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError(
            "digests of CUDA tensors need the CUDA toolkit, once, to be built: install it, with nvcc on PATH, or set"
            " CUDA_HOME to it. Tensors on the host need nothing"
        )
    source = files("pccl._core.kernels").joinpath("digest.cu")
    try:
        return str(cpp_extension.load("pccl_digest", [str(source)], extra_cuda_cflags=["-O3"], is_python_module=False))
    except (OSError, RuntimeError, ImportError) as error:
        raise RuntimeError(
            f"digest.cu could not be built with the CUDA toolkit in {cpp_extension.CUDA_HOME}: {error}"
        ) from error
