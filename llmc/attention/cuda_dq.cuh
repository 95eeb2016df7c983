/*
The first pass of the attention backward on tensor cores: dq, the sums of dZ along diagonals, the gradient of
seq_scale, and what the second pass reads of every row. Private to cuda_backward.cuh.

Diagonals. A warp's logits are blocks of 8 x 8, and a block diagonal is all blocks (m, n) with the same m - n. Of such a
block the element in row g and column x has the distance 8 (m - n) + g - x: eight distances of its own, and a corner of
seven that belongs to the next block diagonal.

      keys ->    n = 0      n = 1           distances of one block, base = 8 (m - n)
    queries  m=0  [ 0 ]     [-1 ]             x=0    1    2  ...  7
             m=1  [ 1 ]     [ 0 ]       g=0    0    -1   -2 ...  -7   \  the corner: g < x,
             m=2  [ 2 ]     [ 1 ]       g=1   +1     0   -1 ...  -6    > base - 7 .. base - 1,
             m=3  [ 3 ]     [ 2 ]       ...                           /  shared with block diagonal m - n - 1
                  [block diagonals]     g=7   +7    +6   +5 ...   0

Each thread adds its elements of a block diagonal in registers. 16 keys finish two block diagonals, which move to a
scratch of one row per g; those of a tile of 64 keys are 64 distances once their corners are joined with those of the
next tile. The sums of a block's warps meet in shared memory and go to the block's own table in global memory; a last
kernel adds these tables in a fixed order.

The gradient of seq_scale is what is left when all pairs cancel: ds = sum_i ln n_i sum_j dZ_ij (u_ij - c_i) with
u = a (+ P inside) and any c_i, since sum_j dZ_ij = 0 but for the rounding of D_i. c_i is the mean of u under p.
*/
#ifndef ATTENTION_CUDA_DQ_CUH
#define ATTENTION_CUDA_DQ_CUH

#include "cuda_mma.cuh"

constexpr int CORNER = 7;            // distances that a block shares with the next block diagonal
constexpr int DIAGONAL_STRIDE = 64;  // of the scratch's rows: the distances of a tile, see diagonal_row
constexpr int DIAGONAL_SKEW = 6;     // more for every second row

template <int D>
struct DqShape : AttentionShape<D> {
    using S = AttentionShape<D>;
    // steps along the head whose queries stay in registers; the others are read from shared memory each time
    static constexpr int KEPT = D == 64 ? 0 : D <= 48 ? 2 : D == 96 ? 6 : 5;
    static constexpr bool Q_TILE = KEPT < S::DEPTH;
    static constexpr int DIAGONALS = S::HALF_ROWS + 1;  // block diagonals of a warp's rows and 16 keys
    // floats of the scratch; distances that a tile finishes in some warp
    static constexpr int SCRATCH = 8 * DIAGONAL_STRIDE + 32;
    static constexpr int SUMS = ATTENTION_KEYS + (S::WARPS - 1) * S::WARP_ROWS;
    static constexpr int TILE = ATTENTION_KEYS * S::STRIDE;

    static constexpr size_t shared(bool bias) {
        const size_t q = Q_TILE ? S::ROWS * S::STRIDE : 0;
        const size_t floats = 2 * S::DISTANCES + S::WARPS * (SCRATCH + 2 * ATTENTION_KEYS);
        return (4 * TILE + q) * sizeof(floatX) + (bias ? floats * sizeof(float) : 0);
    }
};

template <int D>
struct DqRows {
    using S = DqShape<D>;
    FragmentA q[S::KEPT ? S::KEPT : 1][S::ROW_TILES], dout[S::DEPTH][S::ROW_TILES];
    FragmentC dq[S::ROW_TILES][S::COLUMNS];  // without its factor g / sqrt(HS)
    float scale[S::HALF_ROWS], bias_weight[S::HALF_ROWS], reference[S::HALF_ROWS], delta[S::HALF_ROWS];
    float dz_sum[S::HALF_ROWS], log_weight[S::HALF_ROWS];  // sums over keys of dZ and of p log2 p
    float diagonals[S::DIAGONALS][2];                      // [block diagonal + 1][parity of the column]
    float corner;                                          // of distances that the next tile completes
    float bias_factor;
};

