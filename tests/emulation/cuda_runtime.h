/* A CUDA device made of fibres: compiles .cu files with a plain C++ compiler, so that their logic runs without a GPU.
 *
 * The compiler finds it in place of NVIDIA's header of the same name. It holds only what our kernels use. Every thread
 * of a block is a fibre with a stack of its own. A fibre runs until it reaches a barrier and waits there until all
 * threads of the barrier have arrived: 32 for a warp shuffle, the whole block for __syncthreads. A shuffle stores its
 * value, waits for the warp, reads the value of its source, and waits for the warp again, so values really pass
 * between threads.
 *
 * Fibres run in the order of their numbers, each as far as possible. So a thread that reads shared memory without a
 * barrier reads it too early, and an error that a device makes only sometimes happens here every time. If some threads
 * wait at a barrier that others never reach, the launch fails; a device would hang or continue with wrong data.
 *
 * Blocks run one after another, and a launch is over when it returns. Nothing here is about speed.
 */

#ifndef PCCL_CUDA_EMULATION_H
#define PCCL_CUDA_EMULATION_H

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static /* one block is enough, because blocks run one after another */

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
typedef struct CUstream_st *cudaStream_t;

struct dim3 {
    unsigned x, y, z;
    explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

/* Indices of the fibre that runs. */
inline dim3 threadIdx, blockIdx;

namespace emulation {

constexpr unsigned WARP_THREADS = 32;
constexpr std::size_t STACK_BYTES = 1 << 16;

struct Barrier {
    unsigned arrived = 0;
    unsigned passed = 0; /* how often all threads have met at this barrier */
};

struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    const Barrier *awaited = nullptr;
    unsigned passed = 0; /* the barrier's `passed` when the fibre arrived */
    bool ended = false;

    bool held() const { return awaited != nullptr && awaited->passed == passed; }
};

/* One block of threads. */
struct Block {
    std::vector<Fibre> fibres;
    std::vector<Barrier> warps;
    std::vector<unsigned long long> values; /* stored by shuffles */
    Barrier whole;
    ucontext_t scheduler;
    unsigned current = 0;
    std::function<void()> kernel;

    /* Runs every fibre to its end; returns false if some wait at a barrier that others never reach. */
    bool run();

    void meet(Barrier &barrier, unsigned members) {
        Fibre &fibre = fibres[current];
        if (++barrier.arrived == members) {
            barrier.arrived = 0;
            ++barrier.passed;
            return;
        }
        fibre.awaited = &barrier;
        fibre.passed = barrier.passed;
        swapcontext(&fibre.context, &scheduler);
        fibre.awaited = nullptr;
    }
};

inline Block *block;

inline void fibre_main() {
    block->kernel();
    block->fibres[block->current].ended = true;
}

inline bool Block::run() {
    for (Fibre &fibre : fibres) {
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = fibre.stack.size();
        fibre.context.uc_link = &scheduler;
        makecontext(&fibre.context, fibre_main, 0);
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (current = 0; current < fibres.size(); ++current) {
            Fibre &fibre = fibres[current];
            if (fibre.ended || fibre.held()) continue;
            threadIdx = dim3(current, 0, 0);
            swapcontext(&scheduler, &fibre.context);
            moved = true;
        }
    }
    for (const Fibre &fibre : fibres)
        if (!fibre.ended) return false;
    return true;
}

template <typename... Arguments, std::size_t... Indices>
void call(void (*kernel)(Arguments...), void **arguments, std::index_sequence<Indices...>) {
    kernel(*static_cast<Arguments *>(arguments[Indices])...);
}

}  // namespace emulation

inline void __syncthreads() {
    emulation::block->meet(emulation::block->whole, static_cast<unsigned>(emulation::block->fibres.size()));
}

/* Only for whole warps; our kernels use no others. A source beyond the warp's end returns the thread's own value. */
template <typename Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned distance) {
    emulation::Block &block = *emulation::block;
    const unsigned self = block.current, lane = self % emulation::WARP_THREADS;
    const unsigned source = lane + distance < emulation::WARP_THREADS ? self + distance : self;
    emulation::Barrier &warp = block.warps[self / emulation::WARP_THREADS];
    const unsigned members = static_cast<unsigned>(__builtin_popcount(mask));
    static_assert(sizeof(Value) <= sizeof(unsigned long long), "a shuffle passes 64 bits at most");
    block.values[self] = value;
    block.meet(warp, members);
    const Value taken = static_cast<Value>(block.values[source]);
    block.meet(warp, members);
    return taken;
}

/* The kernel's type gives the types of the arguments; nvcc's runtime has this template too. */
template <typename... Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments...), dim3 grid, dim3 threads, void **arguments, std::size_t,
                             cudaStream_t) {
    static emulation::Block block;
    if (block.fibres.size() != threads.x) block.fibres = std::vector<emulation::Fibre>(threads.x);
    block.kernel = [=] { emulation::call(kernel, arguments, std::index_sequence_for<Arguments...>{}); };
    emulation::block = &block;
    for (unsigned number = 0; number < grid.x; ++number) {
        blockIdx = dim3(number, 0, 0);
        block.whole = emulation::Barrier();
        block.warps.assign((threads.x + emulation::WARP_THREADS - 1) / emulation::WARP_THREADS, emulation::Barrier());
        block.values.assign(threads.x, 0);
        for (emulation::Fibre &fibre : block.fibres) fibre.awaited = nullptr, fibre.ended = false;
        if (!block.run()) return cudaErrorLaunchFailure;
    }
    return cudaSuccess;
}

#endif
