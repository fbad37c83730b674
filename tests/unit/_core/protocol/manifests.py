"""Manifests for tests that need no memory behind them. No test in here."""

from __future__ import annotations

from pccl._core.kernels.digest import STATE_BLOCK_BYTES as BLOCK
from pccl._core.kernels.digest import digest_of_blocks
from pccl._core.protocol.state_manifest import Row, StateManifest, block_count, pack_manifest


def row(name: str, *versions: int, nbytes: int | None = None, unequal: bool = False) -> Row:
    """Return a row with one block for each of these versions; `nbytes` if the last block is short."""
    size = len(versions) * BLOCK if nbytes is None else nbytes
    assert block_count(size) == len(versions)
    blocks = b"".join(version.to_bytes(8, "little") for version in versions)
    return Row(name, 10, unequal, size, digest_of_blocks(blocks, size), 0, 0, blocks)


def describe(*rows: Row) -> StateManifest:
    """Return the manifest of these rows."""
    return StateManifest(pack_manifest(rows))