// Where the warp stands.
struct DqPlace {
    int b, h, bh;
    int first, last;  // query rows of the warp
    int lane, group, member;
    bool coarse;  // some row of the block has a coarse lse
};

template <int D, bool BIAS>
__device__ __forceinline__ void open_dq_rows(DqRows<D>& rows, const AttentionBackwardTask& task, const DqPlace& at) {
    using S = DqShape<D>;
    const AttentionInput& in = task.in;
    const size_t head = attention_query_offset(in, at.b, at.h), out_head = attention_out_offset(in, at.b, at.h);
    const size_t out_stride = in.size.NH * in.size.HS;
    const int T = (int)in.size.Tq, HS = (int)in.size.HS;
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) { rows.delta[i] = rows.dz_sum[i] = rows.log_weight[i] = 0.0f; }
#pragma unroll
    for (int t = 0; t < S::ROW_TILES; t++) {
#pragma unroll
        for (int k = 0; k < S::DEPTH; k++) {
            FragmentA out;
            const int row = at.first + t * 16 + at.group, column = k * 16 + at.member * 2;
            if (k < S::KEPT) {
                load_a_global(rows.q[k < S::KEPT ? k : 0][t], in.q + head, in.q_stride, row, T, column, HS);
            }
            load_a_global(rows.dout[k][t], task.dout + out_head, out_stride, row, T, column, HS);
            load_a_global(out, task.out + out_head, out_stride, row, T, column, HS);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float2 x = unpack_bf16(out[r]), y = unpack_bf16(rows.dout[k][t][r]);
                rows.delta[t * 2 + (r & 1)] += x.x * y.x + x.y * y.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
        const int query = at.first + i * 8 + at.group;
        const AttentionRow row = attention_row(in, at.b, at.h, query);
        const float lse = query < T ? task.lse[(size_t)at.bh * T + query] : 0.0f;
        rows.delta[i] = sum_of_group(rows.delta[i]);
        rows.scale[i] = row.scale, rows.bias_weight[i] = row.bias_weight;
        rows.reference[i] = lse * ATTENTION_LOG2_E;
        if (at.coarse && attention_lse_is_coarse(lse)) {
            rows.reference[i] = task.softmax[(size_t)at.bh * T + query].x;
        }
    }
    rows.bias_factor = BIAS ? attention_bias_factor(in, at.h) : 0.0f;
    fill_sums(rows.dq, 0.0f);
#pragma unroll
    for (int m = 0; m < S::DIAGONALS; m++) { rows.diagonals[m][0] = rows.diagonals[m][1] = 0.0f; }
    rows.corner = 0.0f;
}

// key: this thread's first of the 16 keys.
template <int D>
__device__ __forceinline__ void special_rows(FragmentC (&y)[AttentionShape<D>::ROW_TILES][2],
                                             FragmentC (&dp)[AttentionShape<D>::ROW_TILES][2],
                                             const AttentionBackwardTask& task, const DqPlace& at, int key) {
    const int T = (int)task.in.size.Tq;
#pragma unroll
    for (int i = 0; i < AttentionShape<D>::HALF_ROWS; i++) {
        const int query = at.first + i * 8 + at.group;
        const int start = query < T ? attention_start(task.in, at.b, query) : 0x7fffffff;
        const float log_sum = at.coarse && query < T ? coarse_log_sum(task, at.bh, query) : 0.0f;
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int e = (i & 1) * 2 + j;
                special_pair(y[i / 2][n][e], dp[i / 2][n][e], query, key + n * 8 + j, start, log_sum);
            }
        }
    }
}

// 16 keys, block c of the tile. `distance` is the bias at this thread's row and column 0 of the tile.
template <int D, bool BIAS, bool SCALE>
__device__ __forceinline__ void dq_block(DqRows<D>& rows, const AttentionBackwardTask& task, const DqPlace& at,
                                         const floatX* queries, const floatX* keys, const floatX* values,
                                         const float* distance, int c, int k0, bool special) {
    using S = DqShape<D>;
    FragmentC y[S::ROW_TILES][2], dp[S::ROW_TILES][2];
    fill_sums(y, 0.0f);
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
#pragma unroll
        for (int n = 0; n < 2; n++) { dp[i / 2][n][(i & 1) * 2] = dp[i / 2][n][(i & 1) * 2 + 1] = -rows.delta[i]; }
    }
