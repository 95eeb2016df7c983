/*
Numbers by key that are cumulative sums of gates. CPU version; contract and formulas in ops.h.
*/
#include "backend.h"

// Sums over rows go block by block, whatever the number of threads: fp32 within a block, then over the blocks.
enum { BLOCK_ROWS = 64, BLOCK_COLUMNS = 64, BLOCK_HEADS = 8 };

static float dot(const floatX* x, const float* y, size_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) { sum += x[i] * y[i]; }
    return sum;
}

void forget_gates(float* gates, const floatX* inp, const float* weight, const float* bias, size_t N, size_t C,
                  size_t NH) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        for (size_t h = 0; h < NH; h++) { gates[n * NH + h] = dot(inp + n * C, weight + h * C, C) + bias[h]; }
    }
}

void forget_sums(double* sums, const float* gates, const int* start, PosencMechanism kind, size_t position, size_t B,
                 size_t T, size_t NH, size_t stride) {
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < B * NH; row++) {
        const size_t b = row / NH, h = row % NH;
        double *to = sums + row * stride + position, sum = position > 0 ? to[-1] : 0.0;
        for (size_t t = 0; t < T; t++) {
            const bool begins = (size_t)start[b * T + t] == position + t;
            sum = begins ? 0.0 : sum + posenc_gate(kind, (double)gates[(b * T + t) * NH + h]);
            to[t] = sum;
        }
    }
}

void forget_sums_backward(float* dgates, const float* dsums, const float* gates, const int* start, PosencMechanism kind,
                          size_t B, size_t T, size_t NH) {
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < B * NH; row++) {
        const size_t b = row / NH, h = row % NH;
        double sum = 0.0;
        for (size_t t = T; t-- > 0;) {
            const size_t at = (b * T + t) * NH + h;
            sum += (double)dsums[row * T + t];
            const bool begins = (size_t)start[b * T + t] == t;
            dgates[at] = begins ? 0.0f : (float)(sum * posenc_gate_slope(kind, (double)gates[at]));
            sum = begins ? 0.0 : sum;
        }
    }
}

// sums[BLOCK_HEADS][BLOCK_COLUMNS] of rows first..end-1, for some heads and columns.
static void add_block(float sums[BLOCK_HEADS][BLOCK_COLUMNS], const float* dgates, const floatX* inp, size_t first,
                      size_t end, size_t heads, size_t columns, size_t NH, size_t C) {
    float block[BLOCK_HEADS][BLOCK_COLUMNS] = {{0}};
    for (size_t n = first; n < end; n++) {
        for (size_t h = 0; h < heads; h++) {
            const float dgate = dgates[n * NH + h];
#pragma omp simd
            for (size_t c = 0; c < columns; c++) { block[h][c] += dgate * inp[n * C + c]; }
        }
    }
    for (size_t h = 0; h < heads; h++) {
        for (size_t c = 0; c < columns; c++) { sums[h][c] += block[h][c]; }
    }
}

static size_t at_most(size_t n, size_t most) { return n < most ? n : most; }

static void backward_weight(float* dweight, const float* dgates, const floatX* inp, size_t N, size_t C, size_t NH) {
#pragma omp parallel for schedule(static)
    for (size_t c = 0; c < C; c += BLOCK_COLUMNS) {
        const size_t columns = at_most(C - c, BLOCK_COLUMNS);
        for (size_t h = 0; h < NH; h += BLOCK_HEADS) {
            const size_t heads = at_most(NH - h, BLOCK_HEADS);
            float sums[BLOCK_HEADS][BLOCK_COLUMNS] = {{0}};
            for (size_t n = 0; n < N; n += BLOCK_ROWS) {
                add_block(sums, dgates + h, inp + c, n, at_most(N, n + BLOCK_ROWS), heads, columns, NH, C);
            }
            for (size_t i = 0; i < heads; i++) {
                for (size_t k = 0; k < columns; k++) { dweight[(h + i) * C + c + k] += sums[i][k]; }
            }
        }
    }
}

void forget_gates_backward(floatX* dinp, float* dweight, float* dbias, const float* dgates, const floatX* inp,
                           const float* weight, void* workspace, size_t N, size_t C, size_t NH) {
    (void)workspace;
    backward_weight(dweight, dgates, inp, N, C, NH);
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < NH; h++) {
        double sum = 0.0;
        for (size_t n = 0; n < N; n++) { sum += (double)dgates[n * NH + h]; }
        dbias[h] += (float)sum;
    }
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        for (size_t h = 0; h < NH; h++) {
            const float dgate = dgates[n * NH + h];
#pragma omp simd
            for (size_t c = 0; c < C; c++) { dinp[n * C + c] += dgate * weight[h * C + c]; }
        }
    }
}

size_t forget_workspace(size_t N, size_t C, size_t NH) {
    (void)N, (void)C, (void)NH;
    return 0;
}
