/*
RMSNorm, alone, after a residual addition, and of heads. CPU version; contract in ops.h.
With s = 1 / sqrt(mean(x^2) + eps): y_i = x_i s w_i and
dx_i = s (w_i dy_i - x_i s^2 / C sum_j w_j dy_j x_j), dw_i = sum over rows of dy_i x_i s.
*/
#include <math.h>

#include "backend.h"

static const float RMSNORM_EPSILON = 1e-5f;

// The gradient of the weight is summed per block of this many rows, then over the blocks in order:
// the result does not depend on the number of threads.
enum { BLOCK_ROWS = 64, BLOCK_COLUMNS = 64 };

static float reciprocal_rms(const floatX* x, size_t C) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < C; c++) { sum += x[c] * x[c]; }
    return 1.0f / sqrtf(sum / (float)C + RMSNORM_EPSILON);
}

static void normalize_row(floatX* out, const floatX* x, const float* weight, float scale, size_t C) {
#pragma omp simd
    for (size_t c = 0; c < C; c++) { out[c] = x[c] * scale * weight[c]; }
}

void rmsnorm_forward(floatX* out, float* rstd, const floatX* inp, const float* weight, size_t N, size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        rstd[n] = reciprocal_rms(inp + n * C, C);
        normalize_row(out + n * C, inp + n * C, weight, rstd[n], C);
    }
}

void residual_rmsnorm_forward(floatX* residual, floatX* out, float* rstd, const floatX* inp1, const floatX* inp2,
                              const float* weight, size_t N, size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        floatX* sum = residual + n * C;
        const floatX *a = inp1 + n * C, *b = inp2 + n * C;
#pragma omp simd
        for (size_t c = 0; c < C; c++) { sum[c] = a[c] + b[c]; }
        rstd[n] = reciprocal_rms(sum, C);
        normalize_row(out + n * C, sum, weight, rstd[n], C);
    }
}

// One row: dinp += its gradient, dweight += its part of the weight's gradient.
static void backward_row(floatX* dinp, float* dweight, const floatX* dout, const floatX* x, const float* weight,
                         float scale, size_t C) {
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (size_t c = 0; c < C; c++) { dot += dout[c] * weight[c] * x[c]; }
    float projection = dot * scale * scale / (float)C;
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        dinp[c] += scale * (dout[c] * weight[c] - x[c] * projection);
        dweight[c] += dout[c] * x[c] * scale;
    }
}

static void add(float* out, const float* x, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) { out[i] += x[i]; }
}

static size_t block_count(size_t N) { return (N + BLOCK_ROWS - 1) / BLOCK_ROWS; }

// dweight[C] += the sum of partial[blocks,C] over the blocks.
static void add_blocks(float* dweight, const float* partial, size_t blocks, size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < C; first += BLOCK_COLUMNS) {
        size_t count = C - first < BLOCK_COLUMNS ? C - first : BLOCK_COLUMNS;
        for (size_t block = 0; block < blocks; block++) { add(dweight + first, partial + block * C + first, count); }
    }
}

void rmsnorm_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp, const float* weight,
                      const float* rstd, void* workspace, size_t N, size_t C) {
    float* partial = (float*)workspace;  // [blocks,C]
    size_t blocks = block_count(N);
#pragma omp parallel for schedule(static)
    for (size_t block = 0; block < blocks; block++) {
        float* sum = partial + block * C;
        memset(sum, 0, C * sizeof(float));
        size_t end = (block + 1) * BLOCK_ROWS < N ? (block + 1) * BLOCK_ROWS : N;
        for (size_t n = block * BLOCK_ROWS; n < end; n++) {
            backward_row(dinp + n * C, sum, dout + n * C, inp + n * C, weight, rstd[n], C);
        }
    }
    add_blocks(dweight, partial, blocks, C);
}

size_t rmsnorm_workspace(size_t N, size_t C) { return block_count(N) * C * sizeof(float); }

void heads_rmsnorm_forward(floatX* x, size_t stride, floatX* before, float* rstd, const float* weight, size_t N,
                           size_t heads, size_t HS) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        memcpy(before + n * heads * HS, x + n * stride, heads * HS * sizeof(floatX));
        for (size_t h = n * heads; h < (n + 1) * heads; h++) {
            rstd[h] = reciprocal_rms(before + h * HS, HS);
            normalize_row(x + n * stride + h % heads * HS, before + h * HS, weight, rstd[h], HS);
        }
    }
}

void heads_rmsnorm_backward(floatX* dx, size_t stride, float* dweight, const floatX* before, const float* rstd,
                            const float* weight, void* workspace, size_t N, size_t heads, size_t HS) {
    enum { MAX_HEAD = 128 };
    assert(HS <= MAX_HEAD);
    float* partial = (float*)workspace;  // [blocks,HS]
    size_t blocks = block_count(N);
#pragma omp parallel for schedule(static)
    for (size_t block = 0; block < blocks; block++) {
        float* sum = partial + block * HS;
        memset(sum, 0, HS * sizeof(float));
        size_t end = (block + 1) * BLOCK_ROWS < N ? (block + 1) * BLOCK_ROWS : N;
        for (size_t h = block * BLOCK_ROWS * heads; h < end * heads; h++) {
            floatX *d = dx + h / heads * stride + h % heads * HS, dhead[MAX_HEAD] = {0};
            backward_row(dhead, sum, d, before + h * HS, weight, rstd[h], HS);
            memcpy(d, dhead, HS * sizeof(floatX));
        }
    }
    add_blocks(dweight, partial, blocks, HS);
}
