"""Checks that different bytes have different digests: flips, swaps, zeros, lengths, numbers that differ by little.

Attackers are not considered. With 64 bits and the few hundred thousand digests of a test, a single collision is a
defect of the hash, so sets are simply counted. Statistical bounds fail by chance once in a million runs.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pccl._core.kernels import digest

from . import simplehash
from .simplehash import BLOCK_BYTES, ROW_BYTES, SEEDS, TILE_BYTES

Array = np.ndarray[Any, Any]


def digests_of(rows: Array) -> Array:
    """Return the digests of the rows of a matrix."""
    assert rows.flags.c_contiguous
    nbytes = rows.strides[0]
    addresses = list(range(rows.ctypes.data, rows.ctypes.data + rows.nbytes, nbytes))
    return np.frombuffer(digest.digest_many(addresses, [nbytes] * len(rows), 1), np.uint64)


def digest_of(data: Array) -> int:
    data = np.ascontiguousarray(data)
    return digest.digest(data.ctypes.data, data.nbytes)


def assert_distinct(digests: Any) -> None:
    found = list(map(int, digests))
    assert len(set(found)) == len(found)


def random_bytes(nbytes: int, seed: int = 0) -> Array:
    return np.frombuffer(bytearray(random.Random(seed).randbytes(nbytes)), np.uint8)


# --- Single changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "zeros", "ones"])
def test_every_flipped_bit_changes_the_digest(kind: str) -> None:
    """Goal: all buffers that differ from one in one bit have different digests, for several kinds of content."""
    nbytes = 2 * ROW_BYTES + 13
    plain = {
        "random": random_bytes(nbytes),
        "zeros": np.zeros(nbytes, np.uint8),
        "ones": np.full(nbytes, 255, np.uint8),
    }
    rows = np.repeat(plain[kind][None], 8 * nbytes + 1, axis=0)
    for bit in range(8 * nbytes):
        rows[bit, bit // 8] ^= 1 << bit % 8

    assert_distinct(digests_of(rows))


def test_a_flipped_bit_anywhere_in_blocks_changes_the_digest() -> None:
    """Goal: the same for tensors of several tiles and blocks, at random offsets and at both ends."""
    source = random.Random(1)
    data = random_bytes(2 * BLOCK_BYTES + 777)
    places = [0, len(data) - 1, *(source.randrange(len(data)) for _ in range(300))]
    found = [digest_of(data)]
    for place in places:
        data[place] ^= 1 << source.randrange(8)
        found.append(digest_of(data))  # flips accumulate: each of these buffers is new

    assert_distinct(found)


def test_one_byte_among_zeros_is_found_wherever_it_is() -> None:
    """Goal: a single nonzero byte gives another digest for every offset and every value."""
    data = np.zeros(TILE_BYTES + 3 * ROW_BYTES, np.uint8)
    found = []
    for place in range(0, len(data), 7):
        for value in (1, 128):
            data[place] = value
            found.append(digest_of(data))
        data[place] = 0

    assert_distinct(found)


# --- Order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 32, 64, ROW_BYTES, 8 * ROW_BYTES, TILE_BYTES, BLOCK_BYTES])
def test_order_matters(unit: int) -> None:
    """Goal: exchanging two parts of the size of an element, vector, row, tile or block changes the digest."""
    source = random.Random(2)
    data = random_bytes(4 * BLOCK_BYTES + 100)
    plain, count = digest_of(data), len(data) // unit
    for _ in range(30):
        first = source.randrange(count - 1)
        second = source.choice([first + 1, source.randrange(count)])
        one, other = slice(first * unit, (first + 1) * unit), slice(second * unit, (second + 1) * unit)
        if bytes(data[one]) == bytes(data[other]):
            continue
        data[one], data[other] = data[other].copy(), data[one].copy()
        assert digest_of(data) != plain
        data[one], data[other] = data[other].copy(), data[one].copy()

    assert digest_of(data) == plain


def test_two_words_are_not_confused_with_each_other() -> None:
    """Goal: two nonzero words among zeros, at all pairs of offsets in three rows and in both orders, differ."""
    places = range(0, 3 * ROW_BYTES // 8, 3)
    pairs = [(first, second) for first in places for second in places if first != second]
    rows = np.zeros((len(pairs), 3 * ROW_BYTES // 8), np.uint64)
    for row, (first, second) in zip(rows, pairs, strict=True):
        row[first], row[second] = 1, 2

    assert_distinct(digests_of(rows))


# --- Length -------------------------------------------------------------------------------------------------------


def test_runs_of_zeros_differ_by_their_length() -> None:
    """Goal: zeros of different lengths have different digests, from no byte up to several blocks."""
    zeros = np.zeros(3 * BLOCK_BYTES + 1, np.uint8)
    lengths = {*range(2 * ROW_BYTES), *range(TILE_BYTES - 20, TILE_BYTES + 20)}
    lengths |= {border + near for border in (BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES) for near in (-8, -1, 0, 1)}

    assert_distinct(digest.digest(zeros.ctypes.data, nbytes) for nbytes in lengths)


@pytest.mark.parametrize("tail", [0, 255])
def test_appending_changes_the_digest(tail: int) -> None:
    """Goal: random bytes continued by zeros, or by ones, byte by byte past the ends of words and rows."""
    data = np.concatenate([random_bytes(TILE_BYTES - 300), np.full(700, tail, np.uint8)])

    assert_distinct(digest.digest(data.ctypes.data, nbytes) for nbytes in range(TILE_BYTES - 300, len(data) + 1))


# --- Numbers as they are in models --------------------------------------------------------------------------------


def kin() -> dict[str, Array]:
    """Return families of tensors; the members of a family differ by little."""
    count, source = 60_000, np.random.default_rng(6)
    weights = source.normal(0, 0.02, 64).astype(np.float32)
    counters = np.zeros((count, 16), np.int64)
    counters[:, 5] = np.arange(count)
    steps = np.zeros((count, 8), np.int64)
    steps[:, :] = np.arange(count)[:, None]
    constants = np.zeros((count, 64), np.float32)
    constants[:, :] = np.arange(1, count + 1, dtype=np.float32)[:, None]
    signs = np.repeat(weights[None], 1 << 12, axis=0)
    signs[:, :12] *= np.where(np.arange(1 << 12)[:, None] >> np.arange(12) & 1, -1, 1).astype(np.float32)
    columns = np.zeros((1 << 12, 12 * ROW_BYTES // 8), np.uint64)  # the same lane in twelve rows, one bit each
    columns[:, :: ROW_BYTES // 8] = (np.arange(1 << 12)[:, None] >> np.arange(12) & 1).astype(np.uint64) << np.uint64(
        63
    )
    return {
        "one counter": counters,
        "all counters": steps,
        "constants": constants,
        "signs of neighbours": signs,
        "highest bits of one lane": columns,
    }


@pytest.mark.parametrize("family", kin())
def test_kin_are_told_apart(family: str) -> None:
    """Goal: no collision in 64 bits, and in either half of them no more than expected by chance."""
    found = digests_of(kin()[family])

    assert_distinct(found)
    for half in (found >> np.uint64(32), found & np.uint64(0xFFFFFFFF)):
        assert len(half) - len(np.unique(half)) <= 8  # 0.4 are expected of 60 000


@pytest.mark.parametrize("flipped", [0x80000000, 0x8000000080000000, 0x8000, 1, 1 << 63])
def test_equal_flips_in_a_lane_do_not_cancel(flipped: int) -> None:
    """Goal: negating numbers of one lane in any two of many rows always changes the digest."""
    plain = random_bytes(40 * ROW_BYTES, 9).view(np.uint64)
    pairs = [(lane, one, other) for lane in (0, 17, 31) for one in range(40) for other in range(one + 1, 40)]
    rows = np.repeat(plain[None], len(pairs) + 1, axis=0)
    for row, (lane, one, other) in zip(rows, pairs, strict=False):
        row[[one * 32 + lane, other * 32 + lane]] ^= np.uint64(flipped)

    assert_distinct(digests_of(rows))


def test_no_word_silences_others() -> None:
    """Goal: words that set a lane's low half, high half or all of it to zero hide no words before or after them."""
    rows = []
    for mask in (0xFFFFFFFF, 0xFFFFFFFF00000000, simplehash.ALL):
        for before, after in ((0, 0), (1, 0), (0, 1), (1 << 63, 0), (0, 1 << 63), (1 << 32, 0), (0, 1 << 32)):
            row = np.zeros(3 * 32, np.uint64)
            for lane in range(32):
                row[lane] = before
                row[32 + lane] = simplehash.step(SEEDS[lane], 0) & mask
                row[64 + lane] = after
            rows.append(row)

    assert_distinct(digests_of(np.array(rows)))


