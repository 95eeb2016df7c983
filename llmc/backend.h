/*
The only place that chooses a backend: under nvcc every operator's .cuh, else the prototypes of ops.h,
whose CPU versions are linked in. Everything above this file is the same for both.
*/
#ifndef BACKEND_H
#define BACKEND_H

#ifdef __CUDACC__
#error "the CUDA operators are not part of this build; use a C compiler"
#else
#include "cpu_common.h"
#include "ops.h"
#endif

#endif
