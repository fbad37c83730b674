/* Vectors of words, for each instruction set: loaded from anywhere, stored, stepped, added.
 *
 * The step is that of digest_mix.h, word for word. SSE2, AVX2 and AVX-512 multiply the low halves of 64-bit words,
 * which is the one product of integers that all have; NEON multiplies vectors of 32-bit numbers and adds in the same
 * instruction.
 */

#ifndef PCCL_DIGEST_VECTORS_H
#define PCCL_DIGEST_VECTORS_H

#include <stdint.h>
#include <string.h>

#include "digest_mix.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* --- SSE2, which every x86-64 processor has: the portable loops are twice as fast with it --------------------- */

typedef __m128i words_portable;

static inline words_portable load_portable(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }

static inline void store_portable(uint8_t *to, words_portable words) { _mm_storeu_si128((__m128i *)to, words); }

static inline words_portable step_portable(words_portable lanes, words_portable words) {
    const __m128i low = _mm_set1_epi64x(DIGEST_LOW_FACTOR), high = _mm_set1_epi64x(DIGEST_HIGH_FACTOR);
    const __m128i upper = _mm_set1_epi64x((long long)0xFFFFFFFF00000000ull);
    const __m128i mixed = _mm_xor_si128(lanes, words);
    const __m128i once = _mm_add_epi64(_mm_mul_epu32(mixed, low), _mm_and_si128(mixed, upper));
    return _mm_add_epi64(_mm_mul_epu32(_mm_srli_epi64(once, 32), high), _mm_slli_epi64(once, 32));
}

static inline words_portable add_portable(words_portable lanes, words_portable words) {
    return _mm_add_epi64(lanes, words);
}

#else

/* --- one word at a time -------------------------------------------------------------------------------------- */

typedef uint64_t words_portable;

static inline words_portable load_portable(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static inline void store_portable(uint8_t *to, words_portable word) { memcpy(to, &word, sizeof word); }

static inline words_portable step_portable(words_portable lane, words_portable word) { return digest_step(lane, word); }

static inline words_portable add_portable(words_portable lane, words_portable word) { return lane + word; }

#endif

#if defined(__x86_64__)

/* --- AVX2 ---------------------------------------------------------------------------------------------------- */

#define DIGEST_AVX2 __attribute__((target("avx2")))
typedef __m256i words_avx2;

DIGEST_AVX2 static inline words_avx2 load_avx2(const uint8_t *from) {
    return _mm256_loadu_si256((const __m256i *)from);
}

DIGEST_AVX2 static inline void store_avx2(uint8_t *to, words_avx2 words) { _mm256_storeu_si256((__m256i *)to, words); }

DIGEST_AVX2 static inline words_avx2 step_avx2(words_avx2 lanes, words_avx2 words) {
    const __m256i low = _mm256_set1_epi64x(DIGEST_LOW_FACTOR), high = _mm256_set1_epi64x(DIGEST_HIGH_FACTOR);
    const __m256i upper = _mm256_set1_epi64x((long long)0xFFFFFFFF00000000ull);
    const __m256i mixed = _mm256_xor_si256(lanes, words);
    const __m256i once = _mm256_add_epi64(_mm256_mul_epu32(mixed, low), _mm256_and_si256(mixed, upper));
    return _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(once, 32), high), _mm256_slli_epi64(once, 32));
}

DIGEST_AVX2 static inline words_avx2 add_avx2(words_avx2 lanes, words_avx2 words) {
    return _mm256_add_epi64(lanes, words);
}

/* --- AVX-512 ------------------------------------------------------------------------------------------------- */

#define DIGEST_AVX512 __attribute__((target("avx512f")))
typedef __m512i words_avx512;

DIGEST_AVX512 static inline words_avx512 load_avx512(const uint8_t *from) { return _mm512_loadu_si512(from); }

DIGEST_AVX512 static inline void store_avx512(uint8_t *to, words_avx512 words) { _mm512_storeu_si512(to, words); }

DIGEST_AVX512 static inline words_avx512 step_avx512(words_avx512 lanes, words_avx512 words) {
    const __m512i low = _mm512_set1_epi64(DIGEST_LOW_FACTOR), high = _mm512_set1_epi64(DIGEST_HIGH_FACTOR);
    const __m512i upper = _mm512_set1_epi64((long long)0xFFFFFFFF00000000ull);
    const __m512i mixed = _mm512_xor_si512(lanes, words);
    const __m512i once = _mm512_add_epi64(_mm512_mul_epu32(mixed, low), _mm512_and_si512(mixed, upper));
    return _mm512_add_epi64(_mm512_mul_epu32(_mm512_srli_epi64(once, 32), high), _mm512_slli_epi64(once, 32));
}

DIGEST_AVX512 static inline words_avx512 add_avx512(words_avx512 lanes, words_avx512 words) {
    return _mm512_add_epi64(lanes, words);
}

#elif defined(__aarch64__)
#include <arm_neon.h>

/* --- NEON ---------------------------------------------------------------------------------------------------- */

typedef uint64x2_t words_neon;

static inline words_neon load_neon(const uint8_t *from) { return vreinterpretq_u64_u8(vld1q_u8(from)); }

static inline void store_neon(uint8_t *to, words_neon words) { vst1q_u8(to, vreinterpretq_u8_u64(words)); }

static inline words_neon step_neon(words_neon lanes, words_neon words) {
    const words_neon mixed = veorq_u64(lanes, words);
    const words_neon upper = vandq_u64(mixed, vdupq_n_u64(0xFFFFFFFF00000000ull));
    const words_neon once = vmlal_u32(upper, vmovn_u64(mixed), vdup_n_u32(DIGEST_LOW_FACTOR));
    return vmlal_u32(vshlq_n_u64(once, 32), vshrn_n_u64(once, 32), vdup_n_u32(DIGEST_HIGH_FACTOR));
}

static inline words_neon add_neon(words_neon lanes, words_neon words) { return vaddq_u64(lanes, words); }

#endif

#endif
