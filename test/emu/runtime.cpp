/*
The rest of the CUDA runtime: errors and the description of the devices. An emulated device calls itself an sm_90 with
four multiprocessors. Several devices share one memory: they are there
for programs of several processes, each of which uses one.
*/
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "emulator.h"

enum { MULTIPROCESSORS = 4, THREADS_PER_MULTIPROCESSOR = 2048, BLOCKS_PER_MULTIPROCESSOR = 32, RESERVED_SHARED = 1024 };

static int current_device;

static bool is_device(int device) { return device >= 0 && device < emu::config().devices; }
static cudaError_t ok() { return emu::set_error(cudaSuccess); }

extern "C" {

// ----------------------------------------------------------------------------
// errors

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
        default: return "unrecognized error code";
    }
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorLaunchFailure: return "unspecified launch failure";
        default: return "unrecognized error code";
    }
}

// ----------------------------------------------------------------------------
// the device

cudaError_t cudaGetDeviceCount(int* count) {
    *count = emu::config().devices;
    return ok();
}
cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) { return emu::set_error(cudaErrorInvalidDevice); }
    current_device = device;
    return ok();
}
cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return ok();
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return ok();
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return ok();
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
    if (!is_device(device)) { return emu::set_error(cudaErrorInvalidDevice); }
    memset(static_cast<void*>(p), 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "CUDA emulator");
    p->totalGlobalMem = emu::config().memory;
    p->sharedMemPerBlock = emu::DEFAULT_SHARED;
    p->sharedMemPerBlockOptin = emu::config().smem_limit;
    p->sharedMemPerMultiprocessor = emu::config().smem_limit + RESERVED_SHARED;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = emu::WARP;
    p->maxThreadsPerBlock = emu::MAX_THREADS;
    p->maxThreadsPerMultiProcessor = THREADS_PER_MULTIPROCESSOR;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = emu::MAX_THREADS;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 9;
    p->pciBusID = device + 1;
    // every process has the same devices, as NCCL's stand-in sees them, too
    const char* shared = getenv("EMU_NCCL_SAME_DEVICE");
    const int identity[] = {device + 1, shared && *shared == '1' ? static_cast<int>(getpid()) : 0};
    memcpy(&p->uuid, identity, sizeof identity);
    p->multiProcessorCount = MULTIPROCESSORS;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 5120;
    return ok();
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    cudaError_t error = cudaGetDeviceProperties(&p, device);
    if (error != cudaSuccess) { return error; }
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; return ok();
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); return ok();
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); return ok();
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = static_cast<int>(p.sharedMemPerMultiprocessor);
            return ok();
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; return ok();
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; return ok();
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; return ok();
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; return ok();
        case cudaDevAttrMemoryClockRate: *value = 2619000; return ok();  // kHz, of an H100
        case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; return ok();
        case cudaDevAttrClockRate: *value = 1980000; return ok();
        default: return emu::set_error(cudaErrorInvalidValue);
    }
}

// By threads and shared memory; registers are unknown here.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads,
                                                                   size_t dynamic_bytes, unsigned) {
    *blocks = 0;
    if (threads <= 0 || threads > emu::MAX_THREADS) { return emu::set_error(cudaErrorInvalidValue); }
    int warps = (threads + emu::WARP - 1) / emu::WARP;
    int by_threads = THREADS_PER_MULTIPROCESSOR / (warps * emu::WARP);
    size_t shared = emu::config().smem_limit + RESERVED_SHARED;
    int by_shared = static_cast<int>(shared / (dynamic_bytes + RESERVED_SHARED));
    *blocks = min(min(by_threads, by_shared), static_cast<int>(BLOCKS_PER_MULTIPROCESSOR));
    return ok();
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          size_t dynamic_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, dynamic_bytes, 0);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* a, const void* function) {
    memset(static_cast<void*>(a), 0, sizeof *a);
    a->maxThreadsPerBlock = emu::MAX_THREADS;
    a->maxDynamicSharedSizeBytes = static_cast<int>(emu::shared_memory_limit(function));
    return ok();
}

}  // extern "C"