#pragma unroll
    for (int k = 0; k < S::DEPTH; k++) {
        FragmentB b[2];
        load_b_rows(b, keys, S::STRIDE, c * 16, k * 16, at.lane);
        if (k < S::KEPT) {
            multiply_pair(y, 0, rows.q[k < S::KEPT ? k : 0], b);
        } else {
            FragmentA q[S::ROW_TILES];
#pragma unroll
            for (int t = 0; t < S::ROW_TILES; t++) { load_a(q[t], queries, S::STRIDE, t * 16, k * 16, at.lane); }
            multiply_pair(y, 0, q, b);
        }
        load_b_rows(b, values, S::STRIDE, c * 16, k * 16, at.lane);
        multiply_pair(dp, 0, rows.dout[k], b);
    }
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
        const float bias_scale = rows.bias_weight[i] * rows.bias_factor;
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& x = y[i / 2][n][(i & 1) * 2 + j];
                const float bias = BIAS ? distance[8 * (i - n) - 16 * c - j] : 0.0f;
                x = attention_logit(x, rows.scale[i], bias, bias_scale) - rows.reference[i];
            }
        }
    }
    if (special) { special_rows<D>(y, dp, task, at, k0 + c * 16 + at.member * 2); }
    FragmentA dz[S::ROW_TILES];
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float z[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int e = (i & 1) * 2 + j;
                const float weight = fast_exp2(y[i / 2][n][e]);
                z[j] = weight * dp[i / 2][n][e];
                if (SCALE) { rows.dz_sum[i] += z[j], rows.log_weight[i] += weight * y[i / 2][n][e]; }
                if (BIAS) { rows.diagonals[i - n + 1][j] += rows.bias_weight[i] * z[j]; }
            }
            dz[i / 2][n * 2 + (i & 1)] = pack_bf16(z[0], z[1]);
        }
    }
#pragma unroll
    for (int d = 0; d < S::COLUMNS; d += 2) {
        FragmentB b[2];
        load_b(b, keys, S::STRIDE, c * 16, d * 8, at.lane);
        multiply_pair(rows.dq, d, dz, b);
    }
}

// Diagonals that later keys do not reach, in scratch[8][64]: row g holds the elements of the threads of group g, column
// x the distance first - k0 + 8 HALF_ROWS - 64 - CORNER + x, modulo 64. Rows are skewed so that neither stores nor
// loads of a warp meet in a bank.
__device__ __forceinline__ float* diagonal_row(float* scratch, int row) {
    return scratch + DIAGONAL_STRIDE * row + DIAGONAL_SKEW * (row >> 1);
}

// After 16 keys, block c of the tile: moves the upper two block diagonals to the scratch and makes room for two.
template <int D>
__device__ __forceinline__ void shift_diagonals(DqRows<D>& rows, float* scratch, const DqPlace& at, int c) {
    using S = DqShape<D>;
    float* row = diagonal_row(scratch, at.group);
    const int column = at.group - 2 * at.member + CORNER + 8 * (6 - 2 * c);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        row[(column + 8 - j) & 63] = rows.diagonals[S::DIAGONALS - 1][j];
        row[(column - j) & 63] = rows.diagonals[S::DIAGONALS - 2][j];
#pragma unroll
        for (int m = S::DIAGONALS - 1; m >= 0; m--) {
            rows.diagonals[m][j] = m >= 2 ? rows.diagonals[m >= 2 ? m - 2 : 0][j] : 0.0f;
        }
    }
}

