"""Schemas and lists of sources as bytes: one form, bounds that hold for any sender, and differences that are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl._core.protocol.codec import BLOB_BYTES_MAX
from pccl._core.protocol.sources import SOURCES_MAX, Source, pack_sources, unpack_sources
from pccl._core.protocol.state_schema import (
    PAGES_MAX,
    SchemaRow,
    digest_schema,
    explain_difference,
    pack_schema,
    split_schema,
    unpack_schema,
)
from pccl.options import KEY_BYTES_MAX, KEYS_MAX, SCHEMA_BYTES_MAX

WEIGHT, BIAS, SEED = SchemaRow("weight", 10, False, 64), SchemaRow("bias", 10, False, 16), SchemaRow("seed", 7, True, 8)
SCHEMA = pack_schema([WEIGHT, BIAS, SEED])

ROWS = st.builds(
    SchemaRow,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.integers(0, 255),
    st.booleans(),
    st.integers(0, 2**64 - 1),
)


@given(st.lists(ROWS, min_size=1, max_size=20, unique_by=lambda row: row.name))
def test_a_schema_has_one_form(rows: list[SchemaRow]) -> None:
    """Goal: the order in which tensors are given does not matter, and unpacking returns them all."""
    packed = pack_schema(rows)

    assert pack_schema(reversed(rows)) == packed
    assert unpack_schema(packed) == sorted(rows, key=lambda row: row.name.encode())
    assert b"".join(split_schema(packed)) == packed


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "1 to 65536 tensors, not 0"),
        ([WEIGHT] * 2, "two tensors of the shared state are called 'weight'"),
        ([SchemaRow("ä" * 257, 10, False, 1)], "has 514 bytes, at most 512"),
        ([SchemaRow(f"{n:0500}", 10, False, 1) for n in range(13_000)], "at most 6291456 are allowed"),
    ],
)
def test_what_cannot_be_a_schema_is_said_where_it_is_made(rows: list[SchemaRow], reason: str) -> None:
    """Goal: a state that could not be compared is refused in the caller's own process."""
    with pytest.raises(ValueError, match=reason):
        pack_schema(rows)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "1 to 6291456 bytes, not 0"),
        (bytes(SCHEMA_BYTES_MAX + 1), "not 6291457"),
        (SCHEMA[:-1], "row 2 of a schema is damaged"),
        (SCHEMA[:5], "row 0 of a schema is cut off"),
        (SCHEMA[:3] + b"\2" + SCHEMA[4:], "row 0 of a schema is damaged"),
        (pack_schema([WEIGHT]) + pack_schema([BIAS]), "row 1 of a schema is out of order"),
        (pack_schema([WEIGHT]) * 2, "row 1 of a schema is out of order"),
        (SCHEMA.replace(b"bias", b"bi\xff\xfe"), "can't decode"),
        ((KEY_BYTES_MAX + 1).to_bytes(2, "little") + bytes(10 + KEY_BYTES_MAX + 1), "row 0 of a schema is damaged"),
    ],
)
def test_what_is_no_schema_is_refused(blob: bytes, reason: str) -> None:
    """Goal: any bytes that a peer sends as its schema are parsed, or refused with the reason."""
    with pytest.raises(ValueError, match=reason):
        unpack_schema(blob)


def test_the_largest_schema_fits_into_its_pages() -> None:
    """Goal: the bounds fit each other: as many keys as allowed, with names of a sensible length."""
    packed = pack_schema(
        SchemaRow(f"layers.{n:05}.attention.projection.weight", 10, False, 1 << 30) for n in range(KEYS_MAX)
    )

    assert len(unpack_schema(packed)) == KEYS_MAX
    assert len(split_schema(packed)) <= PAGES_MAX
    assert all(len(page) <= BLOB_BYTES_MAX for page in split_schema(packed))


@pytest.mark.parametrize(
    ("rows", "difference"),
    [
        ([WEIGHT, BIAS, SEED], ""),
        ([WEIGHT, SEED], "'bias' is missing: it should be FLOAT, 16 bytes"),
        ([WEIGHT, BIAS, SEED, SchemaRow("extra", 0, False, 1)], "'extra' (UINT8, 1 bytes) is not in the shared state"),
        ([WEIGHT, SchemaRow("bias", 8, False, 16), SEED], "'bias' is FLOAT16, 16 bytes: it should be FLOAT, 16 bytes"),
        ([SchemaRow("weight", 10, False, 640), BIAS, SEED], "'weight' is FLOAT, 640 bytes: it should be FLOAT, 64"),
        (
            [WEIGHT, BIAS, SchemaRow("seed", 7, False, 8)],
            "'seed' is INT64, 8 bytes: it should be INT64, 8 bytes, allow_content_inequality",
        ),
        ([WEIGHT, BIAS, SchemaRow("seed", 99, True, 8)], "'seed' is datatype 99, 8 bytes, allow_content_inequality"),
    ],
    ids=["none", "missing", "extra", "datatype", "size", "flag", "unknown"],
)
def test_a_difference_names_its_key(rows: list[SchemaRow], difference: str) -> None:
    """Goal: a user reads which tensor is wrong, and how."""
    other = pack_schema(rows)

    assert explain_difference(SCHEMA, other).startswith(difference)
    assert (digest_schema(SCHEMA) == digest_schema(other)) == (difference == "")


@given(st.lists(st.builds(Source, st.integers(0, 2**64 - 1), st.text("abc:.0", max_size=40), st.integers(0, 65535))))
def test_sources_survive_the_way(sources: list[Source]) -> None:
    """Goal: the first sources arrive in their order, as many as a receiver can use."""
    if sources:
        assert unpack_sources(pack_sources(sources)) == tuple(sources[:SOURCES_MAX])


def test_long_hosts_leave_room_for_fewer_sources() -> None:
    """Goal: a list never grows beyond what a message can carry."""
    packed = pack_sources([Source(1, "h" * 700, 1)] * 64)

    assert len(packed) <= BLOB_BYTES_MAX
    assert len(unpack_sources(packed)) == BLOB_BYTES_MAX // 712


@pytest.mark.parametrize(
    "blob", [b"", b"\1" * 5, pack_sources([Source(1, "host", 1)])[:-1], pack_sources([Source(1, "", 1)]) * 65]
)
def test_what_is_no_list_of_sources_is_refused(blob: bytes) -> None:
    """Goal: a peer refuses a malformed list of the master."""
    with pytest.raises(ValueError, match="sources"):
        unpack_sources(blob)
