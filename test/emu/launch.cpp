/*
Launches: what a GPU would refuse is refused with the same error code, then blocks are spread over the cores. Also the
settings and the error state of the device.
*/
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <map>

#include "emulator.h"

namespace emu {

// ----------------------------------------------------------------------------
// settings

static size_t environment_number(const char* name, size_t otherwise) {
    const char* value = getenv(name);
    return value && *value ? strtoull(value, NULL, 10) : otherwise;
}

Config& config() {
    static Config c = {static_cast<unsigned>(environment_number("EMU_SEED", 0)),
                       static_cast<int>(environment_number("EMU_WORKERS", 0)),
                       environment_number("EMU_POISON", 1) != 0,
                       environment_number("EMU_PROTECT", 0) != 0,
                       environment_number("EMU_SHARED", 227 << 10),
                       environment_number("EMU_MEMORY", size_t{4} << 30),
                       static_cast<int>(environment_number("EMU_DEVICES", 1)),
                       static_cast<int>(environment_number("EMU_LATE", 0))};
    return c;
}

// ----------------------------------------------------------------------------
// errors

static cudaError_t last_error = cudaSuccess;
static bool failed;

bool device_failed() { return failed; }

cudaError_t set_error(cudaError_t error) {
    if (failed) { error = cudaErrorLaunchFailure; }
    if (error != cudaSuccess) { last_error = error; }
    return error;
}

// A program whose kernels failed must not end well, even if it never asks for the error.
static void refuse_success() {
    fflush(NULL);
    _exit(1);
}

void device_fault(const char* message) {
    fprintf(stderr, "emulator: %s\n", message);
    if (!failed) { atexit(refuse_success); }
    failed = true;
    last_error = cudaErrorLaunchFailure;
}

// ----------------------------------------------------------------------------
// launching

static std::map<const void*, size_t> opted_in;

size_t shared_memory_limit(const void* function) {
    auto found = opted_in.find(function);
    return found != opted_in.end() && found->second > DEFAULT_SHARED ? found->second : DEFAULT_SHARED;
}

static cudaError_t check_launch(const void* function, const char* name, dim3 grid, dim3 block, size_t dynamic_bytes) {
    uint64_t threads = uint64_t{block.x} * block.y * block.z;
    bool grid_fits =
        grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
    if (!grid_fits || threads == 0 || threads > MAX_THREADS || block.z > 64) {
        fprintf(stderr, "emulator: launch of %s refused: grid (%u,%u,%u), block (%u,%u,%u)\n", name, grid.x, grid.y,
                grid.z, block.x, block.y, block.z);
        return cudaErrorInvalidConfiguration;
    }
    if (dynamic_bytes > shared_memory_limit(function)) {
        fprintf(stderr,
                "emulator: launch of %s refused: %zu bytes of dynamic shared memory, allowed %zu; opt in with "
                "cudaFuncSetAttribute\n",
                name, dynamic_bytes, shared_memory_limit(function));
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

// Block number i of n in the order of the seed: ascending, descending, or strided by a prime.
static uint64_t ordered(uint64_t i, uint64_t n) {
    const uint64_t prime = 7919;
    unsigned seed = config().seed;
    if (seed == 1) { return n - 1 - i; }
    return seed >= 2 && n % prime != 0 ? (i * prime + seed) % n : i;
}

struct Launch {
    dim3 grid, block;
    size_t dynamic_bytes, shared_limit;
    const char* name;
    void (*body)(void*);
    void* arguments;
    std::atomic<uint64_t> next;
    std::atomic<bool> stop;
    char message[sizeof(Worker::message)];
};

// What one core does: blocks until there are no more or one has failed.
static void run_blocks(Launch* launch) {
    uint64_t blocks = uint64_t{launch->grid.x} * launch->grid.y * launch->grid.z;
    Worker* w = start_worker();
    w->kernel = launch->name;
    w->body = launch->body;
    w->arguments = launch->arguments;
    w->shared_limit = launch->shared_limit;
    for (uint64_t i; !launch->stop && (i = launch->next++) < blocks;) {
        uint64_t b = ordered(i, blocks), x = launch->grid.x, y = launch->grid.y;
        uint3 index = {static_cast<unsigned>(b % x), static_cast<unsigned>(b / x % y),
                       static_cast<unsigned>(b / x / y)};
        run_block(w, index, launch->grid, launch->block, launch->dynamic_bytes);
        if (w->failed && !launch->stop.exchange(true)) { memcpy(launch->message, w->message, sizeof w->message); }
    }
}

static size_t available_workers(uint64_t blocks) {
    if (CHECKER) { return 1; }  // its clocks belong to one block at a time
    int wanted = config().workers ? config().workers : omp_get_max_threads();
    return blocks < static_cast<uint64_t>(wanted) ? blocks : static_cast<size_t>(wanted);
}

void run_kernel(const void* function, const char* name, dim3 grid, dim3 block, size_t dynamic_bytes,
                void (*body)(void*), void* arguments) {
    if (failed) { return; }
    cudaError_t refused = check_launch(function, name, grid, block, dynamic_bytes);
    if (refused != cudaSuccess) {
        set_error(refused);
        return;
    }
    bool opted = shared_memory_limit(function) > DEFAULT_SHARED;
    size_t shared_limit = opted ? config().smem_limit : DEFAULT_SHARED;
    Launch launch = {grid, block, dynamic_bytes, shared_limit, name, body, arguments, {0}, {false}, ""};
    open_device_memory();
    checker::launch_started();
    size_t workers = available_workers(uint64_t{grid.x} * grid.y * grid.z);
    if (workers <= 1) {
        run_blocks(&launch);
    } else {
#pragma omp parallel num_threads(static_cast <int>(workers))
        run_blocks(&launch);
    }
    close_device_memory();
    if (launch.stop) { device_fault(launch.message); }
    if (checker::errors() > 0) {
        char message[256];
        snprintf(message, sizeof message, "%.180s: %zu faulty accesses", name, checker::errors());
        device_fault(message);
    }
}

}  // namespace emu

extern "C" cudaError_t cudaFuncSetAttribute(const void* function, enum cudaFuncAttribute attribute, int value) {
    if (emu::device_failed()) { return emu::set_error(cudaSuccess); }
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        size_t bytes = static_cast<size_t>(value);
        if (value < 0 || bytes > emu::config().smem_limit) { return emu::set_error(cudaErrorInvalidValue); }
        emu::opted_in[function] = bytes;
    }
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetLastError() {
    cudaError_t error = emu::last_error;
    if (!emu::failed) { emu::last_error = cudaSuccess; }
    return error;
}

extern "C" cudaError_t cudaPeekAtLastError() { return emu::last_error; }
