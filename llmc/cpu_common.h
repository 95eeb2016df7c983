/*
The CPU as a device: memory is the host's, floatX is float, and the precision of matrix products is
chosen at run time. Each function has a CUDA counterpart of the same name in cuda_common.cuh.
*/
#ifndef CPU_COMMON_H
#define CPU_COMMON_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "util.h"

typedef float floatX;

#define BACKEND_DTYPE "float32"  // what --dtype is without the flag

// Products in bf16 round both factors and accumulate in fp32; everything else is fp32 in both.
typedef enum { PRECISION_FP32, PRECISION_BF16 } Precision;

// The precision of matmul_* and cross_entropy_head, set by backend_init. Weak: one variable per program.
EXTERN_C Precision cpu_precision;
__attribute__((weak)) Precision cpu_precision;

#ifndef _OPENMP
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
#endif

// Zeroed memory on the device, aligned to a cache line and large pages where they help; never returns NULL.
EXTERN_C void* device_malloc(size_t bytes);
EXTERN_C void device_free(void* p);

// Bytes that device_malloc can still give without others being pushed out.
EXTERN_C size_t device_memory_available(void);

static inline void device_zero(void* p, size_t bytes) { memset(p, 0, bytes); }
static inline void copy_to_device(void* device, const void* host, size_t bytes) { memcpy(device, host, bytes); }
static inline void copy_to_host(void* host, const void* device, size_t bytes) { memcpy(host, device, bytes); }
static inline void copy_floats_to_host(float* host, const floatX* device, size_t n) {
    memcpy(host, device, n * sizeof(float));
}
static inline void device_copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static inline void device_synchronize(void) {}

// Checks and applies --device and --dtype; ends the program with one line when the build cannot do it.
EXTERN_C void backend_init(const char* device, const char* dtype);

// One line for args.json and the header: device, threads, instruction set, library versions.
EXTERN_C void backend_describe(char* buffer, size_t bytes);

// The device's matrix-product rate in FLOP/s at the chosen precision, measured in about 0.2 s.
EXTERN_C double backend_matmul_rate(void);

#endif
