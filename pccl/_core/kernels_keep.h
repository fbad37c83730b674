/* Reducing with a backup: local elements are kept elsewhere before they may be overwritten.
 *
 * Here live the cut into strips and the stores that bypass the caches; what is computed on a strip never does.
 *
 * A strip is copied, then reduced from the nearest cache, which is as good as one pass, and the loops need not know of
 * it. A backup is written once and hardly ever read. An ordinary store would first fetch the line that it overwrites,
 * and drive out others; a streaming store does neither. Measured with float32 in place, incoming blocks of 256 KiB in
 * cache, AMD Zen 4, one core:
 *
 *                                            256 MiB walked through    one block and its backup in the second cache
 *   ordinary stores, one loop                         9 GB/s                         26 GB/s
 *   streaming stores, one loop                       12                              29
 *   streaming stores, strips of 1024 bytes           12                              36
 *   the same with stores of 16 bytes                 10                              31
 *   no backup                                        15                              57
 *
 * Strips of 512 bytes do nearly as well; of 16 KiB a little better out of memory, much worse in cache.
 */

#ifndef PCCL_KERNELS_KEEP_H
#define PCCL_KERNELS_KEEP_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void (*reduce_loop)(void *out, const void *local, const void *incoming, size_t count, uint32_t divisor);

enum {
    STRIP_BYTES = 1024,      /* copied and reduced in turn; see above */
    LINE_BYTES = 64,         /* what streaming stores must fill to be sent off in one piece */
    STREAM_BYTES_MIN = 16384 /* below this, ordinary stores are faster if the backup happens to be in cache */
};

/* Copies whole lines, to where a line begins, past the caches. */
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

/* Streaming stores overtake others; whoever is told that the block is done must find the backup complete. */
static inline void stream_end(void) { _mm_sfence(); }

#else

static inline void stream_end(void) {}

#endif

/* Without `stream`, or where elements straddle lines, the stores are ordinary. */
static void reduce_keeping(reduce_loop loop, stream_lines stream, size_t itemsize, void *out, const void *local,
                           const void *incoming, void *backup, size_t count, uint32_t divisor) {
    const size_t nbytes = count * itemsize;
    /* Up to the first line that begins in the backup. */
    const size_t lead = -(uintptr_t)backup % LINE_BYTES;
    if (nbytes < STREAM_BYTES_MIN || lead % itemsize != 0) stream = NULL;
    size_t piece = stream != NULL && lead > 0 ? lead : STRIP_BYTES;
    for (size_t done = 0; done < nbytes; done += piece, piece = STRIP_BYTES) {
        if (piece > nbytes - done) piece = nbytes - done;
        char *kept = (char *)backup + done;
        const char *from = (const char *)local + done;
        if (stream != NULL && piece == STRIP_BYTES)
            stream(kept, from, piece);
        else
            memcpy(kept, from, piece);
        loop((char *)out + done, from, (const char *)incoming + done, piece / itemsize, divisor);
    }
    if (stream != NULL) stream_end();
}

#endif
