/*
Positional tables and the rotation: loops over the formulas of posenc.h. CUDA version; contract in ops.h.
*/
#ifndef POSENC_CUH
#define POSENC_CUH

#include "cuda_common.cuh"
#include "ops.h"

// ----------------------------------------------------------------------------
// tables

__global__ void position_table_kernel(float* table, PosencMechanism mechanism, PositionSettings settings,
                                      size_t width) {
    const size_t t = blockIdx.x, m = row_column(1);
    if (m < width / 2) { position_pair(table + t * width + 2 * m, mechanism, &settings, t, m, width); }
}

void position_table(float* table, PosKind kind, const PositionSettings* settings, size_t T, size_t width) {
    const RowLaunch launch = row_launch(T, width / 2);
    LAUNCH(position_table_kernel, launch.grid, launch.threads, 0, main_stream, table, posenc_info(kind)->mechanism,
           *settings, width);
    cudaCheck(cudaGetLastError());
}

__global__ void learned_table_kernel(float* table, const float* learned, bool interpolated, size_t T, size_t rows,
                                     size_t C) {
    const size_t t = blockIdx.x, c = row_column(1);
    if (c < C) { table[t * C + c] = learned_value(learned, learned_row(t, rows, T, interpolated), rows, c, C); }
}

void learned_table(float* table, const float* learned, bool interpolated, size_t T, size_t rows, size_t C) {
    const RowLaunch launch = row_launch(T, C);
    LAUNCH(learned_table_kernel, launch.grid, launch.threads, 0, main_stream, table, learned, interpolated, T, rows, C);
    cudaCheck(cudaGetLastError());
}

// One thread adds the sequences of its channels, in their order.
template <int W>
__global__ void learned_backward_kernel(float* dlearned, const floatX* dout, size_t B, size_t T, size_t C) {
    const size_t t = blockIdx.x, c = row_column(W);
    if (c >= C) { return; }
    float sum[W];
    load(sum, dlearned + t * C + c);
    for (size_t b = 0; b < B; b++) {
        float dy[W];
        load(dy, dout + (b * T + t) * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) { sum[i] += dy[i]; }
    }
    store(dlearned + t * C + c, sum);
}

