/*
Sums and shares over ranks on GPUs, through NCCL. Contract in dist.h.

Operations go to a stream of their own, which waits for what main_stream holds at the time; dist_wait makes
main_stream wait for them. NCCL's identifier travels through ranks.h, and is all that NCCL needs from there.
*/
#ifndef DIST_CUH
#define DIST_CUH

#include "cuda_common.cuh"
#include "dist.h"
#include "ranks.h"

bool dist_needs_mpi(void) { return false; }

size_t dist_ranks_per_device(void) { return 1; }

const char* dist_device(const char* device) {
    if (ranks.local_size == 1) { return device; }
    if (device && *device && strcmp(device, "auto") != 0 && strcmp(device, "cuda") != 0) {
        fatal("--device %s with %zu ranks on this host, which need a GPU each; leave --device out", device,
              ranks.local_size);
    }
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count <= 1) { return "cuda:0"; }  // or its launcher shows it one
    if (ranks.local_rank >= (size_t)count) {
        fatal("%zu ranks on this host, which has %d GPUs; start at most one rank for each", ranks.local_size, count);
    }
    return text("cuda:%zu", ranks.local_rank);
}

#ifdef HAVE_NCCL
#include <nccl.h>

static struct {
    ncclComm_t network;
    cudaStream_t stream;
    cudaEvent_t ready, done;
} dist;

#define ncclCheck(call)                                                                                         \
    do {                                                                                                        \
        ncclResult_t result_ = (call);                                                                          \
        if (result_ != ncclSuccess) {                                                                           \
            fatal("%s:%d: NCCL: %s: %s; set NCCL_DEBUG=INFO to see more", __FILE__, __LINE__,                   \
                  ncclGetErrorString(result_), dist.network ? ncclGetLastError(dist.network) : "at its start"); \
        }                                                                                                       \
    } while (0)

void dist_open(void) {
    if (ranks.size == 1) { return; }
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (ranks.rank == 0) { ncclCheck(ncclGetUniqueId(&id)); }
    ranks_broadcast(&id, sizeof id);
    ncclCheck(ncclCommInitRank(&dist.network, (int)ranks.size, id, (int)ranks.rank));
    cudaCheck(cudaStreamCreateWithFlags(&dist.stream, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreateWithFlags(&dist.ready, cudaEventDisableTiming));
    cudaCheck(cudaEventCreateWithFlags(&dist.done, cudaEventDisableTiming));
}

void dist_wait(void) {
    if (!dist.network) { return; }
    cudaCheck(cudaEventRecord(dist.done, dist.stream));
    cudaCheck(cudaStreamWaitEvent(main_stream, dist.done, 0));
}

void dist_close(void) {
    if (!dist.network) { return; }
    dist_wait();
    device_synchronize();
    ncclCheck(ncclCommDestroy(dist.network));
    cudaCheck(cudaEventDestroy(dist.ready));
    cudaCheck(cudaEventDestroy(dist.done));
    cudaCheck(cudaStreamDestroy(dist.stream));
    memset(&dist, 0, sizeof dist);
}

// The network waits for what the device has to do so far.
static bool dist_begin(size_t n) {
    if (!dist.network || n == 0) { return false; }
    cudaCheck(cudaEventRecord(dist.ready, main_stream));
    cudaCheck(cudaStreamWaitEvent(dist.stream, dist.ready, 0));
    return true;
}

void dist_all_reduce(float* data, size_t n) {
    if (!dist_begin(n)) { return; }
    ncclCheck(ncclAllReduce(data, data, n, ncclFloat, ncclSum, dist.network, dist.stream));
}

// NCCL's shards are of one size. What is left over in the last rank's, fewer elements than 16 a rank, goes on its own.
void dist_reduce_scatter(float* data, size_t n) {
    if (!dist_begin(n)) { return; }
    const size_t shard = part_begin(n, 1, ranks.size), rest = n - shard * ranks.size;
    const int last = (int)ranks.size - 1;
    float* end = data + shard * ranks.size;
    ncclCheck(ncclGroupStart());
    if (shard > 0) {
        ncclCheck(
            ncclReduceScatter(data, data + ranks.rank * shard, shard, ncclFloat, ncclSum, dist.network, dist.stream));
    }
    if (rest > 0) { ncclCheck(ncclReduce(end, end, rest, ncclFloat, ncclSum, last, dist.network, dist.stream)); }
    ncclCheck(ncclGroupEnd());
}

void dist_all_gather(void* data, size_t n, size_t element_bytes) {
    if (!dist_begin(n)) { return; }
    const size_t shard = part_begin(n, 1, ranks.size), rest = n - shard * ranks.size;
    const int last = (int)ranks.size - 1;
    char *bytes = (char*)data, *end = bytes + shard * ranks.size * element_bytes;
    ncclCheck(ncclGroupStart());
    if (shard > 0) {
        ncclCheck(ncclAllGather(bytes + ranks.rank * shard * element_bytes, bytes, shard * element_bytes, ncclInt8,
                                dist.network, dist.stream));
    }
    if (rest > 0) {
        ncclCheck(ncclBroadcast(end, end, rest * element_bytes, ncclInt8, last, dist.network, dist.stream));
    }
    ncclCheck(ncclGroupEnd());
}

#else

void dist_open(void) {
    if (ranks.size > 1) {
        fatal("%zu ranks, but this program was built without NCCL; install NCCL's header and library, then make again",
              ranks.size);
    }
}
void dist_close(void) {}
void dist_wait(void) {}
void dist_all_reduce(float*, size_t) {}
void dist_reduce_scatter(float*, size_t) {}
void dist_all_gather(void*, size_t, size_t) {}

#endif

#endif
