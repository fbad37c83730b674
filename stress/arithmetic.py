"""The arithmetic of a stress run: what peers contribute to reduces and the expected results, for peers and harness.

The operations of a round follow from the seed of the run, the group and the number of the round, so newcomers know them
without a message. A contribution follows from the life, the round and the operation. All values are whole numbers so
small that no sum is rounded: the result of a reduce is one exact array, whatever the order of the ring.

An exact tensor begins with one element for each place of the run. Every peer writes its life at its own place and zeros
elsewhere, so the sum names all participants, and the rest can be computed from them. A quantized result is not exact;
it must be within its range and the same on all peers.

The state of a group is updated with results only: exact results are added, quantized results enter by their checksum.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

Array = np.ndarray[Any, Any]

COUNTS = (256, 4_001, 40_000, 160_000)  # elements: one small block up to several blocks per peer
COUNT_LONG = 320_000  # elements of half of the reduces whose target shows progress: long enough to be interrupted
OPERATIONS_MAX = 5  # in one round
WEIGHTS = 8_192  # elements of the part of a state that results are added to
NOTES = 64  # elements of the part that a training process keeps in ordinary memory
BALLAST = 1 << 18  # elements that follow from the revision alone: bytes for newcomers to receive
OPTIMIZED_EVERY = 50  # one of so many rounds ends with an optimisation of the rings
PERIOD = 7  # of the pattern in every tensor
BASES = 100  # number of different contributions
TOLERANCE = 0.02  # of a quantized sum, for each of its members: half a step of 256 over the range, with room


@dataclass(frozen=True, slots=True)
class PlannedReduce:
    """One reduce of a round."""

    index: int
    count: int
    dtype: str
    quantized: bool
    in_place: bool  # in one tensor, or from one into another
    shared: bool  # memory that peers' workers reach, or memory that is staged
    in_list: bool  # belongs to the part of the round that all_reduce_multiple_with_retry makes

    @property
    def tag(self) -> int:
        """The tag of the reduce."""
        return self.index + 1

    @property
    def shows_progress(self) -> bool:
        """Whether a failed reduce leaves partial results in its target: workers write to it, and it is not restored.

        Reduces of a list are retried before the target can be read.
        """
        return self.shared and not (self.in_place or self.in_list or self.quantized)


def draw_operations(seed: int, group: int, number: int, places: int) -> list[PlannedReduce]:
    """The operations of one round of one group."""
    rng = random.Random(f"{seed} {group} {number}")
    listed = rng.random() < 0.4
    operations = []
    for index in range(rng.randint(1, OPERATIONS_MAX)):
        quantized = rng.random() < 0.3
        operation = PlannedReduce(
            index,
            max(rng.choice(COUNTS), places),
            "float32" if quantized else rng.choice(("float32", "int32", "int64")),
            quantized,
            in_place=rng.random() < 0.6,
            shared=rng.random() < 0.7,
            in_list=listed and index < 3,
        )
        if operation.shows_progress and rng.random() < 0.5:
            operation = replace(operation, count=COUNT_LONG)
        operations.append(operation)
    return operations


def is_optimized(seed: int, number: int) -> bool:
    """Whether a round ends with an optimisation of the rings; the same for all groups."""
    return zlib.crc32(f"{seed} rings {number}".encode()) % OPTIMIZED_EVERY == 0


def base_of(life: int, number: int, index: int) -> int:
    """The number that a life adds to every element of one operation."""
    return 1 + zlib.crc32(f"{life} {number} {index}".encode()) % BASES


@lru_cache(maxsize=64)
def _pattern(count: int, dtype: str) -> Array:
    made = (np.arange(count) % PERIOD).astype(dtype)
    made.setflags(write=False)
    return made


def contribution(operation: PlannedReduce, number: int, place: int, places: int, life: int) -> Array:
    """The contribution of a life."""
    tensor: Array = _pattern(operation.count, operation.dtype).copy()
    tensor += np.array(base_of(life, number, operation.index)).astype(operation.dtype)
    if not operation.quantized:
        tensor[:places] = 0
        tensor[place] = life
    return tensor


def participants_of(result: Array, places: int) -> tuple[tuple[int, int], ...]:
    """Place and life of all participants, from the list at the beginning of an exact result."""
    return tuple((place, int(life)) for place, life in enumerate(result[:places].tolist()) if life)


def progress_of(target: Array, places: int) -> tuple[int, float]:
    """The progress of a failed exact reduce whose target was zero at the start.

    The steps of the pattern are proportional to the number of added contributions. Returns the largest number of
    contributions, and the share of the tensor that has it.
    """
    begin = places + -places % PERIOD
    rows = target[begin : begin + (len(target) - begin) // PERIOD * PERIOD].reshape(-1, PERIOD)
    steps = np.diff(rows[:, :3])
    # Where the two differ, there is a border between two blocks.
    counts = np.bincount(steps[steps[:, 0] == steps[:, 1], 0].clip(0, places).astype(np.int64), minlength=2)
    most = int(counts.nonzero()[0].max(initial=0))
    return most, float(counts[most] / max(counts.sum(), 1))


def expected(operation: PlannedReduce, number: int, places: int, members: Iterable[tuple[int, int]]) -> Array:
    """The exact result for these participants."""
    members = tuple(members)
    total = sum(base_of(life, number, operation.index) for _, life in members)
    result: Array = _pattern(operation.count, operation.dtype).copy()
    result *= np.array(len(members)).astype(operation.dtype)
    result += np.array(total).astype(operation.dtype)
    result[:places] = 0
    for place, life in members:
        result[place] = life
    return result


def span_allowed(operation: PlannedReduce, number: int, lives: Iterable[int], world: int) -> tuple[float, float]:
    """The range of a quantized result, given the lives of its known members."""
    known = [base_of(life, number, operation.index) for life in lives]
    unknown = max(world - len(known), 0)
    room = TOLERANCE * world * (PERIOD + BASES) + 1.0
    return sum(known) + unknown - room, sum(known) + unknown * BASES + world * (PERIOD - 1) + room


def checksum(*arrays: Array) -> int:
    """The checksum of all bytes of these arrays."""
    value = 0
    for array in arrays:
        value = zlib.crc32(array.data.cast("B"), value)
    return value


def update_state(
    weights: Array, notes: Array, operation: PlannedReduce, result: Array | None, result_checksum: int
) -> None:
    """Update a state with one result, in place. A quantized result needs no array."""
    if operation.quantized:
        notes[1] = (int(notes[1]) * 31 + result_checksum) % (1 << 62)
    else:
        assert result is not None
        part = min(len(result), len(weights))
        weights[:part] += result[:part].astype(np.int64)


def ballast_of(revision: int) -> float:
    """The value of the ballast at this revision."""
    return float(revision % 8191)
