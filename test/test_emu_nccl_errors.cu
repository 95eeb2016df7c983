/*
The emulator's NCCL finds what would hang, or be garbage, on GPUs: ranks that disagree, buffers that do not fit, ranks
that end, leave, or never come, streams that do not wait. Each case says what the ranks' calls return and what is
printed. Only for the emulator.
*/
#include "nccl_util.h"

#include <nccl.h>
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static ncclComm_t comm;
static char *buffer, *other;
enum { BUFFER = 1024 };

static void start_with_buffers(void) {
    comm = start();
    buffer = (char*)device_values(ncclUint8, BUFFER, rank, 0);
    other = (char*)device_values(ncclUint8, BUFFER, rank, 0);
    nccl_ok(ncclAllReduce(buffer, other, 100, ncclFloat32, ncclSum, comm, 0));
}

static void finish(void) {
    cuda_ok(cudaFree(buffer));
    cuda_ok(cudaFree(other));
    nccl_ok(ncclCommDestroy(comm));
    exit(0);
}

// This rank's call ended as it should, and so does the next; then the communicator can still be destroyed.
static void expect_result(ncclResult_t got, ncclResult_t want) {
    if (got != want) {
        fprintf(stderr, "rank %d: %s, expected %s\n", rank, ncclGetErrorString(got), ncclGetErrorString(want));
    }
    require(got == want);
    require(strlen(ncclGetLastError(comm)) > 0);
    ncclResult_t state;
    nccl_ok(ncclCommGetAsyncError(comm, &state));
    require(state == want);
    require(ncclAllReduce(buffer, other, 1, ncclFloat32, ncclSum, comm, 0) == want);
    finish();
}

#define REDUCE_WITH(count, type, op, root) ncclReduce(buffer, other, count, type, op, root, comm, 0)
static void other_count(void) {
    start_with_buffers();
    expect_result(REDUCE_WITH(rank == 1 ? 9 : 8, ncclFloat32, ncclSum, 0), ncclInvalidUsage);
}
static void other_count_of_none(void) {
    start_with_buffers();
    expect_result(REDUCE_WITH(rank == 1 ? 0 : 8, ncclFloat32, ncclSum, 0), ncclInvalidUsage);
}
static void other_type(void) {
    start_with_buffers();
    expect_result(REDUCE_WITH(8, rank == 1 ? ncclInt32 : ncclFloat32, ncclSum, 0), ncclInvalidUsage);
}
static void other_operation(void) {
    start_with_buffers();
    expect_result(REDUCE_WITH(8, ncclFloat32, rank == 1 ? ncclMax : ncclSum, 0), ncclInvalidUsage);
}
static void other_root(void) {
    start_with_buffers();
    expect_result(REDUCE_WITH(8, ncclFloat32, ncclSum, rank == 1), ncclInvalidUsage);
}
static void other_collective(void) {
    start_with_buffers();
    expect_result(rank == 1 ? ncclAllReduce(buffer, other, 8, ncclFloat32, ncclSum, comm, 0)
                            : ncclAllGather(buffer, other, 8, ncclFloat32, comm, 0),
                  ncclInvalidUsage);
}
static void other_order_in_group(void) {
    start_with_buffers();
    nccl_ok(ncclGroupStart());
    if (rank == 1) { nccl_ok(ncclBroadcast(buffer, buffer, 8, ncclFloat32, 0, comm, 0)); }
    nccl_ok(ncclAllReduce(other, other, 8, ncclFloat32, ncclSum, comm, 0));
    if (rank != 1) { nccl_ok(ncclBroadcast(buffer, buffer, 8, ncclFloat32, 0, comm, 0)); }
    expect_result(ncclGroupEnd(), ncclInvalidUsage);
}

// Rank 1 makes a call that is refused; the others wait for it, and must learn that it will not come.
#define REFUSED(name, call)                                                                             \
    static void name(void) {                                                                            \
        start_with_buffers();                                                                           \
        if (rank == 1) { expect_result(call, ncclInvalidArgument); }                                    \
        expect_result(ncclAllReduce(buffer, other, 8, ncclFloat32, ncclSum, comm, 0), ncclRemoteError); \
    }
