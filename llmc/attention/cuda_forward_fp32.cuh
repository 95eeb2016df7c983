/*
Attention kernels of the fp32 build, on CUDA cores: the same passes as those for tensor cores, in tiles of 32 queries
and 32 keys that live in shared memory. Plain before fast. Private to cuda_forward.cuh and cuda_backward.cuh.

Sums over a head's columns, over keys and along diagonals each have one order, whatever the number of blocks.
*/
#ifndef ATTENTION_CUDA_FORWARD_FP32_CUH
#define ATTENTION_CUDA_FORWARD_FP32_CUH

#include "cuda_tasks.cuh"

constexpr int FP32_TILE = (int)attention_rows(1);  // queries, and keys, of a tile
constexpr int FP32_THREADS = 128;
constexpr int FP32_STRIDE = FP32_TILE + 1;  // of a tile of logits
constexpr int FP32_LOGITS = FP32_TILE * FP32_STRIDE;

// Rows in shared memory have an odd stride: neighbouring rows then lie in different banks.
__host__ __device__ __forceinline__ int fp32_row_stride(size_t HS) { return (int)HS + 1; }

// Shared memory of a kernel with so many tiles of rows and of logits.
static inline size_t fp32_shared(size_t HS, size_t row_tiles, size_t logit_tiles) {
    return sizeof(float) * (row_tiles * FP32_TILE * (size_t)fp32_row_stride(HS) + logit_tiles * FP32_LOGITS);
}

// ----------------------------------------------------------------------------
// tiles

// Rows from `end` on are 0.
__device__ __forceinline__ void fp32_load(float* tile, const float* head, size_t stride, int first, int end, int HS) {
    for (int n = threadIdx.x; n < FP32_TILE * HS; n += FP32_THREADS) {
        const int row = n / HS, column = n % HS;
        tile[row * (HS + 1) + column] = first + row < end ? head[(size_t)(first + row) * stride + column] : 0.0f;
    }
}

__device__ __forceinline__ void fp32_clear(float* tile, int HS) {
    for (int n = threadIdx.x; n < FP32_TILE * (HS + 1); n += FP32_THREADS) { tile[n] = 0.0f; }
}

__device__ __forceinline__ float fp32_dot(const float* x, const float* y, int HS) {
    float sum = 0.0f;
    for (int d = 0; d < HS; d++) { sum += x[d] * y[d]; }
    return sum;
}

// sums[r][.] += sum over n of a[r * a_row + n * a_column] rows[n][.]
__device__ __forceinline__ void fp32_accumulate(float* sums, const float* a, int a_row, int a_column, const float* rows,
                                                int HS) {
    for (int m = threadIdx.x; m < FP32_TILE * HS; m += FP32_THREADS) {
        const int row = m / HS, column = m % HS;
        float sum = sums[row * (HS + 1) + column];
        for (int n = 0; n < FP32_TILE; n++) { sum += a[row * a_row + n * a_column] * rows[n * (HS + 1) + column]; }
        sums[row * (HS + 1) + column] = sum;
    }
}

// The logit of a query at position i, row r of its tile, and a key; keys that it does not see are -infinity.
__device__ __forceinline__ float fp32_logit(const AttentionInput& in, const float* q, const float* k,
                                            const AttentionBackwardRow& row, int h, int position, int key, int start) {
    if (key > position || key < start) { return -INFINITY; }
    const float bias =
        attention_has(&in, TERM_DISTANCE) ? in.logit.by_distance[h * in.logit.distance_stride + position - key] : 0.0f;
    return attention_logit(fp32_dot(q, k, (int)in.size.HS), row.scale, bias, row.bias_scale);
}

// ----------------------------------------------------------------------------
// forward

