/*
Arrays on the device, summed and shared over the ranks of ranks.h: MPI on the CPU (dist.c), NCCL on GPUs (dist.cuh).

All functions are collective: every rank calls them in the same order with the same sizes. The three operations are
queued: they begin at the earliest when the device's work so far is done and run beside what comes after it, so that
the caller must not touch the array before dist_wait. With one rank they do nothing.

A sum is the same bits on every rank, and the same from run to run with as many ranks on the same hosts. Sharded
arrays are cut as part_begin (util.h) says, for any size and any number of ranks.
*/
#ifndef DIST_H
#define DIST_H

#include <stdbool.h>
#include <stddef.h>

#include "../util.h"

typedef enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER } DistOperation;

#if defined(__cplusplus) && !defined(__CUDACC__) && !defined(CUDA_EMULATOR)
extern "C" {
#endif

// Ranks need MPI on this device, because it has no network of its own.
bool dist_needs_mpi(void);

// The value of --device for this rank: one GPU for each rank of a host where `device` leaves it open.
const char* dist_device(const char* device);

// Ranks that share one device's memory.
size_t dist_ranks_per_device(void);

// Opens the network of the device, after ranks_init and backend_init; dist_close ends it.
void dist_open(void);
void dist_close(void);

// data[n] = the sum over ranks of data[n].
void dist_all_reduce(float* data, size_t n);

// This rank's shard of data[n] = the same shard of the sum over ranks; the rest of data is undefined afterwards.
void dist_reduce_scatter(float* data, size_t n);

// data[n] = each rank's shard of its own data[n]. Elements of element_bytes bytes.
void dist_all_gather(void* data, size_t n, size_t element_bytes);

// The device's work from here on comes after all that has been queued.
void dist_wait(void);

#if defined(__cplusplus) && !defined(__CUDACC__) && !defined(CUDA_EMULATOR)
}
#endif

// Bytes that a rank sends in a ring, the least that each operation takes: dist_all_reduce needs twice this.
static inline double dist_bytes(size_t n, size_t element_bytes, size_t size) {
    return (double)n * (double)element_bytes * (double)(size - 1) / (double)size;
}

#endif
