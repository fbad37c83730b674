"""The manifest of a shared state: its keys in order, the digests of their content, and their locations in memory.

A training process writes the manifest of its state when peers differ; its actor reads it. A source sends its manifest
without the locations to the peers that fetch from it. The bytes are, in little-endian order:

    header   magic, number of keys, bytes of all names, number of all blocks
    rows     for each key, sorted by name: length of the name, datatype, inequality flag, bytes, digest, segment, offset
    names    UTF-8, one after the other
    blocks   the digest of every block of STATE_BLOCK_BYTES, key by key

A manifest may come from another host, so every number is checked against the bytes before it is used: the total length
follows from the header, and no allocation is larger than the received bytes. Pure: bytes in, records out.
"""

from __future__ import annotations

import struct

from pccl._core.kernels.digest import DIGEST_BYTES, STATE_BLOCK_BYTES, digest_of_blocks
from pccl._core.records import record, replace
from pccl.options import KEY_BYTES_MAX, KEYS_MAX

from .state_schema import SchemaRow, digest_content, digest_schema, pack_schema

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

MAGIC = b"pcclDESC"
HEADER = struct.Struct("<8sIIQ")
ROW = struct.Struct("<HBBQQIQ")
RUN_BLOCKS_MAX = 16  # blocks of one unit: 4 MiB take longer than many round trips, and are soon fetched again


class ManifestError(ValueError):
    """The bytes are no manifest; the text says why."""


@record
class Row:
    """One key of a state."""

    name: str
    datatype: int  # the number of a DataType
    unequal: bool  # peers may differ in it (allow_content_inequality)
    nbytes: int
    digest: int
    segment: int  # of shared memory; 0: only the training process can reach it, through the window
    offset: int
    blocks: bytes  # the digests of its blocks


class StateManifest:
    """A manifest, parsed from its bytes."""

    def __init__(self, buffer: Buffer) -> None:
        """Parse all of it, or raise ManifestError."""
        data = memoryview(buffer).cast("B")
        if len(data) < HEADER.size:
            raise ManifestError(f"{len(data)} bytes are less than a header")
        magic, keys, name_bytes, blocks = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise ManifestError("it does not begin with the magic bytes of a manifest")
        if not 1 <= keys <= KEYS_MAX:
            raise ManifestError(f"{keys} keys; 1 to {KEYS_MAX} are allowed")
        names_at = HEADER.size + keys * ROW.size
        blocks_at = names_at + name_bytes
        if blocks_at + blocks * DIGEST_BYTES != len(data):
            raise ManifestError(f"{len(data)} bytes, but {keys} keys and {blocks} blocks were announced")
        rows = ROW.iter_unpack(data[HEADER.size : names_at])
        self.rows = list(_rows(rows, data[names_at:blocks_at], data[blocks_at:]))

    def blocks(self, index: int) -> bytes:
        """The digests of all blocks of a key."""
        return self.rows[index].blocks

    def without_locations(self) -> bytes:
        """Pack the manifest without its locations, for other peers."""
        return pack_manifest([replace(row, segment=0, offset=0) for row in self.rows])

    def schema(self) -> bytes:
        """Pack what must be the same at all peers: names, datatypes, sizes and inequality flags."""
        return pack_schema([SchemaRow(row.name, row.datatype, row.unequal, row.nbytes) for row in self.rows])

    def schema_digest(self) -> bytes:
        """16 bytes that stand for the schema."""
        return digest_schema(self.schema())

    def content_digest(self) -> bytes:
        """16 bytes that stand for everything that peers compare."""
        digests = b"".join(row.digest.to_bytes(DIGEST_BYTES, "little") for row in self.rows)
        return digest_content(digests, [not row.unequal for row in self.rows])