def test_one_step_spreads_a_flipped_bit() -> None:
    """Goal: the effect of one bit on its lane cannot be undone by one or two bits of the next word."""
    source = random.Random(8)
    traces = []
    for _ in range(200):
        lane, word = source.getrandbits(64), source.getrandbits(64)
        plain = simplehash.step(lane, word)
        traces += [(plain ^ simplehash.step(lane, word ^ 1 << bit)).bit_count() for bit in range(64)]

    assert min(traces) > 8
    assert 24 < sum(traces) / len(traces) < 28


# --- Statistics ---------------------------------------------------------------------------------------------------


def flips_by_bit(nbytes: int, bit: int, samples: int) -> Array:
    """Return how often each bit of the digest changes with one bit of random data."""
    rows = np.frombuffer(bytearray(random.Random(bit).randbytes(nbytes * samples)), np.uint8).reshape(samples, nbytes)
    before = digests_of(rows)
    rows[:, bit // 8] ^= np.uint8(1 << bit % 8)
    changed = (before ^ digests_of(rows)).view(np.uint8).reshape(samples, 8)
    return np.asarray(np.unpackbits(changed, axis=1, bitorder="little").mean(axis=0))


@pytest.mark.parametrize("nbytes", [8, ROW_BYTES + 40])
def test_a_flipped_bit_flips_half_of_the_digest(nbytes: int) -> None:
    """Goal: each bit of the digest changes with probability 1/2 for each bit of the data."""
    samples = 1000
    bits = range(64) if nbytes == 8 else random.Random(7).sample(range(8 * nbytes), 48)
    table = np.array([flips_by_bit(nbytes, bit, samples) for bit in bits])

    deviation = 0.5 / samples**0.5
    assert abs(table - 0.5).max() < 6 * deviation
    assert abs(table.mean() - 0.5) < 6 * deviation / table.size**0.5
    assert 0.8 < table.std() / deviation < 1.2


def test_digests_of_a_sequence_look_random() -> None:
    """Goal: every bit of the digests of 0, 1, 2, ... is set half of the time, and so is every change to the next."""
    found = digests_of(np.arange(50_000, dtype=np.uint64)[:, None].copy())
    bits = np.unpackbits(found.view(np.uint8).reshape(-1, 8), axis=1)
    changes = np.unpackbits((found[1:] ^ found[:-1]).view(np.uint8).reshape(-1, 8), axis=1)

    for table in (bits, changes):
        assert abs(table.mean(axis=0) - 0.5).max() < 6 * 0.5 / len(table) ** 0.5
