# Contents of `backup`: the old bytes of an in-place tensor, and how much of each block is among them.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from pccl._core.system cimport posix
from pccl._core.system.check cimport check

from .plan cimport Plan


cdef enum:
    MARKS_BYTES = 64                # ahead of the marks: the world they were made for, on a cache line of its own


cdef inline uint64_t marks_offset(uint64_t nbytes) noexcept nogil:
    """Where the marks begin: behind the bytes of the tensor, on a new cache line."""
    return (nbytes + 63) & ~<uint64_t> 63


# The mark of a block: how many of its bytes are saved.
cdef inline uint32_t *mark_of(char *backup, const Plan *plan, uint32_t itemsize, uint32_t chunk, uint32_t block) noexcept nogil:
    cdef char *marks = backup + marks_offset(plan.count * itemsize)
    check(chunk < plan.world, "a chunk that is marked is one of its plan")
    check(block < plan.blocks_each, "a block that is marked is one of its plan")
    posix.atomic_store_u32(<uint32_t *> marks, plan.world)
    return <uint32_t *> (marks + MARKS_BYTES) + chunk * plan.blocks_each + block


# Copy the old bytes of a block that are not saved yet, up to that many, before they change.
cdef void save(uint32_t *mark, const char *local, char *backup, uint64_t upto) noexcept nogil

# The same of a whole block; `backup` is that of the whole tensor.
cdef void save_block(
    const Plan *plan, uint32_t itemsize, uint32_t chunk, uint32_t block, const char *local, char *backup
) noexcept nogil

# Room for a backup, whether the operation runs with so many peers or, after losses, with fewer.
cpdef uint64_t backup_bytes(uint64_t count, uint32_t itemsize, uint32_t world) noexcept

# Before an operation: nothing is saved.
cpdef void clear(uintptr_t backup, uint64_t count, uint32_t itemsize, uint32_t world) noexcept
