/*
Token embedding, its gradient, and where documents start. CUDA version; contract in ops.h.

The gradient sorts the rows by token (a stable radix sort, so that nothing depends on timing), then one block adds
up the rows of one token and of some columns, in a fixed order.
*/
#ifndef EMBEDDING_CUH
#define EMBEDDING_CUH

#include "cuda_common.cuh"
#include "ops.h"

// ----------------------------------------------------------------------------
// forward

template <int W>
__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const float* position,
                                         size_t T, size_t C) {
    const size_t n = blockIdx.x, c = row_column(W);
    if (c >= C) { return; }
    float x[W];
    load(x, wte + (size_t)tokens[n] * C + c);
    if (position) {
        float p[W];
        load(p, position + (size_t)((unsigned)n % (unsigned)T) * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) { x[i] += p[i]; }
    }
    store(out + n * C + c, x);
}

void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const float* position, size_t B, size_t T,
                       size_t C) {
    const bool wide = aligned((uintptr_t)out | (uintptr_t)wte | (uintptr_t)position | C * sizeof(floatX));
    const RowLaunch launch = row_launch(B * T, wide ? C / WIDE : C);
    LAUNCH_WIDTH(wide, embedding_forward_kernel, launch.grid, launch.threads, 0, main_stream, out, tokens, wte,
                 position, T, C);
}

// ----------------------------------------------------------------------------
// rows sorted by token: least significant digit first; each warp of each block owns consecutive rows

constexpr int RADIX_BITS = 8;
constexpr unsigned RADIX = 1u << RADIX_BITS, SORT_WARPS = 8;
#ifndef SORT_WARP_ROWS
#define SORT_WARP_ROWS ((size_t)256)
#endif
constexpr size_t SORT_BLOCK_ROWS = SORT_WARPS * SORT_WARP_ROWS;

typedef struct {
    uint32_t *order, *other;  // [N] row numbers, before and after a pass
    uint32_t* counts;         // [RADIX,blocks]
    uint32_t *first, *end;    // [V] where a token's rows are in the sorted order
} SortSpace;

static SortSpace sort_space(void* workspace, size_t N, size_t V) {
    SortSpace s;
    s.order = (uint32_t*)workspace;
    s.other = s.order + N;
    s.counts = s.other + N;
    s.first = s.counts + RADIX * ceil_div(N, SORT_BLOCK_ROWS);
    s.end = s.first + V;
    return s;
}

size_t embedding_workspace(size_t N, size_t V) {
    return (2 * N + RADIX * ceil_div(N, SORT_BLOCK_ROWS) + 2 * V) * sizeof(uint32_t);
}

// Row at place i of the order so far (NULL: as given), and its digit.
__device__ __forceinline__ uint32_t sorted_row(const uint32_t* order, size_t i) {
    return order ? order[i] : (uint32_t)i;
}

__device__ __forceinline__ uint32_t row_digit(const int* tokens, uint32_t row, int shift) {
    return ((uint32_t)tokens[row] >> shift) % RADIX;
}

// counts[digit,block] = rows of this block with that digit.
__global__ void count_digits_kernel(uint32_t* counts, const uint32_t* order, const int* tokens, int shift, size_t N) {
    SHARED(unsigned, histogram, [RADIX]);
    histogram[threadIdx.x] = 0;
    __syncthreads();
    const size_t begin = (size_t)blockIdx.x * SORT_BLOCK_ROWS;
    for (size_t i = begin + threadIdx.x; i < begin + SORT_BLOCK_ROWS && i < N; i += blockDim.x) {
        atomicAdd(&histogram[row_digit(tokens, sorted_row(order, i), shift)], 1u);
    }
    __syncthreads();
    counts[threadIdx.x * (size_t)gridDim.x + blockIdx.x] = histogram[threadIdx.x];
}

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ uint32_t warp_scan(uint32_t x) {
    for (int offset = 1; offset < 32; offset *= 2) {
        uint32_t below = __shfl_up_sync(0xffffffffu, x, offset);
        if (threadIdx.x % 32 >= (unsigned)offset) { x += below; }
    }
    return x;
}

