# The structures of `operations`: without gaps, and little-endian, as all supported processors are. In a message the
# items of a list follow each other.

from libc.stdint cimport uint8_t, uint32_t, uint64_t


# One reduce as the training process hands it to its actor. From `tag` to `quantized` it is a PackedSignature.
cdef packed struct PackedOperation:
    uint32_t slot                   # the completion slot that the caller waits for
    uint32_t generation             # of that slot
    uint64_t tag
    uint64_t count
    uint8_t datatype
    uint8_t op
    uint8_t algorithm
    uint8_t quantized
    uint32_t flags                  # of the data plane
    uint32_t send_segment
    uint64_t send_offset
    uint32_t recv_segment
    uint64_t recv_offset
    uint32_t backup_segment         # 0: none
    uint64_t backup_offset
    uint32_t area_segment           # of a quantized reduce: holds coded blocks until they are sent on; 0: none
    uint64_t area_offset


# What all members must pass alike for one tag.
cdef packed struct PackedSignature:
    uint64_t tag
    uint64_t count                  # elements
    uint8_t datatype
    uint8_t op
    uint8_t algorithm               # of quantization; 0: none
    uint8_t quantized               # datatype of the codes; 0 without quantization


# A reduce of this peer, as an object that Python can pass on.
cdef class Operation:
    cdef PackedOperation packed


cdef packed struct PackedPair:
    uint64_t tag
    uint64_t sequence               # of the reduce


# The numbers about the run, the same as `events.NUMBERS`; a test compares the two.
cdef packed struct PackedNumbers:
    uint64_t peer                   # this peer's id
    uint64_t round                  # topology rounds of the run so far
    uint32_t epoch                  # of the group's ring
    uint32_t global_world           # members of all groups
    uint32_t group_world            # members of this group
    uint32_t groups                 # groups with members
    uint32_t largest_group          # members of the largest group


# The payload of a reduce that succeeded: `events.REDUCED`, then `events.NUMBERS`; a test compares them.
cdef packed struct PackedReduced:
    uint32_t world                  # members that took part
    uint64_t sent                   # bytes
    uint64_t received               # bytes
    uint64_t network_ns
    uint64_t neighbour_ns
    uint64_t reduce_ns
    PackedNumbers numbers           # about the run when it commenced


cpdef list unpack_operations(bytes data)
cpdef bytes pack_signatures(signatures)
cpdef list split_signatures(bytes data)
cpdef bytes pack_pairs(pairs)
cpdef list unpack_pairs(bytes data)
