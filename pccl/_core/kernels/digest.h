/* simplehash on the CPU: from rows to tiles, from tiles to the digest of a block.
 *
 * This file has the tiles and blocks of docs/simplehash.md, for all instruction sets. The arithmetic is in
 * digest_mix.h, vectors in digest_vectors.h, the loops over rows in digest_rows.h, which is included here once per
 * instruction set; many blocks at once, on several threads, are in digest_threads.h. Nothing here allocates or waits.
 *
 * arithmetic.h chooses the instruction set; this file finds its loops by name.
 */

#ifndef PCCL_DIGEST_H
#define PCCL_DIGEST_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "digest_mix.h"
#include "digest_vectors.h"

/* An unrolled loop has a separate variable for each vector of a row, so the compiler keeps them in registers. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 32")
#endif

#define NAME(name) name##_portable
#define TARGET
#include "digest_rows.h"

#if defined(__x86_64__)
#define NAME(name) name##_avx2
#define TARGET DIGEST_AVX2
#include "digest_rows.h"

#define NAME(name) name##_avx512
#define TARGET DIGEST_AVX512
#include "digest_rows.h"

#elif defined(__aarch64__)
#define NAME(name) name##_neon
#define TARGET
#include "digest_rows.h"

#endif

typedef void (*rows_loop)(uint64_t lanes[DIGEST_LANES], const uint8_t *data, size_t rows);

/* The loops of one instruction set, by its name in arithmetic.h. */
typedef struct {
    const char *name;
    rows_loop digest, sum;
} digest_set;

static const digest_set digest_sets[] = {
    {"portable", digest_rows_portable, sum_rows_portable},
#if defined(__x86_64__)
    {"avx2", digest_rows_avx2, sum_rows_avx2},
    {"avx512", digest_rows_avx512, sum_rows_avx512},
#elif defined(__aarch64__)
    {"neon", digest_rows_neon, sum_rows_neon},
#endif
};

/* A name that is unknown here gets the portable loops, which compute the same result. */
static inline const digest_set *digest_set_named(const char *name) {
    for (size_t i = 1; i < sizeof digest_sets / sizeof digest_sets[0]; ++i)
        if (strcmp(digest_sets[i].name, name) == 0) return &digest_sets[i];
    return &digest_sets[0];
}

/* What lanes hold before the first row; filled once, when the module is loaded. */
static uint64_t digest_seeds[DIGEST_LANES];

static void digest_load(void) {
    for (unsigned lane = 0; lane < DIGEST_LANES; ++lane) digest_seeds[lane] = digest_seed(lane);
}

/* Digests up to DIGEST_TILE_BYTES. The last row is filled with zeros; digest_block includes the length. */
static uint64_t digest_tile(rows_loop step, const uint8_t *data, size_t nbytes) {
    uint64_t lanes[DIGEST_LANES];
    const size_t rows = nbytes / DIGEST_ROW_BYTES, rest = nbytes % DIGEST_ROW_BYTES;
    memcpy(lanes, digest_seeds, sizeof lanes);
    step(lanes, data, rows);
    if (rest > 0) {
        uint8_t last[DIGEST_ROW_BYTES] = {0};
        memcpy(last, data + rows * DIGEST_ROW_BYTES, rest);
        step(lanes, last, 1);
    }
    for (unsigned half = DIGEST_LANES / 2; half > 0; half /= 2)
        for (unsigned lane = 0; lane < half; ++lane) lanes[lane] = digest_combine(lanes[lane], lanes[lane + half]);
    return lanes[0];
}

/* Digests 1 to DIGEST_BLOCK_BYTES bytes. */
static uint64_t digest_block(const digest_set *set, const uint8_t *data, size_t nbytes) {
    uint64_t tiles[DIGEST_TILES];
    size_t count = 0;
    for (size_t begin = 0; begin < nbytes; begin += DIGEST_TILE_BYTES) {
        const size_t rest = nbytes - begin;
        tiles[count++] = digest_tile(set->digest, data + begin, rest < DIGEST_TILE_BYTES ? rest : DIGEST_TILE_BYTES);
    }
    return digest_fold(tiles, count, nbytes);
}

/* For measurements: the sum of the words in a block's complete rows. */
static uint64_t sum_block(const digest_set *set, const uint8_t *data, size_t nbytes) {
    uint64_t lanes[DIGEST_LANES] = {0}, sum = 0;
    set->sum(lanes, data, nbytes / DIGEST_ROW_BYTES);
    for (unsigned lane = 0; lane < DIGEST_LANES; ++lane) sum += lanes[lane];
    return sum;
}

static inline uint64_t digest_blocks_of(uint64_t nbytes) {
    return nbytes / DIGEST_BLOCK_BYTES + (nbytes % DIGEST_BLOCK_BYTES != 0);
}

#endif