REFUSED(host_memory, ncclAllReduce(output, other, 8, ncclFloat32, ncclSum, comm, 0))
REFUSED(send_past_end, ncclAllReduce(buffer + BUFFER - 28, other, 8, ncclFloat32, ncclSum, comm, 0))
REFUSED(gather_past_end, ncclAllGather(buffer, other, BUFFER / 8 + 1, ncclFloat32, comm, 0))
REFUSED(scatter_past_end, ncclReduceScatter(buffer, other, BUFFER / 8 + 1, ncclFloat32, ncclSum, comm, 0))
REFUSED(misaligned, ncclAllReduce(buffer + 2, other, 8, ncclFloat32, ncclSum, comm, 0))
REFUSED(overlapping, ncclAllReduce(buffer, buffer + 4, 8, ncclFloat32, ncclSum, comm, 0))
REFUSED(scatter_in_wrong_place, ncclReduceScatter(buffer, buffer, 8, ncclFloat32, ncclSum, comm, 0))
REFUSED(gather_in_wrong_place, ncclAllGather(buffer, buffer, 8, ncclFloat32, comm, 0))
REFUSED(bad_root, ncclBroadcast(buffer, other, 8, ncclFloat32, 2, comm, 0))
REFUSED(float16, ncclAllReduce(buffer, other, 8, ncclFloat16, ncclSum, comm, 0))

static void dead_peer(void) {
    start_with_buffers();
    if (rank == 1) { kill(getpid(), SIGKILL); }
    expect_result(REDUCE_WITH(8, ncclFloat32, ncclSum, 0), ncclRemoteError);
}
static void left_peer(void) {
    start_with_buffers();
    if (rank == 1) { finish(); }
    expect_result(REDUCE_WITH(8, ncclFloat32, ncclSum, 0), ncclRemoteError);
}
static void aborted(void) {
    start_with_buffers();
    if (rank == 1) {
        nccl_ok(ncclCommAbort(comm));
        comm = NULL;
        finish();
    }
    expect_result(REDUCE_WITH(8, ncclFloat32, ncclSum, 0), ncclRemoteError);
}
static void slow_peer(void) {
    start_with_buffers();
    setenv("EMU_NCCL_TIMEOUT", "0.5", 1);
    if (rank == 1) {
        while (!__atomic_load_n(&meeting->gave_up, __ATOMIC_SEQ_CST)) { usleep(1000); }
        expect_result(REDUCE_WITH(8, ncclFloat32, ncclSum, 0), ncclRemoteError);
    }
    ncclResult_t result = REDUCE_WITH(8, ncclFloat32, ncclSum, 0);
    __atomic_store_n(&meeting->gave_up, 1, __ATOMIC_SEQ_CST);
    expect_result(result, ncclSystemError);
}
static void absent_peer(void) {
    setenv("EMU_NCCL_TIMEOUT", "0.5", 1);
    if (rank == 1) { exit(0); }
    require(ncclCommInitRank(&comm, ranks, meeting->ids[0], rank) == ncclSystemError && !comm);
}
static void same_rank(void) {
    ncclResult_t result = ncclCommInitRank(&comm, ranks, meeting->ids[0], 0);
    require(result == ncclInvalidUsage || result == ncclRemoteError);
}
static void other_number_of_ranks(void) {
    ncclResult_t result = ncclCommInitRank(&comm, ranks + rank, meeting->ids[0], rank);
    require(result == ncclInvalidUsage || result == ncclRemoteError);
}
static void same_device(void) {
    cuda_ok(cudaSetDevice(0));
    require(ncclCommInitRank(&comm, ranks, meeting->ids[0], rank) == ncclInvalidUsage);
}
static void after_finalize(void) {
    start_with_buffers();
    nccl_ok(ncclCommFinalize(comm));
    ncclResult_t result = REDUCE_WITH(8, ncclFloat32, ncclSum, 0);
    expect_result(result, ncclInvalidUsage);
}

typedef struct {
    const char* name;
    void (*run)(void);
    const char* words;
    int good;  // of two ranks
} Failure;

