/*
The second pass of the attention backward on tensor cores: dk and dv of a tile of keys, over the queries of all heads
that read them. Private to cuda_backward.cuh.
*/
#ifndef ATTENTION_CUDA_DKV_CUH
#define ATTENTION_CUDA_DKV_CUH

#include "cuda_mma.cuh"

template <int D>
struct DkvShape : AttentionShape<D> {
    using S = AttentionShape<D>;
    // steps along the head whose keys and values stay in registers
    static constexpr int K_KEPT = D == 32 ? 2 : D == 48 ? 3 : D == 96 ? 4 : 0, V_KEPT = D <= 48 ? 2 : K_KEPT;
    static constexpr int TILE = ATTENTION_KEYS * S::STRIDE;  // of queries
    static constexpr size_t shared() {
        return (2 * S::ROWS * S::STRIDE + 4 * TILE) * sizeof(floatX) +
               2 * ATTENTION_KEYS * (sizeof(AttentionBackwardRow) + sizeof(int)) + 2 * sizeof(int) +
               2 * S::DISTANCES * sizeof(float);
    }
};

template <int D>
struct DkvRows {
    using S = DkvShape<D>;
    FragmentA k[S::K_KEPT ? S::K_KEPT : 1][S::ROW_TILES], v[S::V_KEPT ? S::V_KEPT : 1][S::ROW_TILES];
    FragmentC dk[S::ROW_TILES][S::COLUMNS], dv[S::ROW_TILES][S::COLUMNS];  // dk without ln 2
};

template <int D>
__device__ __forceinline__ void keep_keys(DkvRows<D>& rows, const floatX* keys, const floatX* values, int lane) {
    using S = DkvShape<D>;
#pragma unroll
    for (int t = 0; t < S::ROW_TILES; t++) {
#pragma unroll
        for (int k = 0; k < S::K_KEPT; k++) { load_a(rows.k[k][t], keys, S::STRIDE, t * 16, k * 16, lane); }
#pragma unroll
        for (int k = 0; k < S::V_KEPT; k++) { load_a(rows.v[k][t], values, S::STRIDE, t * 16, k * 16, lane); }
    }
}

// A tile of queries as the warp sees it.
struct DkvTile {
    const floatX *queries, *dout;
    const AttentionBackwardRow* rows;
    const int* start;
    const float* distance;  // bias at this thread's key and query 0 of the tile
    int bh, q0;
    bool special, coarse;
};

// query: this thread's first of the 16 queries; key: its first key.
template <int D>
__device__ __forceinline__ void special_queries(FragmentC (&y)[AttentionShape<D>::ROW_TILES][2],
                                                FragmentC (&dp)[AttentionShape<D>::ROW_TILES][2],
                                                const AttentionBackwardTask& task, const DkvTile& tile, int query,
                                                int key) {
    const int T = (int)task.in.size.Tq;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int position = tile.q0 + query + n * 8 + j;
            const int start = position < T ? tile.start[query + n * 8 + j] : 0x7fffffff;
            const float log_sum = tile.coarse && position < T ? coarse_log_sum(task, tile.bh, position) : 0.0f;
#pragma unroll
            for (int i = 0; i < AttentionShape<D>::HALF_ROWS; i++) {
                const int e = (i & 1) * 2 + j;
                special_pair(y[i / 2][n][e], dp[i / 2][n][e], position, key + i * 8, start, log_sum);
            }
        }
    }
}

// 16 queries, block c of the tile, with the warp's keys from `first` on. keys and values: the warp's rows.
template <int D, bool BIAS>
__device__ __forceinline__ void dkv_block(DkvRows<D>& rows, const AttentionBackwardTask& task, const DkvTile& tile,
                                          const floatX* keys, const floatX* values, int c, int first, int lane) {
    using S = DkvShape<D>;
    const int group = lane >> 2, member = lane & 3;
    const AttentionBackwardRow* row = tile.rows + c * 16 + member * 2;
    FragmentC y[S::ROW_TILES][2], dp[S::ROW_TILES][2];
    fill_sums(y, 0.0f);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float delta[2] = {row[n * 8].delta, row[n * 8 + 1].delta};
#pragma unroll
        for (int t = 0; t < S::ROW_TILES; t++) {
            dp[t][n][0] = dp[t][n][2] = -delta[0], dp[t][n][1] = dp[t][n][3] = -delta[1];
        }
    }
