"""simplehash in plain Python: docs/simplehash.md line by line, slow, and independent of the C code."""

from __future__ import annotations

LANES, TILE_BYTES, BLOCK_BYTES = 32, 1 << 15, 1 << 18
ROW_BYTES = 8 * LANES

ALL = (1 << 64) - 1
LOW_FACTOR, HIGH_FACTOR = 0x9E3779B9, 0xBB67AE85
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def finish(value: int) -> int:
    """Spread every bit over all bits of the value."""
    value = (value ^ value >> 30) * FIRST_FACTOR & ALL
    value = (value ^ value >> 27) * SECOND_FACTOR & ALL
    return value ^ value >> 31


SEEDS = [finish((lane + 1) * GOLDEN & ALL) for lane in range(LANES)]


def step(lane: int, word: int) -> int:
    """Mix a word into a lane."""
    high, low = divmod(lane ^ word, 1 << 32)
    high, low = divmod(low * LOW_FACTOR + (high << 32) & ALL, 1 << 32)
    return high * HIGH_FACTOR + (low << 32) & ALL


def combine(left: int, right: int) -> int:
    """Combine two digests into one."""
    product = right * FIRST_FACTOR & ALL
    mixed = (left ^ (product << 32 & ALL | product >> 32)) * SECOND_FACTOR & ALL
    return mixed ^ mixed >> 32


def fold(pieces: list[int], nbytes: int) -> int:
    """Combine digests of consecutive parts into the digest of the whole."""
    folded = GOLDEN
    for piece in pieces:
        folded = combine(folded, piece)
    return finish(folded ^ nbytes * GOLDEN & ALL)


def tile_digest(data: bytes) -> int:
    """Return the digest of a tile: mix rows into lanes, then combine the lanes in a tree."""
    lanes = list(SEEDS)
    for begin in range(0, len(data), ROW_BYTES):
        row = data[begin : begin + ROW_BYTES].ljust(ROW_BYTES, b"\0")
        for lane in range(LANES):
            lanes[lane] = step(lanes[lane], int.from_bytes(row[8 * lane : 8 * lane + 8], "little"))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [combine(lanes[lane], lanes[lane + half]) for lane in range(half)]
    return lanes[0]


def pieces(data: bytes, nbytes: int) -> list[bytes]:
    """Cut into parts of this many bytes; the last may be shorter."""
    return [data[begin : begin + nbytes] for begin in range(0, len(data), nbytes)]


def block_digest(data: bytes) -> int:
    """Return the digest of a block of up to 256 KiB."""
    return fold([tile_digest(tile) for tile in pieces(data, TILE_BYTES)], len(data))


def digest(data: bytes) -> int:
    """Return the digest of any number of bytes."""
    return fold([block_digest(block) for block in pieces(data, BLOCK_BYTES)], len(data))
