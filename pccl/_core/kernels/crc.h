/* CRC32C (Castagnoli, as in iSCSI): the checksum of the blocks that travel round the ring.
 *
 * This file has the polynomial, the tables and constants made from it when the module is loaded, and one function per
 * instruction set. All return the same number.
 *
 * A checksum is a remainder of polynomials over GF(2), modulo P. Low bits stand for high powers: bit 31 - n of a
 * remainder belongs to x^n. Everything below follows from two facts:
 *
 *   - Bytes that are followed by n others have x^(8n) times the weight. So the remainders of separate streams are
 *     combined by one multiplication each, and 16 bytes can be moved onto later bytes and added to them (folding).
 *   - The product of two remainders by CLMUL is one bit too low, that is, x times too large; and the crc32 instruction
 *     multiplies its input by x^32. Constants are chosen so that both cancel.
 *
 * Folding keeps 256 bytes in four registers and needs two multiplications per register for every 64 bytes. At the end
 * 16 bytes are left, which have the same remainder as all bytes before; the crc32 instruction computes it.
 */

#ifndef PCCL_KERNELS_CRC_H
#define PCCL_KERNELS_CRC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CRC32C_POLYNOMIAL 0x82F63B78u

/* Table k holds the effect of a byte that is followed by k zero bytes. */
static uint32_t crc32c_table[8][256];

static void crc32c_fill_table(void) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? CRC32C_POLYNOMIAL : 0);
        crc32c_table[0][byte] = crc;
    }
    for (int table = 1; table < 8; ++table)
        for (int byte = 0; byte < 256; ++byte) {
            const uint32_t crc = crc32c_table[table - 1][byte];
            crc32c_table[table][byte] = (crc >> 8) ^ crc32c_table[0][crc & 0xFF];
        }
}

static uint32_t crc32c_portable(uint32_t crc, const void *data, size_t nbytes) {
    const uint8_t *bytes = (const uint8_t *)data;
    crc = ~crc;
    for (; nbytes >= 8; nbytes -= 8, bytes += 8) {
        crc = crc32c_table[7][bytes[0] ^ (crc & 0xFF)] ^ crc32c_table[6][bytes[1] ^ ((crc >> 8) & 0xFF)]
              ^ crc32c_table[5][bytes[2] ^ ((crc >> 16) & 0xFF)] ^ crc32c_table[4][bytes[3] ^ (crc >> 24)]
              ^ crc32c_table[3][bytes[4]] ^ crc32c_table[2][bytes[5]] ^ crc32c_table[1][bytes[6]]
              ^ crc32c_table[0][bytes[7]];
    }
    for (; nbytes > 0; --nbytes, ++bytes) crc = (crc >> 8) ^ crc32c_table[0][(crc ^ *bytes) & 0xFF];
    return ~crc;
}

/* x^power modulo P. */
static uint32_t crc32c_power(unsigned power) {
    uint32_t remainder = 0x80000000u;
    for (; power > 0; --power) remainder = (remainder >> 1) ^ (remainder & 1 ? CRC32C_POLYNOMIAL : 0);
    return remainder;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Three streams, because an instruction takes three cycles and one can start in each cycle. Long stretches need fewer
 * multiplications; short ones are for the bytes that are left. */
enum { STREAMS = 3, STRETCH_BYTES_LONG = 4096, STRETCH_BYTES_SHORT = 256 };

/* Factors that move a remainder ahead by one stretch, and by two. */
static uint64_t crc32c_ahead_long[2], crc32c_ahead_short[2];

/* Factors that move 16 bytes ahead by 16, 32, 48, 64 and 256 bytes: for the first 8 of them, and for the last 8. */
typedef struct {
    uint64_t first, last;
} crc32c_fold;
static crc32c_fold crc32c_fold_16, crc32c_fold_32, crc32c_fold_48, crc32c_fold_64, crc32c_fold_256;

static crc32c_fold crc32c_fold_by(unsigned nbytes) {
    const uint64_t first = crc32c_power(8 * nbytes + 63), last = crc32c_power(8 * nbytes - 1);
    const crc32c_fold fold = {first << 32, last << 32};
    return fold;
}

static void crc32c_fill(void) {
    crc32c_fill_table();
    for (unsigned ahead = 0; ahead < 2; ++ahead) {
        crc32c_ahead_long[ahead] = crc32c_power(8 * (ahead + 1) * STRETCH_BYTES_LONG - 33);
        crc32c_ahead_short[ahead] = crc32c_power(8 * (ahead + 1) * STRETCH_BYTES_SHORT - 33);
    }
    crc32c_fold_16 = crc32c_fold_by(16);
    crc32c_fold_32 = crc32c_fold_by(32);
    crc32c_fold_48 = crc32c_fold_by(48);
    crc32c_fold_64 = crc32c_fold_by(64);
    crc32c_fold_256 = crc32c_fold_by(256);
}

#define CRC_TARGET __attribute__((target("sse4.2,crc32,pclmul")))

CRC_TARGET static inline uint64_t crc32c_eat(uint64_t crc, const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return _mm_crc32_u64(crc, word);
}

CRC_TARGET static inline uint64_t crc32c_move(uint64_t crc, uint64_t ahead) {
    const __m128i factor = _mm_cvtsi64_si128((long long)ahead);
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc), factor, 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* For few bytes; the start value is inverted already, and the result is not inverted back. */
CRC_TARGET static inline uint64_t crc32c_rest(uint64_t crc, const uint8_t *bytes, size_t nbytes) {
    for (; nbytes >= 8; nbytes -= 8, bytes += 8) crc = crc32c_eat(crc, bytes);
    for (; nbytes > 0; --nbytes, ++bytes) crc = _mm_crc32_u8((uint32_t)crc, *bytes);
    return crc;
}

CRC_TARGET static inline uint64_t crc32c_three(uint64_t crc, const uint8_t *bytes, size_t stretch,
                                               const uint64_t *ahead) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < stretch; i += 8) {
        crc = crc32c_eat(crc, bytes + i);
        second = crc32c_eat(second, bytes + stretch + i);
        third = crc32c_eat(third, bytes + 2 * stretch + i);
    }
    return crc32c_move(crc, ahead[1]) ^ crc32c_move(second, ahead[0]) ^ third;
}

