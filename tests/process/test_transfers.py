"""State moves between real processes: what differs and nothing else, from all who have it, whoever dies meanwhile."""

from __future__ import annotations

from random import Random

import numpy as np

from pccl._core.digest import STATE_BLOCK_BYTES as BLOCK
from pccl._core.events import StateFetched

from .state_peers import StatePeer, peers_with

MIB = 1 << 20


def content_of(seed: int, nbytes: int) -> bytes:
    return Random(seed).randbytes(nbytes)


def same(one: StatePeer, other: StatePeer) -> bool:
    return all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_only_what_differs_travels() -> None:
    """Goal: equal keys stay, of a large one only the blocks that differ move, and both sides count the same bytes."""
    state = {"equal": content_of(1, 3 * MIB), "large": content_of(2, 25 * MIB + 17), "small": b"abc"}
    stale = bytearray(state["large"])
    stale[5 * BLOCK] ^= 1
    stale[50 * BLOCK + 9] ^= 1
    stale[-1] ^= 1
    with peers_with(state, {**state, "large": bytes(stale), "small": b"abd"}) as (source, sink):
        content = source.serve().content_digest()
        sink.fetch(content, source)
        assert sink.hear() == StateFetched(1)
        assert same(source, sink)
        moved = 2 * BLOCK + 17 + 3
        assert (sink.end().rx_bytes, source.end().tx_bytes) == (moved, moved)
