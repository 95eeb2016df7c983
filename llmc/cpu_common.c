/*
The CPU as a device: memory, the choice of precision, and a description of the machine.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // sched_getaffinity
#endif

#include <dnnl.h>
#include <sys/mman.h>

#include "host_limits.h"
#include "matmul_cpu.h"

// ----------------------------------------------------------------------------
// memory

// From this size on, memory is asked for in large pages, and a request beyond what the machine has is refused
// before touching the pages would get the process killed without a word.
enum { CACHE_LINE = 64, LARGE_PAGE = 1 << 21, LARGE_REQUEST = 64 << 20 };

size_t device_memory_available(void) { return limits_memory(""); }

void* device_malloc(size_t bytes) {
    size_t alignment = bytes >= LARGE_PAGE ? LARGE_PAGE : CACHE_LINE;
    size_t rounded = bytes > SIZE_MAX - alignment ? SIZE_MAX : round_up(bytes ? bytes : 1, alignment);
    void* p = NULL;
    bool fits = rounded < LARGE_REQUEST || rounded <= device_memory_available();
    if (!fits || posix_memalign(&p, alignment, rounded) != 0) {
        fatal(
            "out of memory: %zu bytes (%.1f GiB) asked for, %.1f GiB available; lower --batch_size, "
            "--sequence_length or --model_size",
            bytes, (double)bytes / 0x1p30, (double)device_memory_available() / 0x1p30);
    }
#ifdef MADV_HUGEPAGE
    if (alignment == LARGE_PAGE) { madvise(p, rounded, MADV_HUGEPAGE); }
#endif
    memset(p, 0, rounded);
    return p;
}

void device_free(void* p) { free(p); }

// ----------------------------------------------------------------------------
// device

// More threads than the processor time that a control group allows would wait for each other most of the time.
static void limit_threads(void) {
#ifdef _OPENMP
    const char* wanted = getenv("OMP_NUM_THREADS");
    int most = (int)limits_threads(limits_read("").cpus, 1, limits_cores());
    if (!(wanted && *wanted) && omp_get_max_threads() > most) { omp_set_num_threads(most); }
#endif
}

void backend_init(const char* device, const char* dtype) {
    if (device && *device && strcmp(device, "auto") != 0 && strcmp(device, "cpu") != 0) {
        fatal(
            "--device %s: this program was built for the CPU, expected cpu or auto; build the CUDA version with "
            "'make cuda' or leave --device out",
            device);
    }
    if (strcmp(dtype, "float32") == 0) {
        cpu_precision = PRECISION_FP32;
    } else if (strcmp(dtype, "bfloat16") == 0) {
        cpu_precision = PRECISION_BF16;
    } else {
        fatal("--dtype %s: not available on the CPU, expected float32 or bfloat16", dtype);
    }
    if (!product_supported(cpu_precision)) {
        fatal(
            "--dtype %s: oneDNN has no such matrix product for this processor (bfloat16 needs AVX-512); use "
            "--dtype float32",
            dtype);
    }
    limit_threads();
}

// The processor's name without its trailing spaces, or "unknown processor".
static void processor_name(char* buffer, size_t bytes) {
    snprintf(buffer, bytes, "unknown processor");
    FILE* f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f)) {
        char* colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) { continue; }
        colon += strspn(colon, ": \t");
        size_t n = strcspn(colon, "\n");
        while (n > 0 && colon[n - 1] == ' ') { n--; }
        snprintf(buffer, bytes, "%.*s", (int)n, colon);
        break;
    }
    if (f) { fclose(f); }
}

// The instruction set that decides the speed of matrix products.
static const char* instruction_set(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bf16")) { return "avx512_bf16"; }
    if (__builtin_cpu_supports("avx512f")) { return "avx512"; }
    return __builtin_cpu_supports("avx2") ? "avx2" : "sse";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "generic";
#endif
}

void backend_describe(char* buffer, size_t bytes) {
    char name[256];
    processor_name(name, sizeof name);
    int threads = omp_get_max_threads();
    const dnnl_version_t* version = dnnl_version();
    snprintf(buffer, bytes, "cpu: %s, %d thread%s, %s, oneDNN %d.%d.%d", name, threads, threads == 1 ? "" : "s",
             instruction_set(), version->major, version->minor, version->patch);
}