CRC_TARGET static uint32_t crc32c_streams(uint32_t start, const void *data, size_t nbytes) {
    const uint8_t *bytes = (const uint8_t *)data;
    uint64_t crc = (uint32_t)~start;
    const size_t large = STREAMS * STRETCH_BYTES_LONG, small = STREAMS * STRETCH_BYTES_SHORT;
    for (; nbytes >= large; nbytes -= large, bytes += large)
        crc = crc32c_three(crc, bytes, STRETCH_BYTES_LONG, crc32c_ahead_long);
    for (; nbytes >= small; nbytes -= small, bytes += small)
        crc = crc32c_three(crc, bytes, STRETCH_BYTES_SHORT, crc32c_ahead_short);
    return ~(uint32_t)crc32c_rest(crc, bytes, nbytes);
}

#define FOLD_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,vpclmulqdq,sse4.2,crc32,pclmul")))

FOLD_TARGET static inline __m512i crc32c_fold_onto(__m512i moved, __m512i by, __m512i onto) {
    const __m512i first = _mm512_clmulepi64_epi128(moved, by, 0x00), last = _mm512_clmulepi64_epi128(moved, by, 0x11);
    return _mm512_ternarylogic_epi64(first, last, onto, 0x96);
}

FOLD_TARGET static inline __m128i crc32c_factor(crc32c_fold fold) {
    return _mm_set_epi64x((long long)fold.last, (long long)fold.first);
}

/* Folds the four quarters of a register onto the last one, and reduces that to 32 bits. */
FOLD_TARGET static inline uint64_t crc32c_collapse(__m512i held) {
    __m512i by = _mm512_zextsi128_si512(crc32c_factor(crc32c_fold_48));
    by = _mm512_inserti32x4(by, crc32c_factor(crc32c_fold_32), 1);
    by = _mm512_inserti32x4(by, crc32c_factor(crc32c_fold_16), 2);
    const __m512i moved = crc32c_fold_onto(held, by, _mm512_maskz_mov_epi64(0xC0, held));
    const __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(moved), _mm512_extracti64x4_epi64(moved, 1));
    const __m128i quarter = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const uint64_t first = (uint64_t)_mm_cvtsi128_si64(quarter), last = (uint64_t)_mm_extract_epi64(quarter, 1);
    return _mm_crc32_u64(_mm_crc32_u64(0, first), last);
}

FOLD_TARGET static uint32_t crc32c_folding(uint32_t start, const void *data, size_t nbytes) {
    const uint8_t *bytes = (const uint8_t *)data;
    if (nbytes < 256) return ~(uint32_t)crc32c_rest((uint32_t)~start, bytes, nbytes);
    const __m512i by_256 = _mm512_broadcast_i32x4(crc32c_factor(crc32c_fold_256));
    const __m512i by_64 = _mm512_broadcast_i32x4(crc32c_factor(crc32c_fold_64));
    __m512i a = _mm512_loadu_si512(bytes), b = _mm512_loadu_si512(bytes + 64);
    __m512i c = _mm512_loadu_si512(bytes + 128), d = _mm512_loadu_si512(bytes + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~start)));
    for (bytes += 256, nbytes -= 256; nbytes >= 256; bytes += 256, nbytes -= 256) {
        a = crc32c_fold_onto(a, by_256, _mm512_loadu_si512(bytes));
        b = crc32c_fold_onto(b, by_256, _mm512_loadu_si512(bytes + 64));
        c = crc32c_fold_onto(c, by_256, _mm512_loadu_si512(bytes + 128));
        d = crc32c_fold_onto(d, by_256, _mm512_loadu_si512(bytes + 192));
    }
    d = crc32c_fold_onto(crc32c_fold_onto(crc32c_fold_onto(a, by_64, b), by_64, c), by_64, d);
    for (; nbytes >= 64; bytes += 64, nbytes -= 64) d = crc32c_fold_onto(d, by_64, _mm512_loadu_si512(bytes));
    return ~(uint32_t)crc32c_rest(crc32c_collapse(d), bytes, nbytes);
}

#elif defined(__aarch64__)
#include <arm_acle.h>

static void crc32c_fill(void) { crc32c_fill_table(); }

#if defined(__clang__)
#define CRC_TARGET __attribute__((target("crc")))
#else
#define CRC_TARGET __attribute__((target("+crc")))
#endif

CRC_TARGET static uint32_t crc32c_instruction(uint32_t crc, const void *data, size_t nbytes) {
    const uint8_t *bytes = (const uint8_t *)data;
    crc = ~crc;
    for (; nbytes >= 8; nbytes -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, sizeof word);
        crc = __crc32cd(crc, word);
    }
    for (; nbytes > 0; --nbytes, ++bytes) crc = __crc32cb(crc, *bytes);
    return ~crc;
}

#else

static void crc32c_fill(void) { crc32c_fill_table(); }

#endif

#endif
