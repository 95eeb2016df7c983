/*
Optimisers: RAdam and AdamW share one kernel and differ in the scalars of adam_scalars.h. One pass over master
weights, moments and gradient, which also writes the compute copy with stochastic rounding. CUDA version; contract
in ops.h.
*/
#ifndef RADAM_CUH
#define RADAM_CUH

#include "adam_scalars.h"
#include "cuda_sum.cuh"

// ----------------------------------------------------------------------------
// stochastic rounding: up with a probability that is the distance from the lower neighbour, so right on average

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
__host__ __device__ __forceinline__ uint64_t mix_bits(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// 16 random bits for each of the elements 4*i .. 4*i+3.
__device__ __forceinline__ uint64_t random_bits(uint64_t key, size_t i) {
    return mix_bits(key + (i + 1) * 0x9E3779B97F4A7C15ull);
}

// Adds the random bits below the last bit that bf16 keeps, then cuts there; infinities and NaN stay what they are.
__device__ __forceinline__ float round_stochastically(float x, uint32_t random) {
    const uint32_t bits = __float_as_uint(x);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return finite ? __uint_as_float((bits + random) & 0xffff0000u) : x;
}

// What the random bits of an array depend on: the update, and the index of its first element among all parameters.
typedef struct {
    uint64_t key;
    size_t first;
} Rounding;

static Rounding rounding_of(unsigned long long step, size_t first) {
    return {mix_bits(step + 0x9E3779B97F4A7C15ull), first};
}

// Rounds p[W], the elements from i on, into the copy; first + i is a multiple of 4 where W is.
template <int W>
__device__ __forceinline__ void store_rounded(floatX* copy, float (&p)[W], Rounding r, size_t i) {
    const size_t index = r.first + i;
    uint64_t random = 0;
#pragma unroll
    for (int j = 0; j < W; j++) {
        if (j % 4 == 0) { random = random_bits(r.key, (index + j) / 4); }
        p[j] = round_stochastically(p[j], (uint32_t)(random >> ((index + j) % 4 * 16)) & 0xffffu);
    }
    store(copy + i, p);
}

// Elements begin .. end-1, as in adam_kernel.
template <int W>
__global__ void recast_kernel(floatX* copy, const float* master, Rounding rounding, size_t begin, size_t end) {
    const size_t i = begin + ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= end) { return; }
    float p[W];
    load(p, master + i);
    store_rounded(copy, p, rounding, i);
}

void recast_parameters(floatX* copy, const float* master, unsigned long long step, size_t n) {
    if ((const void*)copy == (const void*)master) { return; }
    const Rounding rounding = rounding_of(step, 0);
    const size_t wide = aligned((uintptr_t)master | (uintptr_t)copy) ? n / WIDE * WIDE : 0;
    if (wide > 0) {
        LAUNCH((recast_kernel<WIDE>), (unsigned)ceil_div(wide, 256 * WIDE), 256, 0, main_stream, copy, master, rounding,
               (size_t)0, wide);
    }
    if (wide < n) {
        LAUNCH((recast_kernel<1>), (unsigned)ceil_div(n - wide, 256), 256, 0, main_stream, copy, master, rounding, wide,
               n);
    }
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------
// update

// One element; returns the new weight.
__device__ __forceinline__ float adam_element(float p, float* m, float* v, float gradient, const AdamScalars& a) {
    const float g = a.gradient_scale * gradient;
    const float mean = *m + a.weight1 * (g - *m), variance = a.beta2 * *v + a.weight2 * g * g;
    const float denominator = a.adaptive ? a.root_scale * sqrtf(variance) + a.epsilon : 1.0f;
    *m = mean;
    *v = variance;
    return p - (a.decay * p + a.step_size * (mean / denominator));
}

// Elements begin .. end-1, a multiple of W; begin is a multiple of 4 where W is.
template <int W>
__global__ void adam_kernel(float* master, floatX* copy, float* m, float* v, const float* gradient, AdamScalars a,
                            Rounding rounding, size_t begin, size_t end) {
    const size_t i = begin + ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= end) { return; }
    float p[W], mean[W], variance[W], g[W];
    load(p, master + i);
    load(mean, m + i);
    load(variance, v + i);
    load(g, gradient + i);
#pragma unroll
    for (int j = 0; j < W; j++) { p[j] = adam_element(p[j], &mean[j], &variance[j], g[j], a); }
    store(master + i, p);
    store(m + i, mean);
    store(v + i, variance);
    if (sizeof(floatX) < sizeof(float)) { store_rounded(copy, p, rounding, i); }
}

// In fp32 the copy is the master itself.
static void adam_update(float* master, floatX* copy, float* m, float* v, const float* gradient,
                        const OptimizerStep* step, AdamScalars a, size_t n) {
    assert(sizeof(floatX) < sizeof(float) || (const void*)copy == (const void*)master);
    const Rounding rounding = rounding_of(step->step, step->first);
    const uintptr_t addresses = (uintptr_t)master | (uintptr_t)copy | (uintptr_t)m | (uintptr_t)v | (uintptr_t)gradient;
    const size_t wide = aligned(addresses) && step->first % 4 == 0 ? n / WIDE * WIDE : 0;
    if (wide > 0) {
        LAUNCH((adam_kernel<WIDE>), (unsigned)ceil_div(wide, 256 * WIDE), 256, 0, main_stream, master, copy, m, v,
               gradient, a, rounding, (size_t)0, wide);
    }
    if (wide < n) {
        LAUNCH((adam_kernel<1>), (unsigned)ceil_div(n - wide, 256), 256, 0, main_stream, master, copy, m, v, gradient,
               a, rounding, wide, n);
    }
    cudaCheck(cudaGetLastError());
}

void radam_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n) {
    adam_update(master, copy, m, v, gradient, step, radam_scalars(step), n);
}

void adamw_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n) {
    adam_update(master, copy, m, v, gradient, step, adamw_scalars(step), n);
}

double sum_of_squares(const float* x, size_t n) { return sum_to_host<true>(x, n); }

#endif
