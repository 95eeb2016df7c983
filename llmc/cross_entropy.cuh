/*
The output head and its loss: logits, softmax and, in the same call, the gradients, over chunks of rows. CUDA
version; contract in ops.h. A chunk's logits are stored in floatX, then overwritten by their own gradient; the
softmax is online (Milakov & Gimelshein 2018), so that the logits are read twice, the second time from cache.
*/
#ifndef CROSS_ENTROPY_CUH
#define CROSS_ENTROPY_CUH

#include "cuda_sum.cuh"
#include "matmul.cuh"

// Logits of a chunk: enough rows that adding to dweight once per chunk costs little beside the products.
#ifndef CROSS_ENTROPY_CHUNK_LOGITS
#define CROSS_ENTROPY_CHUNK_LOGITS ((size_t)1 << 28)
#endif

// Threads for one row of logits, at most.
constexpr size_t SOFTMAX_THREADS = 512;

// Rows of a chunk, a multiple of 8 so that the next chunk is aligned; elements between rows of logits.
typedef struct {
    size_t rows, ld, workspace;
} HeadLayout;

static HeadLayout head_layout(size_t N, size_t V) {
    HeadLayout h;
    h.ld = round_up(V, 128);
    h.rows = CROSS_ENTROPY_CHUNK_LOGITS / h.ld / 8 * 8;
    h.rows = h.rows < 8 ? 8 : h.rows > N ? N : h.rows;
    h.workspace = PRODUCT_WORKSPACE + h.rows * h.ld * sizeof(floatX);
    return h;
}

size_t cross_entropy_workspace(size_t N, size_t C, size_t V) {
    (void)C;
    return head_layout(N, V).workspace;
}

// A maximum and the sum of exp(x - maximum) so far.
typedef struct {
    float maximum, sum;
} OnlineSoftmax;

// Logits become cap tanh(logit / cap).
template <int W>
__device__ __forceinline__ void cap_logits(float (&x)[W], float cap) {
#pragma unroll
    for (int i = 0; i < W; i++) { x[i] = cap * tanhf(x[i] / cap); }
}

// Gradients by capped logits c become those by the logits before.
template <int W>
__device__ __forceinline__ void cap_gradient(float (&x)[W], const float (&c)[W], float cap) {
#pragma unroll
    for (int i = 0; i < W; i++) { x[i] *= 1.0f - c[i] / cap * (c[i] / cap); }
}

template <int W>
__device__ __forceinline__ void softmax_add(OnlineSoftmax* s, const float (&x)[W]) {
    float maximum = s->maximum;
#pragma unroll
    for (int i = 0; i < W; i++) { maximum = fmaxf(maximum, x[i]); }
    if (maximum > s->maximum) {
        s->sum *= exp_device(s->maximum - maximum);
        s->maximum = maximum;
    }
    const float reference = maximum == -INFINITY ? 0.0f : maximum;  // a logit of -infinity adds 0, a NaN stays one
#pragma unroll
    for (int i = 0; i < W; i++) { s->sum += exp_device(x[i] - reference); }
}

// x[i] = dloss * (softmax - [i is the target]); target_index counts from the first of the W columns.
template <int W>
__device__ __forceinline__ void softmax_gradient(float (&x)[W], float maximum, float factor, float dloss,
                                                 size_t target_index) {
#pragma unroll
    for (int i = 0; i < W; i++) {
        x[i] = exp_device(x[i] - maximum) * factor - (target_index == (size_t)i ? dloss : 0.0f);
    }
}

// W logits at x, capped where that is asked for, into a softmax.
template <bool CAPPED, int W>
__device__ __forceinline__ void softmax_take(OnlineSoftmax* s, const floatX* at, float cap) {
    float x[W];
    load(x, at);
    if (CAPPED) { cap_logits(x, cap); }
    softmax_add(s, x);
}

// What the gradient of a row needs.
typedef struct {
    float maximum, factor, dloss, cap;
} RowGradient;

