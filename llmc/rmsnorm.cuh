/*
RMSNorm, alone, after a residual addition, and of heads. CUDA version; contract in ops.h, formulas in rmsnorm.c.
*/
#ifndef RMSNORM_CUH
#define RMSNORM_CUH

#include "cuda_common.cuh"
#include "ops.h"

#define RMSNORM_EPSILON 1e-5f

// Shared memory that every device gives to a block without being asked.
constexpr size_t RMSNORM_SHARED_BYTES = 48 << 10;

// ----------------------------------------------------------------------------
// forward

// One warp per row. Between the two passes the row waits in shared memory; each thread reads only what it wrote.
template <int W, bool RESIDUAL>
__device__ __forceinline__ void normalize_row(floatX* out, float* rstd, floatX* residual, const floatX* inp1,
                                              const floatX* inp2, const float* weight, size_t N, size_t C) {
    DYN_SHARED(floatX, rows);  // [warps,C]
    const size_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = (size_t)blockIdx.x * (blockDim.x / 32) + warp;
    if (n >= N) { return; }
    floatX* row = rows + warp * C;
    float sum = 0.0f;
    for (size_t c = lane * W; c < C; c += 32 * W) {
        float x[W], y[W];
        load(x, inp1 + n * C + c);
        if (RESIDUAL) {
            load(y, inp2 + n * C + c);
#pragma unroll
            for (int i = 0; i < W; i++) { x[i] += y[i]; }
            store(residual + n * C + c, x);
        }
        store(row + c, x);
        load(x, row + c);  // as the residual stream holds it
#pragma unroll
        for (int i = 0; i < W; i++) { sum += x[i] * x[i]; }
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)C + RMSNORM_EPSILON);
    if (lane == 0) { rstd[n] = scale; }
    for (size_t c = lane * W; c < C; c += 32 * W) {
        float x[W], w[W];
        load(x, row + c);
        load(w, weight + c);
#pragma unroll
        for (int i = 0; i < W; i++) { x[i] *= scale * w[i]; }
        store(out + n * C + c, x);
    }
}

template <int W>
__global__ void rmsnorm_forward_kernel(floatX* out, float* rstd, const floatX* inp, const float* weight, size_t N,
                                       size_t C) {
    normalize_row<W, false>(out, rstd, NULL, inp, NULL, weight, N, C);
}

template <int W>
__global__ void residual_rmsnorm_forward_kernel(floatX* residual, floatX* out, float* rstd, const floatX* inp1,
                                                const floatX* inp2, const float* weight, size_t N, size_t C) {
    normalize_row<W, true>(out, rstd, residual, inp1, inp2, weight, N, C);
}

// Rows of a block: as many as its shared memory holds, at most four. The backward needs a row in fp32.
static size_t rmsnorm_block_rows(size_t C) {
    size_t rows = 4;
    if (C * sizeof(float) > RMSNORM_SHARED_BYTES) {
        fatal("RMSNorm of %zu channels: expected at most %zu; lower --dim", C, RMSNORM_SHARED_BYTES / sizeof(float));
    }
    while (rows * C * sizeof(floatX) > RMSNORM_SHARED_BYTES) { rows /= 2; }
    return rows;
}

void rmsnorm_forward(floatX* out, float* rstd, const floatX* inp, const float* weight, size_t N, size_t C) {
    const size_t rows = rmsnorm_block_rows(C);
    const bool wide = aligned((uintptr_t)out | (uintptr_t)inp | (uintptr_t)weight | C * sizeof(floatX));
    LAUNCH_WIDTH(wide, rmsnorm_forward_kernel, (unsigned)ceil_div(N, rows), (unsigned)(32 * rows),
                 rows * C * sizeof(floatX), main_stream, out, rstd, inp, weight, N, C);
}

void residual_rmsnorm_forward(floatX* residual, floatX* out, float* rstd, const floatX* inp1, const floatX* inp2,
                              const float* weight, size_t N, size_t C) {
    const size_t rows = rmsnorm_block_rows(C);
    const bool wide = aligned((uintptr_t)residual | (uintptr_t)out | (uintptr_t)inp1 | (uintptr_t)inp2 |
                              (uintptr_t)weight | C * sizeof(floatX));
    LAUNCH_WIDTH(wide, residual_rmsnorm_forward_kernel, (unsigned)ceil_div(N, rows), (unsigned)(32 * rows),
                 rows * C * sizeof(floatX), main_stream, residual, out, rstd, inp1, inp2, weight, N, C);
}

// ----------------------------------------------------------------------------
// backward

// A block takes groups of this many rows, one warp for the dot product of each; so many blocks fit a multiprocessor.
constexpr size_t RMSNORM_ROWS = 8, RMSNORM_RESIDENT = 3;

// Blocks, at most: all that run at once, each with its own part of the weight's gradient.
#ifndef RMSNORM_BLOCKS
#define RMSNORM_BLOCKS (RMSNORM_RESIDENT * multiprocessors())
#endif