// x[n] becomes the sum of all before it; one block.
__global__ void exclusive_sums_kernel(uint32_t* x, size_t n) {
    SHARED(uint32_t, warp_totals, [32]);
    uint32_t carry = 0;
    for (size_t begin = 0; begin < n; begin += blockDim.x) {
        const size_t i = begin + threadIdx.x;
        const uint32_t value = i < n ? x[i] : 0, inclusive = warp_scan(value);
        if (threadIdx.x % 32 == 31) { warp_totals[threadIdx.x / 32] = inclusive; }
        __syncthreads();
        uint32_t before = carry;
        for (unsigned w = 0; w < blockDim.x / 32; w++) {
            before += w < threadIdx.x / 32 ? warp_totals[w] : 0;
            carry += warp_totals[w];
        }
        if (i < n) { x[i] = before + inclusive - value; }
        __syncthreads();
    }
}

// Moves every row to the place of its digit, rows of the same digit in the order they had.
__global__ void scatter_rows_kernel(uint32_t* sorted, const uint32_t* places, const uint32_t* order, const int* tokens,
                                    int shift, size_t N) {
    SHARED(unsigned, next, [SORT_WARPS][RADIX]);  // where this warp's next row of a digit goes
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t begin = (size_t)blockIdx.x * SORT_BLOCK_ROWS + warp * SORT_WARP_ROWS;
    for (unsigned w = 0; w < SORT_WARPS; w++) { next[w][threadIdx.x] = 0; }
    __syncthreads();
    for (size_t i = begin + lane; i < begin + SORT_WARP_ROWS && i < N; i += 32) {
        atomicAdd(&next[warp][row_digit(tokens, sorted_row(order, i), shift)], 1u);
    }
    __syncthreads();
    unsigned place = places[threadIdx.x * (size_t)gridDim.x + blockIdx.x];
    for (unsigned w = 0; w < SORT_WARPS; w++) {
        const unsigned count = next[w][threadIdx.x];
        next[w][threadIdx.x] = place;
        place += count;
    }
    __syncthreads();
    for (size_t from = begin; from < begin + SORT_WARP_ROWS && from < N; from += 32) {
        const bool valid = from + lane < N;
        const uint32_t row = valid ? sorted_row(order, from + lane) : 0;
        const uint32_t digit = valid ? row_digit(tokens, row, shift) : RADIX;
        const unsigned same = __match_any_sync(0xffffffffu, digit), before = __popc(same & ((1u << lane) - 1));
        if (valid) { sorted[next[warp][digit] + before] = row; }
        __syncwarp();
        if (valid && before == 0) { next[warp][digit] += __popc(same); }
        __syncwarp();
    }
}

// Rows of token v are at first[v] .. end[v]-1 of the order; only tokens that occur are set.
__global__ void find_runs_kernel(uint32_t* first, uint32_t* end, const uint32_t* order, const int* tokens, size_t N) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i > N) { return; }
    const int before = i > 0 ? tokens[order[i - 1]] : -1, token = i < N ? tokens[order[i]] : -1;
    if (before == token) { return; }
    if (token >= 0) { first[token] = (uint32_t)i; }
    if (before >= 0) { end[before] = (uint32_t)i; }
}

// ----------------------------------------------------------------------------
// backward

constexpr unsigned ADD_WARPS = 8;

// Block (i, strip) adds the rows of the token whose first row is at place i of the order, in columns 32*W*strip ..:
// each warp every ADD_WARPS-th row, then their sums.
template <int W>
__global__ void add_token_rows_kernel(float* dwte, const floatX* dout, const uint32_t* order, const uint32_t* first,
                                      const uint32_t* end, const int* tokens, size_t C) {
    SHARED(float, sums, [ADD_WARPS][32 * W]);
    const size_t begin = blockIdx.x, v = (size_t)tokens[order[begin]];
    if (first[v] != begin) { return; }
    const size_t rows_end = end[v], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t c = (blockIdx.y * (size_t)32 + lane) * W;
    float sum[W] = {0};
    if (c < C) {
#pragma unroll 4
        for (size_t i = begin + warp; i < rows_end; i += ADD_WARPS) {
            float dy[W];
            load(dy, dout + order[i] * C + c);
#pragma unroll
            for (int j = 0; j < W; j++) { sum[j] += dy[j]; }
        }
    }
    for (int j = 0; j < W; j++) { sums[warp][j * 32 + lane] = sum[j]; }
    __syncthreads();
    if (warp != 0 || c >= C) { return; }
    float total[W];
    load(total, dwte + v * C + c);
    for (size_t w = 0; w < ADD_WARPS && w < rows_end - begin; w++) {
        for (int j = 0; j < W; j++) { total[j] += sums[w][j * 32 + lane]; }
    }
    store(dwte + v * C + c, total);
}

