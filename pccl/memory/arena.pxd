# Contents of `arena`: pieces of shared memory, the segments they are cut from, and their allocator.

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from pccl._core.system.mapping cimport Extent, Mapping


# One segment: a slab, or the segment of a single large piece.
cdef class Region:
    cdef uint32_t number            # never used twice in a process
    cdef object segment
    cdef Mapping mapping            # of the segment, while it is open
    cdef uintptr_t address          # where it begins in this process
    cdef uint64_t nbytes
    cdef bint is_slab
    cdef uint64_t live              # pieces in use
    cdef int64_t idle_since         # the arena's clock when the last piece was freed
    cdef uint64_t cut               # bytes of a slab that have been cut into pieces
    cdef dict free                  # of a slab: size class to offsets

    cdef bint carve(self, uint64_t size, uint64_t *offset) noexcept
    cdef int restore(self, uint64_t offset, uint64_t size) except -1
    cdef close(self)


# Bytes of a segment, until they are released.
cdef class Piece(Extent):
    cdef Region region
    cdef Arena arena                # where it returns to
    cdef readonly uint64_t offset   # in the segment
    cdef bint released

    cpdef release(self)


# All segments of one process.
cdef class Arena:
    cdef object __weakref__
    cdef readonly object _lock      # knows its owner; a thread never acquires it twice
    cdef str refusal                # why nothing is allocated any more
    cdef int64_t clock              # allocations so far
    cdef object enter               # acquires the lock
    cdef object leave               # releases the lock
    cdef object is_inside           # whether this thread holds the lock
    cdef list returned              # freed, but not in a free list yet: region, offset and size
    cdef dict regions               # all, by number
    cdef list index                 # all regions, by address; replaced, never changed
    cdef list slabs                 # oldest first, so that the newest become empty
    cdef readonly dict _spare       # idle segments of large pieces by size class, the last used one last
    cdef dict idle                  # idle regions of both kinds, longest idle first
    cdef uint64_t idle_bytes
    cdef uint64_t bytes_mapped
    cdef uint64_t bytes_in_use
    cdef dict watchers              # functions that return a callback, or None if it is gone

    cdef set_lock(self, lock)
    cdef Piece take(self, uint64_t nbytes)
    cdef Piece hand_out(self, uint64_t size)
    cdef Piece reuse(self, uint64_t size)
    cdef Piece reuse_spare(self, uint64_t size)
    cdef Piece reuse_slab(self, uint64_t size)
    cdef Piece piece_of(self, Region region, uint64_t offset, uint64_t size)
    cdef Piece adopt(self, Region region, uint64_t size)
    cdef int give_back(self, Piece piece) except -1
    cdef int sort_in(self) except -1
    cdef uint32_t locate(self, uintptr_t address, uint64_t nbytes, uint64_t *offset) noexcept


# The arena of this process.
cpdef Arena default()
