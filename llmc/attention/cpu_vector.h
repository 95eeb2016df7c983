/*
Vectors of fp32 for attention on the CPU: as wide as the instruction set has them, with the few functions that the
compiler does not know. Private to the CPU files of this folder.
*/
#ifndef ATTENTION_CPU_VECTOR_H
#define ATTENTION_CPU_VECTOR_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../cpu_math.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define VECTORS_OF_512_BITS
#endif

#if defined(VECTORS_OF_512_BITS)
enum { LANES = 16, BLOCK_VECTORS = 4 };  // 6 x 4 sums of 32 registers
#elif defined(__AVX__)
enum { LANES = 8, BLOCK_VECTORS = 2 };  // 6 x 2 sums of 16 registers
#elif defined(__aarch64__)
enum { LANES = 4, BLOCK_VECTORS = 4 };
#else
enum { LANES = 4, BLOCK_VECTORS = 2 };
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int IntVector __attribute__((vector_size(4 * LANES)));
typedef float LooseVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE Vector load(const float* p) { return *(const LooseVector*)p; }
INLINE void store(float* p, Vector x) { *(LooseVector*)p = x; }

INLINE Vector splat(float x) {
    Vector zero = {0};
    return x - zero;
}

INLINE IntVector lane_numbers(void) {
    IntVector lanes = {0};
    for (int i = 0; i < LANES; i++) { lanes[i] = i; }
    return lanes;
}

INLINE Vector select_lanes(IntVector mask, Vector yes, Vector no) {
    return (Vector)(((IntVector)yes & mask) | ((IntVector)no & ~mask));
}

// The larger of each pair; b where either is NaN.
INLINE Vector vector_max(Vector a, Vector b) {
#if defined(VECTORS_OF_512_BITS)
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (Vector)_mm_max_ps((__m128)a, (__m128)b);
#else
    return select_lanes((IntVector)(a > b), a, b);
#endif
}

INLINE bool any_lane_above(Vector x, float limit) {
#if defined(VECTORS_OF_512_BITS)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
    int any = 0;
    for (int i = 0; i < LANES; i++) { any |= x[i] > limit; }
    return any != 0;
#endif
}

INLINE float largest_lane(Vector x) {
#if defined(VECTORS_OF_512_BITS)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) { largest = x[i] > largest ? x[i] : largest; }
    return largest;
#endif
}

INLINE float sum_lanes(Vector x) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) { sum += x[i]; }
    return sum;
}

// 2^x within 2e-7 for x <= 100; exactly 0 below -127 and at -infinity; NaN for NaN. Polynomials by Remez exchange.
INLINE Vector vector_exp2(Vector x) {
#if defined(VECTORS_OF_512_BITS)
    Vector f = (Vector)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
    Vector p = splat(0.00187757669f);
    p = p * f + 0.00898933969f;
    p = p * f + 0.0558263175f;
    p = p * f + 0.240153611f;
    p = p * f + 0.693153083f;
    p = p * f + 0.99999994f;
    return (Vector)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const float round_to_integer = 0x1.8p23f;
    x = vector_max(splat(-127.0f), x);
    Vector shifted = x + round_to_integer, f = x - (shifted - round_to_integer);
    Vector p = splat(0.00132764725f);
    p = p * f + 0.00967554096f;
    p = p * f + 0.0555071309f;
    p = p * f + 0.240221202f;
    p = p * f + 0.693146944f;
    p = p * f + 1.00000012f;
    return p * (Vector)(((IntVector)shifted << 23) + 0x3F800000);  // a biased exponent of 0 is the number 0
#endif
}

// tanh(x) within 3e-7 of itself, or, approximate, within 1e-4: a rational function of x^2, fitted to the smallest
// relative error up to where tanh is 1 in that precision.
INLINE Vector vector_tanh(Vector x, bool approximate) {
    const float limit = approximate ? 5.0f : TANH_LIMIT;
    x = -vector_max(-vector_max(x, splat(-limit)), splat(-limit));
    Vector u = x * x, p, q;
    if (approximate) {
        p = splat(-3.17935477e-06f) * u + 0.00109761065f;
        p = (p * u + 0.111111937f) * u + 0.999996513f;
        q = (splat(0.0159396014f) * u + 0.444418051f) * u + 1.0f;
    } else {
        p = TANH_NUMERATOR(u);
        q = TANH_DENOMINATOR(u);
    }
    return x * p / q;
}

// Interleaves the lower (upper) halves of two vectors.
INLINE Vector interleave_low(Vector a, Vector b) {
#if defined(VECTORS_OF_512_BITS)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

INLINE Vector interleave_high(Vector a, Vector b) {
#if defined(VECTORS_OF_512_BITS)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX__)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Lanes low..high-1 of the KEY_TILE columns, of which x holds those from `column` on; the others become `other`.
INLINE Vector keep_columns(Vector x, size_t column, size_t low, size_t high, float other) {
    IntVector columns = lane_numbers() + (int)column;
    return select_lanes((IntVector)(columns >= (int)low) & (IntVector)(columns < (int)high), x, splat(other));
}

#endif
