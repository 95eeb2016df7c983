/*
SwiGLU: silu(gate) * up. CUDA version; contract in ops.h, derivative in swiglu.c.
*/
#ifndef SWIGLU_CUH
#define SWIGLU_CUH

#include "cuda_common.cuh"
#include "ops.h"

__device__ __forceinline__ float sigmoid_device(float x) { return 1.0f / (1.0f + exp_device(-x)); }

template <int W>
__global__ void swiglu_forward_kernel(floatX* out, const floatX* gate_up, size_t F) {
    const size_t n = blockIdx.x, f = row_column(W);
    if (f >= F) { return; }
    float gate[W], up[W];
    load(gate, gate_up + n * 2 * F + f);
    load(up, gate_up + n * 2 * F + F + f);
#pragma unroll
    for (int i = 0; i < W; i++) { up[i] *= gate[i] * sigmoid_device(gate[i]); }
    store(out + n * F + f, up);
}

// In place: a thread reads its columns of gate and up before it writes them.
template <int W>
__global__ void swiglu_backward_kernel(floatX* dgate_up, const floatX* dout, const floatX* gate_up, size_t F) {
    const size_t n = blockIdx.x, f = row_column(W);
    if (f >= F) { return; }
    float gate[W], up[W], dy[W];
    load(gate, gate_up + n * 2 * F + f);
    load(up, gate_up + n * 2 * F + F + f);
    load(dy, dout + n * F + f);
#pragma unroll
    for (int i = 0; i < W; i++) {
        float g = gate[i], s = sigmoid_device(g);
        gate[i] = dy[i] * up[i] * s * (1.0f + g * (1.0f - s));
        up[i] = dy[i] * g * s;
    }
    store(dgate_up + n * 2 * F + f, gate);
    store(dgate_up + n * 2 * F + F + f, up);
}

void swiglu_forward(floatX* out, const floatX* gate_up, size_t N, size_t F) {
    const bool wide = aligned((uintptr_t)out | (uintptr_t)gate_up | F * sizeof(floatX));
    const RowLaunch launch = row_launch(N, wide ? F / WIDE : F);
    LAUNCH_WIDTH(wide, swiglu_forward_kernel, launch.grid, launch.threads, 0, main_stream, out, gate_up, F);
}

void swiglu_backward(floatX* dgate_up, const floatX* dout, const floatX* gate_up, size_t N, size_t F) {
    const bool wide = aligned((uintptr_t)dgate_up | (uintptr_t)dout | (uintptr_t)gate_up | F * sizeof(floatX));
    const RowLaunch launch = row_launch(N, wide ? F / WIDE : F);
    LAUNCH_WIDTH(wide, swiglu_backward_kernel, launch.grid, launch.threads, 0, main_stream, dgate_up, dout, gate_up, F);
}

#endif