static size_t rmsnorm_backward_blocks(size_t N) {
    size_t blocks = ceil_div(N, RMSNORM_ROWS);
    return blocks < RMSNORM_BLOCKS ? blocks : RMSNORM_BLOCKS;
}

size_t rmsnorm_workspace(size_t N, size_t C) { return rmsnorm_backward_blocks(N) * C * sizeof(float); }

// sum_j w_j dy_j x_j of one row, by one warp.
template <int W>
__device__ __forceinline__ float weighted_dot(const floatX* dout, const floatX* inp, const float* weight, size_t C) {
    float sum = 0.0f;
    for (size_t c = threadIdx.x % 32 * W; c < C; c += 32 * W) {
        float dy[W], x[W], w[W];
        load(dy, dout + c);
        load(x, inp + c);
        load(w, weight + c);
#pragma unroll
        for (int i = 0; i < W; i++) { sum += dy[i] * w[i] * x[i]; }
    }
    return warp_sum(sum);
}

// First each warp finds the dot product of its row, then each thread goes down its own columns of all the rows,
// which the first pass has left in cache, and adds up their part of the weight's gradient.
template <int W>
__global__ void __launch_bounds__(32 * RMSNORM_ROWS, RMSNORM_RESIDENT)
    rmsnorm_backward_kernel(floatX* __restrict__ dinp, float* __restrict__ partial, const floatX* __restrict__ dout,
                            const floatX* __restrict__ inp, const float* __restrict__ weight,
                            const float* __restrict__ rstd, size_t N, size_t C) {
    SHARED(float, scale, [RMSNORM_ROWS]);
    SHARED(float, projection, [RMSNORM_ROWS]);
    DYN_SHARED(float, dweight);  // [C], every entry used by one thread
    const size_t warp = threadIdx.x / 32, columns = blockDim.x * W;
    for (size_t c = threadIdx.x * W; c < C; c += columns) {
        for (int i = 0; i < W; i++) { dweight[c + i] = 0.0f; }
    }
    for (size_t first = (size_t)blockIdx.x * RMSNORM_ROWS; first < N; first += (size_t)gridDim.x * RMSNORM_ROWS) {
        const size_t n = first + warp;
        if (n < N) {
            float dot = weighted_dot<W>(dout + n * C, inp + n * C, weight, C), s = rstd[n];
            if (threadIdx.x % 32 == 0) {
                scale[warp] = s;
                projection[warp] = dot * s * s / (float)C;
            }
        }
        __syncthreads();
        const int rows = (int)(N - first < RMSNORM_ROWS ? N - first : RMSNORM_ROWS);
        for (size_t c = threadIdx.x * W; c < C; c += columns) {
            float sum[W], w[W];
            load(sum, dweight + c);
            load(w, weight + c);
#pragma unroll 4
            for (int r = 0; r < rows; r++) {
                const size_t offset = (first + r) * C + c;
                float dy[W], x[W], dx[W];
                load(dy, dout + offset);
                load(x, inp + offset);
                load(dx, dinp + offset);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    dx[i] += scale[r] * (dy[i] * w[i] - x[i] * projection[r]);
                    sum[i] += dy[i] * x[i] * scale[r];
                }
                store(dinp + offset, dx);
            }
            store(dweight + c, sum);
        }
        __syncthreads();
    }
    for (size_t c = threadIdx.x * W; c < C; c += columns) {
        for (int i = 0; i < W; i++) { partial[blockIdx.x * C + c + i] = dweight[c + i]; }
    }
}

constexpr unsigned RMSNORM_SUM_COLUMNS = 32, RMSNORM_SUM_WARPS = 16;

// out[C] += the sum of partial[count,C] over its rows: each warp adds every RMSNORM_SUM_WARPS-th row, then their sums.
__global__ void add_rows_kernel(float* out, const float* partial, size_t count, size_t C) {
    SHARED(float, sums, [RMSNORM_SUM_WARPS][RMSNORM_SUM_COLUMNS]);
    const size_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = (size_t)blockIdx.x * RMSNORM_SUM_COLUMNS + lane;
    float sum = 0.0f;
    for (size_t row = warp; row < count && c < C; row += RMSNORM_SUM_WARPS) { sum += partial[row * C + c]; }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || c >= C) { return; }
    for (unsigned i = 1; i < RMSNORM_SUM_WARPS; i++) { sum += sums[i][lane]; }
    out[c] += sum;
}