static const Failure failures[] = {
    {"other count", other_count, "is ncclReduce of 8 float32, sum, root 0, but rank 1 calls ncclReduce of 9 float32",
     2},
    {"other count of none", other_count_of_none, "of 0 float32", 2},
    {"other type", other_type, "rank 1 calls ncclReduce of 8 int32", 2},
    {"other operation", other_operation, "rank 1 calls ncclReduce of 8 float32, max", 2},
    {"other root", other_root, "root 1", 2},
    {"other collective", other_collective, "ncclAllGather of 8 float32, but rank 1 calls ncclAllReduce of 8 float32",
     2},
    {"other order in a group", other_order_in_group, "but rank 1 calls ncclBroadcast", 2},
    {"host memory", host_memory, "send buffer of 32 bytes is not in device memory", 2},
    {"send past the end", send_past_end, "send buffer of 32 bytes ends before its last element", 2},
    {"gather past the end", gather_past_end, "receive buffer of 1032 bytes ends before", 2},
    {"scatter past the end", scatter_past_end, "send buffer of 1032 bytes ends before", 2},
    {"misaligned", misaligned, "is not aligned", 2},
    {"overlapping", overlapping, "buffers overlap", 2},
    {"scatter in the wrong place", scatter_in_wrong_place, "buffers overlap", 2},
    {"gather in the wrong place", gather_in_wrong_place, "buffers overlap", 2},
    {"bad root", bad_root, "no rank 2", 2},
    {"float16", float16, "type 6 is unknown", 2},
    {"dead peer", dead_peer, "has ended", 1},
    {"peer that left", left_peer, "has destroyed the communicator", 2},
    {"abort", aborted, "ncclCommAbort", 2},
    {"slow peer", slow_peer, "rank 1 has not come within 0.5 s", 2},
    {"absent peer", absent_peer, "rank 1 has not come within 0.5 s", 2},
    {"same rank twice", same_rank, "is taken", 2},
    {"other number of ranks", other_number_of_ranks, "has", 2},
    {"same device", same_device, "uses device 0 as well", 2},
    {"after finalize", after_finalize, "after ncclCommFinalize", 2},
};

// Has a segment stayed behind?
static bool segment_exists(void) {
    char path[sizeof(ncclUniqueId) + 16];
    snprintf(path, sizeof path, "/dev/shm%s", meeting->ids[0].internal);
    return access(path, F_OK) == 0;
}

static void test_failure(void** state) {
    const Failure* f = (const Failure*)*state;
    double begin = seconds();
    int good = run_ranks(2, f->run, output, sizeof output);
    double took = seconds() - begin;
    if (good != f->good || !strstr(output, f->words) || strncmp(output, "emulator: ", 10) != 0 || took > 45) {
        print_error("%s: %d ranks passed, expected %d, in %.1f s; expected '%s' in: %s\n", f->name, good, f->good, took,
                    f->words, output);
        fail();
    }
    assert_false(segment_exists());
}

// ----------------------------------------------------------------------------
// a forgotten wait between streams, with collectives or kernels as late as allowed

enum Forgotten { NOTHING, WAIT_OF_KERNEL, WAIT_OF_OVERWRITER, WAIT_OF_HOST, WAIT_OF_COLLECTIVE };
static Forgotten forgotten;
static emu::Late late;

static __global__ void add_one(float* x) { x[threadIdx.x] += 1; }

