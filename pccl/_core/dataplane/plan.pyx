# cython: language_level=3, cdivision=True
"""The plan of a ring reduce: chunks, blocks, and which peer handles which of them at which hop. Pure arithmetic.

A tensor is cut into one chunk per peer, and a chunk into blocks. At hop `h` the peer at rank `r` sends chunk `r - h`
and receives chunk `r - h - 1`, modulo the size of the ring. The first `world - 1` hops reduce: the received block is
added to the local one. After them chunk `r + 1` is complete at rank `r`, its *owner*. The other `world - 1` hops spread
the result.

                    hop 0        hop 1        hop 2        hop 3            (three peers, four hops)
    rank 0 sends    chunk 0      chunk 2      chunk 1      chunk 0
    rank 1 sends    chunk 1      chunk 0      chunk 2      chunk 1
    rank 2 sends    chunk 2      chunk 1      chunk 0      chunk 2
                    └──── reducing ─────┘     └──── spreading ────┘

All peers compute the same plan from the count, the size of an element and the world size; no part of it is ever sent.
If a tensor has fewer elements than there are peers, some chunks are empty and have no blocks.
"""

from libc.stdint cimport uint32_t, uint64_t


cdef inline uint64_t smaller(uint64_t one, uint64_t other) noexcept nogil:
    return one if one < other else other


cdef inline uint64_t larger(uint64_t one, uint64_t other) noexcept nogil:
    return one if one > other else other


cdef inline uint64_t divided_up(uint64_t amount, uint64_t by) noexcept nogil:
    return amount // by + (amount % by != 0)


cdef void make_plan(Plan *plan, uint64_t count, uint32_t itemsize, uint32_t world) noexcept nogil:
    cdef uint64_t units, chunk, block
    plan.count = count
    plan.world = world
    plan.unit = UNIT if count // world >= 16 * UNIT else 1
    units = divided_up(count, plan.unit)
    plan.units_each = units // world
    plan.units_over = units % world
    # No chunk is longer than the first.
    chunk = larger(smaller((plan.units_each + (plan.units_over > 0)) * plan.unit, count), 1)
    block = smaller(larger(chunk * itemsize // BLOCKS_PER_CHUNK, BLOCK_BYTES_MIN), BLOCK_BYTES_MAX) // itemsize
    block = larger(block, divided_up(chunk, larger(BLOCKS_MAX // world, 1)))
    block = divided_up(block, BLOCK_UNIT) * BLOCK_UNIT
    # The same number of blocks, but of equal size: an almost empty last block would cost as much as a full one.
    block = larger(divided_up(chunk, divided_up(chunk, block)), BLOCK_BYTES_MIN // itemsize)
    plan.block = divided_up(block, BLOCK_UNIT) * BLOCK_UNIT
    plan.blocks_each = divided_up(chunk, plan.block)


cdef uint64_t chunk_begin(const Plan *plan, uint32_t chunk) noexcept nogil:
    return smaller((chunk * plan.units_each + smaller(chunk, plan.units_over)) * plan.unit, plan.count)


cdef uint32_t blocks_of(const Plan *plan, uint32_t chunk) noexcept nogil:
    return <uint32_t> divided_up(chunk_begin(plan, chunk + 1) - chunk_begin(plan, chunk), plan.block)


cdef void block_range(const Plan *plan, uint32_t chunk, uint32_t block, uint64_t *begin, uint64_t *end) noexcept nogil:
    begin[0] = chunk_begin(plan, chunk) + block * plan.block
    end[0] = smaller(begin[0] + plan.block, chunk_begin(plan, chunk + 1))


cdef uint32_t chunk_sent(const Plan *plan, uint32_t rank, uint32_t hop) noexcept nogil:
    return (rank + 2 * plan.world - hop) % plan.world


cdef uint32_t chunk_received(const Plan *plan, uint32_t rank, uint32_t hop) noexcept nogil:
    return (rank + 2 * plan.world - hop - 1) % plan.world


cdef uint64_t blocks_handled(const Plan *plan, uint32_t rank) noexcept nogil:
    cdef uint64_t total = 0
    cdef uint32_t hop
    for hop in range(2 * plan.world - 2):
        total += blocks_of(plan, chunk_sent(plan, rank, hop))
        total += blocks_of(plan, chunk_received(plan, rank, hop))
    return total


cdef uint64_t blocks_numbered(const Plan *plan) noexcept nogil:
    return plan.world * plan.blocks_each


cdef class Cut:
    """A plan as Python sees it, for tests."""

    cdef Plan plan

    def __init__(self, uint64_t count, uint32_t itemsize, uint32_t world):
        if itemsize == 0 or world == 0 or world > BLOCKS_MAX:
            raise ValueError(f"a ring of {world} peers cannot reduce elements of {itemsize} bytes")
        make_plan(&self.plan, count, itemsize, world)

    @property
    def block(self):
        """Elements of a block."""
        return self.plan.block

    @property
    def blocks_numbered(self):
        """Entries of a table with one entry for each block."""
        return blocks_numbered(&self.plan)

    def chunk(self, uint32_t chunk):
        """The elements of a chunk, as (begin, end)."""
        return chunk_begin(&self.plan, chunk), chunk_begin(&self.plan, chunk + 1)

    def blocks(self, uint32_t chunk):
        """The blocks of a chunk, as a list of (begin, end)."""
        cdef uint64_t begin, end
        cdef uint32_t block
        ranges = []
        for block in range(blocks_of(&self.plan, chunk)):
            block_range(&self.plan, chunk, block, &begin, &end)
            ranges.append((begin, end))
        return ranges

    def sent(self, uint32_t rank, uint32_t hop):
        """The chunk that a rank sends at a hop."""
        return chunk_sent(&self.plan, rank, hop)

    def received(self, uint32_t rank, uint32_t hop):
        """The chunk that a rank receives at a hop."""
        return chunk_received(&self.plan, rank, hop)

    def handled(self, uint32_t rank):
        """Blocks received plus blocks sent by a rank."""
        return blocks_handled(&self.plan, rank)
