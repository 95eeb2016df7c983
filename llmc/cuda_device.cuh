/*
A GPU as a device: memory, copies, the choice of device. Each function has a CPU counterpart of the same name in
cpu_common.h.

Contract: one translation unit per program includes this file; nothing here waits for the device except copy_to_host,
copy_floats_to_host, device_free and device_synchronize.
*/
#ifndef CUDA_DEVICE_CUH
#define CUDA_DEVICE_CUH

#include <cublasLt.h>

#include "cuda_common.cuh"

cudaStream_t main_stream;

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

#endif
