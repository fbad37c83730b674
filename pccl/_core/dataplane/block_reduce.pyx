# cython: language_level=3, cdivision=True
"""The arithmetic on one block: save, reduce, encode, decode, CRC. No socket, no queue and no waiting.

A block is handled in pieces of PIECE_BYTES. Each step finds the piece in the nearest cache, because the step before it
has just touched it. The old bytes of a piece are saved before the piece changes (`backup`).
"""

from libc.stdint cimport uint32_t, uint64_t

from pccl._core.kernels.arithmetic cimport (
    OP_AVG, coded_bytes, crc32c, decode_block, encode_block, reduce_block, reduce_coded
)

from .backup cimport save
from .board cimport Op

cdef enum:
    PIECE_BYTES = 1 << 14


cdef inline uint64_t smaller(uint64_t one, uint64_t other) noexcept nogil:
    return one if one < other else other


cdef inline uint32_t divisor(const Op *op, uint32_t hop) noexcept nogil:
    """What the sum is divided by at this hop: an average is divided once, by the owner of the chunk; 0: not divided."""
    return op.plan.world if hop + 2 == op.plan.world and op.asked.op == OP_AVG else 0


cdef uint32_t encode_pieces(
    const Op *op, char *target, const char *values, uint64_t count, bint wants_crc
) noexcept nogil:
    cdef uint64_t done = 0, some, nbytes
    cdef uint32_t crc = 0
    while done < count:
        some = smaller(count - done, PIECE_BYTES // op.itemsize)
        nbytes = coded_bytes(&op.quantizer, some)
        encode_block(&op.quantizer, target, values + done * op.itemsize, some)
        if wants_crc:
            crc = crc32c(crc, target, nbytes)
        target += nbytes
        done += some
    return crc


cdef uint32_t reduce_pieces(
    const Op *op, uint32_t hop, const BlockMemory *memory, const char *source, bint wants_crc
) noexcept nogil:
    cdef uint64_t at = 0, nbytes = memory.count * op.itemsize, piece
    cdef uint32_t by = divisor(op, hop), crc = 0
    while at < nbytes:
        piece = smaller(nbytes - at, PIECE_BYTES)
        if memory.mark != NULL:
            save(memory.mark, memory.out, memory.backup, at + piece)
        reduce_block(
            op.asked.datatype, op.asked.op, memory.out + at, memory.local + at, source + at, piece // op.itemsize, by
        )
        if wants_crc:
            crc = crc32c(crc, memory.out + at, piece)
        at += piece
    return crc


cdef uint32_t reduce_coded_pieces(
    const Op *op, uint32_t hop, const BlockMemory *memory, const char *coded, char *forward, bint wants_crc
) noexcept nogil:
    cdef bint reduces = hop + 1 < op.plan.world
    cdef bint owned = hop + 2 == op.plan.world  # the owner takes the decoded result, as all other members do
    cdef uint64_t done = 0, some, at, nbytes
    cdef uint32_t by = divisor(op, hop), crc = 0
    while done < memory.count:
        some = smaller(memory.count - done, PIECE_BYTES // op.itemsize)
        at, nbytes = done * op.itemsize, coded_bytes(&op.quantizer, some)
        if memory.mark != NULL:
            save(memory.mark, memory.out, memory.backup, at + some * op.itemsize)
        if reduces:
            reduce_coded(&op.quantizer, op.asked.op, memory.out + at, memory.local + at, coded, some, by)
            encode_block(&op.quantizer, forward, memory.out + at, some)
            if wants_crc:
                crc = crc32c(crc, forward, nbytes)
        if owned:
            decode_block(&op.quantizer, memory.out + at, forward, some)
        elif not reduces:
            decode_block(&op.quantizer, memory.out + at, coded, some)
        coded += nbytes
        forward += nbytes
        done += some
    return crc
