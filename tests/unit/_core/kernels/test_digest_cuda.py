"""The CUDA version of the digest without a GPU: it compiles for devices, and on fibres it gives the CPU's digests.

`tests/emulation/cuda_runtime.h` emulates a device. The emulation is tested too: kernels with a missing barrier must
fail on it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pccl._core.kernels import digest
from tests import ROOT

from .guard_pages import GuardedBytes
from .simplehash import BLOCK_BYTES, ROW_BYTES, TILE_BYTES

Array = np.ndarray[Any, Any]

SOURCE = ROOT / "pccl" / "_core" / "kernels" / "digest.cu"
EMULATION = ROOT / "tests" / "emulation"
COMPILER = shutil.which("g++") or shutil.which("clang++")
ARCHITECTURES = (75, 80, 86, 89, 90, 100)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs a C++ compiler")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="device tensors come with torch")


def declare(library: ctypes.CDLL) -> Any:
    """Declare and return the only function of the library."""
    function = library.pccl_digest_blocks
    function.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_void_p]
    return function


class Device:
    """`digest.cu`, or a version that a test has changed, built for the CPU."""

    def __init__(self, folder: Path, source: str | None = None) -> None:
        program, library = folder / "digest.cpp", folder / "digest.so"
        program.write_text(SOURCE.read_text() if source is None else source)
        assert COMPILER is not None
        command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        command += ["-Wno-unknown-pragmas", f"-I{EMULATION}", f"-I{SOURCE.parent}", str(program), "-o", str(library)]
        subprocess.run(command, check=True, timeout=100)
        self.launch = declare(ctypes.CDLL(str(library)))

    def block_digests(self, address: int, nbytes: int) -> bytes:
        """Return the digests; fail if bytes before or after them were written."""
        count = -(-nbytes // BLOCK_BYTES)
        out = np.full(count + 2, 0xA5A5, np.uint64)
        code = self.launch(address, nbytes, out[1:].ctypes.data, None)
        if code != 0:
            raise RuntimeError(f"error {code}")
        assert out[0] == out[-1] == 0xA5A5
        return out[1:-1].tobytes()


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    """The unchanged kernels."""
    return Device(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def room() -> Array:
    """Random bytes that begin at a memory page; tests take their buffers from it."""
    held = np.frombuffer(bytearray(random.Random(1).randbytes(3 * BLOCK_BYTES + 8192)), np.uint8)
    return held[-held.ctypes.data % 4096 :]


def agree(device: Device, room: Array, buffers: Iterator[tuple[int, int]]) -> int:
    """Compare all buffers (offset, length) with the CPU's digests; return their number."""
    compared = 0
    for offset, nbytes in buffers:
        address = room.ctypes.data + offset
        assert device.block_digests(address, nbytes) == digest.block_digests(address, nbytes, 1), (offset, nbytes)
        compared += 1
    return compared


# --- The logic, on fibres -----------------------------------------------------------------------------------------


@needs_compiler
def test_every_border_and_alignment_agrees_with_the_cpu(device: Device, room: Array) -> None:
    """Goal: around words, rows, unrolled rows, tiles and blocks, from every address modulo 8, the digests are equal."""
    near = (-9, -8, -7, -1, 0, 1, 7, 8, 9)
    borders = (8, ROW_BYTES, 8 * ROW_BYTES, 9 * ROW_BYTES, TILE_BYTES, 2 * TILE_BYTES)
    small = [*range(40), *(border + distance for border in borders for distance in near)]
    large = [BLOCK_BYTES + distance for distance in (-1, 0, 1)] + [2 * BLOCK_BYTES + 5 * ROW_BYTES + 3]
    lengths = [*(nbytes for nbytes in small if nbytes >= 0), *large]

    assert agree(device, room, ((offset, nbytes) for offset in range(8) for nbytes in lengths)) > 700


@needs_compiler
def test_random_buffers_agree_with_the_cpu(device: Device, room: Array) -> None:
    """Goal: buffers of any length at any address, short ones more often."""
    source = random.Random(2)

    def buffers() -> Iterator[tuple[int, int]]:
        for _ in range(2000):
            yield source.randrange(4096), int(2 ** source.uniform(0, 12))
        for _ in range(60):
            yield source.randrange(4096), source.randrange(3 * BLOCK_BYTES)

    assert agree(device, room, buffers()) == 2060


