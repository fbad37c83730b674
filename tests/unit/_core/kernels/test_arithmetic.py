"""Kernels: every instruction set computes the documented bits, writes no other byte, and computes every checksum.

The expected values come from numpy, which computes element by element as `arithmetic.h` defines; bfloat16, which numpy
does not have, is rounded here by comparing distances. The operands contain infinities, subnormals and all kinds of
the operands.
"""

from __future__ import annotations

import itertools
import platform
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl._core.kernels import arithmetic
from pccl.values import DataType, ReduceOp

Array = np.ndarray[Any, Any]

FLOATS = {
    DataType.FLOAT16: 0x7E00,
    DataType.BFLOAT16: 0x7FC0,
    DataType.FLOAT: 0x7FC00000,
    DataType.DOUBLE: 0x7FF8 << 48,
}

# All legal combinations: AVG divides, or is a sum; the others never divide.
WORKS = [(op, 0) for op in ReduceOp] + [
    (ReduceOp.SUM, 1),
    (ReduceOp.AVG, 2),
    (ReduceOp.AVG, 3),
    (ReduceOp.AVG, 100_003),
]

# Counts around every width of a vector and of an unrolled loop, then across several of them.
COUNTS = [*range(131), 255, 256, 257, 511, 777, 1031]


@pytest.fixture(params=arithmetic.available())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    before = arithmetic.chosen()
    arithmetic.use(request.param)
    yield request.param
    arithmetic.use(before)


# --- What must come out -------------------------------------------------------------------------------------------


def carrier(datatype: DataType) -> np.dtype[Any]:
    """Return the numpy type that holds the elements; bfloat16 is held as its bits."""
    return np.dtype(np.uint16) if datatype is DataType.BFLOAT16 else datatype.to_numpy_dtype()


def specials(datatype: DataType) -> list[int]:
    """Return bits of critical values: zeros, infinities, both ends of the normal numbers, kinds of NaN."""
    width = datatype.itemsize * 8
    sign = 1 << (width - 1)
    if datatype not in FLOATS:
        return [0, 1, 2, sign - 1, sign, sign + 1, 2 * sign - 1]
    quiet = FLOATS[datatype]
    lowest = quiet & -quiet
    infinity = quiet ^ lowest
    normal = lowest << 1
    found = [
        0,
        1,
        2,
        3,
        normal - 1,
        normal,
        normal + 1,
        infinity - 1,
        infinity,
        infinity + 1,
        quiet - 1,
        quiet,
        quiet + 1,
        sign - 1,
    ]
    return found + [sign | bits for bits in found]