void learned_backward(float* dlearned, const floatX* dout, size_t B, size_t T, size_t C) {
    const bool wide = aligned((uintptr_t)dlearned | (uintptr_t)dout | C * sizeof(floatX));
    const RowLaunch launch = row_launch(T, wide ? C / WIDE : C);
    LAUNCH_WIDTH(wide, learned_backward_kernel, launch.grid, launch.threads, 0, main_stream, dlearned, dout, B, T, C);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------
// relative biases

// What a head learned, in double, is put where the block's threads share it.
static_assert(POSENC_ALL_ROWS * sizeof(double) <= 48 << 10, "an encoding's numbers of a head fit into shared memory");

// out[params] of head h; all threads of the block take part.
__device__ __forceinline__ void load_head_parameters(double* out, PosKind kind, const float* theta, size_t h,
                                                     size_t NH) {
    __syncthreads();  // out may still be read for another head
    for (size_t p = threadIdx.x; p < posenc_params(kind); p += blockDim.x) {
        out[p] = posenc_parameter(kind, theta, p, h, NH);
    }
    __syncthreads();
}

// Block (i, h): distances of one head.
__global__ void bias_table_forward_kernel(float* table, PosKind kind, PosencSettings settings, const float* theta,
                                          size_t NH, size_t T) {
    DYN_SHARED(double, head_theta);
    const size_t h = blockIdx.y, d = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const PosencHead head = {h, NH, settings, NULL};
    load_head_parameters(head_theta, kind, theta, h, NH);
    if (d < T) { table[h * T + d] = posenc_bias(kind, head_theta, head, d); }
}

void bias_table_forward(float* table, PosKind kind, PosencSettings settings, const float* theta, size_t NH, size_t T) {
    LAUNCH(bias_table_forward_kernel, dim3((unsigned)ceil_div(T, 128), (unsigned)NH), 128,
           posenc_params(kind) * sizeof(double), main_stream, table, kind, settings, theta, NH, T);
    cudaCheck(cudaGetLastError());
}

// Block (p, h): the derivative by one number of one head; by one that all heads share, for all of them in block (p, 0).
__global__ void bias_table_backward_kernel(float* dtheta, const float* dtable, PosKind kind, PosencSettings settings,
                                           const float* theta, size_t NH, size_t T) {
    DYN_SHARED(double, head_theta);
    const size_t p = blockIdx.x, first = blockIdx.y, place = posenc_place(kind, p, first, NH);
    if (first > 0 && posenc_place(kind, p, first - 1, NH) == place) { return; }
    const PosencReach reach = posenc_reach(kind, p);
    double sum = 0;
    for (size_t h = first; h < NH && posenc_place(kind, p, h, NH) == place; h++) {
        const PosencHead head = {h, NH, settings, NULL};
        load_head_parameters(head_theta, kind, theta, h, NH);
        for (size_t d = reach.first + threadIdx.x; d < T && d < reach.end; d += blockDim.x) {
            const bool clamped = posenc_bias_clamped(kind, head_theta, head, d);
            const double slope = clamped ? 0.0 : posenc_derivative_unclamped(kind, head_theta, p, head, d);
            sum += (double)dtable[h * T + d] * slope;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { dtheta[place] += (float)sum; }
}

void bias_table_backward(float* dtheta, const float* dtable, PosKind kind, PosencSettings settings, const float* theta,
                         size_t NH, size_t T) {
    const size_t params = posenc_params(kind);
    if (params == 0) { return; }
    LAUNCH(bias_table_backward_kernel, dim3((unsigned)params, (unsigned)NH), 256, params * sizeof(double), main_stream,
           dtheta, dtable, kind, settings, theta, NH, T);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------
// rotation

// W/2 pairs of one query or key head, all in one row of qkv; direction = -1 turns back. Remainders are taken of 32
// bits, as rows and columns of a launch have, since those of 64 bits are slow.
template <int W>
__global__ void rotary_kernel(floatX* qkv, const float* table, float direction, size_t T, size_t stride, size_t rotated,
                              size_t HS) {
    const size_t n = blockIdx.x, c = row_column(W);
    if (c >= rotated) { return; }
    float x[W], angle[W];
    load(x, qkv + n * stride + c);
    load(angle, table + (size_t)((unsigned)n % (unsigned)T) * HS + (unsigned)c % (unsigned)HS);
#pragma unroll
    for (int i = 0; i < W; i += 2) {
        const float cosine = angle[i], sine = direction * angle[i + 1], x0 = x[i], x1 = x[i + 1];
        x[i] = x0 * cosine - x1 * sine;
        x[i + 1] = x1 * cosine + x0 * sine;
    }
    store(qkv + n * stride + c, x);
}

// Query and key heads are the first NH + NKV heads of a token.
static void rotate_queries_and_keys(floatX* qkv, const float* table, float direction, size_t B, size_t T, size_t NH,
                                    size_t NKV, size_t HS) {
    const size_t stride = (NH + 2 * NKV) * HS, rotated = (NH + NKV) * HS;
    const bool wide = aligned((uintptr_t)qkv | (uintptr_t)table | HS * sizeof(floatX));
    const RowLaunch launch = row_launch(B * T, rotated / (wide ? WIDE : 2));
    if (wide) {
        LAUNCH((rotary_kernel<WIDE>), launch.grid, launch.threads, 0, main_stream, qkv, table, direction, T, stride,
               rotated, HS);
    } else {
        LAUNCH((rotary_kernel<2>), launch.grid, launch.threads, 0, main_stream, qkv, table, direction, T, stride,
               rotated, HS);
    }
    cudaCheck(cudaGetLastError());
}

void rotary_forward(floatX* qkv, const float* table, size_t B, size_t T, size_t NH, size_t NKV, size_t HS) {
    rotate_queries_and_keys(qkv, table, 1.0f, B, T, NH, NKV, HS);
}

void rotary_backward(floatX* dqkv, const float* table, size_t B, size_t T, size_t NH, size_t NKV, size_t HS) {
    rotate_queries_and_keys(dqkv, table, -1.0f, B, T, NH, NKV, HS);
}

#endif
