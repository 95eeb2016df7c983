/*
Fused causal attention on CUDA, backward: weights are recomputed tile by tile from lse (Dao et al. 2022, algorithm
4). Contract in terms.h; formulas as in cpu_backward.c. Two passes, so that no sum needs an atomic:
- dq kernel: a block takes tiles of queries and walks over their keys: dq, the sums of dZ along diagonals, the
  gradient of seq_scale, and for the second pass each row's scale, reference and D_i;
- dk/dv kernel: a block takes a tile of keys and walks over the queries of all heads that read them, on the
  transposed logits, so that the weights are the row operand of both products.

Rows whose lse is too coarse (large logits): their maximum and sum are computed again by the forward kernel.
*/
#ifndef ATTENTION_CUDA_BACKWARD_CUH
#define ATTENTION_CUDA_BACKWARD_CUH

#include "cuda_forward.cuh"

#ifdef PRECISION_FP32
#include "cuda_backward_fp32.cuh"
#else
#include "cuda_dkv.cuh"
#include "cuda_dq.cuh"

template <int D>
static void launch_attention_backward(const AttentionBackwardTask& task) {
    using S = AttentionShape<D>;
    const AttentionInput& in = task.in;
    const unsigned dq_blocks = (unsigned)(in.size.B * in.size.NH * task.query_blocks);
    const unsigned dkv_blocks = (unsigned)(in.size.B * in.size.NKV * ceil_div(in.size.Tk, S::ROWS));
    if (attention_has(&in, TERM_DISTANCE)) {
        LAUNCH_ATTENTION((attention_dq_kernel<D, true, true>), dim3(dq_blocks), S::THREADS, DqShape<D>::shared(true),
                         task);
    } else if (attention_has(&in, TERM_SCALE)) {
        LAUNCH_ATTENTION((attention_dq_kernel<D, false, true>), dim3(dq_blocks), S::THREADS, DqShape<D>::shared(false),
                         task);
    } else {
        LAUNCH_ATTENTION((attention_dq_kernel<D, false, false>), dim3(dq_blocks), S::THREADS, DqShape<D>::shared(false),
                         task);
    }
    if (attention_has(&in, TERM_DISTANCE)) {
        LAUNCH_ATTENTION((attention_dkv_kernel<D, true>), dim3(dkv_blocks), S::THREADS, DkvShape<D>::shared(), task);
    } else {
        LAUNCH_ATTENTION((attention_dkv_kernel<D, false>), dim3(dkv_blocks), S::THREADS, DkvShape<D>::shared(), task);
    }
}

static inline void attention_launch_backward(const AttentionBackwardTask& task) {
    WITH_NATIVE_SIZE(task.in.size.HS, launch_attention_backward, task);
}
#endif

// ----------------------------------------------------------------------------
// both precisions: sums over blocks and sequences

// grid (32 distances each, heads): dbias, and the bias's part of the gradient of seq_scale.
__global__ void __launch_bounds__(256) attention_table_kernel(AttentionBackwardTask task) {
    SHARED(float, parts, [8][32]);
    const AttentionInput& in = task.in;
    const int x = threadIdx.x & 31, y = threadIdx.x >> 5, h = blockIdx.y;
    const size_t T = in.size.Tk, d = (size_t)blockIdx.x * 32 + x, blocks = task.query_blocks;
    float sum = 0.0f;
    for (size_t n = y; n < in.size.B * blocks && d < T; n += 8) {
        const size_t block = (n / blocks * in.size.NH + h) * blocks + n % blocks;
        sum += task.table_sums[block * T + d];
    }
    parts[y][x] = sum;
    __syncthreads();
    if (y > 0) { return; }
#pragma unroll
    for (int i = 1; i < 8; i++) { sum += parts[i][x]; }
    const bool scaled = attention_has(&in, TERM_SCALE) && in.logit.inside;
    float dscale = 0.0f;
    if (d < T) {
        dscale = (in.logit.by_distance[h * in.logit.distance_stride + d] - attention_bias_center(in, h)) * sum;
        task.to.dby_distance[h * in.logit.distance_stride + d] = scaled ? sum * in.logit.seq_scale[h] : sum;
    }
    dscale = warp_sum(dscale);
    if (x == 0) { task.bias_sums[h * gridDim.x + blockIdx.x] = scaled ? dscale : 0.0f; }
}

// grid: heads.
__global__ void __launch_bounds__(128) attention_scale_kernel(AttentionBackwardTask task) {
    const AttentionInput& in = task.in;
    const size_t h = blockIdx.x, blocks = task.query_blocks;
    double sum = 0.0;
    for (size_t n = threadIdx.x; n < in.size.B * blocks; n += blockDim.x) {
        sum += (double)task.scale_sums[(n / blocks * in.size.NH + h) * blocks + n % blocks];
    }
    const size_t tables = attention_has(&in, TERM_DISTANCE) ? (in.size.Tk + 31) / 32 : 0;
    for (size_t n = threadIdx.x; n < tables; n += blockDim.x) { sum += (double)task.bias_sums[h * tables + n]; }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { task.to.dseq_scale[h] += (float)sum; }
}

// Maximum and sum of the rows whose lse is coarse.
static inline void attention_recompute_softmax(const AttentionBackwardTask& task) {
    AttentionForwardTask statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.in = task.in;
    statistics.splits = 1;
    statistics.partial_softmax = task.softmax;
    statistics.backward_lse = task.lse;
    attention_launch_forward(statistics);
}

#endif
