/*
Fused causal attention on CUDA, forward: a tile of logits lives in registers and the softmax is kept running
(Dao et al. 2022, algorithm 1; Dao 2023 for the split of work between warps). Contract in terms.h.

A block takes AttentionShape::ROWS queries of one head and walks over the tiles of keys that they see; each warp
owns whole rows, so nothing but keys, values and the bias goes through shared memory. The bias of a tile pair is a
window of the table, ROWS + 64 distances. Queries may start at an offset: prefill and decoding with a key/value
cache are the same kernel, and when blocks are few (decoding) the keys are split over more of them, whose results
a second kernel combines in a fixed order.
*/
#ifndef ATTENTION_CUDA_FORWARD_CUH
#define ATTENTION_CUDA_FORWARD_CUH

#ifdef PRECISION_FP32
#include "cuda_forward_fp32.cuh"
#else
#include "cuda_mma.cuh"

// What a warp keeps of its rows.
template <int D>
struct ForwardRows {
    using S = AttentionShape<D>;
    FragmentA q[S::DEPTH][S::ROW_TILES];
    FragmentC out[S::ROW_TILES][S::COLUMNS];
    float scale[S::HALF_ROWS], bias_scale[S::HALF_ROWS], maximum[S::HALF_ROWS], sum[S::HALF_ROWS];
};

template <int D>
__device__ __forceinline__ void open_forward_rows(ForwardRows<D>& rows, const AttentionInput& in, int b, int h,
                                                  int first, int lane) {
    using S = AttentionShape<D>;
    const int group = lane >> 2, member = lane & 3;
    const floatX* q = in.q + attention_query_offset(in, b, h);
#pragma unroll
    for (int t = 0; t < S::ROW_TILES; t++) {
#pragma unroll
        for (int k = 0; k < S::DEPTH; k++) {
            load_a_global(rows.q[k][t], q, in.q_stride, first + t * 16 + group, (int)in.size.Tq, k * 16 + member * 2,
                          (int)in.size.HS);
        }
    }
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
        const AttentionRow row = attention_row(in, b, h, first + i * 8 + group);
        rows.scale[i] = row.scale, rows.bias_scale[i] = row.bias_scale;
        rows.maximum[i] = -INFINITY, rows.sum[i] = 0.0f;
    }
    fill_sums(rows.out, 0.0f);
}

// Products with one tile of keys become logits; `distance` is the bias at this thread's row and column 0 of the tile.
template <int D, bool BIAS>
__device__ __forceinline__ void forward_logits(FragmentC (&y)[AttentionShape<D>::ROW_TILES][8],
                                               const ForwardRows<D>& rows, const floatX* keys, const float* distance,
                                               int lane) {
    using S = AttentionShape<D>;
    fill_sums(y, 0.0f);
#pragma unroll
    for (int k = 0; k < S::DEPTH; k++) {
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            FragmentB b[2];
            load_b_rows(b, keys, S::STRIDE, n * 8, k * 16, lane);
            multiply_pair(y, n, rows.q[k], b);
        }
    }
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& x = y[i / 2][n][(i & 1) * 2 + j];
                x = attention_logit(x, rows.scale[i], BIAS ? distance[8 * (i - n) - j] : 0.0f, rows.bias_scale[i]);
            }
        }
    }
}

// query and key are this thread's first. Starts are read again here: tiles with hidden keys are few.
template <int D>
__device__ __forceinline__ void hide_keys(FragmentC (&y)[AttentionShape<D>::ROW_TILES][8], const AttentionInput& in,
                                          int b, int query, int key) {
#pragma unroll
    for (int i = 0; i < AttentionShape<D>::HALF_ROWS; i++) {
        const int position = query + i * 8 + (int)(in.size.Tk - in.size.Tq);
        const int start = query + i * 8 < (int)in.size.Tq ? attention_start(in, b, query + i * 8) : 0x7fffffff;
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int column = key + n * 8 + j;
                if (column > position || column < start) { y[i / 2][n][(i & 1) * 2 + j] = -INFINITY; }
            }
        }
    }
}

// Raises the maxima, scales what was summed so far, and turns logits into weights, packed as factors.
template <int D>
__device__ __forceinline__ void running_softmax(FragmentA (&weights)[4][AttentionShape<D>::ROW_TILES],
                                                ForwardRows<D>& rows,
                                                const FragmentC (&y)[AttentionShape<D>::ROW_TILES][8]) {
#pragma unroll
    for (int i = 0; i < AttentionShape<D>::HALF_ROWS; i++) {
        const int t = i / 2, e = (i & 1) * 2;
        float maximum = rows.maximum[i];
#pragma unroll
        for (int n = 0; n < 8; n++) { maximum = fmaxf(maximum, fmaxf(y[t][n][e], y[t][n][e + 1])); }
        maximum = max_of_group(maximum);
        const float reference = maximum == -INFINITY ? 0.0f : maximum;  // nothing seen yet
        const float correction = fast_exp2(rows.maximum[i] - reference);
        rows.maximum[i] = maximum;
        rows.sum[i] *= correction;
#pragma unroll
        for (int d = 0; d < AttentionShape<D>::COLUMNS; d++) {
            rows.out[t][d][e] *= correction, rows.out[t][d][e + 1] *= correction;
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float w0 = fast_exp2(y[t][n][e] - reference), w1 = fast_exp2(y[t][n][e + 1] - reference);
            rows.sum[i] += w0 + w1;
            weights[n / 2][t][(n & 1) * 2 + (i & 1)] = pack_bf16(w0, w1);
        }
    }
}