void embedding_backward(float* dwte, const floatX* dout, const int* tokens, void* workspace, size_t N, size_t C,
                        size_t V) {
    SortSpace s = sort_space(workspace, N, V);
    const unsigned blocks = (unsigned)ceil_div(N, SORT_BLOCK_ROWS);
    const uint32_t* order = NULL;
    for (int shift = 0; shift == 0 || (V - 1) >> shift > 0; shift += RADIX_BITS) {
        LAUNCH(count_digits_kernel, blocks, RADIX, 0, main_stream, s.counts, order, tokens, shift, N);
        LAUNCH(exclusive_sums_kernel, 1, 1024, 0, main_stream, s.counts, (size_t)RADIX * blocks);
        uint32_t* sorted = order == s.order ? s.other : s.order;
        LAUNCH(scatter_rows_kernel, blocks, 32 * SORT_WARPS, 0, main_stream, sorted, s.counts, order, tokens, shift, N);
        order = sorted;
    }
    LAUNCH(find_runs_kernel, (unsigned)ceil_div(N + 1, 256), 256, 0, main_stream, s.first, s.end, order, tokens, N);
    const bool wide = aligned((uintptr_t)dwte | (uintptr_t)dout | C * sizeof(floatX));
    const dim3 grid((unsigned)N, (unsigned)ceil_div(C, 32 * (wide ? WIDE : 1)));
    LAUNCH_WIDTH(wide, add_token_rows_kernel, grid, 32 * ADD_WARPS, 0, main_stream, dwte, dout, order, s.first, s.end,
                 tokens, C);
}

// ----------------------------------------------------------------------------
// documents

// One block per sequence: a running maximum of the positions where a document starts.
__global__ void document_starts_kernel(int* start, float* log_count, const int* tokens, int bos, size_t position,
                                       int first_start, size_t T) {
    SHARED(int, warp_last, [32]);
    const size_t row = blockIdx.x * T;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int carry = first_start;
    for (size_t begin = 0; begin < T; begin += blockDim.x) {
        const size_t t = begin + threadIdx.x;
        int current = t < T && tokens[row + t] == bos ? (int)(position + t) : -1;
        for (int offset = 1; offset < 32; offset *= 2) {
            int earlier = __shfl_up_sync(0xffffffffu, current, offset);
            if (lane >= (unsigned)offset && earlier > current) { current = earlier; }
        }
        if (lane == 31) { warp_last[warp] = current; }
        __syncthreads();
        current = current > carry ? current : carry;
        for (unsigned w = 0; w < blockDim.x / 32; w++) {
            const int last = warp_last[w];
            if (w < warp && last > current) { current = last; }
            carry = last > carry ? last : carry;
        }
        if (t < T) {
            start[row + t] = current;
            log_count[row + t] = ssmax_log_count(position + t - (size_t)current + 1);
        }
        __syncthreads();
    }
}

void document_starts(int* start, float* log_count, const int* tokens, int bos, size_t position, int first_start,
                     size_t B, size_t T) {
    const unsigned threads = T < 1024 ? (unsigned)round_up(T, 32) : 1024;
    LAUNCH(document_starts_kernel, (unsigned)B, threads, 0, main_stream, start, log_count, tokens, bos, position,
           first_start, T);
    cudaCheck(cudaGetLastError());
}

__global__ void limit_rows_kernel(int* start, float* log_count, RowRule rule, size_t position, size_t T, size_t N) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const size_t at = position + n % T;
    const int first = window_start(rule, at, start[n]);
    start[n] = first;
    log_count[n] = row_scale_of(rule, at - (size_t)first + 1);
}

void limit_rows(int* start, float* log_count, RowRule rule, size_t position, size_t B, size_t T) {
    LAUNCH(limit_rows_kernel, (unsigned)ceil_div(B * T, 128), 128, 0, main_stream, start, log_count, rule, position, T,
           B * T);
    cudaCheck(cudaGetLastError());
}

#endif
