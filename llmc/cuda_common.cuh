/*
What every operator on a GPU shares: the type of weights and activations, the stream, checks, launches, 128-bit
accesses and reductions in a fixed order. The device itself, its memory and copies are in cuda_device.cuh, which one
translation unit of a program includes; all work goes to main_stream in order.
*/
#ifndef CUDA_COMMON_CUH
#define CUDA_COMMON_CUH

#include "cuda_gpu.cuh"
#include "util.h"

// Weights and activations; sums, norms, softmax, gradients of weights and master weights are fp32 in both.
#ifdef PRECISION_FP32
typedef float floatX;
#define PRECISION_NAME "float32"
#else
typedef __nv_bfloat16 floatX;
#define PRECISION_NAME "bfloat16"
#endif

extern cudaStream_t main_stream;  // defined in cuda_device.cuh

#define cudaCheck(call)                                                                                    \
    do {                                                                                                   \
        cudaError_t error_ = (call);                                                                       \
        if (error_ != cudaSuccess) { fatal("%s:%d: %s", __FILE__, __LINE__, cudaGetErrorString(error_)); } \
    } while (0)

// Zeroed memory on the device, aligned to 256 bytes; never returns NULL. Bytes that it can still give.
void* device_malloc(size_t bytes);
void device_free(void* p);
size_t device_memory_available(void);

// ----------------------------------------------------------------------------
// launching

static inline size_t multiprocessors(void) {
    static int count;
    int device;
    if (count == 0) {
        cudaCheck(cudaGetDevice(&device));
        cudaCheck(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    }
    return (size_t)count;
}

// Elements of floatX in 128 bits. Kernels are templates of the number W of elements that a thread takes at once:
// WIDE where all rows are aligned, else 1.
constexpr int WIDE = 16 / sizeof(floatX);

// 16 divides this combination (|) of addresses and strides in bytes.
static inline bool aligned(uintptr_t bits) { return bits % 16 == 0; }

static inline size_t ceil_div(size_t n, size_t divisor) { return (n + divisor - 1) / divisor; }

// The kernel for wide or for single elements; grid and what follows are LAUNCH's.
#define LAUNCH_WIDTH(wide, kernel, ...)          \
    do {                                         \
        if (wide) {                              \
            LAUNCH((kernel<WIDE>), __VA_ARGS__); \
        } else {                                 \
            LAUNCH((kernel<1>), __VA_ARGS__);    \
        }                                        \
        cudaCheck(cudaGetLastError());           \
    } while (0)

// For kernels in which block (n, i) takes part i of row n: threads of a block, parts of a row.
typedef struct {
    dim3 grid;
    unsigned threads;
} RowLaunch;

static inline RowLaunch row_launch(size_t rows, size_t items) {
    size_t threads = items < 256 ? round_up(items, 32) : 256;
    return {dim3((unsigned)rows, (unsigned)ceil_div(items, threads)), (unsigned)threads};
}

// First column of this thread in such a kernel, W columns each.
__device__ __forceinline__ size_t row_column(int W) { return ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * W; }

// ----------------------------------------------------------------------------
// loads and stores of W consecutive elements as fp32: in 128-bit accesses for W = 4, 8, one by one otherwise

#ifdef CUDA_EMULATOR
static inline uint4 load_128(const void* p) {
    if ((uintptr_t)p % 16 != 0) { emu::kernel_fault("128-bit load from the misaligned address %p", p); }
    uint4 bits;
    memcpy(&bits, p, sizeof bits);
    return bits;
}
static inline void store_128(void* p, uint4 bits) {
    if ((uintptr_t)p % 16 != 0) { emu::kernel_fault("128-bit store to the misaligned address %p", p); }
    memcpy(p, &bits, sizeof bits);
}
#else
__device__ __forceinline__ uint4 load_128(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store_128(void* p, uint4 bits) { *static_cast<uint4*>(p) = bits; }
#endif

template <int W>
__device__ __forceinline__ void load(float (&x)[W], const float* p) {
    if constexpr (W % 4 == 0) {
#pragma unroll
        for (int i = 0; i < W; i += 4) {
            const uint4 bits = load_128(p + i);
            x[i] = __uint_as_float(bits.x), x[i + 1] = __uint_as_float(bits.y);
            x[i + 2] = __uint_as_float(bits.z), x[i + 3] = __uint_as_float(bits.w);
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) { x[i] = p[i]; }
    }
}

template <int W>
__device__ __forceinline__ void store(float* p, const float (&x)[W]) {
    if constexpr (W % 4 == 0) {
#pragma unroll
        for (int i = 0; i < W; i += 4) {
            store_128(p + i, make_uint4(__float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                                        __float_as_uint(x[i + 3])));
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) { p[i] = x[i]; }
    }
}

__device__ __forceinline__ void unpack_bf16(float* x, uint32_t pair) {
    x[0] = __uint_as_float(pair << 16);
    x[1] = __uint_as_float(pair & 0xffff0000u);
}

template <int W>
__device__ __forceinline__ void load(float (&x)[W], const __nv_bfloat16* p) {
    if constexpr (W % 8 == 0) {
#pragma unroll
        for (int i = 0; i < W; i += 8) {
            const uint4 bits = load_128(p + i);
            unpack_bf16(x + i, bits.x), unpack_bf16(x + i + 2, bits.y);
            unpack_bf16(x + i + 4, bits.z), unpack_bf16(x + i + 6, bits.w);
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) { x[i] = __bfloat162float(p[i]); }
    }
}

// Rounded to nearest.
template <int W>
__device__ __forceinline__ void store(__nv_bfloat16* p, const float (&x)[W]) {
    if constexpr (W % 8 == 0) {
#pragma unroll
        for (int i = 0; i < W; i += 8) {
            store_128(p + i, make_uint4(pack_bf16(x[i], x[i + 1]), pack_bf16(x[i + 2], x[i + 3]),
                                        pack_bf16(x[i + 4], x[i + 5]), pack_bf16(x[i + 6], x[i + 7])));
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) { p[i] = __float2bfloat16_rn(x[i]); }
    }
}

// e^x: the fast instruction where results are rounded to bf16 anyway, else accurate to 1 ulp.
__device__ __forceinline__ float exp_device(float x) {
#ifdef PRECISION_FP32
    return expf(x);
#else
    return __expf(x);
#endif
}

// ----------------------------------------------------------------------------
// reductions, in an order that depends on the number of threads only; every thread receives the result

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) { x += __shfl_xor_sync(0xffffffffu, x, offset); }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) { x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset)); }
    return x;
}

// Over whole warps: the number of threads is a multiple of 32. All threads of the block take part.
template <typename T>
__device__ __forceinline__ T block_sum(T x) {
    SHARED(T, parts, [32]);
    x = warp_sum(x);
    __syncthreads();  // parts may still be read from an earlier sum
    if (threadIdx.x % 32 == 0) { parts[threadIdx.x / 32] = x; }
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : T(0));
}

__device__ __forceinline__ float block_max(float x) {
    SHARED(float, parts, [32]);
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) { parts[threadIdx.x / 32] = x; }
    __syncthreads();
    return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : -INFINITY);
}

#endif
