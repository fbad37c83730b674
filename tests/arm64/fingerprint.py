"""`python -m tests.arm64.fingerprint`: print the kernels' results for fixed inputs, one line for each kind of work.

Equal lines on two machines mean equal bits. The inputs are random bytes, so every kind of NaN, infinity and subnormal
is among them. The right results are not known here; unit tests check them.
"""

from __future__ import annotations

import ctypes
import hashlib
import random

from pccl._core.dataplane import quantization
from pccl._core.kernels import arithmetic, digest
from pccl.values import DataType, QuantizationOptions, ReduceOp
from tests.unit._core.dataplane.quantization_reference import WAYS

# Sizes around the lengths of vectors, quantization groups, rows, tiles and digest blocks.
COUNTS = (1, 7, 33, 1031, 20_011)
DIVISORS = (0, 3, 100_003)
LENGTHS = (0, 1, 255, 4096, 70_001, 3_000_001)


def drawn(name: str, nbytes: int) -> bytes:
    """Return random bytes, the same on every machine."""
    return random.Random(name).randbytes(nbytes)


def reduced(datatype: DataType, op: ReduceOp) -> str:
    """Return the hash of the results for all counts, with every divisor that the reduce op allows."""
    total = hashlib.sha256()
    for count in COUNTS:
        nbytes = count * datatype.itemsize
        local, incoming = (drawn(f"{datatype.name} {count} {side}", nbytes) for side in ("local", "incoming"))
        for divisor in DIVISORS if op is ReduceOp.AVG else DIVISORS[:1]:
            out = bytearray(nbytes)
            arithmetic.reduce_into(datatype.value, op.value, out, local, incoming, None, divisor)
            total.update(out)
    return total.hexdigest()


def quantized(datatype: DataType, how: QuantizationOptions) -> str:
    """Return the hash of encoded, decoded and reduced elements, for all counts."""
    total = hashlib.sha256()
    numbers = datatype.value, how.algorithm.value, how.quantized_datatype.value
    for count in COUNTS:
        values = drawn(f"{datatype.name} {count} quantized", count * datatype.itemsize)
        coded = bytearray(quantization.coded_size(count, *numbers))
        back, out = bytearray(len(values)), bytearray(len(values))
        quantization.encode_into(*numbers, coded, values)
        quantization.decode_into(*numbers, back, coded)
        quantization.reduce_coded_into(*numbers, ReduceOp.SUM.value, out, values, coded)
        for part in (coded, back, out):
            total.update(part)
    return total.hexdigest()


def digested(nbytes: int) -> str:
    """Return the digest and the checksum of this many bytes, at an odd address."""
    data = drawn(f"digest {nbytes}", nbytes)
    room = ctypes.create_string_buffer(b"\xa5" + data, nbytes + 1)
    return f"{digest.digest(ctypes.addressof(room) + 1, nbytes):016x} {arithmetic.crc32c_of(data):08x}"


def fingerprint() -> list[str]:
    """Return one line for each kind of work, computed with the instruction set in use."""
    lines = [f"reduce {datatype.name} {op.name} {reduced(datatype, op)}" for datatype in DataType for op in ReduceOp]
    for datatype, how in WAYS:
        name = f"{datatype.name} {how.algorithm.name} {how.quantized_datatype.name}"
        lines.append(f"quantize {name} {quantized(datatype, how)}")
    lines += [f"digest {nbytes} {digested(nbytes)}" for nbytes in LENGTHS]
    return lines


def main() -> None:
    """Print the instruction sets of this machine, then the lines of each set, which must all be alike."""
    print("sets", arithmetic.chosen(), *arithmetic.available())
    for name in arithmetic.available():
        arithmetic.use(name)
        for line in fingerprint():
            print(name, line)


if __name__ == "__main__":
    main()
