/*
What device code sees of the emulator: CUDA C++ on the CPU, from the source that nvcc compiles. Included by
llmc/cuda_gpu.cuh when CUDA_EMULATOR is defined; needs g++ or clang, C++17, x86-64, and the CUDA headers.

Types and prototypes come from NVIDIA's headers, so the compiler checks every call of the runtime; the definitions
are in this folder. A kernel runs as one fiber per CUDA thread, blocks are spread over the cores.
*/
#ifndef CUDA_EMULATOR_CUH
#define CUDA_EMULATOR_CUH

#ifdef __CUDACC__
#error "cuda_emulator.h is for the host compiler; nvcc builds run on the device"
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#ifndef __grid_constant__
#define __grid_constant__
#endif
// A bare __shared__ would silently be a variable of each thread.
#undef __shared__
#define __shared__ static_assert(false, "use SHARED() or DYN_SHARED()");

namespace emu {

struct Block {
    uint3 index;
    dim3 threads, blocks;
    uint64_t serial;  // differs for every block ever run
    unsigned char* dynamic;
};

struct Thread {
    uint3 index;
    unsigned linear, lane;
    Block* block;
};

extern __thread Thread* current;  // the CUDA thread that this core runs; NULL in host code

// Of a kernel and a collective that do not wait for each other, which one runs first.
enum Late { NOTHING_LATE, COLLECTIVES_LATE, KERNELS_LATE };

// Settings, read from the environment at the first use; a test may change them between launches.
struct Config {
    unsigned seed;      // EMU_SEED: 0 ascending thread order, 1 descending, 2.. random
    int workers;        // EMU_WORKERS: blocks at a time; 0 for all cores
    bool poison;        // EMU_POISON: new shared and device memory holds NaN (default yes)
    bool protect;       // EMU_PROTECT: host code that touches device memory crashes (default no)
    size_t smem_limit;  // EMU_SHARED: bytes of shared memory a block may opt in to (default 227 KiB)
    size_t memory;      // EMU_MEMORY: bytes of device memory (default 4 GiB)
    int devices;        // EMU_DEVICES: devices to choose from (default 1)
    int late;           // EMU_LATE: what runs as late as the streams' order allows, see Late (default nothing)
};
Config& config();

// Ends the launch: prints where, and every later call of the runtime returns cudaErrorLaunchFailure.
[[noreturn]] void kernel_fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ----------------------------------------------------------------------------
// launches and shared memory

void before_work(cudaStream_t stream);                           // runs what this stream has to wait for
void run_late(cudaStream_t stream, std::function<void()> work);  // when the stream's order demands it
void run_kernel(const void* function, const char* name, dim3 grid, dim3 block, size_t dynamic_bytes,
                void (*body)(void*), void* arguments);

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_bytes,
            cudaStream_t stream, Arguments&&... arguments) {
    static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
    struct Call {
        void (*kernel)(Parameters...);
        std::tuple<Parameters...> arguments;
    } call = {kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)};
    auto body = [](void* p) { std::apply(static_cast<Call*>(p)->kernel, static_cast<Call*>(p)->arguments); };
    if (config().late == KERNELS_LATE) {
        run_late(stream, [=]() mutable {
            run_kernel(reinterpret_cast<const void*>(call.kernel), name, grid, block, dynamic_bytes, body, &call);
        });
        return;
    }
    before_work(stream);
    run_kernel(reinterpret_cast<const void*>(kernel), name, grid, block, dynamic_bytes, body, &call);
}

// Where a SHARED variable of the running block lies; one per declaration and core.
struct SharedSlot {
    uint64_t serial;
    void* address;
};
void* allocate_shared(SharedSlot* slot, size_t bytes, size_t alignment);

inline void* shared_address(SharedSlot* slot, size_t bytes, size_t alignment) {
    return slot->serial == current->block->serial ? slot->address : allocate_shared(slot, bytes, alignment);
}

// ----------------------------------------------------------------------------
// barriers, warp collectives, tensor cores, asynchronous copies

enum BarrierOperation { BARRIER_PLAIN, BARRIER_COUNT, BARRIER_AND, BARRIER_OR };
void bar_sync(int id, int threads);  // 0 threads: the whole block
void bar_arrive(int id, int threads);
int bar_reduce(BarrierOperation operation, int predicate);
void yield();

enum ShuffleMode { SHUFFLE_INDEX, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR };
enum Reduction {
    REDUCE_ADD,
    REDUCE_MIN,
    REDUCE_MAX,
    REDUCE_MIN_SIGNED,
    REDUCE_MAX_SIGNED,
    REDUCE_AND,
    REDUCE_OR,
    REDUCE_XOR
};
void syncwarp(unsigned mask);
uint64_t shuffle(unsigned mask, ShuffleMode mode, uint64_t value, int selector, int width);
unsigned ballot(unsigned mask, bool predicate, unsigned* participants);
unsigned reduce(unsigned mask, Reduction reduction, unsigned value);
unsigned match_any(unsigned mask, uint64_t value);
void mma_bf16_16816(float* d, const uint32_t* a, const uint32_t* b, const float* c);
void ldmatrix(uint32_t* r, const void* row, int matrices, bool transposed);
void cp_async(void* dst, const void* src, int bytes, int source_bytes);
void cp_async_commit();
void cp_async_wait(int groups);

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) <= 8 && sizeof(From) <= 8 && std::is_trivially_copyable<From>::value, "");
    To to;
    memset(static_cast<void*>(&to), 0, sizeof to);
    memcpy(static_cast<void*>(&to), &from, sizeof to < sizeof from ? sizeof to : sizeof from);
    return to;
}

template <class T>
inline T shuffle_value(unsigned mask, ShuffleMode mode, T value, int selector, int width) {
    return bits<T>(shuffle(mask, mode, bits<uint64_t>(value), selector, width));
}

}  // namespace emu

#define LAUNCH(kernel, grid, block, dynamic_bytes, stream, ...) \
    ::emu::launch(#kernel, kernel, grid, block, dynamic_bytes, stream, ##__VA_ARGS__)

#define SHARED(T, name, ...)                                                            \
    using name##_shared_type = T __VA_ARGS__;                                           \
    static thread_local ::emu::SharedSlot name##_shared_slot;                           \
    name##_shared_type& name = *static_cast<name##_shared_type*>(::emu::shared_address( \
        &name##_shared_slot, sizeof(name##_shared_type),                                \
        alignof(name##_shared_type) > 16 ? alignof(name##_shared_type) : static_cast<size_t>(16)))

#define DYN_SHARED(T, name) T* const name = reinterpret_cast<T*>(::emu::current->block->dynamic)

#define threadIdx (::emu::current->index)
#define blockIdx (::emu::current->block->index)
#define blockDim (::emu::current->block->threads)
#define gridDim (::emu::current->block->blocks)

#include "cuda_emulator_builtins.h"

#endif
