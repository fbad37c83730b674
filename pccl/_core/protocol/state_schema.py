"""The schema of a shared state: the names, datatypes, sizes and flags of its tensors, without content.

Peers can only agree on content if their schemas are equal, so a schema has one form: rows sorted by name, packed one
after the other, little endian. Equal schemas are equal bytes and have equal digests; most of the time only the digest
travels. When digests differ the master asks for the rows, in pages, and names the first key that differs.

Bytes of another process are checked before they are used: bounds, text, order. A leaf: pure, imports no I/O.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from pccl._core.kernels.digest import DIGEST_BYTES
from pccl._core.records import record
from pccl.options import KEY_BYTES_MAX, KEYS_MAX, SCHEMA_BYTES_MAX

from .codec import BLOB_BYTES_MAX
from .operations import DATATYPES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROW = struct.Struct("<HBBQ")  # bytes of the name, datatype, flag, bytes of the content; the name follows
STATE_DIGEST_BYTES = 16  # of a schema or a content: enough that two different ones never have equal digests by chance
PAGES_MAX = -(-SCHEMA_BYTES_MAX // BLOB_BYTES_MAX)  # of one schema


@record
class SchemaRow:
    """One tensor, as all peers must have it."""

    name: str
    datatype: int
    unequal: bool  # its content may differ between peers
    nbytes: int

    def __str__(self) -> str:
        datatype = DATATYPES[self.datatype] if self.datatype < len(DATATYPES) else f"datatype {self.datatype}"
        flag = ", allow_content_inequality" if self.unequal else ""
        return f"{datatype}, {self.nbytes:,} bytes{flag}"


def pack_schema(rows: Iterable[SchemaRow]) -> bytes:
    """Pack a schema. Raises ValueError if a name is repeated or too long, or if there are too many."""
    ordered = sorted(rows, key=lambda row: row.name.encode())
    if not 1 <= len(ordered) <= KEYS_MAX:
        raise ValueError(f"a shared state has 1 to {KEYS_MAX} tensors, not {len(ordered)}")
    parts = []
    previous = None
    for row in ordered:
        name = row.name.encode()
        if len(name) > KEY_BYTES_MAX:
            raise ValueError(
                f"the name {row.name[:40]!r}... has {len(name)} bytes, at most {KEY_BYTES_MAX} are allowed"
            )
        if name == previous:
            raise ValueError(f"two tensors of the shared state are called {row.name!r}")
        previous = name
        parts.append(_ROW.pack(len(name), row.datatype, row.unequal, row.nbytes) + name)
    packed = b"".join(parts)
    if len(packed) > SCHEMA_BYTES_MAX:
        raise ValueError(
            f"the names of the shared state take {len(packed)} bytes, at most {SCHEMA_BYTES_MAX} are allowed"
        )
    return packed


def unpack_schema(blob: bytes) -> list[SchemaRow]:
    """The inverse of `pack_schema`. Raises ValueError if the bytes are no schema."""
    if not 1 <= len(blob) <= SCHEMA_BYTES_MAX:
        raise ValueError(f"a schema has 1 to {SCHEMA_BYTES_MAX} bytes, not {len(blob)}")
    rows: list[SchemaRow] = []
    offset = 0
    previous = None
    while offset < len(blob):
        if len(rows) == KEYS_MAX:
            raise ValueError(f"a schema of more than {KEYS_MAX} rows")
        try:
            size, datatype, unequal, nbytes = _ROW.unpack_from(blob, offset)
        except struct.error:
            raise ValueError(f"row {len(rows)} of a schema is cut off") from None
        offset += _ROW.size
        name = blob[offset : offset + size]
        offset += size
        if len(name) != size or size > KEY_BYTES_MAX or unequal > 1:
            raise ValueError(f"row {len(rows)} of a schema is damaged")
        if previous is not None and name <= previous:
            raise ValueError(f"row {len(rows)} of a schema is out of order")
        previous = name
        rows.append(SchemaRow(name.decode(), datatype, bool(unequal), nbytes))
    return rows


def digest_schema(packed: bytes) -> bytes:
    """The digest of a schema, for a vote."""
    return blake2b(packed, digest_size=STATE_DIGEST_BYTES).digest()


def digest_content(digests: bytes, compared: Sequence[bool]) -> bytes:
    """The digest of a content, for a vote: over the digests of all tensors in order, without those that may differ."""
    if not all(compared):
        each = (digests[begin : begin + DIGEST_BYTES] for begin in range(0, len(digests), DIGEST_BYTES))
        digests = b"".join(digest for digest, is_compared in zip(each, compared, strict=True) if is_compared)
    return blake2b(digests, digest_size=STATE_DIGEST_BYTES).digest()


def split_schema(packed: bytes) -> list[bytes]:
    """Cut a packed schema into the pages of its messages."""
    return [packed[offset : offset + BLOB_BYTES_MAX] for offset in range(0, len(packed), BLOB_BYTES_MAX)]


def explain_difference(schema: bytes, other: bytes) -> str:
    """Return the first key in which `other` differs from `schema`, and how; empty: none. Raises as `unpack_schema`."""
    wanted = {row.name: row for row in unpack_schema(schema)}
    given = {row.name: row for row in unpack_schema(other)}
    for name in sorted(wanted.keys() | given.keys(), key=str.encode):
        if name not in given:
            return f"{name!r} is missing: it should be {wanted[name]}"
        if name not in wanted:
            return f"{name!r} ({given[name]}) is not in the shared state of the others"
        if wanted[name] != given[name]:
            return f"{name!r} is {given[name]}: it should be {wanted[name]}"
    return ""