// a = rank + 1, b = sum of a, then a + 1 and b + 1: kernels in one stream, the collective in another.
static void two_streams(void) {
    comm = start();
    cudaStream_t compute, communicate;
    cudaEvent_t ready, done;
    emu::config().late = late;
    cuda_ok(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    cuda_ok(cudaStreamCreateWithFlags(&communicate, cudaStreamNonBlocking));
    cuda_ok(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    cuda_ok(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    float first = (float)rank, got[2], *a = (float*)device_values(ncclFloat32, 1, -1, 0);
    float* b = (float*)device_values(ncclFloat32, 1, -1, 0);
    cuda_ok(cudaMemcpyAsync(a, &first, sizeof first, cudaMemcpyHostToDevice, compute));
    LAUNCH(add_one, 1, 1, 0, compute, a);
    cuda_ok(cudaEventRecord(ready, compute));
    if (forgotten != WAIT_OF_COLLECTIVE) { cuda_ok(cudaStreamWaitEvent(communicate, ready, 0)); }
    nccl_ok(ncclAllReduce(a, b, 1, ncclFloat32, ncclSum, comm, communicate));
    cuda_ok(cudaEventRecord(done, communicate));
    if (forgotten == WAIT_OF_OVERWRITER) { LAUNCH(add_one, 1, 1, 0, compute, a); }
    if (forgotten == WAIT_OF_KERNEL) { LAUNCH(add_one, 1, 1, 0, compute, b); }
    if (forgotten != WAIT_OF_HOST) { cuda_ok(cudaStreamWaitEvent(compute, done, 0)); }
    if (forgotten != WAIT_OF_OVERWRITER) { LAUNCH(add_one, 1, 1, 0, compute, a); }
    if (forgotten != WAIT_OF_KERNEL && forgotten != WAIT_OF_HOST) { LAUNCH(add_one, 1, 1, 0, compute, b); }
    cuda_ok(cudaStreamSynchronize(compute));
    cuda_ok(cudaMemcpy(&got[0], a, sizeof got[0], cudaMemcpyDeviceToHost));
    cuda_ok(cudaMemcpy(&got[1], b, sizeof got[1], cudaMemcpyDeviceToHost));
    cuda_ok(cudaDeviceSynchronize());
    require(got[0] == (float)(rank + 2));
    require(got[1] == (float)(ranks * (ranks + 1) / 2 + (forgotten != WAIT_OF_HOST)));
    cuda_ok(cudaFree(a));
    cuda_ok(cudaFree(b));
    nccl_ok(ncclCommDestroy(comm));
    cuda_ok(cudaEventDestroy(ready));
    cuda_ok(cudaEventDestroy(done));
    cuda_ok(cudaStreamDestroy(compute));
    cuda_ok(cudaStreamDestroy(communicate));
}

static void check_forgotten(emu::Late what, Forgotten wait, bool is_found) {
    late = what;
    forgotten = wait;
    int good = run_ranks(2, two_streams, output, sizeof output);
    if (is_found ? good != 0 || !strstr(output, "not true: got[1]") : good != 2) {
        print_error("late %d, forgotten wait %d: %d ranks passed: %s\n", late, forgotten, good, output);
        fail();
    }
}

static void test_late(void**) {
    check_forgotten(emu::COLLECTIVES_LATE, NOTHING, false);
    check_forgotten(emu::COLLECTIVES_LATE, WAIT_OF_KERNEL, true);
    check_forgotten(emu::COLLECTIVES_LATE, WAIT_OF_OVERWRITER, true);
    check_forgotten(emu::COLLECTIVES_LATE, WAIT_OF_HOST, true);
    check_forgotten(emu::KERNELS_LATE, NOTHING, false);
    check_forgotten(emu::KERNELS_LATE, WAIT_OF_COLLECTIVE, true);
}

// A collective that fails when it is run late is an error of the device.
static void late_failure(void) {
    emu::config().late = emu::COLLECTIVES_LATE;
    start_with_buffers();
    cuda_ok(cudaDeviceSynchronize());
    nccl_ok(REDUCE_WITH(rank == 1 ? 9 : 8, ncclFloat32, ncclSum, 0));
    cudaDeviceSynchronize();
    require(cudaGetLastError() == cudaErrorLaunchFailure);
    nccl_ok(ncclCommDestroy(comm));
}

static void test_late_failure(void**) {
    assert_int_equal(run_ranks(2, late_failure, output, sizeof output), 0);  // the program cannot end well
    assert_non_null(strstr(output, "rank 1 calls ncclReduce of 9 float32"));
    assert_null(strstr(output, "not true"));
}

// ----------------------------------------------------------------------------
// arguments

static void bad_arguments(void) {
    ncclUniqueId none = {{0}};
    int n;
    require(ncclCommInitRank(&comm, 1, none, 0) == ncclInvalidArgument);
    require(ncclCommInitRank(&comm, 2, meeting->ids[0], 2) == ncclInvalidArgument);
    require(ncclCommInitRank(NULL, 1, meeting->ids[0], 0) == ncclInvalidArgument);
    require(ncclCommCount(NULL, &n) == ncclInvalidArgument);
    require(ncclAllReduce(NULL, NULL, 1, ncclFloat32, ncclSum, NULL, 0) == ncclInvalidArgument);
    require(ncclGroupEnd() == ncclInvalidUsage);
    nccl_ok(ncclGetVersion(&n));
    require(n == NCCL_VERSION_CODE);
}

static void devices(void) {
    int n, device;
    struct cudaDeviceProp properties;
    cuda_ok(cudaGetDeviceCount(&n));
    require(n == RANKS);
    require(cudaSetDevice(RANKS) == cudaErrorInvalidDevice && cudaSetDevice(-1) == cudaErrorInvalidDevice);
    cuda_ok(cudaGetDevice(&device));
    require(device == rank);
    cuda_ok(cudaGetDeviceProperties(&properties, RANKS - 1));
    require(cudaGetDeviceProperties(&properties, RANKS) == cudaErrorInvalidDevice);
}

static void test_arguments(void**) {
    expect_good(1, bad_arguments);
    expect_good(2, devices);
}

int main(void) {
    emu::config().seed = 0;  // the order of threads says nothing here
    enum { FAILURES = sizeof failures / sizeof failures[0] };
    struct CMUnitTest tests[FAILURES + 3] = {cmocka_unit_test(test_arguments), cmocka_unit_test(test_late),
                                             cmocka_unit_test(test_late_failure)};
    size_t n = 3;
    for (const Failure& f : failures) { tests[n++] = {f.name, test_failure, NULL, NULL, const_cast<Failure*>(&f)}; }
    return run_nccl_tests(tests, n);
}