@cache
def operands(datatype: DataType, count: int) -> tuple[bytes, bytes]:
    """Return random bytes that contain every pair of special values."""
    source = random.Random(f"{datatype.name} {count}")
    size = datatype.itemsize
    left, right = bytearray(source.randbytes(count * size)), bytearray(source.randbytes(count * size))
    if datatype in FLOATS and size > 2:
        # Random exponents are rarely similar; here the second operand is near the first, so that sums must round.
        with np.errstate(all="ignore"):
            near = np.frombuffer(left, carrier(datatype)) * np.float32(0.37)
        right[: len(right) // 2] = near.tobytes()[: len(right) // 2]
    pairs = list(itertools.product(specials(datatype), repeat=2))
    positions = source.sample(range(count), min(len(pairs), count // 2))
    for position, (one, other) in zip(positions, source.sample(pairs, len(pairs)), strict=False):
        left[position * size : (position + 1) * size] = one.to_bytes(size, sys.byteorder)
        right[position * size : (position + 1) * size] = other.to_bytes(size, sys.byteorder)
    return bytes(left), bytes(right)


def round_bf16(values: Array) -> Array:
    """Round floats to bits of bfloat16: choose the nearer of the two neighbours, in double precision."""
    low = values.view(np.uint32) & np.uint32(0xFFFF0000)
    high = low + np.uint32(0x10000)
    # If the upper neighbour is infinity, its distance is that of the first number of the next exponent.
    beyond = np.where(low & 0x80000000, -(2.0**128), 2.0**128)
    top = high.view(np.float32).astype(np.float64)
    top = np.where(np.isinf(top), beyond, top)
    down, up = np.abs(values - low.view(np.float32).astype(np.float64)), np.abs(top - values)
    upwards = (up < down) | ((up == down) & ((low >> 16) & 1 == 1))
    return np.where(np.isinf(values), low >> 16, np.where(upwards, high >> 16, low >> 16)).astype(np.uint16)


def combine(op: ReduceOp, a: Array, b: Array) -> Array:
    """Apply the op in the type of the arrays; for MAX and MIN minus zero is less than plus zero."""
    if op in {ReduceOp.SUM, ReduceOp.AVG}:
        return a + b
    if op is ReduceOp.PROD:
        return a * b
    best = np.maximum(a, b) if op is ReduceOp.MAX else np.minimum(a, b)
    if a.dtype.kind == "f":
        zeros = (a == 0) & (b == 0)
        negative = np.signbit(a) & np.signbit(b) if op is ReduceOp.MAX else np.signbit(a) | np.signbit(b)
        best = np.where(zeros, np.where(negative, -0.0, 0.0).astype(a.dtype), best)
    return best


def divide(values: Array, divisor: int) -> Array:
    """Divide; integers are rounded towards zero."""
    if values.dtype.kind == "f":
        return values / values.dtype.type(divisor)
    if values.dtype.kind == "u":
        return (values.astype(np.uint64) // np.uint64(divisor)).astype(values.dtype)
    wide = values.astype(np.int64)
    return (wide // divisor + ((wide < 0) & (wide % divisor != 0))).astype(values.dtype)


@cache
def expected(datatype: DataType, op: ReduceOp, divisor: int, count: int) -> bytes:
    """Return the documented result for the operands of this count."""
    a, b = (np.frombuffer(side, carrier(datatype)) for side in operands(datatype, count))
    with np.errstate(all="ignore"):  # an arm64 processor reports the widening of signalling NaNs
        if datatype is DataType.BFLOAT16:
            a, b = ((side.astype(np.uint32) << 16).view(np.float32) for side in (a, b))
        elif datatype is DataType.FLOAT16:
            a, b = a.astype(np.float32), b.astype(np.float32)
        result = combine(op, a, b)
        if divisor > 1:
            result = divide(result, divisor)
        if datatype not in FLOATS:
            return result.tobytes()
        missing = np.isnan(result)
        narrow = round_bf16(result) if datatype is DataType.BFLOAT16 else result.astype(carrier(datatype))
    bits = narrow.view(f"u{datatype.itemsize}").copy()
    bits[missing] = FLOATS[datatype]
    return bits.tobytes()


# --- Reduce -------------------------------------------------------------------------------------------------------

CANARY = b"\xa5" * 64


class Padded:
    """A buffer with canaries on both sides and a block somewhere inside, aligned or not."""

    def __init__(self, content: bytes, offset: int) -> None:
        self.offset = offset
        self.end = offset + len(content)
        self.buffer = bytearray(CANARY[:offset] + content + CANARY)

    @property
    def block(self) -> memoryview:
        """The block that a kernel is given."""
        return memoryview(self.buffer)[self.offset : self.end]

    def holds(self, content: bytes) -> bool:
        """Return whether the block is this, and nothing around it has changed."""
        return self.buffer == CANARY[: self.offset] + content + CANARY


@pytest.mark.parametrize("datatype", DataType, ids=lambda datatype: datatype.name)
@pytest.mark.parametrize(("op", "divisor"), WORKS, ids=lambda work: getattr(work, "name", work))
def test_every_count_and_place(variant: str, datatype: DataType, op: ReduceOp, divisor: int) -> None:
    """Goal: correct at every count and alignment, in place or not, with or without a backup; no other byte changes."""
    left, right = operands(datatype, COUNTS[-1])
    result = expected(datatype, op, divisor, COUNTS[-1])
    for number, count in enumerate(COUNTS):
        nbytes = count * datatype.itemsize
        a, b, answer = left[:nbytes], right[:nbytes], result[:nbytes]
        # All combinations occur; it does not matter which count has which.
        for where, keep in itertools.product(("apart", "local", "incoming"), (False, True)):
            local, incoming = Padded(a, number % 61), Padded(b, number * 7 % 64)
            backup = Padded(bytes(nbytes), number * 5 % 63)
            out = {"apart": Padded(bytes(nbytes), number * 3 % 62), "local": local, "incoming": incoming}[where]
            arithmetic.reduce_into(
                datatype.value,
                op.value,
                out.block,
                local.block,
                incoming.block,
                backup.block if keep else None,
                divisor,
            )
            assert out.holds(answer), (count, where, keep)
            assert backup.holds(a if keep else bytes(nbytes)), (count, where, keep)
            assert local is out or local.holds(a), (count, where, keep)
            assert incoming is out or incoming.holds(b), (count, where, keep)


@pytest.mark.parametrize("datatype", DataType, ids=lambda datatype: datatype.name)
def test_many_random_bytes(variant: str, datatype: DataType) -> None:
    """Goal: the documented bits, so the same on every instruction set, over many more operands."""
    count = 20_011
    a, b = operands(datatype, count)
    for op, divisor in WORKS:
        out = bytearray(len(a))
        arithmetic.reduce_into(datatype.value, op.value, out, a, b, divisor=divisor)
        assert out == expected(datatype, op, divisor, count), (op, divisor)


@pytest.mark.parametrize("datatype", [DataType.INT8, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE], ids=str)
def test_long_backups(variant: str, datatype: DataType) -> None:
    """Goal: also correct if the backup is written past the caches, at any alignment and any end."""
    count = 20_011
    a, b = operands(datatype, count)
    result = expected(datatype, ReduceOp.SUM, 0, count)
    for shift, cut in itertools.product([0, 1, 2, 4, 8, 24, 60, 63], [0, 1, 17, 1000]):
        nbytes = len(a) - cut * datatype.itemsize
        local, backup = Padded(a[:nbytes], shift % 5), Padded(bytes(nbytes), shift)
        arithmetic.reduce_into(datatype.value, ReduceOp.SUM.value, local.block, local.block, b[:nbytes], backup.block)
        assert local.holds(result[:nbytes]), (shift, cut)
        assert backup.holds(a[:nbytes]), (shift, cut)


@pytest.mark.parametrize("datatype", [DataType.FLOAT16, DataType.BFLOAT16], ids=lambda datatype: datatype.name)
def test_every_half_survives(variant: str, datatype: DataType) -> None:
    """Goal: all 65536 values are widened and rounded back unchanged, also subnormals; NaN becomes the standard NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    negative_zero = np.full_like(halves, 0x8000)
    out = np.empty_like(halves)
    arithmetic.reduce_into(datatype.value, ReduceOp.SUM.value, out, halves, negative_zero)
    infinity = 0x7C00 if datatype is DataType.FLOAT16 else 0x7F80

    assert (out == np.where((halves & 0x7FFF) > infinity, FLOATS[datatype], halves)).all()


@pytest.mark.parametrize("divisor", [2, 3, 7, 10, 255, 256, 65_537, (1 << 24) + 1, (1 << 31) + 1, (1 << 32) - 1])
def test_every_quotient_of_small_integers(variant: str, divisor: int) -> None:
    """Goal: a division through floats gives the exact integer quotient for every divisor."""
    for datatype in (DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16):
        values = np.arange(1 << (8 * datatype.itemsize)).astype(datatype.to_numpy_dtype())
        out = np.empty_like(values)
        arithmetic.reduce_into(datatype.value, ReduceOp.AVG.value, out, values, np.zeros_like(values), None, divisor)
        assert (out == divide(values, divisor)).all(), datatype


def test_quotients_of_wide_integers(variant: str) -> None:
    """Goal: also next to multiples of the divisor, where a rounded quotient would be wrong."""
    source = random.Random(7)
    for datatype, _ in itertools.product((DataType.UINT32, DataType.INT32, DataType.UINT64, DataType.INT64), range(50)):
        limits = np.iinfo(datatype.to_numpy_dtype())
        divisor = source.randrange(2, 1 << source.randrange(2, 33))
        near = [
            source.randrange(limits.min, limits.max) // divisor * divisor + step
            for step in (-1, 0, 1)
            for _ in range(9)
        ]
        values = np.array([min(max(value, limits.min), limits.max) for value in near], limits.dtype)
        out = np.empty_like(values)
        arithmetic.reduce_into(datatype.value, ReduceOp.AVG.value, out, values, np.zeros_like(values), None, divisor)
        quotients = [abs(int(value)) // divisor * (1 if value > 0 else -1) for value in values]
        assert out.tolist() == quotients, (datatype, divisor)


def test_what_cannot_be_reduced_is_refused() -> None:
    """Goal: errors name what is wrong, and nothing was written."""
    four, eight = bytearray(4), bytearray(8)
    for arguments, reason in {
        (12, 0): "datatype 12 is unknown",
        (-1, 0): "datatype -1 is unknown",
        (0, 5): "operation 5 is unknown",
        (0, -1): "operation -1 is unknown",
    }.items():
        with pytest.raises(ValueError, match=reason):
            arithmetic.reduce_into(*arguments, four, four, four)
    with pytest.raises(ValueError, match="cannot be divided by 3"):
        arithmetic.reduce_into(0, ReduceOp.MAX.value, four, four, four, None, 3)
    with pytest.raises(ValueError, match="incoming has 8 bytes but needs 4"):
        arithmetic.reduce_into(0, 0, four, four, eight)
    with pytest.raises(ValueError, match="out has 8 bytes but needs 4"):
        arithmetic.reduce_into(0, 0, eight, four, four)
    with pytest.raises(ValueError, match="backup has 8 bytes but needs 4"):
        arithmetic.reduce_into(0, 0, four, four, four, eight)
    with pytest.raises(ValueError, match="4 bytes are not a whole number of elements of 8 bytes"):
        arithmetic.reduce_into(DataType.DOUBLE.value, 0, four, four, four)
    with pytest.raises(BufferError):
        arithmetic.reduce_into(0, 0, bytes(4), four, four)
    assert four == bytes(4)


# --- Checksum -----------------------------------------------------------------------------------------------------

# RFC 3720, B.4, and the usual check value of the polynomial.
KNOWN = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    bytes.fromhex(
        "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"
    ): 0xD9963A56,
}


@cache
def remainders(data: bytes) -> list[int]:
    """Return the checksum of every prefix of the data, computed bit by bit."""
    crc, found = 0xFFFFFFFF, [0]
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        found.append(crc ^ 0xFFFFFFFF)
    return found


def test_checksums_of_the_standard(variant: str) -> None:
    assert {data: arithmetic.crc32c_of(data) for data in KNOWN} == KNOWN


def test_checksums_of_every_length(variant: str) -> None:
    """Goal: correct across every boundary between loops, and at every alignment."""
    data = random.Random(1).randbytes(13_000)
    lengths = [*range(1100), *range(12_280, 12_300), 12_544, 12_800, 13_000]
    for length in lengths:
        buffer = memoryview(bytes(length % 67) + data[:length])[length % 67 :]
        assert arithmetic.crc32c_of(buffer) == remainders(data)[length], length


def test_checksums_continue(variant: str) -> None:
    """Goal: the checksum of parts, continued, is that of the whole, at every cut."""
    source = random.Random(2)
    data = source.randbytes(300_001)
    whole = arithmetic.crc32c_of(data)
    for _ in range(20):
        cuts = sorted(source.randrange(len(data)) for _ in range(source.randrange(1, 9)))
        crc = 0
        for begin, end in itertools.pairwise([0, *cuts, len(data)]):
            crc = arithmetic.crc32c_of(data[begin:end], crc)
        assert crc == whole


def test_checksums_agree_on_whole_blocks() -> None:
    """Goal: every instruction set gives the same checksum as the first one, at the sizes of real blocks."""
    data = random.Random(3).randbytes((1 << 18) + 77)
    before, found = arithmetic.chosen(), {}
    for name in arithmetic.available():
        arithmetic.use(name)
        found[name] = [
            arithmetic.crc32c_of(data),
            arithmetic.crc32c_of(data[: 1 << 18]),
            arithmetic.crc32c_of(data[77:]),
        ]
    arithmetic.use(before)

    assert all(numbers == found["portable"] for numbers in found.values()), found


# --- The choice ---------------------------------------------------------------------------------------------------


def in_fresh_interpreter(simd: str) -> subprocess.CompletedProcess[str]:
    code = "from pccl._core.kernels import arithmetic; print(arithmetic.chosen())"
    environment = {"PCCL_SIMD": simd, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel lists these flags for x86-64 only")
def test_the_instruction_sets_are_those_that_the_kernel_lists() -> None:
    """Goal: what we read from the processor is what Linux reads from it, which hides what it does not save."""
    flags = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
    avx2 = {"avx", "avx2", "sse4_2", "pclmulqdq", "f16c"} <= flags
    avx512 = avx2 and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags

    assert list(arithmetic.available()) == ["portable", *["avx2"] * avx2, *["avx512"] * avx512]


def test_the_environment_chooses() -> None:
    """Goal: an operator can choose the instruction set; the default is the last and best one."""
    names = arithmetic.available()

    assert names[0] == "portable"
    assert in_fresh_interpreter("").stdout == f"{names[-1]}\n"
    for name in names:
        assert in_fresh_interpreter(name).stdout == f"{name}\n"


def test_an_unknown_instruction_set_is_refused() -> None:
    """Goal: the error names the unknown set and the available ones."""
    expected_text = f"'abacus' is not available; this machine supports {', '.join(arithmetic.available())}"
    done = in_fresh_interpreter("abacus")

    assert f"ImportError: PCCL_SIMD: instruction set {expected_text}" in done.stderr
    with pytest.raises(ValueError, match=expected_text):
        arithmetic.use("abacus")
