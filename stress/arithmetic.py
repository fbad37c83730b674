"""What peers put into reduces and what must come out: the arithmetic of a run, known to peers and to the harness.

Which operations a round makes follows from the run's seed, the group and the round's number, so that newcomers know it
without being told. A contribution follows from the life, the round and the operation. All of it is whole numbers small
enough that no sum is rounded: the result of a reduce is one exact array, whatever the order of the ring.

An exact tensor begins with a list of the places of the run. Everyone writes its life at its own place and zeros
elsewhere, so the sum names all who took part, and whoever knows them can compute the rest. A quantized result is not
exact; it is held to its range, and to being the same everywhere.

The state of a group is moved on by results alone: exact ones are added, quantized ones enter by their checksum.
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
COUNT_LONG = 320_000  # elements of every other reduce whose target shows how far it got: long enough to be caught at it
OPERATIONS_MAX = 5  # in one round
WEIGHTS = 8_192  # elements of the part of a state that results are added to
NOTES = 64  # elements of the part that a training process keeps in ordinary memory
BALLAST = 1 << 18  # elements that follow from the revision alone: something to move for those who lack it
OPTIMIZED_EVERY = 50  # one of so many rounds ends with an optimisation of the rings
PERIOD = 7  # of the pattern in every tensor
BASES = 100  # how many different contributions there are
TOLERANCE = 0.02  # of a quantized sum, for each of its members: half a step of 256 over the range, with room


@dataclass(frozen=True, slots=True)
class Operation:
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
        """As the library matches it."""
        return self.index + 1

    @property
    def shows_progress(self) -> bool:
        """Whether a failure leaves in the target what had come: workers write straight to it, nobody restores it.

        Those of a list are retried before anybody can look.
        """
        return self.shared and not (self.in_place or self.in_list or self.quantized)


def draw_operations(seed: int, group: int, number: int, places: int) -> list[Operation]:
    """The operations of one round of one group."""
    chance = random.Random(f"{seed} {group} {number}")
    listed = chance.random() < 0.4
    operations = []
    for index in range(chance.randint(1, OPERATIONS_MAX)):
        quantized = chance.random() < 0.3
        operation = Operation(
            index,
            max(chance.choice(COUNTS), places),
            "float32" if quantized else chance.choice(("float32", "int32", "int64")),
            quantized,
            in_place=chance.random() < 0.6,
            shared=chance.random() < 0.7,
            in_list=listed and index < 3,
        )
        if operation.shows_progress and chance.random() < 0.5:
            operation = replace(operation, count=COUNT_LONG)
        operations.append(operation)
    return operations


def is_optimized(seed: int, number: int) -> bool:
    """Whether a round ends with an optimisation of the rings. All groups take part in it, so the group has no say."""
    return zlib.crc32(f"{seed} rings {number}".encode()) % OPTIMIZED_EVERY == 0


def base_of(life: int, number: int, index: int) -> int:
    """The number that a life adds to every element of one operation."""
    return 1 + zlib.crc32(f"{life} {number} {index}".encode()) % BASES


@lru_cache(maxsize=64)
def _pattern(count: int, dtype: str) -> Array:
    made = (np.arange(count) % PERIOD).astype(dtype)
    made.setflags(write=False)
    return made


def contribution(operation: Operation, number: int, place: int, places: int, life: int) -> Array:
    """What a life puts in."""
    tensor: Array = _pattern(operation.count, operation.dtype).copy()
    tensor += np.array(base_of(life, number, operation.index)).astype(operation.dtype)
    if not operation.quantized:
        tensor[:places] = 0
        tensor[place] = life
    return tensor


def who_took_part(result: Array, places: int) -> tuple[tuple[int, int], ...]:
    """Place and life of everyone in the list at the beginning of an exact result."""
    return tuple((place, int(life)) for place, life in enumerate(result[:places].tolist()) if life)


def how_far(target: Array, places: int) -> tuple[int, float]:
    """How far an exact reduce got that was begun with zeros in its target, and failed.

    The steps of the pattern are as high as contributions were added. Returns how many those are where they are most,
    and in how much of the tensor they are so many.
    """
    begin = places + -places % PERIOD
    rows = target[begin : begin + (len(target) - begin) // PERIOD * PERIOD].reshape(-1, PERIOD)
    steps = np.diff(rows[:, :3])
    # Where the two differ, the border between two blocks lies among them.
    counts = np.bincount(steps[steps[:, 0] == steps[:, 1], 0].clip(0, places).astype(np.int64), minlength=2)
    most = int(counts.nonzero()[0].max(initial=0))
    return most, float(counts[most] / max(counts.sum(), 1))


def expected(operation: Operation, number: int, places: int, who: Iterable[tuple[int, int]]) -> Array:
    """The exact result, given who took part."""
    members = tuple(who)
    total = sum(base_of(life, number, operation.index) for _, life in members)
    result: Array = _pattern(operation.count, operation.dtype).copy()
    result *= np.array(len(members)).astype(operation.dtype)
    result += np.array(total).astype(operation.dtype)
    result[:places] = 0
    for place, life in members:
        result[place] = life
    return result


def span_allowed(operation: Operation, number: int, lives: Iterable[int], world: int) -> tuple[float, float]:
    """Between which numbers a quantized result lies, given those of its members whose lives are known."""
    known = [base_of(life, number, operation.index) for life in lives]
    unknown = max(world - len(known), 0)
    room = TOLERANCE * world * (PERIOD + BASES) + 1.0
    return sum(known) + unknown - room, sum(known) + unknown * BASES + world * (PERIOD - 1) + room


def checksum(*arrays: Array) -> int:
    """Of all bytes of these arrays, one after the other."""
    value = 0
    for array in arrays:
        value = zlib.crc32(array.data.cast("B"), value)
    return value


def move_on(weights: Array, notes: Array, operation: Operation, result: Array | None, result_checksum: int) -> None:
    """Apply one result to a state, in place. A quantized one needs no array."""
    if operation.quantized:
        notes[1] = (int(notes[1]) * 31 + result_checksum) % (1 << 62)
    else:
        assert result is not None
        part = min(len(result), len(weights))
        weights[:part] += result[:part].astype(np.int64)


def ballast_of(revision: int) -> float:
    """What fills the rest of a state at that revision."""
    return float(revision % 8191)
