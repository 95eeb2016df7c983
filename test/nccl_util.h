/*
What the tests of NCCL share: ranks as processes, each forked before anything of CUDA was called, and arrays of known
values. Under nvcc there are as many ranks as devices.
*/
#ifndef NCCL_UTIL_H
#define NCCL_UTIL_H

#include "emu_util.h"

#include <nccl.h>
#include <signal.h>
#include <sys/mman.h>

enum { RANKS = 4, IDS = 3 };

// What the ranks of a case share: ids, made by rank 0, and whether a rank has given up waiting for another.
typedef struct {
    ncclUniqueId ids[IDS];
    int ids_made, gave_up;
} Meeting;

static Meeting* meeting;  // made by run_nccl_tests
static int rank, ranks;   // of this process

// In a rank: assertions of cmocka would go on in its copy of the runner.
#define require(condition)                                                                                        \
    do {                                                                                                          \
        if (!(condition)) {                                                                                       \
            fprintf(stderr, "rank %d of %d: %s:%d: not true: %s\n", rank, ranks, __FILE__, __LINE__, #condition); \
            exit(1);                                                                                              \
        }                                                                                                         \
    } while (0)
#define nccl_ok(call) require((call) == ncclSuccess)
#define cuda_ok(call) require((call) == cudaSuccess)

// ----------------------------------------------------------------------------
// starting ranks

static void run_rank(void (*f)(void)) {
    signal(SIGSEGV, SIG_DFL);  // cmocka would catch it
    alarm(300);
    cuda_ok(cudaSetDevice(rank));
    if (rank == 0) {
        for (int i = 0; i < IDS; i++) { nccl_ok(ncclGetUniqueId(&meeting->ids[i])); }
        __atomic_store_n(&meeting->ids_made, 1, __ATOMIC_SEQ_CST);
    }
    while (!__atomic_load_n(&meeting->ids_made, __ATOMIC_SEQ_CST)) { usleep(1000); }
    f();
    exit(0);
}

// Runs f in n processes; output receives what they printed. The number of ranks that ended with status 0.
static int run_ranks(int n, void (*f)(void), char* output, size_t bytes) {
    pid_t children[RANKS];
    int good = 0;
    FILE* log = tmpfile();
    assert_non_null(log);
    memset(meeting, 0, sizeof *meeting);
    fflush(NULL);
    for (int r = 0; r < n; r++) {
        children[r] = fork();
        if (children[r] == 0) {
            dup2(fileno(log), 2);
            rank = r;
            ranks = n;
            run_rank(f);
        }
    }
    // in this order, so that a rank that ends early stays a process that nobody has waited for
    for (int r = 0; r < n; r++) {
        int status;
        waitpid(children[r], &status, 0);
        good += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    rewind(log);
    size_t got = fread(output, 1, bytes - 1, log);
    output[got] = '\0';
    fclose(log);
    return good;
}

static char output[1 << 16];

static inline int device_count(void) {
#ifdef CUDA_EMULATOR
    return RANKS;
#else
    pid_t child = fork();
    if (child == 0) {
        int n = 0;
        _exit(cudaGetDeviceCount(&n) == cudaSuccess ? n : 0);
    }
    int status;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status) < RANKS ? WEXITSTATUS(status) : RANKS;
#endif
}

static void expect_good(int n, void (*f)(void)) {
    if (n > device_count()) { return; }
    int good = run_ranks(n, f, output, sizeof output);
    if (good != n) {
        print_error("%d of %d ranks passed: %s\n", good, n, output);
        fail();
    }
}

static ncclComm_t start(void) {
    ncclComm_t comm;
    nccl_ok(ncclCommInitRank(&comm, ranks, meeting->ids[0], rank));
    return comm;
}

// ----------------------------------------------------------------------------
// values: small integers, so that any order of summation is exact in every type

static size_t type_bytes(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclBfloat16: return 2;
        case ncclFloat64:
        case ncclInt64:
        case ncclUint64: return 8;
        default: return 4;
    }
}

static int value(int of_rank, size_t i) { return (int)((i * 7 + (size_t)of_rank * 5 + i / 13) % 16) * 2; }

static void set_element(void* array, ncclDataType_t type, size_t i, double v) {
    float single = (float)v;
    uint32_t raw;
    memcpy(&raw, &single, 4);
    switch (type) {
        case ncclInt8: ((int8_t*)array)[i] = (int8_t)v; break;
        case ncclUint8: ((uint8_t*)array)[i] = (uint8_t)v; break;
        case ncclInt32:
        case ncclUint32: ((uint32_t*)array)[i] = (uint32_t)v; break;
        case ncclInt64:
        case ncclUint64: ((uint64_t*)array)[i] = (uint64_t)v; break;
        case ncclFloat64: ((double*)array)[i] = v; break;
        case ncclBfloat16: ((uint16_t*)array)[i] = (uint16_t)(raw >> 16); break;
        default: ((float*)array)[i] = single; break;
    }
}

// A device array of n elements with value(of_rank, first + i), or zeros for of_rank -1.
static void* device_values(ncclDataType_t type, size_t n, int of_rank, size_t first) {
    void *host = xcalloc(n + 1, type_bytes(type)), *device = NULL;
    for (size_t i = 0; i < n && of_rank >= 0; i++) { set_element(host, type, i, value(of_rank, first + i)); }
    cuda_ok(cudaMalloc(&device, n * type_bytes(type)));  // exactly: what is written behind it is noticed
    cuda_ok(cudaMemcpy(device, host, n * type_bytes(type), cudaMemcpyHostToDevice));
    free(host);
    return device;
}

static inline int run_nccl_tests(const struct CMUnitTest* tests, size_t n) {
#ifdef CUDA_EMULATOR
    emu::config().devices = RANKS;
#endif
    meeting = (Meeting*)mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert(meeting != MAP_FAILED);
    return _cmocka_run_group_tests("NCCL", tests, n, NULL, NULL);
}

#endif
