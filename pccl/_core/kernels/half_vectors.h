/* Vectors of 16-bit floats ("halves"): widened to single precision and rounded back, per instruction set.
 *
 * One vector of halves becomes two vectors of floats. The arithmetic does not depend on their order, so bfloat16 is
 * split into even and odd elements, which takes a shift and a mask and moves nothing across the vector.
 *
 * The results have the same bits as those of elements.h. The instructions of F16C and NEON round to the nearest even
 * unless the rounding mode of the thread was changed. The bfloat16 instruction of newer processors is not used, because
 * it treats subnormals as zero.
 */

#ifndef PCCL_KERNELS_HALF_VECTORS_H
#define PCCL_KERNELS_HALF_VECTORS_H

#include "elements.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* --- AVX2 with F16C ------------------------------------------------------------------------------------------ */

#define AVX2_TARGET __attribute__((target("avx2,f16c")))
typedef __m256 floats_avx2;
typedef struct {
    __m256 first, second;
} pair_avx2;

AVX2_TARGET ELEMENTAL __m256 spread_avx2(float value) { return _mm256_set1_ps(value); }

AVX2_TARGET ELEMENTAL __m256 settle_avx2(__m256 values) {
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(NAN_F32));
    return _mm256_blendv_ps(values, quiet, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
}

AVX2_TARGET ELEMENTAL pair_avx2 widen_f16_avx2(const void *from) {
    const __m128i *halves = (const __m128i *)from;
    const pair_avx2 pair = {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
    return pair;
}

AVX2_TARGET ELEMENTAL void narrow_f16_avx2(void *to, pair_avx2 pair) {
    __m128i *halves = (__m128i *)to;
    _mm_storeu_si128(halves, _mm256_cvtps_ph(settle_avx2(pair.first), _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(settle_avx2(pair.second), _MM_FROUND_TO_NEAREST_INT));
}

AVX2_TARGET ELEMENTAL pair_avx2 widen_bf16_avx2(const void *from) {
    const __m256i halves = _mm256_loadu_si256((const __m256i *)from);
    const __m256i odd = _mm256_and_si256(halves, _mm256_set1_epi32((int)0xFFFF0000));
    const pair_avx2 pair = {_mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)), _mm256_castsi256_ps(odd)};
    return pair;
}

/* The rounded half lies in the upper 16 bits of each element. */
AVX2_TARGET ELEMENTAL __m256i round_bf16_avx2(__m256 values) {
    const __m256i bits = _mm256_castps_si256(settle_avx2(values));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
}

AVX2_TARGET ELEMENTAL void narrow_bf16_avx2(void *to, pair_avx2 pair) {
    const __m256i even = _mm256_srli_epi32(round_bf16_avx2(pair.first), 16), odd = round_bf16_avx2(pair.second);
    _mm256_storeu_si256((__m256i *)to, _mm256_blend_epi16(even, odd, 0xAA));
}

/* --- AVX-512 ------------------------------------------------------------------------------------------------- */

#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))
typedef __m512 floats_avx512;
typedef struct {
    __m512 first, second;
} pair_avx512;

AVX512_TARGET ELEMENTAL __m512 spread_avx512(float value) { return _mm512_set1_ps(value); }

AVX512_TARGET ELEMENTAL __m512 settle_avx512(__m512 values) {
    const __m512 quiet = _mm512_castsi512_ps(_mm512_set1_epi32(NAN_F32));
    return _mm512_mask_mov_ps(values, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), quiet);
}

AVX512_TARGET ELEMENTAL pair_avx512 widen_f16_avx512(const void *from) {
    const __m256i *halves = (const __m256i *)from;
    const __m512 first = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
    const pair_avx512 pair = {first, _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
    return pair;
}

AVX512_TARGET ELEMENTAL void narrow_f16_avx512(void *to, pair_avx512 pair) {
    __m256i *halves = (__m256i *)to;
    _mm256_storeu_si256(halves, _mm512_cvtps_ph(settle_avx512(pair.first), _MM_FROUND_TO_NEAREST_INT));
    _mm256_storeu_si256(halves + 1, _mm512_cvtps_ph(settle_avx512(pair.second), _MM_FROUND_TO_NEAREST_INT));
}

AVX512_TARGET ELEMENTAL pair_avx512 widen_bf16_avx512(const void *from) {
    const __m512i halves = _mm512_loadu_si512(from);
    const __m512i odd = _mm512_and_si512(halves, _mm512_set1_epi32((int)0xFFFF0000));
    const pair_avx512 pair = {_mm512_castsi512_ps(_mm512_slli_epi32(halves, 16)), _mm512_castsi512_ps(odd)};
    return pair;
}

AVX512_TARGET ELEMENTAL __m512i round_bf16_avx512(__m512 values) {
    const __m512i bits = _mm512_castps_si512(settle_avx512(values));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
}

AVX512_TARGET ELEMENTAL void narrow_bf16_avx512(void *to, pair_avx512 pair) {
    const __m512i even = _mm512_srli_epi32(round_bf16_avx512(pair.first), 16), odd = round_bf16_avx512(pair.second);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, even, odd));
}

#elif defined(__aarch64__)
#include <arm_neon.h>

/* --- NEON ---------------------------------------------------------------------------------------------------- */

typedef float32x4_t floats_neon;
typedef struct {
    float32x4_t first, second;
} pair_neon;

ELEMENTAL float32x4_t spread_neon(float value) { return vdupq_n_f32(value); }

ELEMENTAL float32x4_t settle_neon(float32x4_t values) {
    const float32x4_t quiet = vreinterpretq_f32_u32(vdupq_n_u32(NAN_F32));
    return vbslq_f32(vceqq_f32(values, values), values, quiet);
}

ELEMENTAL pair_neon widen_f16_neon(const void *from) {
    const float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8((const uint8_t *)from));
    const pair_neon pair = {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
    return pair;
}

ELEMENTAL void narrow_f16_neon(void *to, pair_neon pair) {
    const float16x4_t low = vcvt_f16_f32(settle_neon(pair.first));
    const float16x8_t halves = vcvt_high_f16_f32(low, settle_neon(pair.second));
    vst1q_u8((uint8_t *)to, vreinterpretq_u8_f16(halves));
}

ELEMENTAL pair_neon widen_bf16_neon(const void *from) {
    const uint32x4_t halves = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)from));
    const uint32x4_t odd = vandq_u32(halves, vdupq_n_u32(0xFFFF0000));
    const pair_neon pair = {vreinterpretq_f32_u32(vshlq_n_u32(halves, 16)), vreinterpretq_f32_u32(odd)};
    return pair;
}

ELEMENTAL uint32x4_t round_bf16_neon(float32x4_t values) {
    const uint32x4_t bits = vreinterpretq_u32_f32(settle_neon(values));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
}

ELEMENTAL void narrow_bf16_neon(void *to, pair_neon pair) {
    const uint32x4_t even = vshrq_n_u32(round_bf16_neon(pair.first), 16), odd = round_bf16_neon(pair.second);
    vst1q_u8((uint8_t *)to, vreinterpretq_u8_u32(vbslq_u32(vdupq_n_u32(0xFFFF0000), odd, even)));
}

#endif

#endif
