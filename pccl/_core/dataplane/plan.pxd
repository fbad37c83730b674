# Contents of `plan`: how a tensor is cut into chunks and blocks, and which of them a peer handles at which hop.

from libc.stdint cimport uint32_t, uint64_t


cdef enum:
    # A block of this size stays in the cache between socket, sum and next socket. With its header it fills four packets
    # of loopback; 1 << 18 would need a fifth that is almost empty.
    BLOCK_BYTES_MAX = 63 << 12
    BLOCK_BYTES_MIN = 1 << 14       # below this the header and the system call cost more than the bytes
    # For a small tensor: one travels while the other is added; 4 take a fifth longer at 400 KiB with four or eight
    # peers on two cores, because each block costs wake-ups.
    BLOCKS_PER_CHUNK = 2
    BLOCKS_MAX = 1 << 14            # of one operation: queues and bit sets have room for this many
    UNIT = 64                       # elements; chunks of a large tensor begin at multiples, so vectors stay aligned
    BLOCK_UNIT = 1024               # elements; block sizes are multiples, so no block ends inside a quantization group


# The plan of one operation: the same on all peers, computed from three numbers.
cdef struct Plan:
    uint64_t count                  # elements of the whole tensor
    uint32_t world                  # peers in the ring, and chunks
    uint64_t unit                   # chunks begin at multiples of this many elements
    uint64_t units_each             # units that every chunk has
    uint64_t units_over             # this many chunks, from the first on, have one unit more
    uint64_t block                  # elements of a block; the last block of a chunk may be shorter
    uint64_t blocks_each            # blocks of the longest chunk; the number of a block is chunk * blocks_each + block


cdef void make_plan(Plan *plan, uint64_t count, uint32_t itemsize, uint32_t world) noexcept nogil

# The first element of a chunk; for chunk `world` it is the end of the tensor.
cdef uint64_t chunk_begin(const Plan *plan, uint32_t chunk) noexcept nogil

# How many blocks a chunk has; 0 if it is empty.
cdef uint32_t blocks_of(const Plan *plan, uint32_t chunk) noexcept nogil

# The first element of a block and the element after its last.
cdef void block_range(const Plan *plan, uint32_t chunk, uint32_t block, uint64_t *begin, uint64_t *end) noexcept nogil

# The chunk that the peer at `rank` sends at a hop, and the one that it receives from the previous peer.
cdef uint32_t chunk_sent(const Plan *plan, uint32_t rank, uint32_t hop) noexcept nogil
cdef uint32_t chunk_received(const Plan *plan, uint32_t rank, uint32_t hop) noexcept nogil

# Blocks that the peer at `rank` receives plus blocks that it sends, over all hops.
cdef uint64_t blocks_handled(const Plan *plan, uint32_t rank) noexcept nogil

# The highest number of a block plus one: the length of a table with one entry for each block.
cdef uint64_t blocks_numbered(const Plan *plan) noexcept nogil
