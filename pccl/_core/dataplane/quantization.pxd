# Contents of `codec`: which codec an operation has, and where its coded blocks lie.

from libc.stdint cimport uint32_t, uint64_t

from pccl._core.kernels.arithmetic cimport Codec, coded_bytes

from .plan cimport Plan


# From the numbers of the public enums. Returns 0, or -1 if elements of that type cannot travel so; algorithm 0 is none.
cdef int make_codec(Codec *codec, int datatype, int algorithm, int quantized) noexcept nogil


# Where a coded block lies in the area of its operation.
cdef inline uint64_t coded_offset(const Codec *codec, const Plan *plan, uint32_t chunk, uint32_t block) noexcept nogil:
    return (chunk * plan.blocks_each + block) * coded_bytes(codec, plan.block)
