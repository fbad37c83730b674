# cython: language_level=3, cdivision=True
"""The backup of an in-place tensor: its old bytes, and marks that say how much of each block is saved.

Workers write results into the tensor while the verdict may still be a failure. So the old bytes of a block are copied
before they change, and the mark of the block says how many of them are saved:

    0                      the tensor's bytes
    rounded up to 64       u32 the world size that the blocks were cut for; 0: nothing was changed yet
    64 bytes later         u32 for each block: bytes saved

The order makes it safe to kill a worker at any point: copy, then mark, then change. Bytes beyond the mark were not
changed. The training process restores the tensor, because it survives its actor.
"""

from libc.stdint cimport UINT32_MAX, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from pccl._core.kernels.arithmetic cimport stream_copy
from pccl._core.system cimport posix
from pccl._core.system.check cimport check

from .plan cimport BLOCK_BYTES_MIN, block_range, blocks_of, make_plan


cdef void save(uint32_t *mark, const char *local, char *backup, uint64_t upto) noexcept nogil:
    cdef uint64_t done = posix.atomic_load_u32(mark)
    check(upto <= UINT32_MAX, "the mark of a block has room for its length")
    if done < upto:
        stream_copy(backup + done, local + done, upto - done)
        posix.atomic_store_u32(mark, <uint32_t> upto)


cdef void save_block(
    const Plan *plan, uint32_t itemsize, uint32_t chunk, uint32_t block, const char *local, char *backup
) noexcept nogil:
    cdef uint64_t begin, end
    block_range(plan, chunk, block, &begin, &end)
    check(end <= plan.count, "a block that is saved lies within its tensor")
    save(mark_of(backup, plan, itemsize, chunk, block), local, backup + begin * itemsize, (end - begin) * itemsize)


cpdef uint64_t backup_bytes(uint64_t count, uint32_t itemsize, uint32_t world) noexcept:
    """Bytes for a backup that suffices for `world` peers and, after losses, for fewer."""
    return marks_offset(count * itemsize) + MARKS_BYTES + marks_bytes(count * itemsize, world)


cpdef void clear(uintptr_t backup, uint64_t count, uint32_t itemsize, uint32_t world) noexcept:
    """Mark all blocks as not saved, before an operation."""
    cdef uint64_t nbytes = count * itemsize
    memset(<char *> backup + marks_offset(nbytes), 0, MARKS_BYTES + marks_bytes(nbytes, world))


def restore(uintptr_t tensor, uintptr_t backup, uint64_t count, uint32_t itemsize):
    """Copy the saved bytes back into the tensor. No worker may use the tensor any more."""
    cdef char *old = <char *> backup
    cdef char *target = <char *> tensor
    cdef uint32_t world = posix.atomic_load_u32(<uint32_t *> (old + marks_offset(count * itemsize)))
    cdef Plan plan
    cdef uint64_t begin, end
    cdef uint32_t chunk, block
    if world == 0:
        return
    with nogil:
        make_plan(&plan, count, itemsize, world)
        for chunk in range(world):
            for block in range(blocks_of(&plan, chunk)):
                block_range(&plan, chunk, block, &begin, &end)
                check(
                    mark_of(old, &plan, itemsize, chunk, block)[0] <= (end - begin) * itemsize,
                    "no more of a block is restored than it has",
                )
                begin *= itemsize
                memcpy(target + begin, old + begin, mark_of(old, &plan, itemsize, chunk, block)[0])


cdef uint64_t marks_bytes(uint64_t nbytes, uint32_t world) noexcept:
    """One mark for each block. A block has at least BLOCK_BYTES_MIN, except the last of each chunk."""
    return 4 * (nbytes // BLOCK_BYTES_MIN + 2 * world + 64)
