"""The peers that a state can be fetched from, as the master names them to those who lack it.

A list of them is one blob: peer id, port, length of the host, host, one after the other. As many travel as fit, which
is more than a transfer can make use of; the order says whom to prefer. A leaf: pure.
"""

from __future__ import annotations

import struct

from pccl._core.records import record

from .codec import BLOB_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_SOURCE = struct.Struct("<QHH")  # peer, port, bytes of the host; the host follows
SOURCES_MAX = 64  # of one transfer: the links of a pool are shared out among them, and more would have none


@record
class Source:
    """A peer that has the elected state, and where to dial it."""

    peer: int
    host: str
    port: int


def pack_sources(sources: Iterable[Source]) -> bytes:
    """The first of these, as many as fit."""
    parts: list[bytes] = []
    size = 0
    for source in sources:
        host = source.host.encode()
        part = _SOURCE.pack(source.peer, source.port, len(host)) + host
        if len(parts) == SOURCES_MAX or size + len(part) > BLOB_BYTES_MAX:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def unpack_sources(blob: bytes) -> tuple[Source, ...]:
    """The inverse of `pack_sources`. ValueError if that is no list of sources."""
    sources: list[Source] = []
    offset = 0
    while offset < len(blob):
        try:
            peer, port, size = _SOURCE.unpack_from(blob, offset)
        except struct.error:
            raise ValueError("a list of sources is cut off") from None
        offset += _SOURCE.size
        host = blob[offset : offset + size]
        offset += size
        if len(host) != size or len(sources) == SOURCES_MAX:
            raise ValueError("a list of sources is damaged")
        sources.append(Source(peer, host.decode(), port))
    if not sources:
        raise ValueError("an empty list of sources")
    return tuple(sources)