#pragma unroll
    for (int k = 0; k < S::DEPTH; k++) {
        FragmentB b[2];
        FragmentA a[S::ROW_TILES];
        load_b_rows(b, tile.queries, S::STRIDE, c * 16, k * 16, lane);
        if (k < S::K_KEPT) {
            multiply_pair(y, 0, rows.k[k < S::K_KEPT ? k : 0], b);
        } else {
#pragma unroll
            for (int t = 0; t < S::ROW_TILES; t++) { load_a(a[t], keys, S::STRIDE, t * 16, k * 16, lane); }
            multiply_pair(y, 0, a, b);
        }
        load_b_rows(b, tile.dout, S::STRIDE, c * 16, k * 16, lane);
        if (k < S::V_KEPT) {
            multiply_pair(dp, 0, rows.v[k < S::V_KEPT ? k : 0], b);
        } else {
#pragma unroll
            for (int t = 0; t < S::ROW_TILES; t++) { load_a(a[t], values, S::STRIDE, t * 16, k * 16, lane); }
            multiply_pair(dp, 0, a, b);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const AttentionBackwardRow r = row[n * 8 + j];
#pragma unroll
            for (int i = 0; i < S::HALF_ROWS; i++) {
                float& x = y[i / 2][n][(i & 1) * 2 + j];
                const float bias = BIAS ? tile.distance[8 * (2 * c + n - i) + j] : 0.0f;
                x = attention_logit(x, r.scale, bias, r.bias_scale) - r.reference;
            }
        }
    }
    if (tile.special) { special_queries<D>(y, dp, task, tile, c * 16 + member * 2, first + group); }
    FragmentA weights[S::ROW_TILES], dz[S::ROW_TILES];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float scale[2] = {row[n * 8].scale, row[n * 8 + 1].scale};
#pragma unroll
        for (int i = 0; i < S::HALF_ROWS; i++) {
            const int t = i / 2, e = (i & 1) * 2;
            const float w0 = fast_exp2(y[t][n][e]), w1 = fast_exp2(y[t][n][e + 1]);
            weights[t][n * 2 + (i & 1)] = pack_bf16(w0, w1);
            dz[t][n * 2 + (i & 1)] = pack_bf16(w0 * dp[t][n][e] * scale[0], w1 * dp[t][n][e + 1] * scale[1]);
        }
    }
#pragma unroll
    for (int d = 0; d < S::COLUMNS; d += 2) {
        FragmentB b[2];
        load_b(b, tile.dout, S::STRIDE, c * 16, d * 8, lane);
        multiply_pair(rows.dv, d, weights, b);
        load_b(b, tile.queries, S::STRIDE, c * 16, d * 8, lane);
        multiply_pair(rows.dk, d, dz, b);
    }
}

