/*
What the attention kernels of both precisions share: rows and their scales, tasks, the plan of work and of
workspace. Private to the CUDA files of this folder.

Logits are in units of log 2: y_ij = (q_i.k_j) scale_i + P(d) bias_scale_i with scale_i = g_i log2(e) / sqrt(HS) and
bias_scale_i = log2(e) times g_i (bias inside) or 1, so both orders of bias and scale are one code path. Every
kernel computes y by the same operations in the same order: y minus its row's maximum stays exact at 1e30.

Positions and coordinates inside tiles are int (sequences stay below 2^31); offsets into memory are size_t.
*/
#ifndef ATTENTION_CUDA_TASKS_CUH
#define ATTENTION_CUDA_TASKS_CUH

#include "../arena.h"
#include "../cuda_common.cuh"
#include "../ops.h"

constexpr float ATTENTION_LOG2_E = 1.44269504088896341f, ATTENTION_LN_2 = 0.693147180559945309f;

// log2 of the weight of a key that is not visible, after the row's maximum is subtracted: exp2 of it is exactly 0.
constexpr float ATTENTION_HIDDEN = -200.0f;

enum {
    ATTENTION_KEYS = 64,           // keys per tile
    ATTENTION_MAX_HEAD = 128,      // largest head size
    ATTENTION_SPLIT_BLOCKS = 512,  // blocks that a forward over few queries is split into, at most
    ATTENTION_SPLIT_KEYS = 512,    // keys per split, at least
    ATTENTION_TABLE_BLOCKS = 512,  // partial sums of the bias table: one per block, about this many blocks
};

// ----------------------------------------------------------------------------
// tasks

typedef struct {
    AttentionInput in;
    floatX* out;
    float* lse;                 // may be NULL
    int splits;                 // parts of the keys, each with its own block
    float* partial_out;         // [splits][B*NH*Tq][HS] unnormalised, NULL for statistics alone
    float2* partial_softmax;    // [splits][B*NH*Tq] maximum and sum of weights; NULL: write out and lse
    const float* backward_lse;  // [B*NH*Tq]: only blocks with a row whose lse is coarse do anything; NULL: all
} AttentionForwardTask;

// One row of a query head as the dk/dv kernel reads it.
struct __align__(16) AttentionBackwardRow {
    float scale, bias_scale;  // see above
    float reference;          // y - reference is log2 of the weight
    float delta;              // D_i = sum_j p_ij dout_i.v_j
};

typedef struct {
    AttentionInput in;
    AttentionGradients to;
    const floatX *dout, *out;
    const float* lse;
    size_t query_blocks;         // blocks per query head of the dq kernel; each takes every query_blocks-th tile
    AttentionBackwardRow* rows;  // [B*NH*T]
    float2* softmax;             // [B*NH*T] maximum and sum of weights of rows whose lse is coarse
    int* coarse;                 // [B*NH][tiles of ATTENTION_KEYS queries]: whether such a row is in the tile
    float* table_sums;           // [B*NH][query_blocks][T] sums along diagonals
    float* scale_sums;           // [B*NH][query_blocks]
    float* bias_sums;            // [NH][blocks of the table reduction]
    size_t bytes;                // of workspace
} AttentionBackwardTask;

// ----------------------------------------------------------------------------
// rows

struct AttentionRow {
    float scale, bias_scale;
    float bias_weight;  // of dZ_ij in the table's gradient: ln n_i (inside; its factor s_h comes last) or 1
    float log_count;
};

__device__ __forceinline__ int attention_start(const AttentionInput& in, int b, int i) {
    return in.start ? in.start[(size_t)b * in.size.Tq + i] : 0;
}

// What bias_scale is besides bias_weight.
__device__ __forceinline__ float attention_bias_factor(const AttentionInput& in, int h) {
    return in.logit.inside && attention_has(&in, TERM_SCALE) ? in.logit.seq_scale[h] * ATTENTION_LOG2_E
                                                             : ATTENTION_LOG2_E;
}

