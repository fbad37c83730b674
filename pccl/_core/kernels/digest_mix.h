/* The arithmetic of simplehash, one word and one digest at a time, as docs/simplehash.md defines it.
 *
 * This file has the constants and the mixing functions, for C and for CUDA: digest.h and digest.cu both build on it,
 * and the vectors of digest_rows.h compute what `digest_step` computes. Nothing here loops over data.
 *
 * Every function is a bijection of each of its arguments while the others are constant. So a change of a single word of
 * the data always changes the digest of its block.
 */

#ifndef PCCL_DIGEST_MIX_H
#define PCCL_DIGEST_MIX_H

#include <stdint.h>

#if defined(__CUDACC__)
#define DIGEST_FUNCTION static __device__ __forceinline__
#else
#define DIGEST_FUNCTION static inline
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "simplehash reads words of little endian byte order; this machine would need to swap them"
#endif

enum {
    DIGEST_LANES = 32,                   /* of a row, and threads of a warp */
    DIGEST_ROW_BYTES = DIGEST_LANES * 8, /* one word for each lane */
    DIGEST_TILE_BYTES = 1 << 15,         /* what one warp digests */
    DIGEST_BLOCK_BYTES = 1 << 18,        /* what has a digest outside of these files */
    DIGEST_TILES = DIGEST_BLOCK_BYTES / DIGEST_TILE_BYTES
};

/* Odd, so that a multiplication loses no bits: the first fractional bits of the golden ratio and of the square root of
 * three, and the factors of the finalizer of splitmix64. */
#define DIGEST_LOW_FACTOR 0x9E3779B9u
#define DIGEST_HIGH_FACTOR 0xBB67AE85u
#define DIGEST_GOLDEN 0x9E3779B97F4A7C15ull
#define DIGEST_FIRST_FACTOR 0xBF58476D1CE4E5B9ull
#define DIGEST_SECOND_FACTOR 0x94D049BB133111EBull

/* Mixes one word into one lane. The factors have 32 bits, because vectors have no wider product: the low half is
 * multiplied and carries into the high one, then the same with the halves exchanged. */
DIGEST_FUNCTION uint64_t digest_step(uint64_t lane, uint64_t word) {
    const uint64_t mixed = lane ^ word;
    const uint64_t once = (uint64_t)(uint32_t)mixed * DIGEST_LOW_FACTOR + (mixed & 0xFFFFFFFF00000000ull);
    return (once >> 32) * DIGEST_HIGH_FACTOR + (once << 32);
}

/* Combines two neighbours of a tree, or the digest so far and the next one. Their order matters. */
DIGEST_FUNCTION uint64_t digest_combine(uint64_t left, uint64_t right) {
    const uint64_t product = right * DIGEST_FIRST_FACTOR;
    const uint64_t mixed = (left ^ (product << 32 | product >> 32)) * DIGEST_SECOND_FACTOR;
    return mixed ^ mixed >> 32;
}

/* Every bit of the result depends on every bit of the value. */
DIGEST_FUNCTION uint64_t digest_finish(uint64_t value) {
    value = (value ^ value >> 30) * DIGEST_FIRST_FACTOR;
    value = (value ^ value >> 27) * DIGEST_SECOND_FACTOR;
    return value ^ value >> 31;
}

/* What a lane holds before its first word. */
DIGEST_FUNCTION uint64_t digest_seed(unsigned lane) { return digest_finish((lane + 1) * DIGEST_GOLDEN); }

/* Folds the digests of consecutive parts, in order, into that of the whole, which has `nbytes` bytes. */
DIGEST_FUNCTION uint64_t digest_fold(const uint64_t *pieces, uint64_t count, uint64_t nbytes) {
    uint64_t folded = DIGEST_GOLDEN;
    for (uint64_t piece = 0; piece < count; ++piece) folded = digest_combine(folded, pieces[piece]);
    return digest_finish(folded ^ nbytes * DIGEST_GOLDEN);
}

#endif
