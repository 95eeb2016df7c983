/*
What the tests of the emulator share: cmocka for C++, checked calls of the CUDA runtime, arrays on the device. Works
under nvcc and under the emulator.
*/
#ifndef EMU_UTIL_H
#define EMU_UTIL_H

#include "../llmc/cuda_gpu.cuh"

// clang-format off: cmocka needs these in this order, and does not declare itself for C++
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
}
// clang-format on
#include <stdio.h>
#include <stdlib.h>

#include "test_util.h"

#define check_cuda(call)                                                                \
    do {                                                                                \
        cudaError_t error_ = (call);                                                    \
        if (error_ != cudaSuccess) {                                                    \
            print_error("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
            assert_int_equal(error_, cudaSuccess);                                      \
        }                                                                               \
    } while (0)

// n elements on the device: not written, or a copy of host memory. Release with cudaFree.
template <class T>
static T* device_array(size_t n) {
    void* p = NULL;
    check_cuda(cudaMalloc(&p, n * sizeof(T)));
    return static_cast<T*>(p);
}
template <class T>
static T* device_copy(const T* host, size_t n) {
    T* p = device_array<T>(n);
    check_cuda(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

// Waits for the device and reports what a kernel did wrong.
template <class T>
static void fetch(T* host, const T* device, size_t n) {
    check_cuda(cudaGetLastError());
    check_cuda(cudaMemcpy(host, device, n * sizeof(T), cudaMemcpyDeviceToHost));
}

#endif
