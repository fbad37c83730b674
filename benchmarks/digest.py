"""The cost of digests: compared with a loop that only adds up the same memory, and for states of ordinary sizes.

The large tensor is far larger than all caches, so the speed of memory counts. Reading and digesting take turns, with
every number of threads and every instruction set, so that noise hits them equally; figures are medians over rounds.
Rates are by wall-clock time. The share, the speed of digesting divided by that of reading, is by CPU time, which is
valid on a busy machine too. All digests must be equal.

    python -m benchmarks.digest --size 1G --threads 1 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pccl._core.kernels import arithmetic, digest

from .facts import RESULTS, facts, keep, size, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

# States of ordinary models: (tensors, bytes of each).
STATES = ((1, 400 << 10), (1000, 400), (200, 64 << 10))

Array = np.ndarray[Any, Any]


class Spent(NamedTuple):
    """The time that a call took."""

    wall_ns: int
    cpu_ns: int


def main() -> int:
    """Measure, print a table, save the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.digest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=size, default=1 << 30, help="bytes of the large tensor (1G)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; medians count (9)")
    parser.add_argument("--json", type=Path, default=RESULTS / "digest.json", help="where the numbers go")
    arguments = parser.parse_args()
    results = {
        "facts": facts(),
        "bytes": arguments.size,
        "rounds": arguments.rounds,
        "large": measure_large(arguments.size, arguments.threads, arguments.rounds),
        "states": measure_states(arguments.rounds),
    }
    show(results)
    keep(results, arguments.json)
    return 0


def measure_large(nbytes: int, threads: list[int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """By threads and instruction set: rates of reading and of digesting, and the second's share of the first."""
    tensor = np.arange(nbytes // 4, dtype=np.float32)
    times: dict[tuple[int, str], list[tuple[Spent, Spent]]] = {}
    digests = set()
    before = arithmetic.chosen()
    for number in range(-1, rounds):  # the first is a warm-up
        for count in threads:
            for simd in arithmetic.available():
                arithmetic.use(simd)
                read, _ = timed(digest.read_only, tensor.ctypes.data, nbytes, count)
                digested, value = timed(digest.digest, tensor.ctypes.data, nbytes, count)
                digests.add(value)
                if number >= 0:
                    times.setdefault((count, simd), []).append((read, digested))
    arithmetic.use(before)
    if len(digests) != 1:
        raise RuntimeError(f"one tensor has {len(digests)} digests")
    return {
        str(count): {simd: _row(nbytes, times[count, simd]) for simd in arithmetic.available()} for count in threads
    }


def _row(nbytes: int, pairs: list[tuple[Spent, Spent]]) -> dict[str, float]:
    read_ns, digest_ns = (statistics.median(spent.wall_ns for spent in column) for column in zip(*pairs, strict=True))
    return {
        "read_gigabytes_per_second": round(nbytes / read_ns, 1),
        "digest_gigabytes_per_second": round(nbytes / digest_ns, 1),
        "share": round(statistics.median(read.cpu_ns / digested.cpu_ns for read, digested in pairs), 2),
    }


def measure_states(rounds: int) -> dict[str, float]:
    """Microseconds of a call that digests many tensors, which lie in caches, on up to two threads."""
    found = {}
    for count, nbytes in STATES:
        tensors: list[Array] = [np.full(nbytes, number % 251, np.uint8) for number in range(count)]
        addresses, lengths = [tensor.ctypes.data for tensor in tensors], [nbytes] * count
        calls = [timed(digest.digest_many, addresses, lengths, 2)[0].wall_ns for _ in range(20 * rounds)]
        found[f"{count} of {size_text(nbytes)}"] = round(statistics.median(calls) / 1000, 1)
    return found


def timed(work: Callable[..., object], *arguments: object) -> tuple[Spent, object]:
    """Call `work`; return the time that it took, and its result."""
    cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
    value = work(*arguments)
    return Spent(time.perf_counter_ns() - wall_ns, time.process_time_ns() - cpu_ns), value


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    print(f"float32 tensor of {size_text(results['bytes'])}, GB/s, {results['facts']['machine']['cores']} cores")
    print(f"{'threads':>7} {'':10}{'read':>8}{'digest':>8}{'share':>8}")
    for threads, by_simd in results["large"].items():
        for simd, row in by_simd.items():
            read, digested, share = row.values()
            print(f"{threads:>7} {simd:10}{read:8.1f}{digested:8.1f}{share:8.0%}")
    for state, microseconds in results["states"].items():
        print(f"{state + ', in cache:':26}{time_text(microseconds):>9}")


if __name__ == "__main__":
    sys.exit(main())
