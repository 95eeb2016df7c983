/*
Copies between layouts and precisions: columns of a wider array, and the compute copy of the parameters. CUDA
version; contract in ops.h.
*/
#ifndef COPY_CUH
#define COPY_CUH

#include "cuda_common.cuh"
#include "ops.h"

template <int W>
__global__ void copy_columns_kernel(floatX* out, size_t out_stride, const floatX* inp, size_t inp_stride,
                                    size_t columns) {
    const size_t r = blockIdx.x, c = row_column(W);
    if (c >= columns) { return; }
    float x[W];
    load(x, inp + r * inp_stride + c);
    store(out + r * out_stride + c, x);
}

void copy_columns(floatX* out, size_t out_stride, const floatX* inp, size_t inp_stride, size_t rows, size_t columns) {
    const bool wide = aligned((uintptr_t)out | (uintptr_t)inp | (out_stride | inp_stride | columns) * sizeof(floatX));
    const RowLaunch launch = row_launch(rows, wide ? columns / WIDE : columns);
    LAUNCH_WIDTH(wide, copy_columns_kernel, launch.grid, launch.threads, 0, main_stream, out, out_stride, inp,
                 inp_stride, columns);
}

// n is a multiple of W.
template <int W>
__global__ void cast_parameters_kernel(floatX* copy, const float* master, size_t n) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= n) { return; }
    float x[W];
    load(x, master + i);
    store(copy + i, x);
}

void cast_parameters(floatX* copy, const float* master, size_t n) {
    if ((const void*)copy == (const void*)master) { return; }
    const bool wide = aligned((uintptr_t)copy | (uintptr_t)master | n * sizeof(floatX));
    LAUNCH_WIDTH(wide, cast_parameters_kernel, (unsigned)ceil_div(n, 256 * (wide ? WIDE : 1)), 256, 0, main_stream,
                 copy, master, n);
}

#endif
