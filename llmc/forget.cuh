/*
Numbers by key that are cumulative sums of gates. CUDA version; contract and formulas in ops.h.
*/
#ifndef FORGET_CUH
#define FORGET_CUH

#include "cuda_common.cuh"
#include "ops.h"
#include "rmsnorm.cuh"

// ----------------------------------------------------------------------------
// the projection, in fp32: a weight that was loaded serves FORGET_ROWS rows

constexpr size_t FORGET_ROWS = 8;
constexpr unsigned FORGET_THREADS = 256;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// The last rows of the last block are read again and not written.
__device__ __forceinline__ size_t forget_row(size_t first, size_t r, size_t N) {
    return first + r < N ? first + r : N - 1;
}

// A warp takes a head of all the block's rows at a time.
__global__ void forget_gates_kernel(float* gates, const floatX* inp, const float* weight, const float* bias, size_t N,
                                    size_t C, size_t NH) {
    const size_t first = (size_t)blockIdx.x * FORGET_ROWS, lane = threadIdx.x % 32;
    for (size_t h = threadIdx.x / 32; h < NH; h += FORGET_THREADS / 32) {
        float sums[FORGET_ROWS] = {0.0f};
#pragma unroll 1
        for (size_t c = lane; c < C; c += 32) {
            const float w = weight[h * C + c];
#pragma unroll
            for (size_t r = 0; r < FORGET_ROWS; r++) { sums[r] += w * as_float(inp[forget_row(first, r, N) * C + c]); }
        }
#pragma unroll
        for (size_t r = 0; r < FORGET_ROWS; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0 && first + r < N) { gates[(first + r) * NH + h] = sum + bias[h]; }
        }
    }
}

