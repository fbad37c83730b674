# Contents of `quantization`: the quantizer of an operation, and where its encoded blocks lie.

from libc.stdint cimport uint32_t, uint64_t

from pccl._core.kernels.arithmetic cimport Quantizer, coded_bytes

from .plan cimport Plan


# Makes a quantizer from the numbers of the public enums; algorithm 0 is none. Returns 0, or -1 if it is impossible.
cdef int make_quantizer(Quantizer *quantizer, int datatype, int algorithm, int quantized) noexcept nogil


# Where an encoded block lies in the area of its operation.
cdef inline uint64_t coded_offset(
    const Quantizer *quantizer, const Plan *plan, uint32_t chunk, uint32_t block
) noexcept nogil:
    return (chunk * plan.blocks_each + block) * coded_bytes(quantizer, plan.block)