template <int D>
__device__ __forceinline__ void accumulate_values(ForwardRows<D>& rows,
                                                  const FragmentA (&weights)[4][AttentionShape<D>::ROW_TILES],
                                                  const floatX* values, int lane) {
    using S = AttentionShape<D>;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int d = 0; d < S::COLUMNS; d += 2) {
            FragmentB b[2];
            load_b(b, values, S::STRIDE, k * 16, d * 8, lane);
            multiply_pair(rows.out, d, weights[k], b);
        }
    }
}

// Writes out and lse, or the split's part of them.
template <int D>
__device__ __forceinline__ void close_forward_rows(const ForwardRows<D>& rows, const AttentionForwardTask& task, int b,
                                                   int h, int first, int lane) {
    using S = AttentionShape<D>;
    const AttentionInput& in = task.in;
    const int group = lane >> 2, member = lane & 3;
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
        const float sum = sum_of_group(rows.sum[i]);
        const int query = first + i * 8 + group;
        if (query >= (int)in.size.Tq) { continue; }
        const size_t row = ((size_t)b * in.size.NH + h) * in.size.Tq + query;
        const FragmentC(&out)[S::COLUMNS] = rows.out[i / 2];
        if (task.partial_softmax) {
            const size_t part = blockIdx.y * in.size.B * in.size.NH * in.size.Tq + row;
            if (member == 0) { task.partial_softmax[part] = make_float2(rows.maximum[i], sum); }
            if (!task.partial_out) { continue; }
#pragma unroll
            for (int n = 0; n < S::COLUMNS; n++) {
                if (n * 8 >= (int)in.size.HS) { break; }
                float2* to = reinterpret_cast<float2*>(task.partial_out + part * in.size.HS + n * 8 + member * 2);
                *to = make_float2(out[n][(i & 1) * 2], out[n][(i & 1) * 2 + 1]);
            }
            continue;
        }
        if (member == 0 && task.lse) { task.lse[row] = (rows.maximum[i] + log2f(sum)) * ATTENTION_LN_2; }
        store_row(task.out + attention_out_offset(in, b, h) + (size_t)query * in.size.NH * in.size.HS, out, i & 1,
                  1.0f / sum, member, (int)in.size.HS);
    }
}

template <int D>
constexpr size_t attention_forward_shared() {
    using S = AttentionShape<D>;
    return 4 * ATTENTION_KEYS * S::STRIDE * sizeof(floatX) + 2 * S::DISTANCES * sizeof(float);
}