void forget_gates(float* gates, const floatX* inp, const float* weight, const float* bias, size_t N, size_t C,
                  size_t NH) {
    LAUNCH(forget_gates_kernel, (unsigned)ceil_div(N, FORGET_ROWS), FORGET_THREADS, 0, main_stream, gates, inp, weight,
           bias, N, C, NH);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------
// the sums: a block goes along one head of one sequence, FORGET_THREADS tokens at a time (Hillis & Steele 1986)

// With x this thread's number: the sum of those of this and earlier threads (later ones when BACKWARDS) back to thread
// `limit`, in an order that depends on the threads alone.
template <bool BACKWARDS>
__device__ __forceinline__ double forget_scan(double x, int limit) {
    SHARED(double, sums, [FORGET_THREADS]);
    const int thread = (int)threadIdx.x;
    for (int reach = 1; reach < (int)FORGET_THREADS; reach *= 2) {
        __syncthreads();
        sums[thread] = x;
        __syncthreads();
        const int other = BACKWARDS ? thread + reach : thread - reach;
        if (BACKWARDS ? other <= limit : other >= limit) { x += sums[other]; }
    }
    __syncthreads();
    return x;
}

// The last thread up to this one at whose token a document begins, -1 without one; when BACKWARDS the last before the
// next such thread.
template <bool BACKWARDS>
__device__ __forceinline__ int forget_limit(bool begins) {
    SHARED(int, limits, [FORGET_THREADS]);
    const int thread = (int)threadIdx.x, end = (int)FORGET_THREADS;
    int limit = begins ? (BACKWARDS ? thread - 1 : thread) : (BACKWARDS ? end - 1 : -1);
    for (int reach = 1; reach < end; reach *= 2) {
        __syncthreads();
        limits[thread] = limit;
        __syncthreads();
        const int other = BACKWARDS ? thread + reach : thread - reach;
        if (other < 0 || other >= end) { continue; }
        limit = BACKWARDS ? min(limit, limits[other]) : max(limit, limits[other]);
    }
    __syncthreads();
    limits[thread] = limit;
    __syncthreads();
    if (BACKWARDS) { limit = thread + 1 < end ? limits[thread + 1] : end - 1; }
    return limit;
}

__global__ void forget_sums_kernel(double* sums, const float* gates, const int* start, PosencMechanism kind,
                                   size_t position, size_t T, size_t NH, size_t stride) {
    SHARED(double, carried, [1]);
    const size_t h = blockIdx.x, b = blockIdx.y;
    double *to = sums + (b * NH + h) * stride + position, before = position > 0 ? to[-1] : 0.0;
    for (size_t first = 0; first < T; first += FORGET_THREADS) {
        const size_t t = first + threadIdx.x;
        const bool begins = t < T && (size_t)start[b * T + t] == position + t;
        const int limit = forget_limit<false>(begins);
        double x = t < T && !begins ? posenc_gate(kind, (double)gates[(b * T + t) * NH + h]) : 0.0;
        x = forget_scan<false>(x, limit > 0 ? limit : 0);
        if (limit < 0) { x += before; }
        if (t < T) { to[t] = x; }
        if (threadIdx.x == FORGET_THREADS - 1) { carried[0] = x; }
        __syncthreads();
        before = carried[0];
    }
}

void forget_sums(double* sums, const float* gates, const int* start, PosencMechanism kind, size_t position, size_t B,
                 size_t T, size_t NH, size_t stride) {
    LAUNCH(forget_sums_kernel, dim3((unsigned)NH, (unsigned)B), FORGET_THREADS, 0, main_stream, sums, gates, start,
           kind, position, T, NH, stride);
    cudaCheck(cudaGetLastError());
}

// From the end to the beginning. `later` is the sum behind the threads' tokens, of the document that goes on there.
__global__ void forget_sums_backward_kernel(float* dgates, const float* dsums, const float* gates, const int* start,
                                            PosencMechanism kind, size_t T, size_t NH) {
    SHARED(double, carried, [1]);
    const size_t h = blockIdx.x, b = blockIdx.y;
    double later = 0.0;
    for (size_t chunk = (T + FORGET_THREADS - 1) / FORGET_THREADS; chunk-- > 0;) {
        const size_t t = chunk * FORGET_THREADS + threadIdx.x, at = (b * T + t) * NH + h;
        const bool begins = t < T && (size_t)start[b * T + t] == t;
        const int limit = forget_limit<true>(begins);
        double x = forget_scan<true>(t < T ? (double)dsums[(b * NH + h) * T + t] : 0.0, limit);
        if (limit == (int)FORGET_THREADS - 1) { x += later; }
        if (t < T) { dgates[at] = begins ? 0.0f : (float)(x * posenc_gate_slope(kind, (double)gates[at])); }
        if (threadIdx.x == 0) { carried[0] = begins ? 0.0 : x; }
        __syncthreads();
        later = carried[0];
        __syncthreads();
    }
}

void forget_sums_backward(float* dgates, const float* dsums, const float* gates, const int* start, PosencMechanism kind,
                          size_t B, size_t T, size_t NH) {
    LAUNCH(forget_sums_backward_kernel, dim3((unsigned)NH, (unsigned)B), FORGET_THREADS, 0, main_stream, dgates, dsums,
           gates, start, kind, T, NH);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------
// backward of the projection

// Thread = column of FORGET_ROWS rows.
__global__ void forget_input_kernel(floatX* dinp, const float* dgates, const float* weight, size_t N, size_t C,
                                    size_t NH) {
    const size_t first = (size_t)blockIdx.x * FORGET_ROWS, c = row_column(1);
    if (c >= C) { return; }
    float sums[FORGET_ROWS] = {0.0f};
    for (size_t h = 0; h < NH; h++) {
        const float w = weight[h * C + c];
#pragma unroll
        for (size_t r = 0; r < FORGET_ROWS; r++) { sums[r] += w * dgates[forget_row(first, r, N) * NH + h]; }
    }
    for (size_t r = 0; r < FORGET_ROWS && first + r < N; r++) {
        floatX* to = dinp + (first + r) * C + c;
        *to = (floatX)(as_float(*to) + sums[r]);
    }
}

constexpr size_t FORGET_HEADS = 4, FORGET_SLICES = 32;

// Slices of rows that are summed side by side.
static size_t forget_slices(size_t N) {
    const size_t wanted = ceil_div(N, 64);
    return wanted < FORGET_SLICES ? wanted : FORGET_SLICES;
}

// partial[slice,NH,C]: block (columns, heads, slice), a thread per column.
__global__ void forget_weight_kernel(float* partial, const float* dgates, const floatX* inp, size_t N, size_t C,
                                     size_t NH) {
    const size_t c = (size_t)blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y * FORGET_HEADS;
    const size_t slice = blockIdx.z, rows = (N + gridDim.z - 1) / gridDim.z;
    const size_t end = (slice + 1) * rows < N ? (slice + 1) * rows : N;
    if (c >= C) { return; }
    float sums[FORGET_HEADS] = {0.0f};
    for (size_t n = slice * rows; n < end; n++) {
        const float x = as_float(inp[n * C + c]);
#pragma unroll
        for (size_t k = 0; k < FORGET_HEADS; k++) {
            if (head + k < NH) { sums[k] += x * dgates[n * NH + head + k]; }
        }
    }
#pragma unroll
    for (size_t k = 0; k < FORGET_HEADS; k++) {
        if (head + k < NH) { partial[(slice * NH + head + k) * C + c] = sums[k]; }
    }
}

__global__ void forget_bias_kernel(float* dbias, const float* dgates, size_t N, size_t NH) {
    double sum = 0.0;
    for (size_t n = threadIdx.x; n < N; n += blockDim.x) { sum += (double)dgates[n * NH + blockIdx.x]; }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { dbias[blockIdx.x] += (float)sum; }
}

void forget_gates_backward(floatX* dinp, float* dweight, float* dbias, const float* dgates, const floatX* inp,
                           const float* weight, void* workspace, size_t N, size_t C, size_t NH) {
    float* partial = (float*)workspace;
    const size_t slices = forget_slices(N);
    const dim3 blocks((unsigned)ceil_div(C, 128), (unsigned)ceil_div(NH, FORGET_HEADS), (unsigned)slices);
    LAUNCH(forget_weight_kernel, blocks, 128, 0, main_stream, partial, dgates, inp, N, C, NH);
    LAUNCH(add_rows_kernel, (unsigned)ceil_div(NH * C, RMSNORM_SUM_COLUMNS), 32 * RMSNORM_SUM_WARPS, 0, main_stream,
           dweight, partial, slices, NH * C);
    LAUNCH(forget_bias_kernel, (unsigned)NH, FORGET_THREADS, 0, main_stream, dbias, dgates, N, NH);
    const RowLaunch launch = row_launch(ceil_div(N, FORGET_ROWS), C);
    LAUNCH(forget_input_kernel, launch.grid, launch.threads, 0, main_stream, dinp, dgates, weight, N, C, NH);
    cudaCheck(cudaGetLastError());
}

size_t forget_workspace(size_t N, size_t C, size_t NH) { return forget_slices(N) * NH * C * sizeof(float); }

#endif
