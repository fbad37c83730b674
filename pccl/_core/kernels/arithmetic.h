/* Arithmetic of the ring all-reduce: the choice of the instruction set, and what every instruction set must compute.
 *
 * The arithmetic on one element is in elements.h. The loops over blocks are in reduce_loops.h, those of quantization in
 * quantize_loops.h; both are included here once per instruction set. What is done once per quantization group is in
 * quantize_groups.h, vectors of 16-bit floats in half_vectors.h, copies past the caches in stream_copy.h, the CRC in
 * crc.h. Nothing here allocates, waits, or knows what a block is for.
 *
 * The result is the same on every instruction set, bit for bit:
 *
 *   integers   wrap around; the mean divides the wrapped sum and truncates towards zero
 *   floats     each operation is rounded once, to the nearest even; nothing is fused, approximated or flushed to zero
 *   16 bits    float16 and bfloat16 are computed in single precision and rounded once, at the end, after any division
 *   NaN        every NaN that comes out is the same one, quiet, positive and without payload; MAX and MIN give it
 *              if either operand is NaN
 *   zeros      minus zero is less than plus zero for MAX and MIN; sums and products follow IEEE 754 (-0 + 0 is 0)
 *   divisors   are converted to the type of the quotient first, where a single precision float rounds beyond 2^24
 *
 * This presumes what every thread starts with: rounding to the nearest, no flushing of subnormals to zero.
 */

#ifndef PCCL_KERNELS_H
#define PCCL_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "crc.h"
#include "stream_copy.h"

typedef void (*reduce_loop)(void *out, const void *local, const void *incoming, size_t count, uint32_t divisor);
#include "elements.h"
#include "half_vectors.h"
#include "kernel_values.h"

#include "quantize_groups.h"

typedef uint32_t (*crc_loop)(uint32_t crc, const void *data, size_t nbytes);

/* The iterations of the next loop do not depend on each other. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define NAME(name) name##_portable
#define TARGET
#define LANES 0
#include "reduce_loops.h"
#include "quantize_loops.h"

#if defined(__x86_64__)
#include <cpuid.h>

#define NAME(name) name##_avx2
#define TARGET AVX2_TARGET
#define LANES 16
#include "reduce_loops.h"
#include "quantize_loops.h"

#define NAME(name) name##_avx512
#define TARGET AVX512_TARGET
#define LANES 32
#include "reduce_loops.h"
#include "quantize_loops.h"

#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

/* Every aarch64 processor has NEON, and the portable loops use it too: this set adds conversions and CRCs. */
#define NAME(name) name##_neon
#define TARGET
#define LANES 8
#include "reduce_loops.h"
#include "quantize_loops.h"

#endif

/* One instruction set: its name and its loops. */
typedef struct {
    const char *name;
    const reduce_loop (*loops)[OPS];
    const group_loops *groups;
    stream_lines stream; /* NULL: it has no streaming stores */
    crc_loop crc;
} kernel_set;

enum { SETS_MAX = 3 };

/* The instruction sets of this machine, slowest first; filled once, when the module is loaded. */
static kernel_set kernel_sets[SETS_MAX];
static int kernel_sets_count;
static const kernel_set *kernel_chosen;

static void kernels_add(const char *name, const reduce_loop (*loops)[OPS], const group_loops *groups,
                        stream_lines stream, crc_loop crc) {
    const kernel_set set = {name, loops, groups, stream, crc};
    kernel_sets[kernel_sets_count++] = set;
}

#if defined(__x86_64__)
/* The registers that the operating system saves at a context switch, one bit each; 0 if it saves no wide ones. */
static unsigned saved_registers(unsigned leaf1_ecx) {
    unsigned low = 0, high = 0;
    if (leaf1_ecx & bit_OSXSAVE) __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

typedef struct {
    int avx2;       /* AVX2, SSE4.2, PCLMUL and F16C */
    int avx512;     /* those, and AVX-512 F, BW, VL and DQ */
    int vpclmulqdq; /* carry-less products of whole vectors */
} x86_features;

/* Not __builtin_cpu_supports: it needs a symbol that the libraries of some compilers lack, such as that of zig. */
static x86_features x86_detect(void) {
    enum { YMM = 0x06, ZMM = 0xe6 };
    const unsigned base = bit_SSE4_2 | bit_PCLMUL | bit_F16C | bit_AVX;
    const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned eax, ebx, ecx1, ecx7, edx;
    x86_features found = {0, 0, 0};
    if (!__get_cpuid(1, &eax, &ebx, &ecx1, &edx) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx7, &edx)) return found;
    const unsigned saved = saved_registers(ecx1);
    found.avx2 = (ecx1 & base) == base && (ebx & bit_AVX2) != 0 && (saved & YMM) == YMM;
    found.avx512 = found.avx2 && (ebx & wide) == wide && (saved & ZMM) == ZMM;
    found.vpclmulqdq = found.avx2 && (ecx7 & bit_VPCLMULQDQ) != 0;
    return found;
}
#endif