// Rows past the end weigh nothing.
__device__ __forceinline__ AttentionRow attention_row(const AttentionInput& in, int b, int h, int i) {
    if (i >= (int)in.size.Tq) { return {0.0f, 0.0f, 0.0f, 0.0f}; }
    const float log_count = attention_has(&in, TERM_SCALE) ? in.logit.log_count[(size_t)b * in.size.Tq + i] : 1.0f;
    const float g = attention_has(&in, TERM_SCALE) ? in.logit.seq_scale[h] * log_count : 1.0f;
    AttentionRow row;
    row.scale = g * ATTENTION_LOG2_E * rsqrtf((float)in.size.HS);
    row.bias_weight = in.logit.inside ? log_count : 1.0f;
    row.bias_scale = row.bias_weight * attention_bias_factor(in, h);
    row.log_count = log_count;
    return row;
}

__device__ __forceinline__ float attention_logit(float product, float scale, float bias, float bias_scale) {
    return fmaf(product, scale, bias * bias_scale);
}

// lse in fp32 is too coarse to recompute weights from when its rounding shows beside that of the weights.
__device__ __forceinline__ bool attention_lse_is_coarse(float lse) {
    return fabsf(lse) > (sizeof(floatX) == sizeof(float) ? 64.0f : 1024.0f);
}

__device__ __forceinline__ int attention_key_head(const AttentionInput& in, int h) {
    return h / ((int)in.size.NH / (int)in.size.NKV);
}

__device__ __forceinline__ size_t attention_query_offset(const AttentionInput& in, int b, int h) {
    return b * in.q_batch + h * in.size.HS;
}

__device__ __forceinline__ size_t attention_kv_offset(const AttentionInput& in, int b, int kv_head) {
    return b * in.kv_batch + kv_head * in.size.HS;
}

// Of out and dout.
__device__ __forceinline__ size_t attention_out_offset(const AttentionInput& in, int b, int h) {
    return ((size_t)b * in.size.Tq * in.size.NH + h) * in.size.HS;
}

// ----------------------------------------------------------------------------
// backward

// What sum_d P(d) W(d) is taken from, instead of 0: noise in the sum of W is not multiplied by a bias far from 0.
__device__ __forceinline__ float attention_bias_center(const AttentionInput& in, int h) {
    return attention_has(&in, TERM_DISTANCE) && in.logit.inside
               ? in.logit.by_distance[h * in.logit.distance_stride + (in.size.Tk > 1 ? 1 : 0)]
               : 0.0f;
}

// The mean of u under p less the bias's center, from the mean of log2 p; 0 where it is not known well. Any value
// is right but for noise.
__device__ __forceinline__ float attention_logit_center(const AttentionInput& in, const AttentionRow& row, int h,
                                                        float mean_log_weight, float log_sum) {
    const float g = in.logit.seq_scale[h] * row.log_count;
    const bool known = fabsf(g) > 1e-3f && (in.logit.inside || !attention_has(&in, TERM_DISTANCE));
    return known ? (mean_log_weight + log_sum) / (g * ATTENTION_LOG2_E) - attention_bias_center(in, h) : 0.0f;
}

// log2 of the sum of weights where it is not part of the reference, else 0.
__device__ __forceinline__ float coarse_log_sum(const AttentionBackwardTask& task, int bh, int query) {
    const size_t row = (size_t)bh * task.in.size.Tq + query;
    return attention_lse_is_coarse(task.lse[row]) ? log2f(task.softmax[row].y) : 0.0f;
}

// One pair of a tile that is not wholly visible, or whose lse is coarse: log2 of the weight, and dout.v - D. A row
// with one visible key has weight 1 there and no gradient. No weight is above 1, however the maximum was rounded.
__device__ __forceinline__ void special_pair(float& log_weight, float& dp, int query, int key, int start,
                                             float log_sum) {
    const bool hidden = key > query || key < start;
    log_weight = fminf(log_weight, 0.0f) - log_sum;
    if (start == query) { log_weight = 0.0f; }
    if (hidden) { log_weight = ATTENTION_HIDDEN; }
    if (hidden || start == query) { dp = 0.0f; }
}

// ----------------------------------------------------------------------------
// plan

// Queries per block of the forward.
constexpr size_t attention_rows(size_t HS) {
#ifdef PRECISION_FP32
    return HS > 0 ? 32 : 0;
#else
    return HS <= 64 ? 128 : 64;
#endif
}

// Blocks of a forward that are split over the keys: all that have enough keys, while blocks are few. It depends
// on sizes alone, so results do not depend on the device.
static inline int attention_splits(const AttentionInput* in, size_t rows) {
    size_t blocks = in->size.B * in->size.NH * ceil_div(in->size.Tq, rows);
    size_t splits = ATTENTION_SPLIT_BLOCKS / blocks, most = in->size.Tk / ATTENTION_SPLIT_KEYS;
    splits = splits < most ? splits : most;
    return splits > 1 ? (int)splits : 1;
}

