/*
A GPU as a device: memory, copies, the choice of device, and what kernels share: 128-bit accesses and reductions
in a fixed order. Each host function has a CPU counterpart of the same name in cpu_common.h.

Contract: one translation unit per program includes this file; all work goes to main_stream in order; nothing here
waits for the device except copy_to_host, copy_floats_to_host, device_free and device_synchronize.
*/
#ifndef CUDA_COMMON_CUH
#define CUDA_COMMON_CUH

#include <cublasLt.h>

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

static cudaStream_t main_stream;

#define cudaCheck(call)                                                                                    \
    do {                                                                                                   \
        cudaError_t error_ = (call);                                                                       \
        if (error_ != cudaSuccess) { fatal("%s:%d: %s", __FILE__, __LINE__, cudaGetErrorString(error_)); } \
    } while (0)

#define cublasCheck(call)                                                                       \
    do {                                                                                        \
        cublasStatus_t status_ = (call);                                                        \
        if (status_ != CUBLAS_STATUS_SUCCESS) {                                                 \
            fatal("%s:%d: cuBLASLt: %s", __FILE__, __LINE__, cublasLtGetStatusString(status_)); \
        }                                                                                       \
    } while (0)

// ----------------------------------------------------------------------------
// memory

// Bytes that device_malloc can still give.
size_t device_memory_available(void) {
    size_t available, total;
    cudaCheck(cudaMemGetInfo(&available, &total));
    return available;
}

// Zeroed memory on the device, aligned to 256 bytes; never returns NULL.
void* device_malloc(size_t bytes) {
    void* p = NULL;
    cudaError_t error = cudaMalloc(&p, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        double available = (double)device_memory_available();
        fatal(
            "out of device memory: %zu bytes (%.1f GiB) asked for, %.1f GiB free; lower --batch_size, "
            "--sequence_length or --model_size",
            bytes, (double)bytes / 0x1p30, available / 0x1p30);
    }
    cudaCheck(error);
    cudaCheck(cudaMemsetAsync(p, 0, bytes ? bytes : 1, main_stream));
    return p;
}

void device_free(void* p) { cudaCheck(cudaFree(p)); }

void device_zero(void* p, size_t bytes) {
    if (bytes) { cudaCheck(cudaMemsetAsync(p, 0, bytes, main_stream)); }
}

void device_synchronize(void) { cudaCheck(cudaStreamSynchronize(main_stream)); }

// ----------------------------------------------------------------------------
// copies

// A copy from ordinary memory waits for all earlier work of the stream; one from these pinned buffers does not.
constexpr size_t STAGES = 4, STAGE_BYTES = 1 << 20;

static struct {
    char* memory;  // [STAGES][STAGE_BYTES]
    cudaEvent_t free[STAGES];
    size_t next;
} staging;

static void staging_create(void) {
    cudaCheck(cudaMallocHost((void**)&staging.memory, STAGES * STAGE_BYTES));
    for (size_t i = 0; i < STAGES; i++) {
        cudaCheck(cudaEventCreateWithFlags(&staging.free[i], cudaEventDisableTiming));
    }
}

// The host's memory may be changed as soon as this returns; the device sees the copy in the order of the stream.
void copy_to_device(void* device, const void* host, size_t bytes) {
    if (!staging.memory) { staging_create(); }
    for (size_t done = 0; done < bytes; done += STAGE_BYTES) {
        size_t stage = staging.next++ % STAGES, count = bytes - done < STAGE_BYTES ? bytes - done : STAGE_BYTES;
        char* buffer = staging.memory + stage * STAGE_BYTES;
        cudaCheck(cudaEventSynchronize(staging.free[stage]));
        memcpy(buffer, (const char*)host + done, count);
        cudaCheck(cudaMemcpyAsync((char*)device + done, buffer, count, cudaMemcpyHostToDevice, main_stream));
        cudaCheck(cudaEventRecord(staging.free[stage], main_stream));
    }
}

void device_copy(void* to, const void* from, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, main_stream));
}

void copy_to_host(void* host, const void* device, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, main_stream));
    device_synchronize();
}

void copy_floats_to_host(float* host, const floatX* device, size_t n) {
    floatX* copy = (floatX*)xcalloc(n, sizeof(floatX));
    copy_to_host(copy, device, n * sizeof(floatX));
    for (size_t i = 0; i < n; i++) { host[i] = (float)copy[i]; }
    free(copy);
}

// ----------------------------------------------------------------------------
// device

// The number in "cuda:N"; 0 for "auto", "cuda" and nothing.
static int parse_device(const char* device) {
    if (!device || !*device || strcmp(device, "auto") == 0 || strcmp(device, "cuda") == 0) { return 0; }
    char* end = NULL;
    long index = strncmp(device, "cuda:", 5) == 0 ? strtol(device + 5, &end, 10) : -1;
    if (index < 0 || index > INT16_MAX || end == device + 5 || *end != '\0') {
        fatal(
            "--device %s: this program was built for CUDA, expected auto, cuda or cuda:N; leave --device out, or "
            "build the CPU version without CUDA",
            device);
    }
    return (int)index;
}

// Ends the program unless the binary's precision is the one asked for.
#define BACKEND_DTYPE PRECISION_NAME  // what --dtype is without the flag

static void check_precision(const char* dtype) {
    if (strcmp(dtype, PRECISION_NAME) == 0) { return; }
    bool known = strcmp(dtype, "float32") == 0 || strcmp(dtype, "bfloat16") == 0;
    if (!known) { fatal("--dtype %s: not available with CUDA, expected float32 or bfloat16", dtype); }
    fatal("--dtype %s: this program was built for %s; build the other one with 'make cuda PRECISION=%s'", dtype,
          PRECISION_NAME, strcmp(dtype, "float32") == 0 ? "fp32" : "bf16");
}

// Checks and applies --device and --dtype; ends the program with one line when the build cannot do it.
void backend_init(const char* device, const char* dtype) {
    int index = parse_device(device), count = 0;
    check_precision(dtype);
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        fatal("no CUDA device: %s; check nvidia-smi, or build the CPU version without CUDA",
              error == cudaSuccess ? "none found" : cudaGetErrorString(error));
    }
    if (index >= count) { fatal("--device cuda:%d: expected a number below %d, the devices found", index, count); }
    struct cudaDeviceProp properties;
    cudaCheck(cudaSetDevice(index));
    cudaCheck(cudaGetDeviceProperties(&properties, index));
    if (properties.major < 8) {
        fatal("--device cuda:%d: %s has compute capability %d.%d, expected at least 8.0; use another device", index,
              properties.name, properties.major, properties.minor);
    }
    if (!main_stream) { cudaCheck(cudaStreamCreateWithFlags(&main_stream, cudaStreamNonBlocking)); }
}

// One line for args.json and the header: device, library versions, precision.
void backend_describe(char* buffer, size_t bytes) {
    struct cudaDeviceProp p;
    int device, runtime;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&p, device));
    cudaCheck(cudaRuntimeGetVersion(&runtime));
    snprintf(buffer, bytes, "cuda:%d: %s, sm_%d%d, %d multiprocessors, %.1f GiB, CUDA %d.%d, cuBLASLt %zu, %s", device,
             p.name, p.major, p.minor, p.multiProcessorCount, (double)p.totalGlobalMem / 0x1p30, runtime / 1000,
             runtime % 1000 / 10, cublasLtGetVersion(), PRECISION_NAME);
}

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