static void kernels_load(void) {
    crc32c_fill();
    kernel_sets_count = 0;
    kernels_add("portable", loops_portable, &groups_portable, NULL, crc32c_portable);
#if defined(__x86_64__)
    const x86_features cpu = x86_detect();
    if (cpu.avx2) kernels_add("avx2", loops_avx2, &groups_avx2, stream_avx, crc32c_streams);
    const crc_loop crc = cpu.vpclmulqdq ? crc32c_folding : crc32c_streams;
    if (cpu.avx512) kernels_add("avx512", loops_avx512, &groups_avx512, stream_avx, crc);
#elif defined(__aarch64__)
    const int crc = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
    kernels_add("neon", loops_neon, &groups_neon, NULL, crc ? crc32c_instruction : crc32c_portable);
#endif
    kernel_chosen = &kernel_sets[kernel_sets_count - 1];
}

static inline size_t kernels_itemsize(int datatype) {
    static const uint8_t sizes[DATATYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
    return datatype >= 0 && datatype < DATATYPES ? sizes[datatype] : 0;
}

static inline uint32_t kernels_crc32c(uint32_t crc, const void *data, size_t nbytes) {
    return kernel_chosen->crc(crc, data, nbytes);
}

static inline void kernels_stream_copy(void *target, const void *source, size_t nbytes) {
    stream_copy_bytes(kernel_chosen->stream, target, source, nbytes);
}

static inline int kernels_reduce(int datatype, int op, void *out, const void *local, const void *incoming, size_t count,
                                 uint32_t divisor) {
    if (datatype < 0 || datatype >= DATATYPES || op < 0 || op >= OPS) return -1;
    if (op == OP_SUM || op == OP_AVG)
        op = divisor > 1 ? OP_AVG : OP_SUM;
    else if (divisor > 1)
        return -1;
    kernel_chosen->loops[datatype][op](out, local, incoming, count, divisor);
    return 0;
}

static inline void kernels_encode(const quantizer *how, void *coded, const void *values, size_t count) {
    encode_values(kernel_chosen->groups, how, coded, values, count);
}

static inline void kernels_decode(const quantizer *how, void *values, const void *coded, size_t count) {
    const size_t itemsize = kernels_itemsize((int)how->datatype);
    const uint8_t *from = (const uint8_t *)coded;
    uint8_t *to = (uint8_t *)values;
    while (count > 0) {
        const size_t some = SMALLER(count, quantizer_group(how));
        from += decode_one(kernel_chosen->groups, how, to, from, some);
        to += some * itemsize;
        count -= some;
    }
}

/* Decodes group by group into the nearest cache, and reduces from there. */
static inline int kernels_reduce_coded(const quantizer *how, int op, void *out, const void *local, const void *coded,
                                         size_t count, uint32_t divisor) {
    const size_t itemsize = kernels_itemsize((int)how->datatype);
    const uint8_t *from = (const uint8_t *)coded;
    uint8_t decoded[GROUP_BYTES_MAX] __attribute__((aligned(64)));
    for (size_t done = 0; done < count;) {
        const size_t some = SMALLER(count - done, quantizer_group(how)), at = done * itemsize;
        from += decode_one(kernel_chosen->groups, how, decoded, from, some);
        const uint8_t *mine = (const uint8_t *)local + at;
        if (kernels_reduce((int)how->datatype, op, (uint8_t *)out + at, mine, decoded, some, divisor)) return -1;
        done += some;
    }
    return 0;
}

#endif