// Enough for any B and Tq, so that it grows with every size.
static inline size_t attention_split_bytes(size_t Tk, size_t HS, size_t rows) {
    if (Tk < 2 * ATTENTION_SPLIT_KEYS) { return 0; }
    return ATTENTION_SPLIT_BLOCKS * rows * (HS * sizeof(float) + sizeof(float2));
}

static inline void attention_plan_forward(AttentionForwardTask* task, size_t rows, void* workspace) {
    const AttentionInput* in = &task->in;
    task->splits = attention_splits(in, rows);
    if (task->splits == 1) { return; }
    task->partial_softmax = (float2*)workspace;
    task->partial_out = (float*)(task->partial_softmax + task->splits * in->size.B * in->size.NH * in->size.Tq);
}

// Several blocks per head only while heads are few: their partial tables are B*NH*query_blocks*T floats.
static inline void attention_plan_backward(AttentionBackwardTask* task, size_t rows, void* workspace) {
    const AttentionInput* in = &task->in;
    size_t heads = in->size.B * in->size.NH, tiles = ceil_div(in->size.Tq, rows), N = heads * in->size.Tq;
    size_t blocks = ATTENTION_TABLE_BLOCKS / heads;
    blocks = blocks < 1 ? 1 : blocks;
    task->query_blocks = blocks < tiles ? blocks : tiles;
    // the count for fewer heads may be rounded up less: take what is enough for any number up to these
    size_t most = heads > ATTENTION_TABLE_BLOCKS ? heads : (size_t)ATTENTION_TABLE_BLOCKS;
    most = most < heads * tiles ? most : heads * tiles;
    Arena arena = {(char*)workspace, 0};
    task->rows = (AttentionBackwardRow*)arena_take(&arena, N * sizeof(AttentionBackwardRow));
    task->softmax = (float2*)arena_take(&arena, N * sizeof(float2));
    task->coarse = (int*)arena_take(&arena, heads * ceil_div(in->size.Tq, ATTENTION_KEYS) * sizeof(int));
    task->table_sums = (float*)arena_take(&arena, most * in->size.Tk * sizeof(float));
    task->scale_sums = (float*)arena_take(&arena, most * sizeof(float));
    task->bias_sums = (float*)arena_take(&arena, in->size.NH * ceil_div(in->size.Tk, 32) * sizeof(float));
    task->bytes = arena.used;
}

// The kernels have a table by distance and a row scale.
static inline void attention_check_terms(unsigned terms) {
    if (terms & ~(unsigned)(TERM_DISTANCE | TERM_SLOPES | TERM_SCALE)) {
        fatal(
            "attention on CUDA has no %s yet, which this --position_encoding needs; use another one, or the build for "
            "the CPU",
            terms & TERM_KEY   ? "numbers by key"
            : terms & TERM_CAP ? "soft-capping"
                               : "sinks");
    }
}

// What the kernels take for granted.
static inline void attention_check(const AttentionInput* in) {
    assert(in->size.Tq >= 1 && in->size.Tq <= in->size.Tk && in->size.NH % in->size.NKV == 0);
    attention_check_terms(in->size.terms);
    if (in->size.HS % 8 != 0 || in->size.HS > ATTENTION_MAX_HEAD) {
        fatal("head size: found %zu, expected a multiple of 8 up to %d; change --dim or --n_heads", in->size.HS,
              ATTENTION_MAX_HEAD);
    }
    // rows are read 16 bytes at a time
    assert(in->q_stride % 8 == 0 && in->kv_stride % 8 == 0 && in->q_batch % 8 == 0 && in->kv_batch % 8 == 0);
    assert((uintptr_t)in->q % 16 == 0 && (uintptr_t)in->k % 16 == 0 && (uintptr_t)in->v % 16 == 0);
}

// Raises the limit of shared memory and launches.
#define LAUNCH_ATTENTION(kernel, grid, threads, shared, task)                                                \
    do {                                                                                                     \
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(shared))); \
        LAUNCH((kernel), grid, threads, shared, main_stream, task);                                          \
        cudaCheck(cudaGetLastError());                                                                       \
    } while (0)

#endif
