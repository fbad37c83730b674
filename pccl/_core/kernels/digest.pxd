# Contents of `digest`: simplehash of bytes in memory, for loops that hold no GIL. What it is: docs/simplehash.md.

from libc.stdint cimport uint64_t


cpdef enum:
    # What one digest of a block covers, and what travels where two differ: small beside a tensor, large beside 8 bytes.
    STATE_BLOCK_BYTES = 1 << 18


# The digest of one block of 1 up to STATE_BLOCK_BYTES bytes, anywhere in memory.
cdef uint64_t digest_of_block(const void *data, size_t nbytes) noexcept nogil

# The digest of `nbytes` bytes from those of its blocks, in order, of which there are as many as it needs.
cdef uint64_t digest_folded(const uint64_t *blocks, uint64_t nbytes) noexcept nogil
