# Contents of `backup`: the old bytes of an in-place tensor, and marks that say how much of each block is saved.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from pccl._core.system cimport posix
from pccl._core.system.check cimport check

from .plan cimport Plan


cdef enum:
    MARKS_BYTES = 64                # before the marks: the world size that they are for, on its own cache line


cdef inline uint64_t marks_offset(uint64_t nbytes) noexcept nogil:
    """Where the marks begin: after the bytes of the tensor, on a new cache line."""
    return (nbytes + 63) & ~<uint64_t> 63


# The mark of a block: how many of its bytes are saved.
cdef inline uint32_t *mark_of(
    char *backup, const Plan *plan, uint32_t itemsize, uint32_t chunk, uint32_t block
) noexcept nogil:
    cdef char *marks = backup + marks_offset(plan.count * itemsize)
    check(chunk < plan.world, "a chunk that is marked is one of its plan")
    check(block < plan.blocks_each, "a block that is marked is one of its plan")
    posix.atomic_store_u32(<uint32_t *> marks, plan.world)
    return <uint32_t *> (marks + MARKS_BYTES) + chunk * plan.blocks_each + block


# Copies the old bytes of a block that are not saved yet, up to `upto`, before they change.
cdef void save(uint32_t *mark, const char *local, char *backup, uint64_t upto) noexcept nogil

# The same for a whole block; `backup` is the backup of the whole tensor.
cdef void save_block(
    const Plan *plan, uint32_t itemsize, uint32_t chunk, uint32_t block, const char *local, char *backup
) noexcept nogil

# Bytes for a backup that suffices for `world` peers and, after losses, for fewer.
cpdef uint64_t backup_bytes(uint64_t count, uint32_t itemsize, uint32_t world) noexcept

# Marks all blocks as not saved, before an operation.
cpdef void clear(uintptr_t backup, uint64_t count, uint32_t itemsize, uint32_t world) noexcept
