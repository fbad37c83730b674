# Contents of `block_reduce`: the arithmetic on one block, for senders and receivers.

from libc.stdint cimport uint32_t, uint64_t

from .board cimport Op


# Where a block is in the memory of this peer.
cdef struct BlockMemory:
    uint64_t count                  # elements
    char *local                     # what this peer contributes
    char *out                       # where the result goes
    char *backup                    # where the old bytes of `out` go; NULL: they are not saved
    uint32_t *mark                  # how many of them are saved


# Encodes elements into `target`; returns the CRC of the codes, or 0 if `wants_crc` is false.
cdef uint32_t encode_pieces(
    const Op *op, char *target, const char *values, uint64_t count, bint wants_crc
) noexcept nogil

# Combines the block at `source`, which arrived at this hop, with the local one; returns the CRC of the result, or 0.
cdef uint32_t reduce_pieces(
    const Op *op, uint32_t hop, const BlockMemory *memory, const char *source, bint wants_crc
) noexcept nogil

# The same for a quantized block. `forward` is where the codes lie that are sent on. If the block is final, it is only
# decoded, and `forward` stays as it is; then the return value is 0.
cdef uint32_t reduce_coded_pieces(
    const Op *op, uint32_t hop, const BlockMemory *memory, const char *coded, char *forward, bint wants_crc
) noexcept nogil
