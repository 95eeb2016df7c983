/*
What the tests of products in both precisions share.
*/
#ifndef PRECISION_UTIL_H
#define PRECISION_UTIL_H

#include "test_util.h"

#include "../llmc/matmul_cpu.h"

static const Precision precisions[] = {PRECISION_FP32, PRECISION_BF16};

// bf16 needs AVX-512.
static inline size_t precision_count(void) { return product_supported(PRECISION_BF16) ? 2 : 1; }

// x rounded to bf16's 8 significant bits, ties to even; written from the definition.
static inline double to_bf16(double x) {
    if (x == 0 || !isfinite(x)) { return x; }
    int exponent;
    frexp(x, &exponent);
    double unit = ldexp(1.0, exponent - 8);
    return nearbyint(x / unit) * unit;
}

#endif