// After all keys of a tile, and before the block's next barrier: adds the rows of the scratch. sums[n] belongs to
// distance first - k0 + 8 HALF_ROWS - 64 + n. Column x < CORNER has from rows g > x the end of the distances of this
// tile, and from the other rows the beginning of those of the next.
template <int D>
__device__ __forceinline__ void finish_diagonals(DqRows<D>& rows, float* scratch, float* sums, const DqPlace& at) {
    __syncwarp();
    float low = 0.0f, high = 0.0f, upper = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float* p = diagonal_row(scratch, r) + at.lane;
        if (r <= at.lane) {
            low += p[0];
        } else {
            high += p[0];
        }
        upper += p[32];
    }
    const bool corner = at.lane < CORNER;
    sums[corner ? at.lane + ATTENTION_KEYS - CORNER : at.lane - CORNER] = corner ? rows.corner + high : low;
    sums[at.lane + 32 - CORNER] = upper;
    rows.corner = low;
}

// What the warps finished with the keys from k0 on, at position n of the block's distances; sums[WARPS][64].
template <int D>
__device__ __forceinline__ float sum_over_warps(const float* sums, int n, int q0, int k0, int T) {
    using S = DqShape<D>;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) {
        const int first = q0 + w * S::WARP_ROWS, last = min(first + S::WARP_ROWS, T) - 1, at = n - w * S::WARP_ROWS;
        if (at >= 0 && at < 64 && last >= first && k0 <= last) { sum += sums[w * 64 + at]; }
    }
    return sum;
}

// Adds what the warps finished to the block's table. Loads come before the tile's work and stores after it.
template <int D>
struct TableUpdate {
    using S = DqShape<D>;
    static constexpr int COUNT = (S::SUMS + S::THREADS - 1) / S::THREADS;
    float held[COUNT];

    __device__ __forceinline__ TableUpdate() : held{0.0f} {}

    __device__ __forceinline__ int distance(int n, int q0, int k0) const {
        const int i = n * S::THREADS + (int)threadIdx.x, d = q0 - k0 + 8 * S::HALF_ROWS - 64 + i;
        return i < S::SUMS ? d : -1;
    }
    __device__ __forceinline__ void load(const float* table, int q0, int k0, int T) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const int d = distance(n, q0, k0);
            held[n] = d >= 0 && d < T ? table[d] : 0.0f;
        }
    }
    __device__ __forceinline__ void store(float* table, const float* sums, int q0, int k0, int T) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const int d = distance(n, q0, k0);
            if (d >= 0 && d < T) {
                table[d] = held[n] + sum_over_warps<D>(sums, n * S::THREADS + (int)threadIdx.x, q0, k0, T);
            }
        }
    }
};

// Writes dq and what the second pass reads; returns this thread's part of the gradient of seq_scale.
template <int D, bool BIAS, bool SCALE>
__device__ __forceinline__ float close_dq_rows(DqRows<D>& rows, const AttentionBackwardTask& task, const DqPlace& at,
                                               const floatX* queries) {
    using S = DqShape<D>;
    const AttentionInput& in = task.in;
    floatX* dq = task.to.dq + attention_query_offset(in, at.b, at.h);
    float dscale = 0.0f;
#pragma unroll
    for (int i = 0; i < S::HALF_ROWS; i++) {
        const int query = at.first + i * 8 + at.group, e = (i & 1) * 2;
        float dot = 0.0f;
        const float dz_sum = SCALE ? sum_of_group(rows.dz_sum[i]) : 0.0f;
        const float log_weight = SCALE ? sum_of_group(rows.log_weight[i]) : 0.0f;
        if (query >= (int)in.size.Tq) { continue; }
        if (SCALE && attention_has(&in, TERM_SCALE)) {
            const AttentionRow row = attention_row(in, at.b, at.h, query);
#pragma unroll
            for (int n = 0; n < S::COLUMNS; n++) {
                const bool kept = n / 2 < S::KEPT;
                const uint32_t* shared =
                    reinterpret_cast<const uint32_t*>(queries + (i * 8 + at.group) * S::STRIDE + n * 8 + at.member * 2);
                const float2 q = unpack_bf16(kept ? rows.q[kept ? n / 2 : 0][i / 2][(n & 1) * 2 + (i & 1)] : *shared);
                dot += q.x * rows.dq[i / 2][n][e] + q.y * rows.dq[i / 2][n][e + 1];
            }
            dscale += row.log_count * rsqrtf((float)in.size.HS) * dot;
            if (at.member == 0) {
                const float log_sum = rows.reference[i] + (at.coarse ? coarse_log_sum(task, at.bh, query) : 0.0f);
                dscale -= row.log_count * dz_sum * attention_logit_center(in, row, at.h, log_weight, log_sum);
            }
        }
        store_row(dq + query * in.q_stride, rows.dq[i / 2], i & 1, rows.scale[i] * ATTENTION_LN_2, at.member,
                  (int)in.size.HS);
        if (at.member == 0) {
            AttentionBackwardRow row;
            row.scale = rows.scale[i], row.bias_scale = rows.bias_weight[i] * rows.bias_factor;
            row.reference = rows.reference[i], row.delta = rows.delta[i] + dz_sum;
            task.rows[(size_t)at.bh * in.size.Tq + query] = row;
        }
    }
    return dscale;
}

