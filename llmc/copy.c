/*
Copies between layouts and precisions: columns of a wider array, and the compute copy of the parameters.
*/
#include "backend.h"

void copy_columns(floatX* out, size_t out_stride, const floatX* inp, size_t inp_stride, size_t rows, size_t columns) {
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++) { memcpy(out + r * out_stride, inp + r * inp_stride, columns * sizeof(floatX)); }
}

void cast_parameters(floatX* copy, const float* master, size_t n) {
    if (copy != master) { memcpy(copy, master, n * sizeof(floatX)); }
}
