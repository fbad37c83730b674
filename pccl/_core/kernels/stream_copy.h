/* Copies with streaming (non-temporal) stores, for bytes that are hardly ever read again, such as a backup.
 *
 * An ordinary store first loads the cache line that it overwrites and evicts other lines; a streaming store does
 * neither. Measured with float32, saved and then summed in place, incoming blocks of 256 KiB in the cache, AMD Zen 4, one
 * core:
 *
 *                             all of 256 MiB            one block and its backup in the L2 cache
 *   ordinary stores                    9 GB/s                         26 GB/s
 *   streaming stores                  12                              36
 *   the same, of 16 bytes             10                              31
 *   no backup                         15                              57
 */

#ifndef PCCL_KERNELS_STREAM_COPY_H
#define PCCL_KERNELS_STREAM_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    LINE_BYTES = 64,         /* streaming stores must fill a whole line to be written at once */
    STREAM_BYTES_MIN = 16384 /* below this, ordinary stores are faster if the target is in the cache */
};

/* Copies whole lines to an aligned address, past the caches. */
typedef void (*stream_lines)(void *to, const void *from, size_t nbytes);

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx"))) static void stream_avx(void *to, const void *from, size_t nbytes) {
    __m256i *target = (__m256i *)to;
    const __m256i *source = (const __m256i *)from;
    for (; nbytes > 0; nbytes -= LINE_BYTES, source += 2, target += 2) {
        const __m256i low = _mm256_loadu_si256(source), high = _mm256_loadu_si256(source + 1);
        _mm256_stream_si256(target, low);
        _mm256_stream_si256(target + 1, high);
    }
}

/* Streaming stores are weakly ordered; a process that reads the mark of a block must find the saved bytes. */
static inline void stream_end(void) { _mm_sfence(); }

#else

static inline void stream_end(void) {}

#endif

/* The stores are ordinary without `stream`, and always before the first whole line and after the last. */
static void stream_copy_bytes(stream_lines stream, void *target, const void *source, size_t nbytes) {
    const size_t lead = -(uintptr_t)target % LINE_BYTES;
    if (stream == NULL || nbytes < STREAM_BYTES_MIN) {
        memcpy(target, source, nbytes);
        return;
    }
    const size_t lines = (nbytes - lead) / LINE_BYTES * LINE_BYTES;
    memcpy(target, source, lead);
    stream((char *)target + lead, (const char *)source + lead, lines);
    memcpy((char *)target + lead + lines, (const char *)source + lead + lines, nbytes - lead - lines);
    stream_end();
}

#endif