template <int D>
struct DqShared {
    using S = DqShape<D>;
    floatX *keys, *values, *queries;  // [2] tiles, [2] tiles, a warp's rows
    float *window, *scratch, *sums;   // [2][DISTANCES], of the warp [SCRATCH], [2][WARPS][64]

    __device__ __forceinline__ explicit DqShared(floatX* memory, int warp) {
        keys = memory, values = keys + 2 * S::TILE, queries = values + 2 * S::TILE;
        window = reinterpret_cast<float*>(queries + (S::Q_TILE ? S::ROWS * S::STRIDE : 0));
        sums = window + 2 * S::DISTANCES, scratch = sums + 2 * S::WARPS * 64 + warp * S::SCRATCH;
    }
};

// All keys of one tile of queries; returns this thread's part of the gradient of seq_scale.
template <int D, bool BIAS, bool SCALE>
__device__ __forceinline__ float dq_tile(const AttentionBackwardTask& task, const DqPlace& at,
                                         const DqShared<D>& shared, int q0, float* table) {
    using S = DqShape<D>;
    const AttentionInput& in = task.in;
    const int T = (int)in.size.Tq, warp = threadIdx.x >> 5;
    const size_t kv = attention_kv_offset(in, at.b, attention_key_head(in, at.h));
    const int begin = attention_start(in, at.b, q0) / ATTENTION_KEYS;
    const int end = (min(q0 + S::ROWS, T) - 1) / ATTENTION_KEYS + 1;
    const int last_start = at.last >= at.first ? attention_start(in, at.b, at.last) : 0;
    floatX* queries = shared.queries + warp * S::WARP_ROWS * S::STRIDE;
    auto fetch = [&](int tile) {
        const int slot = tile & 1, k0 = tile * ATTENTION_KEYS;
        load_tile<D, ATTENTION_KEYS, S::THREADS>(shared.keys + slot * S::TILE, in.k + kv, in.kv_stride, k0, T,
                                                 (int)in.size.HS);
        load_tile<D, ATTENTION_KEYS, S::THREADS>(shared.values + slot * S::TILE, in.v + kv, in.kv_stride, k0, T,
                                                 (int)in.size.HS);
        if (BIAS) {
            load_distances<S::DISTANCES, S::THREADS>(shared.window + slot * S::DISTANCES,
                                                     in.logit.by_distance + at.h * in.logit.distance_stride,
                                                     q0 - k0 - (ATTENTION_KEYS - 1), T);
        }
        cp_async_commit();
    };
    if (S::Q_TILE) {
        load_tile<D, S::ROWS, S::THREADS>(shared.queries, in.q + attention_query_offset(in, at.b, at.h), in.q_stride,
                                          q0, T, (int)in.size.HS);
    }
    fetch(begin);
    DqRows<D> rows;
    open_dq_rows<D, BIAS>(rows, task, at);
    TableUpdate<D> update;
    for (int tile = begin; tile < end; tile++) {
        const int slot = tile & 1, k0 = tile * ATTENTION_KEYS, before = k0 - ATTENTION_KEYS;
        cp_async_wait<0>();
        __syncthreads();  // this tile and the sums of the one before are here, and nobody reads the other slot
        if (tile + 1 < end) { fetch(tile + 1); }
        if (BIAS && tile > begin) { update.load(table, q0, before, T); }
        if (at.last >= at.first && k0 <= at.last) {
            const bool special = k0 + ATTENTION_KEYS - 1 > at.first || last_start > k0 ||
                                 at.last < at.first + S::WARP_ROWS - 1 || at.coarse;
            const float* distance = shared.window + slot * S::DISTANCES + warp * S::WARP_ROWS + at.group -
                                    2 * at.member + ATTENTION_KEYS - 1;
#pragma unroll 1
            for (int c = 0; c < 4; c++) {
                if (k0 + c * 16 <= at.last) {
                    dq_block<D, BIAS, SCALE>(rows, task, at, queries, shared.keys + slot * S::TILE,
                                             shared.values + slot * S::TILE, distance, c, k0, special);
                }
                if (BIAS) { shift_diagonals<D>(rows, shared.scratch, at, c); }
            }
            if (BIAS) { finish_diagonals<D>(rows, shared.scratch, shared.sums + (slot * S::WARPS + warp) * 64, at); }
        }
        if (BIAS && tile > begin) { update.store(table, shared.sums + (slot ^ 1) * S::WARPS * 64, q0, before, T); }
    }
    __syncthreads();
    if (BIAS) {
        const int k0 = (end - 1) * ATTENTION_KEYS;
        update.load(table, q0, k0, T);
        update.store(table, shared.sums + ((end - 1) & 1) * S::WARPS * 64, q0, k0, T);
    }
    return close_dq_rows<D, BIAS, SCALE>(rows, task, at, queries);
}