// Tiles of queries from the diagonal on that see any of the keys before `end`: start never decreases.
__device__ __forceinline__ int live_query_tiles(const AttentionInput& in, int b, int first, int end) {
    int low = first, high = ((int)in.size.Tq + ATTENTION_KEYS - 1) / ATTENTION_KEYS;
    if (!in.start) { return high - first; }
    while (low < high) {
        const int middle = (low + high) / 2;
        if (attention_start(in, b, middle * ATTENTION_KEYS) < end) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - first;
}

// grid: tiles of keys of all key/value heads.
template <int D, bool BIAS>
__global__ void __launch_bounds__(AttentionShape<D>::THREADS, AttentionShape<D>::BLOCKS)
    attention_dkv_kernel(AttentionBackwardTask task) {
    using S = DkvShape<D>;
    constexpr int QUERIES = ATTENTION_KEYS;
    DYN_SHARED(floatX, keys);
    floatX *values = keys + S::ROWS * S::STRIDE, *queries = values + S::ROWS * S::STRIDE, *dout = queries + 2 * S::TILE;
    AttentionBackwardRow* query_rows = reinterpret_cast<AttentionBackwardRow*>(dout + 2 * S::TILE);
    int* start = reinterpret_cast<int*>(query_rows + 2 * QUERIES);
    int* coarse = start + 2 * QUERIES;
    float* window = reinterpret_cast<float*>(coarse + 2);
    const AttentionInput& in = task.in;
    const int T = (int)in.size.Tq, tiles = (T + S::ROWS - 1) / S::ROWS, bkv = blockIdx.x / tiles;
    const int b = bkv / (int)in.size.NKV, kv_head = bkv % (int)in.size.NKV, heads = (int)in.size.NH / (int)in.size.NKV;
    const int k0 = (int)blockIdx.x % tiles * S::ROWS;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = lane >> 2, member = lane & 3;
    const int first = k0 + warp * S::WARP_ROWS;
    const size_t kv = attention_kv_offset(in, b, kv_head);
    const int first_tile = k0 / QUERIES, count = live_query_tiles(in, b, first_tile, k0 + S::ROWS);

    auto fetch = [&](int step) {
        const int slot = step & 1, h = kv_head * heads + step / count, q0 = (first_tile + step % count) * QUERIES;
        load_tile<D, QUERIES, S::THREADS>(queries + slot * S::TILE, in.q + attention_query_offset(in, b, h),
                                          in.q_stride, q0, T, (int)in.size.HS);
        load_tile<D, QUERIES, S::THREADS>(dout + slot * S::TILE, task.dout + attention_out_offset(in, b, h),
                                          in.size.NH * in.size.HS, q0, T, (int)in.size.HS);
        if (tid < QUERIES) {
            const int i = q0 + tid;
            const AttentionBackwardRow* rows = task.rows + ((size_t)b * in.size.NH + h) * T;
            cp_async16(query_rows + slot * QUERIES + tid, rows + (i < T ? i : 0), i < T);
            const bool known = in.start && i < T;
            const void* from = known ? (const void*)(in.start + (size_t)b * T + i) : (const void*)rows;
            cp_async4(start + slot * QUERIES + tid, from, known);
        }
        if (tid == 0) {
            const int parts = (T + QUERIES - 1) / QUERIES;
            cp_async4(coarse + slot, task.coarse + ((size_t)b * in.size.NH + h) * parts + q0 / QUERIES, true);
        }
        if (BIAS) {
            load_distances<S::DISTANCES, S::THREADS>(window + slot * S::DISTANCES,
                                                     in.logit.by_distance + h * in.logit.distance_stride,
                                                     q0 - k0 - (S::ROWS - 1), T);
        }
        cp_async_commit();
    };
    load_tile<D, S::ROWS, S::THREADS>(keys, in.k + kv, in.kv_stride, k0, T, (int)in.size.HS);
    load_tile<D, S::ROWS, S::THREADS>(values, in.v + kv, in.kv_stride, k0, T, (int)in.size.HS);
    fetch(0);
    const floatX *warp_keys = keys + warp * S::WARP_ROWS * S::STRIDE, *warp_values = warp_keys + S::ROWS * S::STRIDE;
    DkvRows<D> rows;
    fill_sums(rows.dk, 0.0f);
    fill_sums(rows.dv, 0.0f);
    for (int step = 0; step < heads * count; step++) {
        const int slot = step & 1, h = kv_head * heads + step / count, query_tile = first_tile + step % count;
        cp_async_wait<0>();
        __syncthreads();  // this tile is here, and nobody reads the other slot any more
        if (step + 1 < heads * count) { fetch(step + 1); }
        if (step == 0) { keep_keys<D>(rows, warp_keys, warp_values, lane); }
        DkvTile tile;
        tile.q0 = query_tile * QUERIES, tile.bh = b * (int)in.size.NH + h;
        tile.queries = queries + slot * S::TILE, tile.dout = dout + slot * S::TILE;
        tile.rows = query_rows + slot * QUERIES, tile.start = start + slot * QUERIES;
        const int last = first + S::WARP_ROWS - 1;
        if (tile.q0 + QUERIES - 1 < first || tile.start[0] > last) { continue; }
        tile.coarse = coarse[slot] != 0;
        tile.special = last > tile.q0 || tile.q0 + QUERIES > T || tile.start[QUERIES - 1] > first || tile.coarse;
        tile.distance = window + slot * S::DISTANCES + S::ROWS - 1 - warp * S::WARP_ROWS - group + 2 * member;
#pragma unroll 1
        for (int c = 0; c < 4; c++) {
            if (tile.q0 + c * 16 + 15 < first) { continue; }
            dkv_block<D, BIAS>(rows, task, tile, warp_keys, warp_values, c, first, lane);
        }
    }
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
        const int key = first + i * 8 + group;
        if (key >= T) { continue; }
        const size_t at = kv + key * in.kv_stride;
        store_row(task.to.dk + at, rows.dk[i / 2], i & 1, ATTENTION_LN_2, member, (int)in.size.HS);
        store_row(task.to.dv + at, rows.dv[i / 2], i & 1, 1.0f, member, (int)in.size.HS);
    }
}

#endif
