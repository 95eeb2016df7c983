/*
Sums of whole arrays, returned to the host: in double, in an order that depends on the length only. What
array_sum and sum_of_squares are made of.
*/
#ifndef CUDA_SUM_CUH
#define CUDA_SUM_CUH

#include "cuda_common.cuh"

constexpr unsigned SUM_THREADS = 256;
constexpr size_t SUM_BLOCKS = 1024;
constexpr int SUM_WIDTH = 4;

// partial[block] = the sum of the elements, or of their squares, that the block strides over. vectors * SUM_WIDTH
// elements are read in vectors, the rest up to n one by one.
template <bool SQUARES>
__global__ void sum_kernel(double* partial, const float* x, size_t vectors, size_t n) {
    const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (size_t)gridDim.x * blockDim.x;
    double sum = 0.0;
    for (size_t i = thread; i < vectors; i += threads) {
        float v[SUM_WIDTH];
        load(v, x + i * SUM_WIDTH);
#pragma unroll
        for (int j = 0; j < SUM_WIDTH; j++) { sum += SQUARES ? (double)v[j] * (double)v[j] : (double)v[j]; }
    }
    for (size_t i = vectors * SUM_WIDTH + thread; i < n; i += threads) {
        sum += SQUARES ? (double)x[i] * (double)x[i] : (double)x[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}

// Waits for the device. Its memory for partial sums is kept from call to call.
template <bool SQUARES>
static double sum_to_host(const float* x, size_t n) {
    static double* partial;
    if (!partial) { partial = (double*)device_malloc(SUM_BLOCKS * sizeof(double)); }
    const size_t vectors = aligned((uintptr_t)x) ? n / SUM_WIDTH : 0;
    const size_t wanted = ceil_div(n, SUM_THREADS * SUM_WIDTH), blocks = wanted < SUM_BLOCKS ? wanted : SUM_BLOCKS;
    if (blocks == 0) { return 0.0; }
    LAUNCH((sum_kernel<SQUARES>), (unsigned)blocks, SUM_THREADS, 0, main_stream, partial, x, vectors, n);
    cudaCheck(cudaGetLastError());
    double sums[SUM_BLOCKS], total = 0.0;
    copy_to_host(sums, partial, blocks * sizeof(double));
    for (size_t i = 0; i < blocks; i++) { total += sums[i]; }
    return total;
}

#endif
