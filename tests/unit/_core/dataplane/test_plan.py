"""The plan of an operation: nothing is left out, nothing is done twice, and neighbours have the same plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl._core.dataplane.backup import backup_bytes
from pccl._core.dataplane.plan import Cut

BLOCKS_MAX = 1 << 14
BLOCK_BYTES_MIN, BLOCK_BYTES_MAX = 1 << 14, 1 << 18
MARK_BYTES = 4

counts = st.one_of(st.integers(0, 300), st.integers(0, 1 << 24), st.integers(0, 1 << 40))
itemsizes = st.sampled_from([1, 2, 4, 8])
worlds = st.one_of(st.integers(1, 8), st.integers(1, 64), st.sampled_from([500, 1024, 2047, 3000]))


@given(counts, itemsizes, worlds)
@settings(max_examples=200)
def test_chunks_and_blocks_partition_the_tensor(count: int, itemsize: int, world: int) -> None:
    cut = Cut(count, itemsize, world)
    at = blocks = 0
    for chunk in range(world):
        begin, end = cut.chunk(chunk)
        assert begin == at <= end
        ranges = cut.blocks(chunk)
        for block_begin, block_end in ranges:
            assert block_begin == at < block_end <= end
            assert block_end - block_begin == cut.block or block_end == end
            at = block_end
        assert at == end
        # Numbers of blocks are unique over all chunks.
        assert len(ranges) * world <= cut.blocks_numbered
        blocks += len(ranges)
    assert at == count
    assert blocks <= cut.blocks_numbered <= max(BLOCKS_MAX, world)


@given(counts, itemsizes, worlds)
@settings(max_examples=200)
def test_chunks_differ_by_one_unit_at_most(count: int, itemsize: int, world: int) -> None:
    cut = Cut(count, itemsize, world)
    lengths = [end - begin for begin, end in map(cut.chunk, range(world))]

    # The last chunk of a large tensor may lack part of its last unit.
    assert max(lengths) - min(lengths) <= (2 * 64 if count // world >= 16 * 64 else 1)
    assert lengths[0] == max(lengths)


@given(counts, itemsizes, worlds)
@settings(max_examples=200)
def test_blocks_are_neither_crumbs_nor_larger_than_a_cache(count: int, itemsize: int, world: int) -> None:
    cut = Cut(count, itemsize, world)
    nbytes = cut.block * itemsize

    assert cut.block % 1024 == 0  # no quantization group is cut
    assert nbytes >= BLOCK_BYTES_MIN
    if nbytes > BLOCK_BYTES_MAX:  # only to limit the number of blocks
        per_chunk = BLOCKS_MAX // world
        assert cut.block <= -(-cut.chunk(0)[1] // per_chunk) + 1024
    assert nbytes < 1 << 32  # a frame carries its length in 32 bits, and so does a mark


@given(counts, itemsizes, worlds)
@settings(max_examples=200)
def test_blocks_of_a_chunk_are_alike(count: int, itemsize: int, world: int) -> None:
    """Goal: no chunk ends with a very small block that costs a frame, apart from rounding."""
    cut = Cut(count, itemsize, world)
    lengths = [end - begin for begin, end in cut.blocks(0)]

    assert all(length == cut.block for length in lengths[:-1])
    if cut.block * itemsize > max(BLOCK_BYTES_MIN, 1024 * itemsize):
        assert cut.block - lengths[-1] <= 1024 * len(lengths)


@given(st.integers(0, 1 << 26), itemsizes, st.integers(1, 12))
@settings(max_examples=60)
def test_the_ring_reduces_each_chunk_in_order_and_spreads_it(count: int, itemsize: int, world: int) -> None:
    """Goal: chunk c starts at rank c, each next rank adds its part, and all ranks end with the same result."""
    cut = Cut(count, itemsize, world)
    held = [[(rank,) for _ in range(world)] for rank in range(world)]  # by rank and chunk: the ranks that were added
    moved = [0] * world
    for hop in range(2 * world - 2):
        sent = [held[rank][cut.sent(rank, hop)] for rank in range(world)]
        for rank in range(world):
            chunk, previous = cut.received(rank, hop), (rank - 1) % world
            assert chunk == cut.sent(previous, hop)
            moved[rank] += len(cut.blocks(chunk)) + len(cut.blocks(cut.sent(rank, hop)))
            if hop < world - 1:
                held[rank][chunk] = (*sent[previous], rank)  # type: ignore[assignment]
            else:
                held[rank][chunk] = sent[previous]
            # The chunk that was received is sent at the next hop.
            assert hop == 2 * world - 3 or cut.sent(rank, hop + 1) == chunk
    in_order = [tuple((chunk + step) % world for step in range(world)) for chunk in range(world)]
    assert held == [in_order] * world
    assert moved == [cut.handled(rank) for rank in range(world)]


@given(counts, itemsizes, worlds)
@settings(max_examples=60)
def test_equal_inputs_cut_equally(count: int, itemsize: int, world: int) -> None:
    one, other = Cut(count, itemsize, world), Cut(count, itemsize, world)

    assert [one.chunk(chunk) for chunk in range(world)] == [other.chunk(chunk) for chunk in range(world)]
    assert (one.block, one.blocks_numbered) == (other.block, other.blocks_numbered)


@given(counts, itemsizes, st.integers(1, 3000), st.data())
@settings(max_examples=300)
def test_a_backup_has_a_mark_for_each_block_of_every_smaller_ring(
    count: int, itemsize: int, world: int, data: st.DataObject
) -> None:
    fewer = data.draw(st.integers(1, world))
    marks = backup_bytes(count, itemsize, world) - (count * itemsize + 63) // 64 * 64 - 64

    assert MARK_BYTES * Cut(count, itemsize, fewer).blocks_numbered <= marks


def test_a_ring_of_one_moves_nothing() -> None:
    assert Cut(1 << 20, 4, 1).handled(0) == 0


@pytest.mark.parametrize(("itemsize", "world"), [(0, 2), (4, 0), (4, BLOCKS_MAX + 1)])
def test_what_is_no_ring_is_refused(itemsize: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"a ring of {world} peers cannot reduce elements of {itemsize} bytes"):
        Cut(10, itemsize, world)
