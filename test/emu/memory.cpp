/*
Device memory and copies. Allocations are cut from one range of addresses with a filled gap behind each, so that a
write past the end is found when the memory is freed or the program ends; under AddressSanitizer they come from
malloc, which finds it at once. New memory holds NaN.
*/
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <vector>

#include "emulator.h"

namespace emu {

// Protection is changed around every launch, for which large pages are hundreds of times faster than small ones.
enum { ALIGNMENT = 256, GAP_BYTES = 256, GAP_FILL = 0xA5, PAGE = 2 << 20 };
const size_t RANGE_BYTES = size_t{64} << 30;  // addresses, not memory

struct Allocation {
    size_t bytes;
    bool on_device;
};

static std::map<uintptr_t, Allocation> allocations;
static std::map<size_t, std::vector<unsigned char*>> freed;  // by size with gap
static unsigned char* range;
static size_t range_used, bytes_used;
static int open_calls;

// ----------------------------------------------------------------------------
// allocations

static size_t size_with_gap(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + GAP_BYTES; }

// True if nobody wrote behind the allocation; says so if somebody did.
static bool gap_intact(uintptr_t address, size_t bytes) {
    const unsigned char* p = reinterpret_cast<const unsigned char*>(address);
    for (size_t i = bytes; !EMU_ASAN && i < size_with_gap(bytes); i++) {
        if (p[i] != GAP_FILL) {
            fprintf(stderr, "emulator: a write past the end of %zu bytes of device memory, at +%zu\n", bytes, i);
            return false;
        }
    }
    return true;
}

static void check_gaps_at_exit() {
    open_device_memory();
    for (const auto& a : allocations) {
        if (a.second.on_device && !gap_intact(a.first, a.second.bytes)) {
            fflush(NULL);
            _exit(1);
        }
    }
}

static void set_protection() {
    if (!config().protect || EMU_ASAN || range_used == 0) { return; }
    size_t bytes = (range_used + PAGE - 1) / PAGE * PAGE;
    mprotect(range, bytes, open_calls > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void open_device_memory() {
    if (open_calls++ == 0) { set_protection(); }
}

void close_device_memory() {
    if (--open_calls == 0) { set_protection(); }
}

static unsigned char* cut_from_range(size_t bytes) {
    if (!range) {
        void* p = mmap(NULL, RANGE_BYTES + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) { return NULL; }
        range = static_cast<unsigned char*>(p) + (PAGE - reinterpret_cast<uintptr_t>(p) % PAGE) % PAGE;
        madvise(range, RANGE_BYTES, MADV_HUGEPAGE);
        checker::set_device_memory(range, RANGE_BYTES);
        atexit(check_gaps_at_exit);
    }
    size_t whole = size_with_gap(bytes);
    std::vector<unsigned char*>* same_size = &freed[whole];
    if (!same_size->empty()) {
        unsigned char* p = same_size->back();
        same_size->pop_back();
        return p;
    }
    if (range_used + whole > RANGE_BYTES) { return NULL; }
    unsigned char* p = range + range_used;
    range_used += whole;
    mprotect(range, (range_used + PAGE - 1) / PAGE * PAGE, PROT_READ | PROT_WRITE);
    return p;
}

static cudaError_t allocate(void** p, size_t bytes) {
    *p = NULL;
    if (bytes == 0) { return cudaSuccess; }
    if (bytes > config().memory || bytes_used > config().memory - bytes) { return cudaErrorMemoryAllocation; }
    if (EMU_ASAN) {
        if (posix_memalign(p, ALIGNMENT, bytes) != 0) { *p = NULL; }
    } else {
        *p = cut_from_range(bytes);
        if (*p) { memset(static_cast<unsigned char*>(*p) + bytes, GAP_FILL, size_with_gap(bytes) - bytes); }
    }
    if (!*p) { return cudaErrorMemoryAllocation; }
    if (config().poison) { memset(*p, 0xff, bytes); }
    allocations[reinterpret_cast<uintptr_t>(*p)] = {bytes, true};
    bytes_used += bytes;
    checker::device_allocated(*p, bytes);
    return cudaSuccess;
}

static cudaError_t release(void* p) {
    auto found = allocations.find(reinterpret_cast<uintptr_t>(p));
    if (found == allocations.end() || !found->second.on_device) {
        fprintf(stderr, "emulator: cudaFree of an address that cudaMalloc did not return\n");
        return cudaErrorInvalidValue;
    }
    size_t bytes = found->second.bytes;
    allocations.erase(found);
    bytes_used -= bytes;
    checker::device_freed(p, bytes);
    if (EMU_ASAN) {
        free(p);
        return cudaSuccess;
    }
    if (!gap_intact(reinterpret_cast<uintptr_t>(p), bytes)) { return cudaErrorIllegalAddress; }
    memset(p, 0xff, bytes);
    freed[size_with_gap(bytes)].push_back(static_cast<unsigned char*>(p));
    return cudaSuccess;
}

Containment find_allocation(const void* p, size_t bytes, bool* on_device) {
    uintptr_t address = reinterpret_cast<uintptr_t>(p);
    *on_device = false;
    auto above = allocations.upper_bound(address);
    if (above == allocations.begin()) { return OUTSIDE; }
    --above;
    if (address >= above->first + above->second.bytes) { return OUTSIDE; }
    *on_device = above->second.on_device;
    return bytes <= above->first + above->second.bytes - address ? INSIDE : BEYOND_END;
}

// ----------------------------------------------------------------------------
// copies

static cudaError_t check_copy(const void* dst, const void* src, size_t bytes, enum cudaMemcpyKind kind) {
    bool dst_device, src_device;
    Containment d = find_allocation(dst, bytes, &dst_device), s = find_allocation(src, bytes, &src_device);
    bool want_dst = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool want_src = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (dst_device != want_dst || src_device != want_src)) {
        fprintf(stderr, "emulator: a copy of kind %d, but to %s and from %s memory\n", static_cast<int>(kind),
                dst_device ? "device" : "host", src_device ? "device" : "host");
        return cudaErrorInvalidValue;
    }
    if (d == BEYOND_END || s == BEYOND_END) {
        fprintf(stderr, "emulator: a copy of %zu bytes past the end of an allocation\n", bytes);
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

static cudaError_t copy(void* dst, const void* src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    before_work(stream);
    if (device_failed() || bytes == 0) { return set_error(cudaSuccess); }
    cudaError_t error = check_copy(dst, src, bytes, kind);
    if (error != cudaSuccess) { return set_error(error); }
    open_device_memory();
    memmove(dst, src, bytes);
    checker::host_wrote(dst, bytes);
    close_device_memory();
    return cudaSuccess;
}

static cudaError_t fill(void* dst, int value, size_t bytes, cudaStream_t stream) {
    before_work(stream);
    if (device_failed() || bytes == 0) { return set_error(cudaSuccess); }
    bool on_device;
    if (find_allocation(dst, bytes, &on_device) != INSIDE || !on_device) {
        fprintf(stderr, "emulator: cudaMemset of %zu bytes that are not inside one allocation\n", bytes);
        return set_error(cudaErrorInvalidValue);
    }
    open_device_memory();
    memset(dst, value, bytes);
    checker::host_wrote(dst, bytes);
    close_device_memory();
    return cudaSuccess;
}

}  // namespace emu

// ----------------------------------------------------------------------------
// the runtime's names

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
    if (emu::device_failed()) { return emu::set_error(cudaSuccess); }
    emu::open_device_memory();
    cudaError_t error = emu::allocate(p, bytes);
    emu::close_device_memory();
    return emu::set_error(error);
}

// Waits for the whole device.
cudaError_t cudaFree(void* p) {
    emu::finish_delayed();
    if (!p || emu::device_failed()) { return emu::set_error(cudaSuccess); }
    emu::open_device_memory();
    cudaError_t error = emu::release(p);
    emu::close_device_memory();
    return emu::set_error(error);
}

cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }

cudaError_t cudaMallocHost(void** p, size_t bytes) {
    *p = malloc(bytes ? bytes : 1);
    if (!*p) { return emu::set_error(cudaErrorMemoryAllocation); }
    emu::allocations[reinterpret_cast<uintptr_t>(*p)] = {bytes, false};
    return emu::set_error(cudaSuccess);
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMallocHost(p, bytes); }

cudaError_t cudaFreeHost(void* p) {
    if (p && emu::allocations.erase(reinterpret_cast<uintptr_t>(p)) == 0) {
        return emu::set_error(cudaErrorInvalidValue);
    }
    free(p);
    return emu::set_error(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    *total = emu::config().memory;
    *available = *total - (emu::bytes_used < *total ? emu::bytes_used : *total);
    return emu::set_error(cudaSuccess);
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, enum cudaMemcpyKind kind) {
    return emu::copy(dst, src, bytes, kind, NULL);
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return emu::copy(dst, src, bytes, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t i = 0; i < height; i++) {
        cudaError_t error = emu::copy(static_cast<char*>(dst) + i * dst_pitch,
                                      static_cast<const char*>(src) + i * src_pitch, width, kind, stream);
        if (error != cudaSuccess) { return error; }
    }
    return emu::set_error(cudaSuccess);
}

cudaError_t cudaMemcpy2D(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind) {
    return cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, kind, NULL);
}

// __constant__ and __device__ variables are plain globals here.
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* src, size_t bytes, size_t offset, enum cudaMemcpyKind) {
    memcpy(static_cast<char*>(const_cast<void*>(symbol)) + offset, src, bytes);
    return emu::set_error(cudaSuccess);
}

cudaError_t cudaMemset(void* dst, int value, size_t bytes) { return emu::fill(dst, value, bytes, NULL); }
cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t stream) {
    return emu::fill(dst, value, bytes, stream);
}

}  // extern "C"
