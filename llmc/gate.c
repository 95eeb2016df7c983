/*
The sigmoid gate on attention's output. CPU version; contract in ops.h.
*/
#include "backend.h"
#include "cpu_math.h"

void gate_forward(floatX* out, const floatX* inp, const floatX* gate, size_t count) {
#pragma omp parallel for simd schedule(static)
    for (size_t n = 0; n < count; n++) { out[n] = inp[n] * sigmoid_fast(gate[n]); }
}

// With s = sigmoid(g): d/dx = s, d/dg = x s (1 - s).
void gate_backward(floatX* dinp, floatX* dgate, const floatX* dout, const floatX* inp, const floatX* gate,
                   size_t count) {
#pragma omp parallel for simd schedule(static)
    for (size_t n = 0; n < count; n++) {
        float dy = dout[n], s = sigmoid_fast(gate[n]);
        dgate[n] = dy * inp[n] * s * (1.0f - s);
        dinp[n] = dy * s;
    }
}
