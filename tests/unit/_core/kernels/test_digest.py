"""Digests: every instruction set, any number of threads and any address give what the specification says.

The specification is simplehash.py in this folder, which is docs/simplehash.md in plain Python. The quality of the
digest is tested in test_digest_quality.py.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl._core.kernels import arithmetic, digest
from tests import ROOT
from tests.unit._core.dataplane.loopback import eventually

from . import simplehash
from .guard_pages import GuardedBytes

Array = np.ndarray[Any, Any]

ROW, TILE, BLOCK = simplehash.ROW_BYTES, simplehash.TILE_BYTES, simplehash.BLOCK_BYTES
SPECIFICATION = ROOT / "docs" / "simplehash.md"

# Lengths around every boundary: words, rows, tiles, blocks.
LENGTHS = sorted(
    {
        0,
        *range(18),
        *(border + near for border in (ROW, 5 * ROW, TILE, 3 * TILE, BLOCK) for near in (-9, -8, -1, 0, 1, 8)),
    }
)


@pytest.fixture(params=arithmetic.available())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    before = arithmetic.chosen()
    arithmetic.use(request.param)
    yield request.param
    arithmetic.use(before)


def place(data: bytes, offset: int = 0) -> Array:
    """Copy the bytes to memory at this offset from an aligned address, with other bytes before and after."""
    room = np.full(len(data) + 128, 0xA5, np.uint8)
    begin = -room.ctypes.data % 64 + offset
    room[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
    return room[begin : begin + len(data)]


def digest_of(data: bytes, offset: int = 0, threads: int = 1) -> int:
    placed = place(data, offset)
    return digest.digest(placed.ctypes.data, len(data), threads)


@cache
def sample(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


@cache
def expected(nbytes: int) -> int:
    return simplehash.digest(sample(nbytes))


def words(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<u8").tolist()


# --- What must come out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), re.findall(r"^\| `(.+?)` \| `([0-9a-f]{16})` \|$", SPECIFICATION.read_text(), re.MULTILINE)
)
def test_the_known_answers_hold(text: str, value: str) -> None:
    """Goal: both implementations give the known answers of the page for other implementations."""
    data = eval(text, {"bytes": bytes, "range": range})

    assert f"{digest_of(data):016x}" == value
    assert f"{simplehash.digest(data):016x}" == value


def test_the_page_has_known_answers() -> None:
    """Goal: the test above has cases."""
    assert len(re.findall(r"^\| `.+` \| `[0-9a-f]{16}` \|$", SPECIFICATION.read_text(), re.MULTILINE)) >= 8


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_every_length_is_as_specified(variant: str, nbytes: int) -> None:
    """Goal: all instruction sets agree with the reference, tails included."""
    assert digest_of(sample(nbytes)) == expected(nbytes)


@pytest.mark.parametrize("offset", range(1, 64, 3))
def test_every_address_is_as_good(variant: str, offset: int) -> None:
    """Goal: the digest does not depend on the address or on the bytes around."""
    for nbytes in (1, 100, 5 * ROW + 3, TILE + 9):
        assert digest_of(sample(nbytes), offset) == expected(nbytes)


@settings(max_examples=150)
@given(data=st.binary(max_size=3 * ROW), repeats=st.integers(1, 6), offset=st.integers(0, 15))
def test_random_buffers_agree(data: bytes, repeats: int, offset: int) -> None:
    """Goal: the reference and all instruction sets give the same digest for any bytes."""
    data *= repeats
    before = arithmetic.chosen()
    try:
        for name in arithmetic.available():
            arithmetic.use(name)
            assert digest_of(data, offset) == simplehash.digest(data), name
    finally:
        arithmetic.use(before)


def test_no_byte_beyond_is_read(variant: str) -> None:
    """Goal: buffers at the beginning or end of a mapping are read to their last byte and not beyond."""
    content = sample(2 * TILE)
    guarded = GuardedBytes(content)
    for nbytes in range(600):
        assert digest.digest(guarded.end - nbytes, nbytes) == digest_of(content[len(content) - nbytes :])
        assert digest.digest(guarded.begin, nbytes) == digest_of(content[:nbytes])


# --- Blocks and threads -------------------------------------------------------------------------------------------


def test_blocks_have_digests_of_their_own() -> None:
    """Goal: a block's digest depends only on its bytes, and the blocks' digests give the tensor's."""
    data = sample(2 * BLOCK + 1234)
    placed = place(data, 5)
    blocks = digest.block_digests(placed.ctypes.data, len(data), 1)

    assert words(blocks) == [simplehash.block_digest(piece) for piece in simplehash.pieces(data, BLOCK)]
    assert digest.digest_of_blocks(blocks, len(data)) == digest_of(data) == simplehash.digest(data)
    assert digest.digest_of_blocks(memoryview(b"\0" + blocks)[1:], len(data)) == digest_of(data)
    assert digest.STATE_BLOCK_BYTES == BLOCK


