/* simplehash on CUDA: the digests of a tensor's blocks, computed on the tensor's device.
 *
 * This file divides the work of docs/simplehash.md among the threads of a device: a lane is a thread, a row is one load
 * of a warp, a tile is a warp, a block is a block of threads. The arithmetic is that of the CPU, from digest_mix.h. The
 * file does not use torch. It is built on first use by pccl/torch/device_digest.py; tests build it for the CPU, with
 * tests/emulation/cuda_runtime.h in place of NVIDIA's, and for devices, with nvcc. It was not run on a GPU.
 *
 * A warp waits for memory most of the time, so it loads several rows before it steps the first of them. If the data
 * begins at an odd address, a word is built from the widest aligned loads; no byte outside of the data is read.
 */

#include <cuda_runtime.h>

#include "digest_mix.h"

namespace {

constexpr unsigned THREADS = DIGEST_TILES * DIGEST_LANES;  // of a block
constexpr unsigned WHOLE_WARP = 0xFFFFFFFFu;
constexpr unsigned ROWS_AHEAD = 8;          // loads in flight at once: 2 KiB for each warp
constexpr uint64_t BLOCKS_MAX = 0x7FFFFFFF;  // of a launch, which are 512 TiB

__device__ __forceinline__ unsigned at_most(uint64_t nbytes, unsigned limit) {
    return nbytes < limit ? static_cast<unsigned>(nbytes) : limit;
}

template <typename Unit>
__device__ __forceinline__ uint64_t load_word(const unsigned char *from) {
    const Unit *units = reinterpret_cast<const Unit *>(from);
    uint64_t word = 0;
#pragma unroll
    for (unsigned unit = 0; unit < sizeof word / sizeof(Unit); ++unit)
        word |= static_cast<uint64_t>(units[unit]) << (8 * sizeof(Unit) * unit);
    return word;
}

/* This thread's word of the last row, which is incomplete. */
__device__ __forceinline__ uint64_t load_rest(const unsigned char *row, unsigned rest, unsigned lane) {
    uint64_t word = 0;
    for (unsigned i = 8 * lane; i < 8 * lane + 8 && i < rest; ++i)
        word |= static_cast<uint64_t>(row[i]) << (8 * (i - 8 * lane));
    return word;
}

/* Returns the digest of a tile, in the first thread of the warp. All threads of the warp must call this. */
template <typename Unit>
__device__ __forceinline__ uint64_t digest_tile(const unsigned char *data, unsigned nbytes, unsigned lane) {
    const unsigned rows = nbytes / DIGEST_ROW_BYTES, rest = nbytes % DIGEST_ROW_BYTES;
    uint64_t state = digest_seed(lane);
    unsigned row = 0;
    for (; row + ROWS_AHEAD <= rows; row += ROWS_AHEAD) {
        const unsigned char *from = data + row * DIGEST_ROW_BYTES + 8 * lane;
        uint64_t words[ROWS_AHEAD];
#pragma unroll
        for (unsigned i = 0; i < ROWS_AHEAD; ++i) words[i] = load_word<Unit>(from + i * DIGEST_ROW_BYTES);
#pragma unroll
        for (unsigned i = 0; i < ROWS_AHEAD; ++i) state = digest_step(state, words[i]);
    }
    for (; row < rows; ++row) state = digest_step(state, load_word<Unit>(data + row * DIGEST_ROW_BYTES + 8 * lane));
    if (rest > 0) state = digest_step(state, load_rest(data + rows * DIGEST_ROW_BYTES, rest, lane));
#pragma unroll
    for (unsigned half = DIGEST_LANES / 2; half > 0; half /= 2)
        state = digest_combine(state, __shfl_down_sync(WHOLE_WARP, state, half));
    return state;
}

template <typename Unit>
__global__ void __launch_bounds__(THREADS) digest_block(const unsigned char *data, uint64_t nbytes, uint64_t *digests) {
    __shared__ uint64_t tiles[DIGEST_TILES];
    const unsigned warp = threadIdx.x / DIGEST_LANES, lane = threadIdx.x % DIGEST_LANES;
    const uint64_t begin = static_cast<uint64_t>(blockIdx.x) * DIGEST_BLOCK_BYTES;
    const unsigned block_bytes = at_most(nbytes - begin, DIGEST_BLOCK_BYTES);
    const unsigned tile_begin = warp * DIGEST_TILE_BYTES;
    if (tile_begin < block_bytes) {
        const unsigned tile_bytes = at_most(block_bytes - tile_begin, DIGEST_TILE_BYTES);
        const uint64_t tile = digest_tile<Unit>(data + begin + tile_begin, tile_bytes, lane);
        if (lane == 0) tiles[warp] = tile;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        digests[blockIdx.x] = digest_fold(tiles, (block_bytes - 1) / DIGEST_TILE_BYTES + 1, block_bytes);
}

template <typename Unit>
cudaError_t launch(const unsigned char *data, uint64_t nbytes, uint64_t *digests, uint64_t blocks,
                   cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(blocks)), threads(THREADS);
    void *arguments[] = {&data, &nbytes, &digests};
    return cudaLaunchKernel(digest_block<Unit>, grid, threads, arguments, 0, stream);
}

}  // namespace

/* Writes the digests of all blocks of `nbytes` bytes to memory of the same device, on the caller's stream, and returns
 * at once. Returns a cudaError_t; 0: the kernel was launched. */
extern "C" int pccl_digest_blocks(const void *data, unsigned long long nbytes, unsigned long long *out_block_digests,
                                  void *stream) {
    const unsigned char *bytes = static_cast<const unsigned char *>(data);
    uint64_t *digests = reinterpret_cast<uint64_t *>(out_block_digests);
    const uintptr_t address = reinterpret_cast<uintptr_t>(data);
    const uint64_t blocks = nbytes / DIGEST_BLOCK_BYTES + (nbytes % DIGEST_BLOCK_BYTES != 0);
    const cudaStream_t queue = static_cast<cudaStream_t>(stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > BLOCKS_MAX) return cudaErrorInvalidValue;
    if (address % 8 == 0) return launch<uint64_t>(bytes, nbytes, digests, blocks, queue);
    if (address % 4 == 0) return launch<uint32_t>(bytes, nbytes, digests, blocks, queue);
    if (address % 2 == 0) return launch<uint16_t>(bytes, nbytes, digests, blocks, queue);
    return launch<uint8_t>(bytes, nbytes, digests, blocks, queue);
}
