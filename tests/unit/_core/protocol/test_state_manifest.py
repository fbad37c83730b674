"""Manifests: they are decoded as they were encoded, and every field of a received one is checked."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from pccl._core.kernels.digest import STATE_BLOCK_BYTES as BLOCK
from pccl._core.protocol.state_manifest import (
    HEADER,
    ROW,
    RUN_BLOCKS_MAX,
    ManifestError,
    Row,
    StateManifest,
    block_count,
    check_manifest,
    differing_runs,
    pack_manifest,
    run_bytes,
)
from pccl._core.protocol.state_schema import digest_content, unpack_schema
from pccl._core.records import replace

from .manifests import describe, row

STATE = (row("", 1), row("bias", 7, nbytes=3), row("empty"), row("ünicode", 1, 2, nbytes=BLOCK + 1, unequal=True))


def test_what_was_written_comes_back() -> None:
    placed = [replace(one, segment=index, offset=index << 33) for index, one in enumerate(STATE)]
    assert StateManifest(pack_manifest(placed)).rows == placed


def test_a_table_tells_nothing_of_places_in_memory() -> None:
    placed = [replace(one, segment=3, offset=99) for one in STATE]
    assert StateManifest(StateManifest(pack_manifest(placed)).without_locations()).rows == list(STATE)


def test_the_layout_is_the_same_whatever_the_content() -> None:
    one, other = describe(row("a", 1)), describe(row("a", 2))
    assert one.schema_digest() == other.schema_digest()
    assert one.content_digest() != other.content_digest()
    assert [(found.name, found.datatype, found.nbytes) for found in unpack_schema(one.schema())] == [("a", 10, BLOCK)]


def test_what_may_differ_is_not_compared() -> None:
    one, other = describe(row("a", 1), row("b", 1, unequal=True)), describe(row("a", 1), row("b", 2, unequal=True))
    assert one.content_digest() == other.content_digest()
    assert one.content_digest() == describe(row("a", 1)).content_digest()


def test_a_manifest_and_a_vote_have_the_same_content_digest() -> None:
    """Goal: the elected digest, which comes from a vote, is that of the manifests of its sources."""
    digests = b"".join(one.digest.to_bytes(8, "little") for one in STATE)
    assert describe(*STATE).content_digest() == digest_content(digests, (True, True, True, False))
    assert describe(*STATE[:3]).content_digest() == digest_content(digests[:24], (True, True, True))


def test_blocks_must_fit_the_tensor() -> None:
    with pytest.raises(ValueError, match="block digests"):
        pack_manifest([replace(row("a", 1), blocks=b"")])


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK - 3])
def test_runs_cover_a_tensor(nbytes: int) -> None:
    count = block_count(nbytes)
    assert sum(run_bytes(nbytes, first, 1) for first in range(count)) == nbytes
    assert not count or run_bytes(nbytes, 0, count) == nbytes


# ---------------------------------------------------------------------------------------------- what differs


def test_runs_of_blocks_that_differ() -> None:
    """Goal: exactly the blocks that differ, in runs that are as long as possible."""
    random = Random(3)
    for _ in range(200):
        ours = [random.randrange(2) for _ in range(random.randrange(60))]
        theirs = [random.randrange(2) for _ in ours]
        packed = [b"".join(value.to_bytes(8, "little") for value in values) for values in (ours, theirs)]
        runs = list(differing_runs(*packed))
        found = [block for first, count in runs for block in range(first, first + count)]
        assert found == [block for block, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
        assert all(1 <= count <= RUN_BLOCKS_MAX for _, count in runs)


def test_a_tensor_that_differs_throughout_is_cut_into_the_largest_units() -> None:
    assert list(differing_runs(bytes(8 * 40), b"\1" * 8 * 40)) == [(0, 16), (16, 16), (32, 8)]


# ---------------------------------------------------------------------------------------------- nothing is believed


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="cut off"),
        pytest.param(lambda data: data + b"\0", id="too long"),
        pytest.param(lambda data: data[: HEADER.size - 1], id="half a header"),
        pytest.param(lambda data: b"q" + data[1:], id="another beginning"),
        pytest.param(lambda data: patched(data, 8, b"\xff\xff\xff\xff"), id="four billion keys"),
        pytest.param(lambda data: patched(data, 8, b"\0\0\0\0"), id="no keys"),
        pytest.param(lambda data: patched(data, 16, b"\xff" * 8), id="endless blocks"),
        pytest.param(lambda data: patched(data, HEADER.size, b"\xff\xff"), id="a name longer than allowed"),
        pytest.param(lambda data: patched(data, HEADER.size + ROW.size, b"\x05"), id="a name longer than told"),
        pytest.param(lambda data: patched(data, HEADER.size + 3, b"\2"), id="a flag that is none"),
        pytest.param(lambda data: patched(data, HEADER.size + 4, b"\xff" * 8), id="a tensor larger than the world"),
        pytest.param(lambda data: patched(data, HEADER.size + 4, bytes(8)), id="a tensor smaller than its blocks"),
        pytest.param(lambda data: patched(data, HEADER.size + 4 * ROW.size, b"z"), id="names out of order"),
        pytest.param(lambda data: patched(data, HEADER.size + 4 * ROW.size + 9, b"\xff"), id="a name that is no text"),
    ],
)
def test_damage_is_an_error_and_nothing_else(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ManifestError):
        StateManifest(damage(pack_manifest(STATE)))


def patched(data: bytes, at: int, patch: bytes) -> bytes:
    return data[:at] + patch + data[at + len(patch) :]


def test_flipped_bits_never_do_more_than_raise() -> None:
    """Goal: reading a damaged manifest ends with rows or with the one error."""
    data, random = pack_manifest(STATE), Random(5)
    for _ in range(3000):
        broken = bytearray(data)
        for _ in range(random.randrange(1, 4)):
            broken[random.randrange(len(broken))] ^= 1 << random.randrange(8)
        try:
            assert len(StateManifest(broken).rows) == len(STATE)
        except ManifestError:
            pass


OWN = (row("a", 1, 2), row("b", 3), row("c", 4, unequal=True))
ELECTED = (row("a", 1, 5), row("b", 3), row("c", 6, unequal=True))


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (ELECTED, ""),
        (ELECTED[:2], "has 2 keys instead of 3"),
        ((*ELECTED[:2], row("d", 6, unequal=True)), "'d' is not our 'c'"),
        ((*ELECTED[:2], row("c", 6)), "'c' is not our 'c', or of another"),
        ((row("a", 1, 5, nbytes=BLOCK + 1), *ELECTED[1:]), "another datatype, size"),
        ((replace(ELECTED[0], datatype=9), *ELECTED[1:]), "another datatype, size"),
        ((row("a", 1, 9), *ELECTED[1:]), "another content than the elected one"),
        ((replace(ELECTED[0], blocks=row("a", 1, 9).blocks), *ELECTED[1:]), "blocks of its key 'a' do not add up"),
        ((*ELECTED[:2], replace(ELECTED[2], blocks=row("c", 9).blocks)), "blocks of its key 'c' do not add up"),
        ((ELECTED[0], replace(ELECTED[1], blocks=row("b", 9).blocks), ELECTED[2]), "blocks of its key 'b' do not"),
        ((*ELECTED[:2], replace(OWN[2], blocks=row("c", 9).blocks)), "blocks of its key 'c' do not add up"),
        ((*ELECTED[:2], row("c", 8, unequal=True)), ""),
    ],
)
def test_only_the_table_of_the_elected_state_will_do(rows: tuple[Row, ...], complaint: str) -> None:
    found = check_manifest(describe(*rows), describe(*OWN), describe(*ELECTED).content_digest())
    assert complaint in found
    assert bool(complaint) == bool(found)