def test_nothing_has_no_blocks() -> None:
    """Goal: an empty tensor has a digest, and no address is needed for it."""
    assert digest.block_digests(0, 0, 4) == b""
    assert digest.digest(0, 0) == digest.digest_of_blocks(b"", 0) == simplehash.digest(b"")
    assert digest.digest_many([], [], 2) == b""


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 1000])
def test_threads_do_not_matter(variant: str, threads: int) -> None:
    """Goal: any number of threads gives the same digests, and no thread is left."""
    data = random.Random(3).randbytes(5 << 20) + b"rest"
    placed = place(data, 1)
    before = len(os.listdir("/proc/self/task"))

    found = digest.block_digests(placed.ctypes.data, len(data), threads)

    assert found == b"".join(
        digest.block_digests(placed[i:].ctypes.data, min(BLOCK, len(data) - i), 1) for i in range(0, len(data), BLOCK)
    )
    # The kernel reports the end of a thread a moment before it removes the thread from /proc.
    eventually(lambda: len(os.listdir("/proc/self/task")) == before, "the end of all threads")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_many_tensors_are_digested_at_once(threads: int) -> None:
    """Goal: each tensor gets its own digest, in order, whether empty, tiny, or larger than a thread's share."""
    source = random.Random(4)
    lengths = [0, 3 << 20, 1, 0, 0, BLOCK, BLOCK + 1, (1 << 20) - 1, *(source.randrange(3000) for _ in range(1000)), 0]
    tensors = [place(source.randbytes(nbytes), source.randrange(16)) for nbytes in lengths]

    found = digest.digest_many([tensor.ctypes.data for tensor in tensors], lengths, threads)

    assert words(found) == [digest.digest(tensor.ctypes.data, len(tensor)) for tensor in tensors]


def test_digests_run_side_by_side() -> None:
    """Goal: calls from several Python threads, each with threads of its own, do not disturb each other."""
    placed = place(random.Random(5).randbytes(4 << 20))
    wanted = digest.digest(placed.ctypes.data, len(placed))
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(digest.digest(placed.ctypes.data, len(placed), 3)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [wanted] * 4


def test_reading_adds_all_words() -> None:
    """Goal: the benchmark's reference for digests reads every byte too."""
    placed = place(sample(3 * BLOCK), 8)
    for threads in (1, 2):
        total = digest.read_only(placed.ctypes.data, len(placed), threads)
        assert total == int(np.frombuffer(placed.tobytes(), np.uint64).sum(dtype=np.uint64))


# --- Bad input ----------------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused() -> None:
    """Goal: a mistake of the caller is named before a byte is read."""
    with pytest.raises(ValueError, match="at least one thread; 0"):
        digest.digest(1, 8, 0)
    with pytest.raises(ValueError, match="at least one thread; -1"):
        digest.digest_many([1], [8], -1)
    with pytest.raises(ValueError, match="2 addresses come with 1 lengths"):
        digest.digest_many([1, 2], [8], 1)
    with pytest.raises(ValueError, match="262145 bytes have 2 block digests of 8 bytes; 8 bytes were given"):
        digest.digest_of_blocks(bytes(8), BLOCK + 1)
    with pytest.raises(OverflowError):
        digest.digest(1, -1)
    with pytest.raises(OverflowError):
        digest.digest_many([1, -2], [0, 0], 1)
    with pytest.raises(TypeError):
        digest.digest_many(["here"], [8], 1)  # type: ignore[list-item]
