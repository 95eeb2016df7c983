/*
SwiGLU: silu(gate) * up, silu(g) = g sigmoid(g). CPU version; contract in ops.h.
*/
#include "backend.h"
#include "cpu_math.h"

void swiglu_forward(floatX* out, const floatX* gate_up, size_t N, size_t F) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        floatX* y = out + n * F;
        const floatX *gate = gate_up + n * 2 * F, *up = gate + F;
#pragma omp simd
        for (size_t f = 0; f < F; f++) { y[f] = gate[f] * sigmoid_fast(gate[f]) * up[f]; }
    }
}

// d silu(g)/dg = s (1 + g (1 - s)) with s = sigmoid(g).
void swiglu_backward(floatX* dgate_up, const floatX* dout, const floatX* gate_up, size_t N, size_t F) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const floatX *dy = dout + n * F, *gate = gate_up + n * 2 * F, *up = gate + F;
        floatX *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
#pragma omp simd
        for (size_t f = 0; f < F; f++) {
            float g = gate[f], u = up[f], s = sigmoid_fast(g);
            dgate[f] = dy[f] * u * s * (1.0f + g * (1.0f - s));
            dup[f] = dy[f] * g * s;
        }
    }
}
