# Contents of `packing`: what is said between a training process and its actor for each reduce, as bytes.

from libc.stdint cimport uint8_t, uint32_t, uint64_t


# One operation, without gaps and little-endian, as every machine is that this is built for. The only place that knows its
# layout; what the fields mean is in `operations`.
cdef packed struct Packed:
    uint32_t slot
    uint32_t sequence               # of the completion slot
    uint64_t tag
    uint64_t count                  # elements
    uint8_t datatype
    uint8_t op
    uint8_t algorithm
    uint8_t quantized
    uint32_t flags
    uint32_t send_segment
    uint64_t send_offset
    uint32_t recv_segment
    uint64_t recv_offset
    uint32_t backup_segment         # 0: none
    uint64_t backup_offset
    uint32_t area_segment           # 0: none
    uint64_t area_offset


# The payload of a reduce that succeeded, the same as `events.REDUCED`; a test holds the two together.
cdef packed struct Reduced:
    uint32_t world                  # members that took part
    uint64_t sent                   # bytes
    uint64_t received               # bytes
    uint64_t network_ns
    uint64_t neighbour_ns
    uint64_t reduce_ns
