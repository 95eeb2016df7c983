/*
Positional tables and the rotation: loops over the formulas of posenc.h. CUDA version; contract in ops.h.
*/
#ifndef POSENC_CUH
#define POSENC_CUH

#include "cuda_common.cuh"
#include "ops.h"

// ----------------------------------------------------------------------------
// tables

__global__ void sinusoidal_table_kernel(float* table, double theta, bool vaswani, size_t C) {
    const size_t t = blockIdx.x, c = row_column(1);
    if (c < C) { table[t * C + c] = sinusoidal_value(t, c, C, theta, vaswani); }
}

void sinusoidal_table(float* table, double theta, bool vaswani, size_t T, size_t C) {
    const RowLaunch launch = row_launch(T, C);
    LAUNCH(sinusoidal_table_kernel, launch.grid, launch.threads, 0, main_stream, table, theta, vaswani, C);
    cudaCheck(cudaGetLastError());
}

__global__ void rotary_table_kernel(float* table, double theta, size_t HS) {
    const size_t t = blockIdx.x, m = row_column(1);
    if (m >= HS / 2) { return; }
    const double angle = rotary_angle(t, m, HS, theta);
    table[t * HS + 2 * m] = (float)cos(angle);
    table[t * HS + 2 * m + 1] = (float)sin(angle);
}

void rotary_table(float* table, double theta, size_t T, size_t HS) {
    const RowLaunch launch = row_launch(T, HS / 2);
    LAUNCH(rotary_table_kernel, launch.grid, launch.threads, 0, main_stream, table, theta, HS);
    cudaCheck(cudaGetLastError());
}

void position_table(float* table, PosKind kind, const PosencOptions* options, size_t T, size_t C, size_t HS) {
    switch (posenc_info(kind)->mechanism) {
        case POSENC_ADD: sinusoidal_table(table, options->sinusoidal_theta, options->sinusoidal_vaswani, T, C); break;
        case POSENC_ROTATE: rotary_table(table, options->rotary_theta, T, HS); break;
        default: break;
    }
}

// Parameters of head h from theta[params,NH], in double; params may be 0.
__device__ __forceinline__ void load_head_parameters(double (&out)[POSENC_MAX_PARAMS], const float* theta, int params,
                                                     size_t h, size_t NH) {
    for (int p = 0; p < POSENC_MAX_PARAMS; p++) { out[p] = p < params ? (double)theta[(size_t)p * NH + h] : 0.0; }
}

// Block (i, h): distances of one head.
__global__ void bias_table_forward_kernel(float* table, PosKind kind, const float* theta, int params, size_t NH,
                                          size_t T) {
    const size_t h = blockIdx.y, d = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (d >= T) { return; }
    double head_theta[POSENC_MAX_PARAMS];
    load_head_parameters(head_theta, theta, params, h, NH);
    table[h * T + d] = posenc_bias(kind, head_theta, h, NH, d);
}

void bias_table_forward(float* table, PosKind kind, const float* theta, size_t NH, size_t T) {
    LAUNCH(bias_table_forward_kernel, dim3((unsigned)ceil_div(T, 128), (unsigned)NH), 128, 0, main_stream, table, kind,
           theta, posenc_info(kind)->params, NH, T);
    cudaCheck(cudaGetLastError());
}

// One block per head.
__global__ void bias_table_backward_kernel(float* dtheta, const float* dtable, PosKind kind, const float* theta,
                                           int params, size_t NH, size_t T) {
    const size_t h = blockIdx.x;
    double head_theta[POSENC_MAX_PARAMS], gradient[POSENC_MAX_PARAMS], sum[POSENC_MAX_PARAMS] = {0};
    load_head_parameters(head_theta, theta, params, h, NH);
    for (size_t d = threadIdx.x; d < T; d += blockDim.x) {
        posenc_bias_derivatives(gradient, kind, head_theta, h, NH, d);
        for (int p = 0; p < POSENC_MAX_PARAMS; p++) { sum[p] += (double)dtable[h * T + d] * gradient[p]; }
    }
    for (int p = 0; p < params; p++) {
        const double total = block_sum(p == 0 ? sum[0] : p == 1 ? sum[1] : sum[2]);
        if (threadIdx.x == 0) { dtheta[(size_t)p * NH + h] += (float)total; }
    }
}

void bias_table_backward(float* dtheta, const float* dtable, PosKind kind, const float* theta, size_t NH, size_t T) {
    const int params = posenc_info(kind)->params;
    if (params == 0) { return; }
    LAUNCH(bias_table_backward_kernel, (unsigned)NH, 256, 0, main_stream, dtheta, dtable, kind, theta, params, NH, T);
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