// grid (query tiles of all heads, splits). The longest rows come first.
template <int D, bool BIAS>
__global__ void __launch_bounds__(AttentionShape<D>::THREADS) attention_forward_kernel(AttentionForwardTask task) {
    using S = AttentionShape<D>;
    constexpr int TILE = ATTENTION_KEYS * S::STRIDE;
    DYN_SHARED(floatX, keys);
    floatX* values = keys + 2 * TILE;
    float* window = reinterpret_cast<float*>(values + 2 * TILE);
    const AttentionInput& in = task.in;
    const int Tq = (int)in.size.Tq, Tk = (int)in.size.Tk, offset = Tk - Tq, tiles = (Tq + S::ROWS - 1) / S::ROWS;
    const int bh = blockIdx.x / tiles, b = bh / (int)in.size.NH, h = bh % (int)in.size.NH;
    const int q0 = (tiles - 1 - (int)blockIdx.x % tiles) * S::ROWS;
    if (task.backward_lse) {
        const int i = q0 + (int)threadIdx.x;
        const bool coarse =
            i < min(q0 + S::ROWS, Tq) && attention_lse_is_coarse(task.backward_lse[(size_t)bh * Tq + i]);
        if (!__syncthreads_or(coarse)) { return; }
    }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, member = lane & 3;
    const int first = q0 + warp * S::WARP_ROWS, last = min(first + S::WARP_ROWS, Tq) - 1;
    const size_t kv = attention_kv_offset(in, b, attention_key_head(in, h));
    const float* table = BIAS ? in.logit.by_distance + h * in.logit.distance_stride : NULL;

    const int low = attention_start(in, b, q0) / ATTENTION_KEYS;
    const int high = (offset + min(q0 + S::ROWS, Tq) - 1) / ATTENTION_KEYS + 1;
    const int share = (high - low + (int)gridDim.y - 1) / (int)gridDim.y;
    const int begin = low + (int)blockIdx.y * share, end = min(high, begin + share);
    auto fetch = [&](int tile) {
        const int slot = tile & 1, k0 = tile * ATTENTION_KEYS;
        load_tile<D, ATTENTION_KEYS, S::THREADS>(keys + slot * TILE, in.k + kv, in.kv_stride, k0, Tk, (int)in.size.HS);
        load_tile<D, ATTENTION_KEYS, S::THREADS>(values + slot * TILE, in.v + kv, in.kv_stride, k0, Tk,
                                                 (int)in.size.HS);
        if (BIAS) {
            load_distances<S::DISTANCES, S::THREADS>(window + slot * S::DISTANCES, table,
                                                     offset + q0 - k0 - (ATTENTION_KEYS - 1), Tk);
        }
        cp_async_commit();
    };
    if (begin < end) { fetch(begin); }
    ForwardRows<D> rows;
    open_forward_rows<D>(rows, in, b, h, first, lane);
    const int last_start = last >= first ? attention_start(in, b, last) : 0;
    for (int tile = begin; tile < end; tile++) {
        const int slot = tile & 1, k0 = tile * ATTENTION_KEYS;
        cp_async_wait<0>();
        __syncthreads();  // this tile is here, and nobody reads the other slot any more
        if (tile + 1 < end) { fetch(tile + 1); }
        if (last < first || k0 > offset + last) { continue; }
        FragmentC y[S::ROW_TILES][8];
        forward_logits<D, BIAS>(
            y, rows, keys + slot * TILE,
            window + slot * S::DISTANCES + warp * S::WARP_ROWS + group - 2 * member + ATTENTION_KEYS - 1, lane);
        if (k0 + ATTENTION_KEYS - 1 > offset + first || last_start > k0 || last < first + S::WARP_ROWS - 1) {
            hide_keys<D>(y, in, b, first + group, k0 + member * 2);
        }
        FragmentA weights[4][S::ROW_TILES];
        running_softmax<D>(weights, rows, y);
        accumulate_values<D>(rows, weights, values + slot * TILE, lane);
    }
    close_forward_rows<D>(rows, task, b, h, first, lane);
}

template <int D>
static void launch_attention_forward(const AttentionForwardTask& task) {
    using S = AttentionShape<D>;
    const AttentionInput& in = task.in;
    const dim3 grid((unsigned)(in.size.B * in.size.NH * ceil_div(in.size.Tq, S::ROWS)), (unsigned)task.splits);
    constexpr size_t shared = attention_forward_shared<D>();
    if (attention_has(&in, TERM_DISTANCE)) {
        LAUNCH_ATTENTION((attention_forward_kernel<D, true>), grid, S::THREADS, shared, task);
    } else {
        LAUNCH_ATTENTION((attention_forward_kernel<D, false>), grid, S::THREADS, shared, task);
    }
}

static inline void attention_launch_forward(const AttentionForwardTask& task) {
    WITH_NATIVE_SIZE(task.in.size.HS, launch_attention_forward, task);
}
#endif

// ----------------------------------------------------------------------------
// both precisions

// One warp per row: out and lse from the splits, in their order.
__global__ void __launch_bounds__(128) attention_combine_kernel(AttentionForwardTask task) {
    const AttentionInput& in = task.in;
    const size_t rows = in.size.B * in.size.NH * in.size.Tq, row = (size_t)blockIdx.x * 4 + (threadIdx.x >> 5);
    if (row >= rows) { return; }
    const int lane = threadIdx.x & 31;
    float maximum = -INFINITY, sum = 0.0f;
    for (int s = 0; s < task.splits; s++) { maximum = fmaxf(maximum, task.partial_softmax[s * rows + row].x); }
    float out[ATTENTION_MAX_HEAD / 32] = {0.0f};
    for (int s = 0; s < task.splits; s++) {
        const float2 part = task.partial_softmax[s * rows + row];
        if (part.y == 0.0f) { continue; }  // its document begins in a later split; the sum of what is NaN is not 0
        const float factor = fast_exp2(part.x - maximum);
        sum += part.y * factor;
        const float* from = task.partial_out + (s * rows + row) * in.size.HS;
#pragma unroll
        for (int n = 0; n < ATTENTION_MAX_HEAD / 32; n++) {
            if (n * 32 + lane < (int)in.size.HS) { out[n] += from[n * 32 + lane] * factor; }
        }
    }
    const size_t query = row % in.size.Tq, h = row / in.size.Tq % in.size.NH, b = row / in.size.Tq / in.size.NH;
    floatX* to = task.out + ((b * in.size.Tq + query) * in.size.NH + h) * in.size.HS;
#pragma unroll
    for (int n = 0; n < ATTENTION_MAX_HEAD / 32; n++) {
        if (n * 32 + lane < (int)in.size.HS) { to[n * 32 + lane] = (floatX)(out[n] / sum); }
    }
    if (lane == 0 && task.lse) { task.lse[row] = (maximum + log2f(sum)) * ATTENTION_LN_2; }
}

#endif