@needs_compiler
def test_no_byte_beyond_is_read(device: Device) -> None:
    """Goal: no byte is read outside of buffers at the beginning or end of a mapping, at any alignment."""
    guarded = GuardedBytes(random.Random(3).randbytes(TILE_BYTES))
    for nbytes in (*range(1, 40), *range(ROW_BYTES - 9, ROW_BYTES + 10), *range(9 * ROW_BYTES - 9, 9 * ROW_BYTES + 10)):
        for address in (guarded.end - nbytes, guarded.begin):
            assert device.block_digests(address, nbytes) == digest.block_digests(address, nbytes, 1)


@needs_compiler
def test_nothing_is_launched_for_nothing(device: Device) -> None:
    """Goal: an empty buffer is no error; one with more blocks than a launch can number is one."""
    assert device.launch(None, 0, None, None) == 0
    assert device.launch(None, 1 << 63, None, None) == 1


# --- The emulation itself -----------------------------------------------------------------------------------------


def changed(before: str, after: str) -> str:
    """Return the source of the kernels with an error inserted."""
    source = SOURCE.read_text()
    assert source.count(before) == 1
    return source.replace(before, after)


@needs_compiler
def test_a_missing_barrier_is_noticed(tmp_path: Path, room: Array) -> None:
    """Goal: a thread that reads shared memory before others have written it gives wrong digests here, every time."""
    careless = Device(tmp_path, changed("__syncthreads();", ""))

    for nbytes in (2 * TILE_BYTES, BLOCK_BYTES):
        address = room.ctypes.data
        assert careless.block_digests(address, nbytes) != digest.block_digests(address, nbytes, 1)


@needs_compiler
def test_a_shuffle_without_the_whole_warp_is_noticed(tmp_path: Path, room: Array) -> None:
    """Goal: a shuffle that some threads of the warp do not reach makes the launch fail."""
    alone = Device(tmp_path, changed("#pragma unroll\n    for (unsigned half", "    if (lane < 16) for (unsigned half"))

    with pytest.raises(RuntimeError, match="error 719"):
        alone.block_digests(room.ctypes.data, TILE_BYTES)


# --- Compilers of devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_for_devices(architecture: int, tmp_path: Path) -> None:
    """Goal: nvcc compiles the source for every generation that torch supports, without a warning."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc on PATH")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if f"sm_{architecture}" not in known:
        pytest.skip(f"this nvcc does not know sm_{architecture}")
    target = tmp_path / "digest.cubin"
    command = [nvcc, "-cubin", f"-arch=sm_{architecture}", "-O3", "-Werror", "all-warnings", str(SOURCE)]
    command += ["-o", str(target)]

    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert outcome.returncode == 0, outcome.stderr
    for width in ("m", "j", "t", "h"):  # uint64_t, uint32_t, uint16_t, uint8_t
        assert f"digest_blockI{width}E".encode() in target.read_bytes()


def test_it_links_with_the_runtime(tmp_path: Path) -> None:
    """Goal: with NVIDIA's header and library but no device, a launch returns an error code, as callers expect."""
    nvcc, target = shutil.which("nvcc"), tmp_path / "digest.so"
    if nvcc is None or Path("/proc/driver/nvidia").exists():
        pytest.skip("this needs nvcc and no device")
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC", str(SOURCE), "-o", str(target)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if "cudart" in outcome.stderr:
        pytest.skip("this toolkit comes without its runtime library")
    assert outcome.returncode == 0, outcome.stderr

    launch = declare(ctypes.CDLL(str(target)))
    content, out = ctypes.create_string_buffer(64), ctypes.create_string_buffer(8)

    assert launch(content, 64, out, None) != 0
    assert launch(content, 0, out, None) == 0


# --- From torch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, device: Device) -> ModuleType:
    """The torch digest module with a device that uses host memory."""
    import torch

    from pccl.torch import device_digest

    monkeypatch.setattr(device_digest, "_library", lambda: SimpleNamespace(pccl_digest_blocks=device.launch))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return device_digest


