/*
What the tests of CUDA operators share: both sides' operators, arrays on the host and the device, comparison.

Inputs are rounded to floatX before both sides see them, so that a result may differ from the CPU's fp32 one by the
rounding of its own store and by the order of fp32 sums, nothing else. Every result must be bit for bit equal over the
emulator's orders of execution (on a GPU: over repetitions).
*/
#ifndef CUDA_OPS_UTIL_H
#define CUDA_OPS_UTIL_H

// cmocka's header names its functions as C only from version 1.1.8 on
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
}

#include "test_util.h"

#include "../llmc/cuda_device.cuh"
#include "../llmc/cross_entropy.cuh"
#include "../llmc/copy.cuh"
#include "../llmc/embedding.cuh"
#include "../llmc/gate.cuh"
#include "../llmc/matmul.cuh"
#include "../llmc/posenc.cuh"
#include "../llmc/radam.cuh"
#include "../llmc/rmsnorm.cuh"
#include "../llmc/swiglu.cuh"

#undef OPS_H
namespace cpu {
typedef float floatX;
extern "C" {
#include "../llmc/ops.h"
}
}  // namespace cpu

// Largest relative error of one rounding to floatX: half of 2^-7 in bf16. fp32 sums are covered by FP32_NOISE.
static const double ROUNDING = sizeof(floatX) == sizeof(float) ? 0.0 : 0x1p-8;
// Errors of fp32 sums in another order, relative to the largest value of the tensor; in bf16 also those of tensor cores
// and of the fast exponential.
static const double FP32_NOISE = sizeof(floatX) == sizeof(float) ? 2e-6 : 1e-5;

enum { ORDERS = 4 };

static inline void set_order(unsigned order) {
#ifdef CUDA_EMULATOR
    emu::config().seed = order;
#endif
    (void)order;
}

// ----------------------------------------------------------------------------
// arrays on both sides

static inline float* round_array(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] = (float)(floatX)x[i]; }
    return x;
}

// Random values that floatX holds exactly.
static inline float* rounded_array(size_t n, double scale, Random* r) {
    return round_array(random_array(n, scale, r), n);
}

static inline void upload(float* device, const float* host, size_t n) {
    copy_to_device(device, host, n * sizeof(float));
}

static inline void upload(__nv_bfloat16* device, const float* host, size_t n) {
    __nv_bfloat16* copy = (__nv_bfloat16*)xcalloc(n, sizeof(__nv_bfloat16));
    for (size_t i = 0; i < n; i++) { copy[i] = __float2bfloat16(host[i]); }
    copy_to_device(device, copy, n * sizeof(__nv_bfloat16));
    free(copy);
}

static inline void download(float* host, const float* device, size_t n) {
    copy_to_host(host, device, n * sizeof(float));
}
static inline void download(float* host, const __nv_bfloat16* device, size_t n) {
    __nv_bfloat16* copy = (__nv_bfloat16*)xcalloc(n, sizeof(__nv_bfloat16));
    copy_to_host(copy, device, n * sizeof(__nv_bfloat16));
    for (size_t i = 0; i < n; i++) { host[i] = __bfloat162float(copy[i]); }
    free(copy);
}

template <typename T>
static T* device_copy(const float* host, size_t n) {
    T* p = (T*)device_malloc(n * sizeof(T));
    upload(p, host, n);
    return p;
}

static inline int* device_ints(const int* host, size_t n) {
    int* p = (int*)device_malloc(n * sizeof(int));
    copy_to_device(p, host, n * sizeof(int));
    return p;
}

static inline float* host_copy(const float* x, size_t n) {
    return (float*)memcpy(xcalloc(n, sizeof(float)), x, n * sizeof(float));
}

// Tokens below V, a few of them often.
static inline int* random_tokens(size_t n, size_t V, Random* r) {
    int* tokens = (int*)xcalloc(n, sizeof(int));
    for (size_t i = 0; i < n; i++) { tokens[i] = (int)random_below(r, random_below(r, 3) ? V : V / 16 + 1); }
    return tokens;
}

// ----------------------------------------------------------------------------
// comparison

// What exceeds one rounding of the stored value, relative to the tensor's largest value; infinite for NaN.
static inline double excess_error(const float* got, const float* want, size_t n, double rounding) {
    double error = 0, largest = 1e-30;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]) - rounding * fabs((double)want[i]);
        if (!(e <= error)) { error = isnan(e) ? INFINITY : e; }
        if (fabs(want[i]) > largest) { largest = fabs(want[i]); }
    }
    return error / largest;
}

// A device array that a test computes once per order: the first result is compared with `want`, all with the first.
typedef struct {
    const char* name;
    float *first, *now;
    size_t n;
} Result;

template <typename T>
static void check_result(Result* r, const char* name, const T* device, const float* want, size_t n, double rounding,
                         double tolerance, unsigned order) {
    if (order == 0) { *r = {name, (float*)xcalloc(n, sizeof(float)), (float*)xcalloc(n, sizeof(float)), n}; }
    download(order == 0 ? r->first : r->now, device, n);
    if (order == 0) {
        double error = excess_error(r->first, want, n, rounding);
        if (!(error <= tolerance)) {
            fail_msg("%s[%zu]: error %g beyond one rounding, allowed %g", name, n, error, tolerance);
        }
    } else if (memcmp(r->first, r->now, n * sizeof(float)) != 0) {
        fail_msg("%s[%zu]: order %u gives other bits than order 0", name, n, order);
    }
    if (order == ORDERS - 1) { free(r->first), free(r->now); }
}

#endif
