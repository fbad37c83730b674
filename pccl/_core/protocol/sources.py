"""The sources of a transfer, as the master sends them to the peers that fetch.

A list of sources is one blob; each source has peer id, port, length of the host, host. As many are sent as fit, which
is more than a transfer can use; earlier sources are preferred. A leaf: pure.
"""

from __future__ import annotations

import struct

from pccl._core.records import record

from .codec import BLOB_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_SOURCE = struct.Struct("<QHH")  # peer, port, bytes of the host; the host follows
SOURCES_MAX = 64  # of one transfer: the links of a pool are divided among them, and more would get none


@record
class Source:
    """A peer that has the elected state, and where to dial it."""

    peer: int
    host: str
    port: int


def pack_sources(sources: Iterable[Source]) -> bytes:
    """Pack the first of these sources, as many as fit."""
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
    """The inverse of `pack_sources`. Raises ValueError if the bytes are no list of sources."""
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
