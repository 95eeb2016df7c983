/*
The only place that chooses a backend: under nvcc, or g++ with the emulator of test/emu, every operator's .cuh;
else the prototypes of ops.h, whose CPU versions are linked in. Everything above this file is the same for all.
DEVICE_NETWORK is what a program that trains on several ranks includes besides.
*/
#ifndef BACKEND_H
#define BACKEND_H

#if defined(__CUDACC__) || defined(CUDA_EMULATOR)
#include "cuda_device.cuh"
#include "copy.cuh"
#include "embedding.cuh"
#include "rmsnorm.cuh"
#include "matmul.cuh"
#include "swiglu.cuh"
#include "gate.cuh"
#include "posenc.cuh"
#include "forget.cuh"
#include "cross_entropy.cuh"
#include "radam.cuh"
#define DEVICE_NETWORK "dist.cuh"
#else
#include "cpu_common.h"
#include "ops.h"
#define DEVICE_NETWORK "dist.h"
#endif

#endif