void rmsnorm_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp, const float* weight,
                      const float* rstd, void* workspace, size_t N, size_t C) {
    float* partial = (float*)workspace;  // [blocks,C]
    const size_t blocks = rmsnorm_backward_blocks(N);
    rmsnorm_block_rows(C);
    const bool wide = aligned((uintptr_t)dinp | (uintptr_t)dout | (uintptr_t)inp | (uintptr_t)weight |
                              (uintptr_t)workspace | C * sizeof(floatX));
    LAUNCH_WIDTH(wide, rmsnorm_backward_kernel, (unsigned)blocks, 32 * RMSNORM_ROWS, C * sizeof(float), main_stream,
                 dinp, partial, dout, inp, weight, rstd, N, C);
    LAUNCH(add_rows_kernel, (unsigned)ceil_div(C, RMSNORM_SUM_COLUMNS), 32 * RMSNORM_SUM_WARPS, 0, main_stream, dweight,
           partial, blocks, C);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------
// heads

// One warp per head of at most 128 channels: channel lane + 32 i in its i-th register.
constexpr unsigned HEAD_WARPS = 8, HEAD_REGISTERS = 4;

__global__ void heads_rmsnorm_forward_kernel(floatX* x, size_t stride, floatX* before, float* rstd, const float* weight,
                                             size_t N, size_t heads, size_t HS) {
    const size_t head = (size_t)blockIdx.x * HEAD_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= N * heads) { return; }
    floatX* row = x + head / heads * stride + head % heads * HS;
    float value[HEAD_REGISTERS], sum = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < HEAD_REGISTERS; i++) {
        const size_t c = lane + 32 * i;
        value[i] = c < HS ? (float)row[c] : 0.0f;
        if (c < HS) { before[head * HS + c] = row[c]; }
        sum += value[i] * value[i];
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)HS + RMSNORM_EPSILON);
    if (lane == 0) { rstd[head] = scale; }
#pragma unroll
    for (unsigned i = 0; i < HEAD_REGISTERS; i++) {
        const size_t c = lane + 32 * i;
        if (c < HS) { row[c] = (floatX)(value[i] * scale * weight[c]); }
    }
}

void heads_rmsnorm_forward(floatX* x, size_t stride, floatX* before, float* rstd, const float* weight, size_t N,
                           size_t heads, size_t HS) {
    LAUNCH(heads_rmsnorm_forward_kernel, (unsigned)ceil_div(N * heads, HEAD_WARPS), 32 * HEAD_WARPS, 0, main_stream, x,
           stride, before, rstd, weight, N, heads, HS);
    cudaCheck(cudaGetLastError());
}

// Warps go through the heads in strides; each sums its part of the weight's gradient in registers, the block its warps'
// in order.
__global__ void heads_rmsnorm_backward_kernel(floatX* dx, size_t stride, float* partial, const floatX* before,
                                              const float* rstd, const float* weight, size_t N, size_t heads,
                                              size_t HS) {
    SHARED(float, sums, [HEAD_WARPS][32 * HEAD_REGISTERS]);
    const size_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float dweight[HEAD_REGISTERS] = {0.0f};
    for (size_t head = (size_t)blockIdx.x * HEAD_WARPS + warp; head < N * heads;
         head += (size_t)gridDim.x * HEAD_WARPS) {
        floatX* row = dx + head / heads * stride + head % heads * HS;
        const float scale = rstd[head];
        float value[HEAD_REGISTERS], weighted[HEAD_REGISTERS], dot = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < HEAD_REGISTERS; i++) {
            const size_t c = lane + 32 * i;
            const float dy = c < HS ? (float)row[c] : 0.0f;
            value[i] = c < HS ? (float)before[head * HS + c] : 0.0f;
            weighted[i] = c < HS ? dy * weight[c] : 0.0f;
            dweight[i] += dy * value[i] * scale;
            dot += weighted[i] * value[i];
        }
        const float projection = warp_sum(dot) * scale * scale / (float)HS;
#pragma unroll
        for (unsigned i = 0; i < HEAD_REGISTERS; i++) {
            const size_t c = lane + 32 * i;
            if (c < HS) { row[c] = (floatX)(scale * (weighted[i] - value[i] * projection)); }
        }
    }
#pragma unroll
    for (unsigned i = 0; i < HEAD_REGISTERS; i++) { sums[warp][lane + 32 * i] = dweight[i]; }
    __syncthreads();
    for (size_t c = threadIdx.x; c < HS; c += blockDim.x) {
        float sum = 0.0f;
        for (unsigned w = 0; w < HEAD_WARPS; w++) { sum += sums[w][c]; }
        partial[blockIdx.x * HS + c] = sum;
    }
}

void heads_rmsnorm_backward(floatX* dx, size_t stride, float* dweight, const floatX* before, const float* rstd,
                            const float* weight, void* workspace, size_t N, size_t heads, size_t HS) {
    assert(HS <= 32 * HEAD_REGISTERS);
    float* partial = (float*)workspace;  // [blocks,HS]
    const size_t blocks = rmsnorm_backward_blocks(N);
    LAUNCH(heads_rmsnorm_backward_kernel, (unsigned)blocks, 32 * HEAD_WARPS, 0, main_stream, dx, stride, partial,
           before, rstd, weight, N, heads, HS);
    LAUNCH(add_rows_kernel, (unsigned)ceil_div(HS, RMSNORM_SUM_COLUMNS), 32 * RMSNORM_SUM_WARPS, 0, main_stream,
           dweight, partial, blocks, HS);
    cudaCheck(cudaGetLastError());
}

#endif
