"""Digests of tensors on a device, computed there: what travels to the host is 8 bytes for each block.

Here live building and calling `digest.cu`. It is built when the first CUDA tensor is digested, by nvcc of the machine's
CUDA toolkit and kept by torch for later processes; then it takes milliseconds to open. Tensors of the host are the
business of `pccl._core.digest`, which gives the same digests. Not run on a GPU by our tests: they build the kernels for
devices and run them on the CPU, and call this module with a library and tensors that only pretend.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files

import torch

from pccl._core.digest import STATE_BLOCK_BYTES

DIGEST_BYTES = 8


def block_digests(tensor: torch.Tensor) -> bytes:
    """The digests of the blocks of a contiguous CUDA tensor, 8 bytes each in little endian order.

    Runs on the current stream of the tensor's device, after what was put there before, and waits for its end.
    """
    if not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor has a digest on its device; call .contiguous() on it first")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return b""
    library = _library()
    with torch.cuda.device(tensor.device):
        digests = torch.empty(-(-nbytes // STATE_BLOCK_BYTES), dtype=torch.int64, device=tensor.device)
        stream = torch.cuda.current_stream().cuda_stream
        code = library.pccl_digest_blocks(tensor.data_ptr(), nbytes, digests.data_ptr(), stream)
        if code != 0:
            raise RuntimeError(f"CUDA refused to digest a tensor of {nbytes} bytes on {tensor.device}: error {code}")
        host = digests.cpu()  # waits for the stream
    return ctypes.string_at(host.data_ptr(), host.numel() * DIGEST_BYTES)


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
    source = files("pccl._core").joinpath("digest.cu")
    try:
        return str(cpp_extension.load("pccl_digest", [str(source)], extra_cuda_cflags=["-O3"], is_python_module=False))
    except (OSError, RuntimeError, ImportError) as error:
        raise RuntimeError(
            f"digest.cu could not be built with the CUDA toolkit in {cpp_extension.CUDA_HOME}: {error}"
        ) from error
