# Contents of `arithmetic`: the arithmetic on blocks of elements, for loops that hold no GIL.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t


# out[i] = local[i] OP incoming[i], for `count` elements. `out` may be `local` or `incoming`, exactly; any pointer may
# be unaligned. With a divisor above 1 the sum is divided by it before it is stored; with 0 or 1, AVG is SUM. Returns 0,
# or -1 for an unknown datatype or operation, and for a divisor above 1 with an operation that does not add.
cdef int reduce_block(
    int datatype, int op, void *out, const void *local, const void *incoming, size_t count, uint32_t divisor
) noexcept nogil

# Copies bytes that are rarely read again: large copies bypass the caches.
cdef void stream_copy(void *target, const void *source, size_t nbytes) noexcept nogil

# CRC32C; start with 0, and pass the last result to continue.
cdef uint32_t crc32c(uint32_t crc, const void *data, size_t nbytes) noexcept nogil

# Bytes per element, 0 for an unknown datatype.
cdef size_t itemsize_of(int datatype) noexcept nogil

# The name of the instruction set in use, for modules that have loops of their own.
cdef const char *chosen_name() noexcept nogil

cdef extern from "kernel_values.h" nogil:
    # The numbers of pccl.values that other modules need.
    enum:
        DATATYPE_UINT8
        DATATYPE_INT8
        DATATYPE_UINT16
        DATATYPE_FLOAT16
        DATATYPE_DOUBLE
        OP_AVG
        ALGORITHM_NONE
        ALGORITHM_MIN_MAX
        ALGORITHM_ZERO_POINT_SCALE
        ALGORITHM_MIN_MAX_4BIT
        ALGORITHM_ZERO_POINT_SCALE_4BIT

    # How the elements of an operation are encoded; `make_quantizer` fills it.
    ctypedef struct Quantizer "quantizer":
        uint32_t datatype           # FLOAT16 to DOUBLE
        uint32_t bits               # of a code: 4, 8 or 16; 0: elements are sent unchanged
        uint32_t anchored           # 1: zero is a whole number of steps

# Elements of a quantization group: a block that is encoded in parts is cut at multiples of this.
cdef size_t group_of(const Quantizer *quantizer) noexcept nogil

# Bytes of that many elements after encoding.
cdef size_t coded_bytes(const Quantizer *quantizer, size_t count) noexcept nogil

cdef void encode_block(const Quantizer *quantizer, void *coded, const void *values, size_t count) noexcept nogil
cdef void decode_block(const Quantizer *quantizer, void *values, const void *coded, size_t count) noexcept nogil

# As `reduce_block`, for incoming elements that are encoded.
cdef int reduce_coded(
    const Quantizer *quantizer, int op, void *out, const void *local, const void *coded, size_t count, uint32_t divisor
) noexcept nogil


# A buffer that stays exported, for functions that Python calls.
cdef class _Held:
    cdef Py_buffer exported

cdef _Held of_length(object buffer, int flags, str name, Py_ssize_t nbytes)
