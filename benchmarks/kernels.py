"""The speed of reducing, quantizing and checksumming blocks, per instruction set, compared with memcpy.

A block and its operands lie in the second-level cache, as they do in a lane worker. Every figure is the median of
rounds in which all kernels take turns, so that noise hits them equally. GB/s count the bytes of one block: a sum
without backup touches three times as many, a memcpy twice. For quantization they count the bytes of the elements.

    python -m benchmarks.kernels --block-bytes 262144
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pccl._core.dataplane import quantization
from pccl._core.kernels import arithmetic
from pccl.values import DataType, QuantizationAlgorithm, ReduceOp

from .facts import RESULTS, facts, keep

if TYPE_CHECKING:
    from collections.abc import Callable


# What is reduced, in the order of the table.
REDUCES = {
    "sum float32": (DataType.FLOAT, ReduceOp.SUM),
    "sum bfloat16": (DataType.BFLOAT16, ReduceOp.SUM),
    "sum float16": (DataType.FLOAT16, ReduceOp.SUM),
    "sum int8": (DataType.INT8, ReduceOp.SUM),
    "max float32": (DataType.FLOAT, ReduceOp.MAX),
}

# What is quantized by MIN_MAX, and to what.
CODINGS = {
    "float32, 8 bits": (DataType.FLOAT, QuantizationAlgorithm.MIN_MAX, DataType.UINT8),
    "float32, 16 bits": (DataType.FLOAT, QuantizationAlgorithm.MIN_MAX, DataType.UINT16),
    "float32, 4 bits": (DataType.FLOAT, QuantizationAlgorithm.MIN_MAX_4BIT, DataType.UINT8),
    "bfloat16, 8 bits": (DataType.BFLOAT16, QuantizationAlgorithm.MIN_MAX, DataType.UINT8),
}


class Bench:
    """One block, the received block, and buffers for results and backups."""

    def __init__(self, block_bytes: int) -> None:
        # Whole pages, as in our segments. Small numbers in every type: neither NaN nor subnormal, which some
        # processors are slow with.
        self.local, self.incoming, self.out, self.backup = (memoryview(mmap.mmap(-1, block_bytes)) for _ in range(4))
        for view in (self.local, self.incoming, self.out, self.backup):
            view[:] = bytes.fromhex("803f") * (block_bytes // 2)

    def copy(self) -> None:
        """Copy the block with memcpy, called from Python like the other kernels."""
        self.out[:] = self.local

    def reduce(self, datatype: DataType, op: ReduceOp, backup: memoryview | None) -> Callable[[], object]:
        """A reduce as a call without arguments."""
        return lambda: arithmetic.reduce_into(datatype.value, op.value, self.out, self.local, self.incoming, backup)

    def coding(self, name: str, itemsize: int, numbers: tuple[int, int, int]) -> dict[str, Callable[[], object]]:
        """Return calls that encode a block, and that decode and add one, as a hop does."""
        values = bytearray.fromhex("803f803f003f003f") * (
            self.local.nbytes // 8
        )  # equal values would give a quantization group with a range of zero
        coded = bytearray(quantization.coded_size(len(values) // itemsize, *numbers))
        quantization.encode_into(*numbers, coded, values)
        return {
            f"encode {name}": lambda: quantization.encode_into(*numbers, coded, values),
            f"decode and sum {name}": lambda: quantization.reduce_coded_into(
                *numbers, ReduceOp.SUM.value, self.out, self.local, coded
            ),
        }

    def works(self) -> dict[str, Callable[[], object]]:
        """Return all measured calls, by name."""
        works: dict[str, Callable[[], object]] = {"memcpy": self.copy}
        for name, (datatype, op) in REDUCES.items():
            works[name] = self.reduce(datatype, op, None)
            works[f"{name}, backup"] = self.reduce(datatype, op, self.backup)
        for name, (datatype, algorithm, quantized) in CODINGS.items():
            works |= self.coding(name, datatype.itemsize, (datatype.value, algorithm.value, quantized.value))
        works["crc32c"] = lambda: arithmetic.crc32c_of(self.local)
        return works


def rate(work: Callable[[], object], block_bytes: int, calls: int) -> float:
    """Return GB/s of one round, by the CPU time of this process, because other processes may use the core too."""
    began = time.process_time_ns()
    for _ in range(calls):
        work()
    return block_bytes * calls / (time.process_time_ns() - began)


def measure(block_bytes: int, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Median GB/s by work and instruction set."""
    works = Bench(block_bytes).works()
    rates: dict[str, dict[str, list[float]]] = {name: {simd: [] for simd in arithmetic.available()} for name in works}
    before = arithmetic.chosen()
    for _ in range(rounds):
        for simd in arithmetic.available():
            arithmetic.use(simd)
            for name, work in works.items():
                rates[name][simd].append(rate(work, block_bytes, calls))
    arithmetic.use(before)
    return {
        name: {simd: round(statistics.median(found), 1) for simd, found in by_simd.items()}
        for name, by_simd in rates.items()
    }


def main() -> int:
    """Measure, print a table, save the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--block-bytes", type=int, default=1 << 18, help="bytes per block, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=21, help="rounds; the median counts")
    parser.add_argument("--calls", type=int, default=20, help="calls per round and work")
    parser.add_argument("--output", type=Path, default=RESULTS / "kernels.json", help="where the JSON goes")
    arguments = parser.parse_args()
    results = measure(arguments.block_bytes, arguments.rounds, arguments.calls)
    print(
        f"{'GB/s of blocks of ' + str(arguments.block_bytes) + ' bytes':34}",
        *(f"{s:>9}" for s in arithmetic.available()),
    )
    for name, by_simd in results.items():
        print(f"{name:34}", *(f"{number:9.1f}" for number in by_simd.values()))
    keep({"facts": facts(), "block_bytes": arguments.block_bytes, "gigabytes_per_second": results}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
