/*
Elementary functions in fp32 that compilers vectorise inside `#pragma omp simd` loops without
-ffast-math: no branch, no table, no call. CPU operators only.
*/
#ifndef CPU_MATH_H
#define CPU_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_from_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// e^x within 1.02 ulp wherever it is a normal number; 0 below that, infinity above, exactly 1 at 0, NaN for NaN.
// x = n ln 2 + r with |r| <= ln(2)/2, so e^x = 2^n e^r; e^r = 1 + r + r^2 q(r), q the polynomial of degree 4
// with the smallest relative error of e^r (3e-9, found by Remez exchange).
static inline float exp_fast(float x) {
    const float lowest = -0x1.5d589ep+6f, highest = 0x1.62e42ep+6f;  // ln 2^-126 and ln FLT_MAX, rounded inwards
    const float log2_e = 0x1.715476p+0f;
    const float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;  // n * ln2_high is exact
    const float round_to_integer = 0x1.8p23f;  // adding it leaves the nearest integer in the lowest bits
    float shifted = x * log2_e + round_to_integer;
    float n = shifted - round_to_integer;
    float r = (x - n * ln2_high) - n * ln2_low;
    float q = 0x1.6a2352p-10f;
    q = q * r + 0x1.123a6cp-7f;
    q = q * r + 0x1.5558f4p-5f;
    q = q * r + 0x1.55549p-3f;
    q = q * r + 0x1.fffffcp-2f;
    float exp_r = 1.0f + (r + r * r * q);
    // times 2^n: the exponent field is the highest one, and the field of 1.5 * 2^23 is shifted out
    float result = float_from_bits(bits_from_float(exp_r) + (bits_from_float(shifted) << 23));
    result = x < lowest ? 0.0f : result;
    return x <= highest ? result : x + INFINITY;
}

// 1 / (1 + e^-x)
static inline float sigmoid_fast(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// Numerator and denominator of tanh(x) = x p(u) / q(u), u = x^2, within 3e-7 of itself up to |x| = 8, where tanh is 1
// in fp32: fitted to the smallest relative error. Macros, for numbers and for vectors of them.
#define TANH_LIMIT 8.0f
#define TANH_NUMERATOR(u) \
    ((((1.5230455e-08f * (u) + 2.18946912e-05f) * (u) + 0.00357159994f) * (u) + 0.134444996f) * (u) + 0.999999994f)
#define TANH_DENOMINATOR(u) \
    ((((8.52246254e-07f * (u) + 0.000341129505f) * (u) + 0.0261644504f) * (u) + 0.46777827f) * (u) + 1.0f)

// A NaN stays one.
static inline float tanh_fast(float x) {
    x = x > TANH_LIMIT ? TANH_LIMIT : x;
    x = x < -TANH_LIMIT ? -TANH_LIMIT : x;
    const float u = x * x;
    return x * TANH_NUMERATOR(u) / TANH_DENOMINATOR(u);
}

#endif
