/* The digests of many blocks of many tensors, on threads that exist only during the call.
 *
 * This file divides the work; digest.h computes a digest. All threads, including the caller, take shares of consecutive
 * blocks from one list until it is empty. So a busy core does not delay the other threads, a share contains many small
 * tensors, and a thread that the system refuses to start costs only speed. No result depends on the thread that
 * computed it. Nothing here allocates; every thread has ended when the call returns.
 */

#ifndef PCCL_DIGEST_THREADS_H
#define PCCL_DIGEST_THREADS_H

#include <pthread.h>
#include <signal.h>

#include "digest.h"

enum {
    THREADS_MAX = 64,            /* threads at most, far beyond what memory has bandwidth for */
    SHARE_BYTES_MIN = 1 << 20 /* some 50 us of work; less is not worth a thread, which must start and end */
};

typedef uint64_t (*block_function)(const digest_set *set, const uint8_t *data, size_t nbytes);

/* One tensor: where it is, and where the results of its blocks go. */
typedef struct {
    const uint8_t *data;
    uint64_t nbytes;
    uint64_t *blocks;
} digest_tensor;

/* A position in the list. After the last block of a tensor comes the first one of the next. */
typedef struct {
    size_t tensor;
    uint64_t begin; /* of the block, in bytes of the tensor */
} digest_position;

typedef struct {
    const digest_tensor *tensors;
    size_t count;
    block_function function;
    const digest_set *set;
    pthread_mutex_t lock;
    digest_position next; /* the first block that no thread has taken; read and written under the lock */
} digest_work;

/* The bytes of the block at a position, 0 if the tensor has no block there. */
static inline uint64_t block_bytes_at(const digest_work *work, digest_position position) {
    const uint64_t rest = work->tensors[position.tensor].nbytes - position.begin;
    return rest < DIGEST_BLOCK_BYTES ? rest : DIGEST_BLOCK_BYTES;
}

static inline digest_position position_after(const digest_work *work, digest_position position, uint64_t block_bytes) {
    position.begin += block_bytes;
    if (position.begin == work->tensors[position.tensor].nbytes) {
        const digest_position following = {position.tensor + 1, 0};
        return following;
    }
    return position;
}

/* Takes the next share from the list: from the returned position to `end`. Both are the list's end if it is empty. */
static digest_position take_blocks(digest_work *work, digest_position *end) {
    pthread_mutex_lock(&work->lock);
    const digest_position begin = work->next;
    uint64_t taken = 0;
    while (work->next.tensor < work->count && taken < SHARE_BYTES_MIN) {
        const uint64_t block_bytes = block_bytes_at(work, work->next);
        work->next = position_after(work, work->next, block_bytes);
        taken += block_bytes;
    }
    *end = work->next;
    pthread_mutex_unlock(&work->lock);
    return begin;
}

static void *run_thread(void *shared) {
    digest_work *work = (digest_work *)shared;
    digest_position end;
    for (digest_position at = take_blocks(work, &end); at.tensor < work->count; at = take_blocks(work, &end))
        while (at.tensor != end.tensor || at.begin != end.begin) {
            const digest_tensor *tensor = &work->tensors[at.tensor];
            const uint64_t block_bytes = block_bytes_at(work, at);
            if (block_bytes > 0)
                tensor->blocks[at.begin / DIGEST_BLOCK_BYTES] =
                    work->function(work->set, tensor->data + at.begin, block_bytes);
            at = position_after(work, at, block_bytes);
        }
    return NULL;
}

/* Computes the results of all blocks, on this thread and up to `threads - 1` others. */
static void digest_on_threads(const digest_tensor *tensors, size_t count, block_function function,
                              const digest_set *set, int threads) {
    digest_work work = {tensors, count, function, set, PTHREAD_MUTEX_INITIALIZER, {0, 0}};
    pthread_t others[THREADS_MAX];
    uint64_t nbytes = 0;
    int started = 0;
    for (size_t tensor = 0; tensor < count; ++tensor) nbytes += tensors[tensor].nbytes;
    const uint64_t shares = nbytes / SHARE_BYTES_MIN;
    if (threads > THREADS_MAX) threads = THREADS_MAX;
    if ((uint64_t)threads > shares) threads = (int)shares;
    if (threads > 1) {
        /* Only threads of the application may receive signals. */
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        while (started < threads - 1 && pthread_create(&others[started], NULL, run_thread, &work) == 0) ++started;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    run_thread(&work);
    while (started > 0) pthread_join(others[--started], NULL);
    pthread_mutex_destroy(&work.lock);
}

#endif