// W logits at x become their gradient; target_index counts from the first of them.
template <bool CAPPED, int W>
__device__ __forceinline__ void softmax_replace(floatX* at, const RowGradient& g, size_t target_index) {
    float x[W];
    load(x, at);
    if (CAPPED) {
        float c[W];
        cap_logits(x, g.cap);
#pragma unroll
        for (int i = 0; i < W; i++) { c[i] = x[i]; }
        softmax_gradient(x, g.maximum, g.factor, g.dloss, target_index);
        cap_gradient(x, c, g.cap);
    } else {
        softmax_gradient(x, g.maximum, g.factor, g.dloss, target_index);
    }
    store(at, x);
}

// One block per row: its loss, and the gradient in place of its logits. Columns V.. are left alone.
template <bool CAPPED>
__global__ void __launch_bounds__(SOFTMAX_THREADS)
    softmax_loss_kernel(float* losses, floatX* logits, const int* targets, float dloss, float cap, bool gradient,
                        size_t ld, size_t V) {
    floatX* row = logits + blockIdx.x * ld;
    const size_t target = (size_t)targets[blockIdx.x], tail = V / WIDE * WIDE;
    float target_logit[1] = {(float)row[target]};  // before the barriers, after which it is overwritten
    if (CAPPED) { cap_logits(target_logit, cap); }
    OnlineSoftmax own = {-INFINITY, 0.0f};
#pragma unroll 2
    for (size_t i = threadIdx.x * (size_t)WIDE; i < tail; i += blockDim.x * WIDE) {
        softmax_take<CAPPED, WIDE>(&own, row + i, cap);
    }
    for (size_t i = tail + threadIdx.x; i < V; i += blockDim.x) { softmax_take<CAPPED, 1>(&own, row + i, cap); }
    const float maximum = block_max(own.maximum);
    // a thread without columns has the sum 0; not `> 0`, which a NaN would fail, too, and be lost
    const float sum = block_sum(own.sum == 0.0f ? 0.0f : own.sum * exp_device(own.maximum - maximum));
    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + (maximum - target_logit[0]); }
    if (!gradient) { return; }
    const RowGradient g = {maximum, dloss / sum, dloss, cap};
    for (size_t i = threadIdx.x * (size_t)WIDE; i < tail; i += blockDim.x * WIDE) {
        softmax_replace<CAPPED, WIDE>(row + i, g, target - i);
    }
    for (size_t i = tail + threadIdx.x; i < V; i += blockDim.x) { softmax_replace<CAPPED, 1>(row + i, g, target - i); }
}

void cross_entropy_head(float* losses, floatX* dinp, float* dweight, const floatX* inp, const floatX* weight,
                        const int* targets, float dloss, float cap, void* workspace, size_t N, size_t C, size_t V) {
    const HeadLayout h = head_layout(N, V);
    floatX* logits = (floatX*)((char*)workspace + PRODUCT_WORKSPACE);
    const size_t items = round_up(ceil_div(V, WIDE), 32), threads = items < SOFTMAX_THREADS ? items : SOFTMAX_THREADS;
    for (size_t row = 0; row < N; row += h.rows) {
        const size_t rows = N - row < h.rows ? N - row : h.rows;
        const Product forward = {rows, V, C, C, C, h.ld, false, true, false};
        const Product to_inp = {rows, C, V, h.ld, C, C, false, false, false};
        const Product to_weight = {V, C, rows, h.ld, C, C, true, false, true};
        product(logits, inp + row * C, weight, workspace, &forward);
        if (cap != 0) {
            LAUNCH(softmax_loss_kernel<true>, (unsigned)rows, (unsigned)threads, 0, main_stream, losses + row, logits,
                   targets + row, dloss, cap, dinp != NULL, h.ld, V);
        } else {
            LAUNCH(softmax_loss_kernel<false>, (unsigned)rows, (unsigned)threads, 0, main_stream, losses + row, logits,
                   targets + row, dloss, cap, dinp != NULL, h.ld, V);
        }
        cudaCheck(cudaGetLastError());
        if (dinp) { product(dinp + row * C, logits, weight, workspace, &to_inp); }
        if (dinp && dweight) { product(dweight, logits, inp + row * C, workspace, &to_weight); }
    }
}

double array_sum(const float* x, size_t n) { return sum_to_host<false>(x, n); }

#endif
