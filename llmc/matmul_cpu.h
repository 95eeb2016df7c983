/*
Matrix products of the CPU backend, one level below matmul_*: C = A * B or C += A * B for any shape, strides and
precision, on oneDNN. For matmul.c and cross_entropy.c only.

In PRECISION_BF16 the factors are bf16 (uint16_t), in PRECISION_FP32 float; C is always float. The right factor
may be packed once, into the layout that the library prefers, and used by many products.
Compiled kernels are kept by shape. Calls come from one thread; the library uses all of OpenMP's threads.
*/
#ifndef MATMUL_CPU_H
#define MATMUL_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "cpu_common.h"

// Strides are elements between stored rows. A[m,k] is stored as [k,m] when transpose_a, B[k,n] as [n,k] when
// transpose_b. A packed B has no stride or transpose of its own: they describe what product_pack reads; A and C
// are then dense, since the library has no fast kernel for a packed B otherwise.
typedef struct {
    size_t m, n, k;
    size_t lda, ldb, ldc;
    bool transpose_a, transpose_b;
    bool packed;
    bool accumulate;
    Precision precision;
} Product;

// C (+)= A * B.
void product(float* c, const void* a, const void* b, const Product* p);

// packed = B from fp32, rounded to p->precision; at most product_packed_bytes(k, n). Depends on k, n and the
// precision only, so that products of any m may share it.
void product_pack(void* packed, const float* b, const Product* p);
size_t product_packed_bytes(size_t k, size_t n);

// Whether the library multiplies in this precision on this processor.
bool product_supported(Precision precision);

// Loops over fewer elements than this are done before other threads have woken up.
enum { PARALLEL_ELEMENTS = 1 << 15 };

// fp32 to bf16, round to nearest even; NaN stays NaN.
static inline uint16_t bf16_round(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, quiet = u >> 16 | 0x40;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

// out[rows,columns] with stride ld_out = inp[rows,columns] with stride ld_inp, as factors of this precision.
void factor_copy(void* out, size_t ld_out, const float* inp, size_t ld_inp, size_t rows, size_t columns,
                 Precision precision);

// A stride for n elements a row that is no multiple of a large power of two: rows at such distances compete for
// the same few cache lines when a product walks down a column.
static inline size_t padded_stride(size_t n) { return round_up(n, 32) + 32; }

#endif