def pack_manifest(rows: Sequence[Row]) -> bytes:
    """The bytes of a manifest; the rows are sorted by name."""
    names = [row.name.encode() for row in rows]
    parts = [HEADER.pack(MAGIC, len(rows), sum(map(len, names)), sum(block_count(row.nbytes) for row in rows))]
    for row, name in zip(rows, names, strict=True):
        if len(row.blocks) != block_count(row.nbytes) * DIGEST_BYTES:
            raise ValueError(f"{row.name!r} has {row.nbytes} bytes, but {len(row.blocks)} bytes of block digests")
        parts.append(ROW.pack(len(name), row.datatype, row.unequal, row.nbytes, row.digest, row.segment, row.offset))
    return b"".join([*parts, *names, *(row.blocks for row in rows)])


def block_count(nbytes: int) -> int:
    """The number of blocks in a tensor of `nbytes` bytes; the last one may be short."""
    return -(-nbytes // STATE_BLOCK_BYTES)


def run_bytes(nbytes: int, first: int, count: int) -> int:
    """The number of bytes in `count` adjacent blocks of a tensor of `nbytes` bytes."""
    return min(nbytes, (first + count) * STATE_BLOCK_BYTES) - first * STATE_BLOCK_BYTES


def differing_runs(blocks: bytes | bytearray, others: bytes) -> Iterator[tuple[int, int]]:
    """Yield (first block, number of blocks) of each run of adjacent blocks that differ, at most a unit long."""
    ours, theirs = memoryview(blocks).cast("Q"), memoryview(others).cast("Q")
    for begin in range(0, len(ours), RUN_BLOCKS_MAX):
        end = min(begin + RUN_BLOCKS_MAX, len(ours))
        first = -1
        # No run crosses a multiple of RUN_BLOCKS_MAX, so that equal blocks are skipped with one comparison.
        if blocks[begin * DIGEST_BYTES : end * DIGEST_BYTES] != others[begin * DIGEST_BYTES : end * DIGEST_BYTES]:
            for block in range(begin, end):
                if ours[block] == theirs[block]:
                    if first >= 0:
                        yield first, block - first
                    first = -1
                elif first < 0:
                    first = block
            if first >= 0:
                yield first, end - first


def check_manifest(manifest: StateManifest, own: StateManifest, content: bytes) -> str:
    """Return why this manifest is not that of the elected state; empty if it is. `content` is the elected digest."""
    if len(manifest.rows) != len(own.rows):
        return f"its manifest has {len(manifest.rows)} keys instead of {len(own.rows)}"
    for theirs, ours in zip(manifest.rows, own.rows, strict=True):
        if _schema_of(theirs) != _schema_of(ours):
            return f"its key {theirs.name!r} is not our {ours.name!r}, or of another datatype, size or inequality flag"
        # Blocks that differ are fetched. If the digests are equal, none may differ, which is cheaper to see.
        is_sound = (
            theirs.blocks == ours.blocks
            if theirs.digest == ours.digest
            else digest_of_blocks(theirs.blocks, theirs.nbytes) == theirs.digest
        )
        if not is_sound:
            return f"the blocks of its key {theirs.name!r} do not add up to its digest"
    if manifest.content_digest() != content:
        return "it has another content than the elected one"
    return ""


def _schema_of(row: Row) -> tuple[str, int, bool, int]:
    return row.name, row.datatype, row.unequal, row.nbytes


def _rows(rows: Iterator[tuple[int, ...]], names: memoryview, digests: memoryview) -> Iterator[Row]:
    named = counted = 0
    last = b""
    for index, (length, datatype, unequal, nbytes, digest, segment, offset) in enumerate(rows):
        name = bytes(names[named : named + length])
        named += length
        blocks = block_count(nbytes) * DIGEST_BYTES
        if length > KEY_BYTES_MAX or len(name) != length or (index and name <= last):
            raise ManifestError(f"the name of key {index} is too long, cut off, or out of order")
        if unequal > 1 or blocks > len(digests) - counted:
            raise ManifestError(f"key {index} has a wrong flag, or more blocks than there are")
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise ManifestError(f"the name of key {index} is not UTF-8") from None
        yield Row(
            *(text, datatype, bool(unequal), nbytes, digest, segment, offset),
            bytes(digests[counted : counted + blocks]),
        )
        counted += blocks
        last = name
    if named != len(names) or counted != len(digests):
        raise ManifestError("there are more names or blocks than keys have")
