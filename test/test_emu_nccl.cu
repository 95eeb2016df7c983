/*
NCCL's collectives between processes against sums made on the host: every type and operation, in place, in groups, in
two communicators at once. Under nvcc it runs between the devices that there are. What is refused is the matter of
test_emu_nccl_errors.
*/
#include "nccl_util.h"

#include <nccl.h>
// ----------------------------------------------------------------------------
// values: small integers, so that any order of summation is exact in every type

static const ncclDataType_t types[] = {ncclFloat32, ncclFloat64, ncclBfloat16, ncclInt8,  ncclUint8,
                                       ncclInt32,   ncclUint32,  ncclInt64,    ncclUint64};
static const ncclRedOp_t operations[] = {ncclSum, ncclMax, ncclMin, ncclAvg};
static const size_t counts[] = {0, 1, 7, 1000, 140001};  // the last takes several chunks

static int expected(ncclRedOp_t op, size_t i) {
    int result = value(0, i);
    for (int r = 1; r < ranks; r++) {
        int v = value(r, i);
        if (op == ncclSum || op == ncclAvg) { result += v; }
        if (op == ncclMax && v > result) { result = v; }
        if (op == ncclMin && v < result) { result = v; }
    }
    return result;
}

typedef double (*Want)(ncclRedOp_t op, size_t i);
static double want_reduced(ncclRedOp_t op, size_t i) { return expected(op, i); }
static int source;  // for want_copied
static double want_copied(ncclRedOp_t, size_t i) { return value(source, i); }
static double want_zero(ncclRedOp_t, size_t) { return 0; }

