/*
Sums and shares over ranks on GPUs, through NCCL. Contract in dist.h.

Operations go to a stream of their own, which waits for what main_stream holds when they start; dist_wait makes
main_stream wait for them. NCCL's identifier travels through ranks.h, and is all that NCCL needs from there.
*/
#ifndef DIST_CUH
#define DIST_CUH

#include "../cuda_common.cuh"
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
    if (ranks.local_size <= (size_t)count && ranks.local_rank >= (size_t)count) {
        fatal(
            "local rank %zu (LOCAL_RANK, SLURM_LOCALID) on a host with %d GPUs, expected 0 to %d; number the ranks of "
            "each host from 0, or leave it out",
            ranks.local_rank, count, count - 1);
    }
    if (ranks.local_size > (size_t)count) {
        fatal("%zu ranks on this host, which has %d GPUs; start at most one rank for each", ranks.local_size, count);
    }
    return text("cuda:%zu", ranks.local_rank);
}

#ifdef HAVE_NCCL
#include <nccl.h>

#include <vector>

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

// NCCL refuses two ranks on one GPU without saying so.
static void check_devices_differ(void) {
    struct cudaDeviceProp mine;
    int device;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&mine, device));
    std::vector<cudaUUID_t> all(ranks.size);
    ranks_all_gather(all.data(), &mine.uuid, sizeof mine.uuid);
    for (size_t r = 1; r < ranks.size; r++) {
        for (size_t other = 0; other < r; other++) {
            if (memcmp(&all[r], &all[other], sizeof mine.uuid) != 0) { continue; }
            fatal(
                "ranks %zu and %zu are on the same GPU, which NCCL cannot do; start at most one rank for each GPU, and "
                "check LOCAL_RANK and CUDA_VISIBLE_DEVICES",
                other, r);
        }
    }
}

void dist_open(void) {
    if (ranks.size == 1) { return; }
    check_devices_differ();
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (ranks.rank == 0) { ncclCheck(ncclGetUniqueId(&id)); }
    ranks_broadcast(&id, sizeof id);
    ncclCheck(ncclCommInitRank(&dist.network, (int)ranks.size, id, (int)ranks.rank));
    cudaCheck(cudaStreamCreateWithFlags(&dist.stream, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreateWithFlags(&dist.ready, cudaEventDisableTiming));
    cudaCheck(cudaEventCreateWithFlags(&dist.done, cudaEventDisableTiming));
}

// Operations wait until there are enough bytes for the network's full speed, then go as one group. The emulator's
// models are a thousandth of real ones.
#ifdef CUDA_EMULATOR
constexpr size_t GROUP_BYTES = 64 << 10;
#else
constexpr size_t GROUP_BYTES = 64 << 20;
#endif

typedef struct {
    DistOperation operation;
    char* data;
    size_t n, element_bytes;
} DistJob;

static std::vector<DistJob> dist_jobs;
static size_t dist_job_bytes;

// NCCL's shards are of one size. What is left over in the last rank's, fewer elements than 16 a rank, goes on its own.
static void dist_launch(const DistJob* job) {
    const size_t shard = part_begin(job->n, 1, ranks.size), rest = job->n - shard * ranks.size;
    const int last = (int)ranks.size - 1;
    const size_t bytes = job->element_bytes;
    char *own = job->data + ranks.rank * shard * bytes, *end = job->data + ranks.size * shard * bytes;
    ncclComm_t network = dist.network;
    cudaStream_t stream = dist.stream;
    switch (job->operation) {
        case ALL_REDUCE:
            ncclCheck(ncclAllReduce(job->data, job->data, job->n, ncclFloat, ncclSum, network, stream));
            break;
        case REDUCE_SCATTER:
            if (shard > 0) { ncclCheck(ncclReduceScatter(job->data, own, shard, ncclFloat, ncclSum, network, stream)); }
            if (rest > 0) { ncclCheck(ncclReduce(end, end, rest, ncclFloat, ncclSum, last, network, stream)); }
            break;
        case ALL_GATHER:
            if (shard > 0) { ncclCheck(ncclAllGather(own, job->data, shard * bytes, ncclInt8, network, stream)); }
            if (rest > 0) { ncclCheck(ncclBroadcast(end, end, rest * bytes, ncclInt8, last, network, stream)); }
            break;
    }
}

// The network waits for what the device has to do so far, which the operations' data are part of.
static void dist_flush(void) {
    if (dist_jobs.empty()) { return; }
    cudaCheck(cudaEventRecord(dist.ready, main_stream));
    cudaCheck(cudaStreamWaitEvent(dist.stream, dist.ready, 0));
    ncclCheck(ncclGroupStart());
    for (const DistJob& job : dist_jobs) { dist_launch(&job); }
    ncclCheck(ncclGroupEnd());
    dist_jobs.clear();
    dist_job_bytes = 0;
}

static void dist_enqueue(DistOperation operation, void* data, size_t n, size_t element_bytes) {
    if (!dist.network || n == 0) { return; }
    dist_jobs.push_back({operation, (char*)data, n, element_bytes});
    dist_job_bytes += n * element_bytes;
    if (dist_job_bytes >= GROUP_BYTES) { dist_flush(); }
}

void dist_all_reduce(float* data, size_t n) { dist_enqueue(ALL_REDUCE, data, n, sizeof(float)); }

void dist_reduce_scatter(float* data, size_t n) { dist_enqueue(REDUCE_SCATTER, data, n, sizeof(float)); }

void dist_all_gather(void* data, size_t n, size_t element_bytes) { dist_enqueue(ALL_GATHER, data, n, element_bytes); }

void dist_wait(void) {
    if (!dist.network) { return; }
    dist_flush();
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