// grid: query_blocks per head. The longest rows come first.
template <int D, bool BIAS, bool SCALE>
__global__ void __launch_bounds__(AttentionShape<D>::THREADS, AttentionShape<D>::BLOCKS)
    attention_dq_kernel(AttentionBackwardTask task) {
    using S = DqShape<D>;
    DYN_SHARED(floatX, memory);
    const AttentionInput& in = task.in;
    const int T = (int)in.size.Tq, tiles = (T + S::ROWS - 1) / S::ROWS, blocks = (int)task.query_blocks;
    const int warp = threadIdx.x >> 5;
    const DqShared<D> shared(memory, warp);
    DqPlace at;
    at.bh = blockIdx.x / blocks, at.b = at.bh / (int)in.size.NH, at.h = at.bh % (int)in.size.NH;
    at.lane = threadIdx.x & 31, at.group = at.lane >> 2, at.member = at.lane & 3;
    float* table = BIAS ? task.table_sums + (size_t)blockIdx.x * T : NULL;
    if (BIAS) {
        for (int d = threadIdx.x; d < T; d += S::THREADS) { table[d] = 0.0f; }
    }
    float dscale = 0.0f;
    for (int tile = tiles - 1 - (int)(blockIdx.x % blocks); tile >= 0; tile -= blocks) {
        const int q0 = tile * S::ROWS, row = q0 + (int)threadIdx.x;
        at.first = q0 + warp * S::WARP_ROWS, at.last = min(at.first + S::WARP_ROWS, T) - 1;
        const bool coarse = row < min(q0 + S::ROWS, T) && attention_lse_is_coarse(task.lse[(size_t)at.bh * T + row]);
        at.coarse = __syncthreads_or(coarse);
        const int part = q0 / ATTENTION_KEYS + (int)threadIdx.x, parts = (T + ATTENTION_KEYS - 1) / ATTENTION_KEYS;
        if (threadIdx.x < S::ROWS / ATTENTION_KEYS && part < parts) {
            task.coarse[(size_t)at.bh * parts + part] = at.coarse;
        }
        dscale += dq_tile<D, BIAS, SCALE>(task, at, shared, q0, table);
    }
    if (SCALE && attention_has(&in, TERM_SCALE)) {
        dscale = block_sum(dscale);
        if (threadIdx.x == 0) { task.scale_sums[blockIdx.x] = dscale; }
    }
}

#endif