// grid (query tiles of all heads, splits). Row r's softmax belongs to threads 4r to 4r+3.
__global__ void __launch_bounds__(FP32_THREADS, 4) attention_forward_fp32_kernel(AttentionForwardTask task) {
    SHARED(float, maxima, [FP32_TILE]);
    SHARED(float, corrections, [FP32_TILE]);
    SHARED(float, weight_sums, [FP32_TILE]);
    DYN_SHARED(float, queries);
    const AttentionInput& in = task.in;
    const int HS = (int)in.size.HS, stride = fp32_row_stride(in.size.HS), Tq = (int)in.size.Tq, Tk = (int)in.size.Tk,
              offset = Tk - Tq;
    const int tiles = (Tq + FP32_TILE - 1) / FP32_TILE, bh = blockIdx.x / tiles;
    const int b = bh / (int)in.size.NH, h = bh % (int)in.size.NH,
              q0 = (tiles - 1 - (int)blockIdx.x % tiles) * FP32_TILE;
    float *keys = queries + FP32_TILE * stride, *values = keys + FP32_TILE * stride, *out = values + FP32_TILE * stride;
    float* logits = out + FP32_TILE * stride;
    const int r = threadIdx.x / 4, part = threadIdx.x % 4, query = q0 + r;
    if (task.backward_lse) {
        const bool coarse = query < Tq && attention_lse_is_coarse(task.backward_lse[(size_t)bh * Tq + query]);
        if (!__syncthreads_or(coarse)) { return; }
    }
    const AttentionRow scales = attention_row(in, b, h, query);
    AttentionBackwardRow row;
    row.scale = scales.scale, row.bias_scale = scales.bias_scale, row.reference = row.delta = 0.0f;
    const int start = query < Tq ? attention_start(in, b, query) : 0x7fffffff;
    const size_t kv = attention_kv_offset(in, b, attention_key_head(in, h));
    fp32_load(queries, in.q + attention_query_offset(in, b, h), in.q_stride, q0, Tq, HS);
    fp32_clear(out, HS);
    if (part == 0) { maxima[r] = -INFINITY, weight_sums[r] = 0.0f; }

    const int low = attention_start(in, b, q0) / FP32_TILE;
    const int high = (offset + min(q0 + FP32_TILE, Tq) - 1) / FP32_TILE + 1;
    const int share = (high - low + (int)gridDim.y - 1) / (int)gridDim.y;
    const int begin = low + (int)blockIdx.y * share, end = min(high, begin + share);
    for (int k0 = begin * FP32_TILE; k0 < end * FP32_TILE; k0 += FP32_TILE) {
        __syncthreads();
        fp32_load(keys, in.k + kv, in.kv_stride, k0, Tk, HS);
        fp32_load(values, in.v + kv, in.kv_stride, k0, Tk, HS);
        __syncthreads();
        float maximum = maxima[r], sum = 0.0f;
        for (int c = part; c < FP32_TILE; c += 4) {
            const float y =
                fp32_logit(in, queries + r * stride, keys + c * stride, row, h, offset + query, k0 + c, start);
            logits[r * FP32_STRIDE + c] = y;
            maximum = fmaxf(maximum, y);
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
        const float reference = maximum == -INFINITY ? 0.0f : maximum;
        for (int c = part; c < FP32_TILE; c += 4) {
            const float weight = exp2f(logits[r * FP32_STRIDE + c] - reference);
            logits[r * FP32_STRIDE + c] = weight;
            sum += weight;
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        __syncwarp();  // the row's other threads have read its maximum
        if (part == 0) {
            corrections[r] = exp2f(maxima[r] - reference);
            weight_sums[r] = weight_sums[r] * corrections[r] + sum;
            maxima[r] = maximum;
        }
        __syncthreads();
        for (int n = threadIdx.x; n < FP32_TILE * HS; n += FP32_THREADS) {
            out[n / HS * stride + n % HS] *= corrections[n / HS];
        }
        // no barrier: a thread adds to the elements that it has just scaled
        fp32_accumulate(out, logits, FP32_STRIDE, 1, values, HS);
    }
    __syncthreads();
    const size_t rows = in.size.B * in.size.NH * in.size.Tq, first_row = (size_t)bh * Tq + q0;
    for (int n = threadIdx.x; n < FP32_TILE * HS; n += FP32_THREADS) {
        const int i = n / HS, column = n % HS;
        if (q0 + i >= Tq) { break; }
        const float x = out[i * stride + column];
        if (task.partial_softmax) {
            if (task.partial_out) { task.partial_out[(blockIdx.y * rows + first_row + i) * HS + column] = x; }
        } else {
            task.out[attention_out_offset(in, b, h) + (size_t)(q0 + i) * in.size.NH * HS + column] = x / weight_sums[i];
        }
    }
    if (part != 0 || query >= Tq) { return; }
    if (task.partial_softmax) {
        task.partial_softmax[blockIdx.y * rows + first_row + r] = make_float2(maxima[r], weight_sums[r]);
    } else if (task.lse) {
        task.lse[first_row + r] = (maxima[r] + log2f(weight_sums[r])) * ATTENTION_LN_2;
    }
}

static inline void attention_launch_forward(const AttentionForwardTask& task) {
    const size_t shared = fp32_shared(task.in.size.HS, 4, 1);
    const dim3 grid((unsigned)(task.in.size.B * task.in.size.NH * ceil_div(task.in.size.Tq, FP32_TILE)),
                    (unsigned)task.splits);
    LAUNCH_ATTENTION(attention_forward_fp32_kernel, grid, FP32_THREADS, shared, task);
}

#endif
