# cython: language_level=3, cdivision=True
"""The quantizer of a quantized operation, and the area in which its encoded blocks wait to be sent on.

A block is encoded once per reducing hop. The final block is encoded once, by its owner: every other member decodes it
and forwards the same bytes. Between arrival and departure the codes lie in the *area* of the operation, which has room
for each block; any sender can read them there. `kernels` defines the codes.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from libc.stdint cimport uint32_t, uint64_t

from pccl._core.kernels.arithmetic cimport (
    ALGORITHM_MIN_MAX, ALGORITHM_MIN_MAX_4BIT, ALGORITHM_NONE, ALGORITHM_ZERO_POINT_SCALE,
    ALGORITHM_ZERO_POINT_SCALE_4BIT, DATATYPE_DOUBLE, DATATYPE_FLOAT16, DATATYPE_INT8, DATATYPE_UINT8, DATATYPE_UINT16,
    _Held, decode_block, encode_block, group_of, itemsize_of, of_length, reduce_coded
)

from .plan cimport blocks_numbered, make_plan


cdef int make_quantizer(Quantizer *quantizer, int datatype, int algorithm, int quantized) noexcept nogil:
    quantizer.datatype, quantizer.bits, quantizer.anchored = datatype, 0, 0
    if algorithm == ALGORITHM_NONE:
        return 0
    if not DATATYPE_FLOAT16 <= datatype <= DATATYPE_DOUBLE or not DATATYPE_UINT8 <= quantized <= DATATYPE_UINT16:
        return -1
    quantizer.anchored = algorithm == ALGORITHM_ZERO_POINT_SCALE or algorithm == ALGORITHM_ZERO_POINT_SCALE_4BIT
    quantizer.bits = 8 if quantized == DATATYPE_UINT8 or quantized == DATATYPE_INT8 else 16
    if algorithm == ALGORITHM_MIN_MAX_4BIT or algorithm == ALGORITHM_ZERO_POINT_SCALE_4BIT:
        quantizer.bits = 4 if quantized == DATATYPE_UINT8 else 0
    elif algorithm != ALGORITHM_MIN_MAX and algorithm != ALGORITHM_ZERO_POINT_SCALE:
        quantizer.bits = 0
    return 0 if 0 < quantizer.bits < 8 * itemsize_of(datatype) else -1


cdef int check(Quantizer *quantizer, int datatype, int algorithm, int quantized) except -1:
    """Make the quantizer of a quantized operation; raises ValueError if there is none."""
    if make_quantizer(quantizer, datatype, algorithm, quantized) != 0 or quantizer.bits == 0:
        raise ValueError(f"datatype {datatype} cannot be quantized to datatype {quantized} by algorithm {algorithm}")
    return 0


def area_bytes(uint64_t count, int datatype, int algorithm, int quantized, uint32_t world):
    """Bytes of an area that suffices for `world` peers and, after losses, for fewer."""
    cdef Quantizer quantizer
    cdef Plan plan
    cdef uint64_t nbytes = 0
    cdef uint32_t peers
    check(&quantizer, datatype, algorithm, quantized)
    for peers in range(1, world + 1):
        make_plan(&plan, count, <uint32_t> itemsize_of(datatype), peers)
        nbytes = max(nbytes, blocks_numbered(&plan) * coded_bytes(&quantizer, plan.block))
    return nbytes


# --- the same on buffers, for tests and measurements ----------------------------------------------------------

def group_elements(int datatype, int algorithm, int quantized):
    """How many elements share a scale."""
    cdef Quantizer quantizer
    check(&quantizer, datatype, algorithm, quantized)
    return group_of(&quantizer)


def coded_size(uint64_t count, int datatype, int algorithm, int quantized):
    """Bytes of that many elements after encoding."""
    cdef Quantizer quantizer
    check(&quantizer, datatype, algorithm, quantized)
    return coded_bytes(&quantizer, count)


def encode_into(int datatype, int algorithm, int quantized, coded, values):
    """Encode elements as one block."""
    cdef Quantizer quantizer
    check(&quantizer, datatype, algorithm, quantized)
    cdef _Held source = _Held(values, PyBUF_SIMPLE)
    cdef size_t count = source.exported.len // itemsize_of(datatype)
    cdef _Held target = of_length(coded, PyBUF_WRITABLE, "coded", coded_bytes(&quantizer, count))
    with nogil:
        encode_block(&quantizer, target.exported.buf, source.exported.buf, count)


def decode_into(int datatype, int algorithm, int quantized, values, coded):
    """Decode a block."""
    cdef Quantizer quantizer
    check(&quantizer, datatype, algorithm, quantized)
    cdef _Held target = _Held(values, PyBUF_WRITABLE)
    cdef size_t count = target.exported.len // itemsize_of(datatype)
    cdef _Held source = of_length(coded, PyBUF_SIMPLE, "coded", coded_bytes(&quantizer, count))
    with nogil:
        decode_block(&quantizer, target.exported.buf, source.exported.buf, count)


def reduce_coded_into(int datatype, int algorithm, int quantized, int op, out, local, coded, uint32_t divisor=0):
    """Combine `local` with an encoded block into `out`."""
    cdef Quantizer quantizer
    check(&quantizer, datatype, algorithm, quantized)
    cdef _Held source = _Held(local, PyBUF_SIMPLE)
    cdef size_t count = source.exported.len // itemsize_of(datatype)
    cdef _Held arrived = of_length(coded, PyBUF_SIMPLE, "coded", coded_bytes(&quantizer, count))
    cdef _Held target = of_length(out, PyBUF_WRITABLE, "out", source.exported.len)
    cdef int code
    with nogil:
        code = reduce_coded(
            &quantizer, op, target.exported.buf, source.exported.buf, arrived.exported.buf, count, divisor
        )
    if code != 0:
        raise ValueError(f"operation {op} is unknown, or cannot be divided by {divisor}")