@needs_torch
@needs_compiler
def test_tensors_are_digested_where_they_lie(pretended: ModuleType) -> None:
    """Goal: tensors of any dtype, at any offset of a storage, and empty ones have the CPU's digests."""
    import torch

    whole = torch.arange(300_000, dtype=torch.float32)
    bits = whole[3:].view(torch.uint8)
    tensors = [whole, whole[:0], whole[1:], bits[5:], bits[6:9], whole[:0], whole.to(torch.bfloat16)[1:]]
    expected = [digest.block_digests(t.data_ptr(), t.numel() * t.element_size(), 1) for t in tensors]
    assert [pretended.block_digests(tensor) for tensor in tensors] == expected
    assert pretended.block_digests_many(tensors) == expected
    assert pretended.block_digests_many([]) == []
    with pytest.raises(ValueError, match="call .contiguous"):
        pretended.block_digests(whole.view(300, 1000).T)


@needs_torch
@needs_compiler
def test_refusals_of_the_driver_are_told(pretended: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a failed launch is an exception that names the device and the number of bytes."""
    import torch

    refusing = SimpleNamespace(pccl_digest_blocks=lambda *_arguments: 700)
    monkeypatch.setattr(pretended, "_library", lambda: refusing)
    with pytest.raises(RuntimeError, match="refused to digest 12 bytes on cpu: error 700"):
        pretended.block_digests(torch.zeros(3))


@needs_torch
def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: without a device, without the toolkit, or if the build fails, the message says so and what to do."""
    import torch
    from torch.utils import cpp_extension

    from pccl.torch import device_digest

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch.cuda sees none"):
        device_digest.block_digests(torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(RuntimeError, match="set CUDA_HOME"):
        device_digest.block_digests(torch.zeros(1))

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("Ninja is required")

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/opt/cuda")
    monkeypatch.setattr(cpp_extension, "load", fail)
    with pytest.raises(RuntimeError, match="could not be built with the CUDA toolkit in /opt/cuda: Ninja is required"):
        device_digest.block_digests(torch.zeros(1))


@needs_torch
@needs_compiler
def test_torch_builds_what_we_open(tmp_path: Path, room: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: torch's builder, with the emulation as toolkit, builds the library once; it is opened and called."""
    if shutil.which("ninja") is None:
        pytest.skip("torch builds with ninja, which is not on PATH")
    import torch
    from torch.utils import cpp_extension

    from pccl.torch import device_digest

    plain = cpp_extension.load
    program = tmp_path / "digest.cpp"

    def load(name: str, sources: list[str], extra_cuda_cflags: list[str], is_python_module: bool) -> str:
        # torch would pass a .cu to nvcc, whose libraries torch for the CPU cannot link.
        program.write_text(f'#include "{sources[0]}"\n')
        include = [str(EMULATION)]
        return str(
            plain(
                name,
                [str(program)],
                extra_include_paths=include,
                build_directory=str(tmp_path),
                is_python_module=is_python_module,
            )
        )

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/opt/cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device_digest._library.cache_clear()
    try:
        library = device_digest._library()
    finally:
        device_digest._library.cache_clear()
    out = np.zeros(1, np.uint64)

    assert library.pccl_digest_blocks(room.ctypes.data, 1000, out.ctypes.data, None) == 0
    assert out.tobytes() == digest.block_digests(room.ctypes.data, 1000, 1)


@needs_torch
def test_a_real_device_agrees_with_the_cpu() -> None:
    """Goal: digests on a real GPU. Has been skipped on every machine of this project so far."""
    import torch

    from pccl.torch import device_digest

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    whole = torch.arange(3 * BLOCK_BYTES, dtype=torch.int32)
    tensors = [whole, whole[1:], whole.view(torch.uint8)[3:], whole[:7], whole[:0], whole[BLOCK_BYTES // 4 :]]

    found = device_digest.block_digests_many([tensor.cuda() for tensor in tensors])

    assert found == [digest.block_digests(t.data_ptr(), t.numel() * t.element_size(), 2) for t in tensors]
    assert device_digest.block_digests(whole.cuda()[1:]) == found[1]