// Is the device array of n elements want(first + i) everywhere? An average may be off by the rounding of the type.
static void check_values(const void* device, ncclDataType_t type, size_t n, Want want, ncclRedOp_t op, size_t first) {
    size_t bytes = type_bytes(type);
    char *got = (char*)xcalloc(n + 1, bytes), expected_bytes[8];
    cuda_ok(cudaDeviceSynchronize());
    cuda_ok(cudaMemcpy(got, device, n * bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) {
        double v = want(op, first + i);
        if (want == want_reduced && op == ncclAvg) {
            // only where the division is exact; others depend on how it is rounded
            if ((int)v % ranks != 0) { continue; }
            v /= ranks;
        }
        set_element(expected_bytes, type, 0, v);
        if (memcmp(got + i * bytes, expected_bytes, bytes) != 0) {
            fprintf(stderr, "type %d, operation %d: element %zu of %zu is not %g\n", type, op, i, n, v);
            require(false);
        }
    }
    free(got);
}

// ----------------------------------------------------------------------------
// collectives

// Runs each way of one collective: into another buffer and in place.
static void all_reduce(ncclComm_t comm, ncclDataType_t type, ncclRedOp_t op, size_t n) {
    void *send = device_values(type, n, rank, 0), *recv = device_values(type, n, -1, 0);
    nccl_ok(ncclAllReduce(send, recv, n, type, op, comm, 0));
    check_values(recv, type, n, want_reduced, op, 0);
    source = rank;
    check_values(send, type, n, want_copied, op, 0);
    nccl_ok(ncclAllReduce(send, send, n, type, op, comm, 0));
    check_values(send, type, n, want_reduced, op, 0);
    cuda_ok(cudaFree(send));
    cuda_ok(cudaFree(recv));
}

static void reduce(ncclComm_t comm, ncclDataType_t type, ncclRedOp_t op, size_t n) {
    for (int root = 0; root < (op == ncclSum ? ranks : 1); root++) {
        void *send = device_values(type, n, rank, 0), *recv = device_values(type, n, -1, 0);
        bool here = root == rank;
        nccl_ok(ncclReduce(send, here || n % 2 ? recv : NULL, n, type, op, root, comm, 0));
        check_values(recv, type, n, here ? want_reduced : want_zero, op, 0);
        nccl_ok(ncclReduce(send, send, n, type, op, root, comm, 0));
        source = rank;
        check_values(send, type, n, here ? want_reduced : want_copied, op, 0);
        cuda_ok(cudaFree(send));
        cuda_ok(cudaFree(recv));
    }
}

static void reduce_scatter(ncclComm_t comm, ncclDataType_t type, ncclRedOp_t op, size_t n) {
    size_t mine = (size_t)rank * n;
    char* send = (char*)device_values(type, n * (size_t)ranks, rank, 0);
    void* recv = device_values(type, n, -1, 0);
    nccl_ok(ncclReduceScatter(send, recv, n, type, op, comm, 0));
    check_values(recv, type, n, want_reduced, op, mine);
    char* place = send + mine * type_bytes(type);
    nccl_ok(ncclReduceScatter(send, place, n, type, op, comm, 0));
    check_values(place, type, n, want_reduced, op, mine);
    source = rank;  // the other blocks are only read
    check_values(send, type, mine, want_copied, op, 0);
    cuda_ok(cudaFree(send));
    cuda_ok(cudaFree(recv));
}

static void check_gathered(const char* recv, ncclDataType_t type, size_t n) {
    for (source = 0; source < ranks; source++) {
        check_values(recv + (size_t)source * n * type_bytes(type), type, n, want_copied, ncclSum, 0);
    }
}

static void all_gather(ncclComm_t comm, ncclDataType_t type, size_t n) {
    void* send = device_values(type, n, rank, 0);
    char* recv = (char*)device_values(type, n * (size_t)ranks, -1, 0);
    nccl_ok(ncclAllGather(send, recv, n, type, comm, 0));
    check_gathered(recv, type, n);
    cuda_ok(cudaMemset(recv, 0, n * (size_t)ranks * type_bytes(type)));
    char* place = recv + (size_t)rank * n * type_bytes(type);
    cuda_ok(cudaMemcpy(place, send, n * type_bytes(type), cudaMemcpyDeviceToDevice));
    nccl_ok(ncclAllGather(place, recv, n, type, comm, 0));
    check_gathered(recv, type, n);
    cuda_ok(cudaFree(send));
    cuda_ok(cudaFree(recv));
}

static void broadcast(ncclComm_t comm, ncclDataType_t type, size_t n) {
    for (int root = 0; root < ranks; root++) {
        void *send = device_values(type, n, rank, 0), *recv = device_values(type, n, -1, 0);
        nccl_ok(ncclBroadcast(root == rank ? send : NULL, recv, n, type, root, comm, 0));
        source = root;
        check_values(recv, type, n, want_copied, ncclSum, 0);
        nccl_ok(ncclBroadcast(send, send, n, type, root, comm, 0));
        check_values(send, type, n, want_copied, ncclSum, 0);
        cuda_ok(cudaFree(send));
        cuda_ok(cudaFree(recv));
    }
}

static void every_collective(void) {
    ncclComm_t comm = start();
    int n, r;
    nccl_ok(ncclCommCount(comm, &n));
    nccl_ok(ncclCommUserRank(comm, &r));
    require(n == ranks && r == rank);
    for (ncclDataType_t type : types) {
        for (size_t count : counts) {
            bool large = count > 1000;  // these with two types and sums only
            if (large && type != ncclFloat32 && type != ncclBfloat16) { continue; }
            for (ncclRedOp_t op : operations) {
                if (large && op != ncclSum) { continue; }
                all_reduce(comm, type, op, count);
                reduce_scatter(comm, type, op, count);
                reduce(comm, type, op, count);
            }
            all_gather(comm, type, count);
            broadcast(comm, type, count);
        }
    }
    ncclResult_t state;
    nccl_ok(ncclCommGetAsyncError(comm, &state));
    require(state == ncclSuccess);
    nccl_ok(ncclCommFinalize(comm));
    nccl_ok(ncclCommDestroy(comm));
}

static void test_collectives(void**) {
    for (int n = 1; n <= RANKS; n++) { expect_good(n, every_collective); }
}

static __global__ void add_one(float* x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { x[i] += 1; }
}

// Kernels before and after, a group in a group, buffers that reach to the end of their memory.
static void kernels_and_groups(void) {
    enum { N = 333, BLOCK = 64, GRID = (N + BLOCK - 1) / BLOCK };
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    cudaStream_t stream;
    cuda_ok(cudaStreamCreate(&stream));
    nccl_ok(ncclCommInitRankConfig(&comm, ranks, meeting->ids[0], rank, &config));
    float *a = (float*)device_values(ncclFloat32, N, rank, 0), *b = NULL, *c = NULL;
    cuda_ok(cudaMalloc((void**)&b, sizeof(float) * N));
    cuda_ok(cudaMalloc((void**)&c, sizeof(float) * N * (size_t)ranks));
    LAUNCH(add_one, GRID, BLOCK, 0, stream, a, N);
    nccl_ok(ncclGroupStart());
    nccl_ok(ncclAllReduce(a, b, N, ncclFloat32, ncclSum, comm, stream));
    nccl_ok(ncclGroupStart());
    nccl_ok(ncclAllGather(a, c, N, ncclFloat32, comm, stream));
    nccl_ok(ncclGroupEnd());
    nccl_ok(ncclGroupEnd());
    LAUNCH(add_one, GRID, BLOCK, 0, stream, b, N);
    LAUNCH(add_one, GRID * RANKS, BLOCK, 0, stream, c, (unsigned)(N * ranks));
    cuda_ok(cudaStreamSynchronize(stream));
    cuda_ok(cudaGetLastError());
    float sums[N], gathered[N * RANKS];
    cuda_ok(cudaMemcpy(sums, b, sizeof sums, cudaMemcpyDeviceToHost));
    cuda_ok(cudaMemcpy(gathered, c, sizeof(float) * N * (size_t)ranks, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++) {
        require(sums[i] == (float)(expected(ncclSum, (size_t)i) + ranks + 1));
        for (int r = 0; r < ranks; r++) { require(gathered[r * N + i] == (float)(value(r, (size_t)i) + 2)); }
    }
    cuda_ok(cudaFree(a));
    cuda_ok(cudaFree(b));
    cuda_ok(cudaFree(c));
    nccl_ok(ncclCommDestroy(comm));
    cuda_ok(cudaStreamDestroy(stream));
}

static void test_kernels_and_groups(void**) {
    for (int n = 1; n <= 3; n++) { expect_good(n, kernels_and_groups); }
}

// One of all ranks and one of each half, in turns: sums in the halves, which the others then receive.
static void two_communicators(void) {
    ncclComm_t all = start(), half;
    int members = ranks / 2;
    nccl_ok(ncclCommInitRank(&half, members, meeting->ids[1 + rank / members], rank % members));
    float mine = (float)(rank + 1), got, *x = (float*)device_values(ncclFloat32, 1, -1, 0);
    for (int root = 0; root < ranks; root++) {
        cuda_ok(cudaMemcpy(x, &mine, sizeof mine, cudaMemcpyHostToDevice));
        nccl_ok(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, half, 0));
        nccl_ok(ncclBroadcast(x, x, 1, ncclFloat32, root, all, 0));
        cuda_ok(cudaMemcpy(&got, x, sizeof got, cudaMemcpyDeviceToHost));
        int first = root / members * members;
        require(got == (float)(members == 1 ? first + 1 : 2 * first + 3));
    }
    cuda_ok(cudaFree(x));
    nccl_ok(ncclCommDestroy(half));
    nccl_ok(ncclCommDestroy(all));
}

static void test_two_communicators(void**) {
    expect_good(2, two_communicators);
    expect_good(4, two_communicators);
}

#ifdef CUDA_EMULATOR
// Sums in the order of the ranks and, of bf16, in fp32: both with the same bits everywhere, which GPUs do not promise.
static void order_of_sums(void) {
    const float terms[] = {1e8f, 1, -1e8f, 1}, halves[] = {256, 1, 1, 0};
    ncclComm_t comm = start();
    float got, *x = (float*)device_values(ncclFloat32, 1, -1, 0);
    uint16_t raw, *h = (uint16_t*)device_values(ncclBfloat16, 1, -1, 0);
    cuda_ok(cudaMemcpy(x, &terms[rank], 4, cudaMemcpyHostToDevice));
    set_element(&raw, ncclBfloat16, 0, halves[rank]);
    cuda_ok(cudaMemcpy(h, &raw, 2, cudaMemcpyHostToDevice));
    nccl_ok(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, 0));
    nccl_ok(ncclAllReduce(h, h, 1, ncclBfloat16, ncclSum, comm, 0));
    cuda_ok(cudaMemcpy(&got, x, 4, cudaMemcpyDeviceToHost));
    cuda_ok(cudaMemcpy(&raw, h, 2, cudaMemcpyDeviceToHost));
    require(got == 1);       // ((1e8 + 1) - 1e8) + 1
    require(raw == 0x4381);  // 258; rounded after each term it would be 256
    cuda_ok(cudaFree(x));
    cuda_ok(cudaFree(h));
    nccl_ok(ncclCommDestroy(comm));
}

static void test_order_of_sums(void**) { expect_good(4, order_of_sums); }
#endif

int main(void) {
#ifdef CUDA_EMULATOR
    emu::config().seed = 0;  // the order of threads says nothing here
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_kernels_and_groups),
        cmocka_unit_test(test_two_communicators),
#ifdef CUDA_EMULATOR
        cmocka_unit_test(test_order_of_sums),
#endif
    };
    return run_nccl_tests(tests, sizeof tests / sizeof tests[0]);
}
