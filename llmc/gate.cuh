/*
The sigmoid gate on attention's output. CUDA version; contract in ops.h, derivative in gate.c.
*/
#ifndef GATE_CUH
#define GATE_CUH

#include "cuda_common.cuh"
#include "ops.h"
#include "swiglu.cuh"

constexpr unsigned GATE_THREADS = 256;

// count is a multiple of W.
template <int W>
__global__ void gate_forward_kernel(floatX* out, const floatX* inp, const floatX* gate, size_t count) {
    const size_t n = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (n >= count) { return; }
    float x[W], g[W];
    load(x, inp + n);
    load(g, gate + n);
#pragma unroll
    for (int i = 0; i < W; i++) { x[i] *= sigmoid_device(g[i]); }
    store(out + n, x);
}

// In place: a thread reads its numbers before it writes them.
template <int W>
__global__ void gate_backward_kernel(floatX* dinp, floatX* dgate, const floatX* dout, const floatX* inp,
                                     const floatX* gate, size_t count) {
    const size_t n = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (n >= count) { return; }
    float dy[W], x[W], g[W];
    load(dy, dout + n);
    load(x, inp + n);
    load(g, gate + n);
#pragma unroll
    for (int i = 0; i < W; i++) {
        const float s = sigmoid_device(g[i]);
        g[i] = dy[i] * x[i] * s * (1.0f - s);
        dy[i] *= s;
    }
    store(dgate + n, g);
    store(dinp + n, dy);
}

void gate_forward(floatX* out, const floatX* inp, const floatX* gate, size_t count) {
    const bool wide = aligned((uintptr_t)out | (uintptr_t)inp | (uintptr_t)gate | count * sizeof(floatX));
    LAUNCH_WIDTH(wide, gate_forward_kernel, (unsigned)ceil_div(count, GATE_THREADS * (wide ? WIDE : 1)), GATE_THREADS,
                 0, main_stream, out, inp, gate, count);
}

void gate_backward(floatX* dinp, floatX* dgate, const floatX* dout, const floatX* inp, const floatX* gate,
                   size_t count) {
    const bool wide = aligned((uintptr_t)dinp | (uintptr_t)dgate | (uintptr_t)dout | (uintptr_t)inp | (uintptr_t)gate |
                              count * sizeof(floatX));
    LAUNCH_WIDTH(wide, gate_backward_kernel, (unsigned)ceil_div(count, GATE_THREADS * (wide ? WIDE : 1)), GATE_THREADS,
                 0, main_stream, dinp, dgate, dout, inp, gate, count);
}

#endif
