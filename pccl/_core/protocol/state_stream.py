"""The messages on a link of a transfer, after the handshake: unit requests and their answers.

The fetching side sends unit requests, the source answers them in the same order. Both have one fixed header; an answer
repeats the request, and its bytes follow raw:

    request   magic, kind, key, first block, number of blocks
    answer    magic, kind, key, first block, number of blocks, bytes that follow

A request for the manifest has zeros as key and blocks. Both sides know the schema, so both know how many bytes an
answer has before it arrives: an answer of another size ends the connection. This module also has the commands that a
fetching worker gets from its actor: units with the digests that their blocks must have. Pure.
"""

from __future__ import annotations

import struct

from pccl._core.kernels.digest import DIGEST_BYTES
from pccl._core.records import record

from .codec import BLOB_BYTES_MAX
from .state_manifest import RUN_BLOCKS_MAX, block_count, run_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .state_manifest import StateManifest

MAGIC = 0x31545350  # "PST1"
MANIFEST = 1  # all digests, without the content
UNIT = 2  # adjacent blocks of one key

REQUEST = struct.Struct("<IIIII")
ANSWER = struct.Struct("<IIIIIQ")
_ORDER = struct.Struct("<III")


@record
class Unit:
    """A run of adjacent blocks of one key."""

    key: int
    first: int
    count: int
    nbytes: int


class StateLinkError(ValueError):
    """The other side sent a request or an answer that is not allowed."""


@record
class UnitRequest:
    """A request for the manifest, or for `count` blocks of a key from block `first` on."""

    kind: int
    key: int = 0
    first: int = 0
    count: int = 0


ASK_MANIFEST = UnitRequest(MANIFEST)


def pack_request(request: UnitRequest) -> bytes:
    """The bytes of a unit request."""
    return REQUEST.pack(MAGIC, request.kind, request.key, request.first, request.count)


def unpack_request(data: bytes, manifest: StateManifest) -> UnitRequest:
    """Return the unit request. Raises StateLinkError if it cannot be answered from this manifest."""
    magic, kind, key, first, count = REQUEST.unpack(data)
    request = UnitRequest(kind, key, first, count)
    if magic != MAGIC:
        raise StateLinkError("its request does not begin with the magic number of state links")
    if request == ASK_MANIFEST:
        return request
    if kind != UNIT:
        raise StateLinkError(f"it asked for kind {kind}, which does not exist")
    if key >= len(manifest.rows):
        raise StateLinkError(f"it asked for key {key} of {len(manifest.rows)}")
    blocks = block_count(manifest.rows[key].nbytes)
    if not 1 <= count <= RUN_BLOCKS_MAX or first + count > blocks:
        raise StateLinkError(f"it asked for {count} blocks from {first} on, of a key that has {blocks}")
    return request


def pack_answer(request: UnitRequest, nbytes: int) -> bytes:
    """The header of an answer, which precedes the requested bytes."""
    return ANSWER.pack(MAGIC, request.kind, request.key, request.first, request.count, nbytes)


def check_answer(data: bytes, request: UnitRequest, nbytes: int) -> None:
    """Raise StateLinkError unless this is the header of the answer to the request, with `nbytes` bytes to follow."""
    magic, kind, key, first, count, announced = ANSWER.unpack(data)
    if magic != MAGIC or UnitRequest(kind, key, first, count) != request:
        raise StateLinkError("it answered something else than it was asked for")
    if announced != nbytes:
        raise StateLinkError(f"it announced {announced} bytes, where {nbytes} belong")


@record
class Wanted:
    """A unit that a worker is to fetch: the request, its bytes, and the digests of its blocks."""

    request: UnitRequest
    nbytes: int
    digests: bytes


def pack_orders(units: Iterable[Unit], manifest: StateManifest) -> list[bytes]:
    """Pack units for a fetching worker, into as many blobs as needed."""
    blobs = [bytearray()]
    for unit in units:
        digests = manifest.blocks(unit.key)[unit.first * DIGEST_BYTES : (unit.first + unit.count) * DIGEST_BYTES]
        if len(blobs[-1]) + _ORDER.size + len(digests) > BLOB_BYTES_MAX:
            blobs.append(bytearray())
        blobs[-1] += _ORDER.pack(unit.key, unit.first, unit.count) + digests
    return [bytes(blob) for blob in blobs if blob]


def unpack_orders(blob: bytes, own: StateManifest) -> Iterator[Wanted]:
    """The inverse of one blob of `pack_orders`."""
    offset = 0
    while offset < len(blob):
        key, first, count = _ORDER.unpack_from(blob, offset)
        offset += _ORDER.size
        digests = blob[offset : offset + count * DIGEST_BYTES]
        offset += len(digests)
        yield Wanted(UnitRequest(UNIT, key, first, count), run_bytes(own.rows[key].nbytes, first, count), digests)
