/*
The emulator finds faults: each kernel below has one planted when its argument BUG is true, and none when it is false.
The build at hand must report every fault that it claims to find, with the words of the table, and must find nothing
in the twin. Every run is a process of its own. Only for the emulator: a GPU may forgive any of these.
*/
#include <signal.h>

#include "emu_util.h"

enum { N = 128 };

// ----------------------------------------------------------------------------
// missing barriers

template <bool BUG>
static __global__ void missing_syncthreads(const float* in, float* out) {
    SHARED(float, s, [N]);
    unsigned i = threadIdx.x;
    s[i] = in[i];
    if (!BUG) { __syncthreads(); }
    out[i] = s[(i + 37) % N];
}

// Right in ascending order of the threads.
template <bool BUG>
static __global__ void missing_syncthreads_before(const float* in, float* out) {
    SHARED(float, s, [N]);
    unsigned i = threadIdx.x;
    s[i] = in[i];
    if (!BUG) { __syncthreads(); }
    out[i] = i > 0 ? s[i - 1] : s[0];
}

// A sum by halving, twice; the second round must not begin before everyone has read the first result.
template <bool BUG>
static __global__ void missing_syncthreads_reuse(const float* in, float* out) {
    SHARED(float, s, [N]);
    unsigned i = threadIdx.x;
    float total = 0;
    for (int round = 0; round < 2; round++) {
        s[i] = in[i];
        __syncthreads();
        for (unsigned half = N / 2; half; half /= 2) {
            if (i < half) { s[i] += s[i + half]; }
            __syncthreads();
        }
        total += s[0];
        if (!BUG) { __syncthreads(); }
    }
    out[i] = total;
}

template <bool BUG>
static __global__ void missing_syncthreads_device(const float* in, float* out) {
    unsigned i = threadIdx.x;
    out[i] = 0;
    if (!BUG) { __syncthreads(); }
    out[N - 1 - i] = in[i];
}

template <bool BUG>
static __global__ void missing_syncthreads_device_reuse(const float* in, float* out) {
    unsigned i = threadIdx.x;
    out[i] = in[i];
    __syncthreads();
    float v = out[N - 1 - i];
    if (!BUG) { __syncthreads(); }
    out[i] = v;
}

template <bool BUG>
static __global__ void missing_syncwarp(const float* in, float* out) {
    SHARED(float, s, [N]);
    unsigned i = threadIdx.x;
    s[i] = in[i];
    if (!BUG) { __syncwarp(); }
    out[i] = s[i ^ 1];
}

// Warp 0 fills a buffer for warp 1: barrier 1 says full, barrier 2 says empty. EARLY: warp 1 says empty before it has
// read; else nobody says it.
template <bool BUG, bool EARLY>
static __device__ void hand_over(const float* in, float* out) {
    SHARED(float, buffer, [32]);
    unsigned lane = threadIdx.x % 32;
    for (unsigned round = 0; round < N / 32; round++) {
        bool last = round + 1 == N / 32;
        if (threadIdx.x < 32) {
            if ((!BUG || EARLY) && round > 0) { named_bar_sync(2, 64); }
            buffer[lane] = in[round * 32 + lane];
            named_bar_arrive(1, 64);
        } else {
            named_bar_sync(1, 64);
            if (BUG && EARLY && !last) { named_bar_arrive(2, 64); }
            out[round * 32 + lane] = buffer[31 - lane];
            if (!BUG && !last) { named_bar_arrive(2, 64); }
        }
    }
}
template <bool BUG>
static __global__ void early_named_barrier(const float* in, float* out) {
    hand_over<BUG, true>(in, out);
}
template <bool BUG>
static __global__ void missing_named_barrier(const float* in, float* out) {
    hand_over<BUG, false>(in, out);
}

template <bool BUG>
static __global__ void atomic_then_read(const float* in, float* out) {
    SHARED(float, sum);
    unsigned i = threadIdx.x;
    if (i == 0) { sum = 0; }
    __syncthreads();
    atomicAdd(&sum, in[i]);
    if (!BUG) { __syncthreads(); }
    out[i] = sum;
}

// ----------------------------------------------------------------------------
// asynchronous copies

enum AsyncFault { NO_WAIT, NO_COMMIT, NO_BARRIER };

template <bool BUG, AsyncFault FAULT>
static __device__ void async_copy(const float* in, float* out) {
    SHARED(float, s, [N]);
    unsigned i = threadIdx.x;
    if (i < N / 4) { cp_async16(&s[i * 4], in + i * 4); }
    if (!BUG || FAULT != NO_COMMIT) { cp_async_commit(); }
    if (!BUG || FAULT != NO_WAIT) { cp_async_wait<0>(); }
    if (!BUG || FAULT != NO_BARRIER) { __syncthreads(); }
    out[i] = s[N - 1 - i];
}
template <bool BUG>
static __global__ void missing_async_wait(const float* in, float* out) {
    async_copy<BUG, NO_WAIT>(in, out);
}
template <bool BUG>
static __global__ void missing_async_commit(const float* in, float* out) {
    async_copy<BUG, NO_COMMIT>(in, out);
}
template <bool BUG>
static __global__ void missing_async_barrier(const float* in, float* out) {
    async_copy<BUG, NO_BARRIER>(in, out);
}

// Two stages of 32; a stage is filled again while others may still read it.
template <bool BUG>
static __global__ void missing_ring_barrier(const float* in, float* out) {
    SHARED(float, ring, [2][32]);
    unsigned i = threadIdx.x;
    for (unsigned s = 0; s <= N / 32; s++) {
        if (s < N / 32 && i < 8) { cp_async16(&ring[s % 2][i * 4], in + s * 32 + i * 4); }
        cp_async_commit();
        if (s == 0) { continue; }
        cp_async_wait<1>();
        __syncthreads();
        if (i < 32) { out[(s - 1) * 32 + i] = ring[(s - 1) % 2][31 - i]; }
        if (!BUG) { __syncthreads(); }
    }
}

template <bool BUG>
static __global__ void misaligned_async(const float* in, float* out) {
    SHARED(float, s, [N]);
    unsigned i = threadIdx.x;
    if (i < N / 4) { cp_async16(&s[i * 4], in + (BUG ? (i * 4 + 1) % (N - 4) : i * 4)); }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    out[i] = s[i];
}

// ----------------------------------------------------------------------------
// bounds, alignment, uninitialised memory

template <bool BUG>
static __global__ void shared_past_end(const float* in, float* out) {
    SHARED(float, s, [N]);
    SHARED(float, next, [N]);
    unsigned i = threadIdx.x;
    next[i] = 0;
    s[i] = in[i];
    __syncthreads();
    if (i == 0) { s[i + (BUG ? N : 0)] = in[0]; }
    __syncthreads();
    out[i] = s[i] + 0 * next[i];
}

template <bool BUG>
static __global__ void dynamic_past_end(const float* in, float* out) {
    DYN_SHARED(float, s);
    unsigned i = threadIdx.x;
    s[i] = in[i];
    if (i == 0) { s[i + (BUG ? N : 0)] = in[0]; }
    __syncthreads();
    out[i] = s[i];
}

template <bool BUG>
static __global__ void device_read_past_end(const float* in, float* out) {
    unsigned i = threadIdx.x;
    out[i] = in[i] + 0 * (BUG ? in[i + 1] : 0.0f);
}

template <bool BUG>
static __global__ void device_write_past_end(const float* in, float* out) {
    unsigned i = threadIdx.x;
    out[i] = in[i];
    if (BUG && i == N - 1) { out[i + 1] = 0; }
}

template <bool BUG>
static __global__ void uninitialised_shared(const float* in, float* out) {
    SHARED(float, s);
    if (!BUG && threadIdx.x == 0) { s = 0; }
    __syncthreads();
    atomicAdd(&s, in[threadIdx.x]);
    __syncthreads();
    out[threadIdx.x] = s;
}

template <bool BUG>
static __global__ void uninitialised_device(const float* in, float* out) {
    unsigned i = threadIdx.x;
    if (!BUG) { out[i] = 0; }
    out[i] += in[i];
}

// Rows of 36 elements are 72 bytes apart.
template <bool BUG>
static __global__ void misaligned_ldmatrix(const float* in, float* out) {
    SHARED(uint16_t, s, [16][BUG ? 36 : 40]);
    unsigned i = threadIdx.x;
    for (unsigned k = i; k < sizeof s / 2; k += N) { (&s[0][0])[k] = 1; }
    __syncthreads();
    uint32_t r[4];
    ldmatrix_x4(r, &s[i % 16][i / 16 % 2 * 8]);
    out[i] = in[i] * (float)(r[0] & 1);
}

template <bool BUG>
static __global__ void misaligned_vector(const float* in, float* out) {
    unsigned i = threadIdx.x;
    if (i < N / 4 - 1) {
        float4 v = *(const float4*)(in + i * 4 + (BUG ? 1 : 0));
        out[i * 4] = v.x, out[i * 4 + 1] = v.y, out[i * 4 + 2] = v.z, out[i * 4 + 3] = v.w;
    } else if (i == N / 4 - 1) {
        for (unsigned k = N - 4; k < N; k++) { out[k] = in[k]; }
    }
}

// ----------------------------------------------------------------------------
// divergence

template <bool BUG>
static __global__ void divergent_barriers(const float* in, float* out) {
    unsigned i = threadIdx.x;
    if (BUG && i >= 64) {
        named_bar_sync(1, N);
    } else {
        __syncthreads();
    }
    out[i] = in[i];
}

template <bool BUG>
static __global__ void ended_before_barrier(const float* in, float* out) {
    unsigned i = threadIdx.x;
    out[i] = in[i];
    if (BUG && i >= 96) { return; }
    __syncthreads();
}

template <bool BUG>
static __global__ void divergent_collectives(const float* in, float* out) {
    unsigned i = threadIdx.x, all = 0xffffffffu;
    float v = in[i];
    if (BUG && i % 2) {
        __syncwarp();
    } else {
        v += 0 * __shfl_xor_sync(all, v, 2);
    }
    out[i] = v;
}

template <bool BUG>
static __global__ void shuffle_outside_mask(const float* in, float* out) {
    unsigned i = threadIdx.x;
    float v = in[i];
    if (i % 32 < 16) { v += 0 * __shfl_xor_sync(0xffffu, v, BUG ? 16 : 1); }
    out[i] = v;
}

template <bool BUG>
static __global__ void overlapping_masks(const float* in, float* out) {
    unsigned i = threadIdx.x, low = 0x0000ffffu;
    out[i] = in[i];
    if (i % 32 < 16) {
        __syncwarp(low);
    } else {
        __syncwarp(BUG ? 0xffffffffu : ~low);
    }
}

// ----------------------------------------------------------------------------
// between blocks; N blocks of 32 threads

template <bool BUG>
static __global__ void blocks_accumulate(const float* in, float* out) {
    if (threadIdx.x > 0) { return; }
    if (BUG) {
        *out += in[blockIdx.x];
    } else {
        atomicAdd(out, in[blockIdx.x]);
    }
}

template <bool BUG>
static __global__ void blocks_hand_over(const float* in, float* out) {
    unsigned i = blockIdx.x * 32 + threadIdx.x;
    if (i >= N) { return; }
    out[i] = in[i];
    if (BUG && blockIdx.x > 0) { out[i] = in[i] + 0 * out[i - 32]; }
}

// The last block writes what the others may have read.
template <bool BUG>
static __global__ void blocks_overwrite(const float* in, float* out) {
    for (unsigned i = threadIdx.x; i < N; i += 32) {
        if (blockIdx.x == N - 1) { out[i] = in[i]; }
        if (BUG && blockIdx.x < N - 1 && out[i] == -1) { __trap(); }
    }
}

// ----------------------------------------------------------------------------
// running one case

typedef struct {
    float host_in[N], host_out[N], want[N];
    float *in, *out;
} Arrays;

#define RUN(kernel, grid, block, bytes, a)                                     \
    do {                                                                       \
        if (bug) {                                                             \
            LAUNCH((kernel<true>), grid, block, bytes, 0, (a)->in, (a)->out);  \
        } else {                                                               \
            LAUNCH((kernel<false>), grid, block, bytes, 0, (a)->in, (a)->out); \
        }                                                                      \
    } while (0)

#define CASE(kernel, grid, block, bytes) [](Arrays* a, bool bug) { RUN(kernel, grid, block, bytes, a); }

static void expect_reversed(Arrays* a) {
    for (int i = 0; i < N; i++) { a->want[i] = a->host_in[N - 1 - i]; }
}
static void expect_sum(Arrays* a, float factor) {
    float sum = 0;
    for (int i = 0; i < N; i++) { sum += a->host_in[i]; }
    for (int i = 0; i < N; i++) { a->want[i] = factor * sum; }
}

static void accumulate(Arrays* a, bool bug) {
    check_cuda(cudaMemset(a->out, 0, sizeof a->want));
    RUN(blocks_accumulate, N, 32, 0, a);
}
static void overwrite(Arrays* a, bool bug) {
    check_cuda(cudaMemset(a->out, 0, sizeof a->want));
    RUN(blocks_overwrite, N, 32, 0, a);
}
static void expect_first_sum(Arrays* a) {
    expect_sum(a, 1);
    for (int i = 1; i < N; i++) { a->want[i] = 0; }
}

static void too_much_shared(Arrays* a, bool bug) {
    if (!bug) {
        check_cuda(cudaFuncSetAttribute(dynamic_past_end<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
    }
    LAUNCH((dynamic_past_end<false>), 1, N, 60000, 0, a->in, a->out);
}

static void host_dereference(Arrays* a, bool bug) {
    LAUNCH((uninitialised_device<false>), 1, N, 0, 0, a->in, a->out);
    if (bug) {
        volatile float* p = a->out;
        p[3] = p[3] + 0;
    }
}

static void use_after_free(Arrays* a, bool bug) {
    float* copy = device_copy(a->host_in, N);
    if (bug) { check_cuda(cudaFree(copy)); }
    LAUNCH((uninitialised_device<false>), 1, N, 0, 0, copy, a->out);
    if (!bug) { check_cuda(cudaFree(copy)); }
}

static void copy_past_end(Arrays* a, bool bug) {
    LAUNCH((uninitialised_device<false>), 1, N, 0, 0, a->in, a->out);
    float more[N + 1] = {0};
    if (cudaMemcpy(more, a->out, (N + bug) * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess) { exit(1); }
}

static void copy_wrong_way(Arrays* a, bool bug) {
    if (cudaMemcpy(a->out, a->in, sizeof a->want, bug ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToDevice)) { exit(1); }
}

// A program that never asks for errors and never frees: its exit status must tell.
static __global__ void trap_kernel(float* out, bool bug) {
    if (bug) { __trap(); }
    out[threadIdx.x] = 0;
}
static void ignored_fault(Arrays* a, bool bug) {
    LAUNCH(trap_kernel, 1, N, 0, 0, a->out, bug);
    exit(0);
}
static void ignored_past_end(Arrays* a, bool bug) {
    RUN(device_write_past_end, 1, N, 0, a);
    exit(0);
}

// Words that the report of a build must contain; NULL where it does not claim to find the fault.
typedef struct {
    const char* name;
    void (*run)(Arrays* a, bool bug);
    void (*expect)(Arrays* a);  // fills want; NULL: the input
    const char *plain, *asan, *race;
} Case;

static const char *const WRONG = "wrong result", *const RAW = "read-after-write race",
                         *const WAR = "write-after-read race", *const WAW = "write-after-write race",
                         *const IN_FLIGHT = "cp.async in flight", *const DEADLOCK = "deadlock",
                         *const BOUNDS = "out of bounds", *const UNWRITTEN = "uninitialised read";

#define ROTATED                                                                \
    [](Arrays* a) {                                                            \
        for (int i = 0; i < N; i++) { a->want[i] = a->host_in[(i + 37) % N]; } \
    }
#define SHIFTED                                                                 \
    [](Arrays* a) {                                                             \
        for (int i = 0; i < N; i++) { a->want[i] = a->host_in[i ? i - 1 : 0]; } \
    }
#define SWAPPED                                                         \
    [](Arrays* a) {                                                     \
        for (int i = 0; i < N; i++) { a->want[i] = a->host_in[i ^ 1]; } \
    }
#define TILES_REVERSED                                                   \
    [](Arrays* a) {                                                      \
        for (int i = 0; i < N; i++) { a->want[i] = a->host_in[i ^ 31]; } \
    }
#define SUM [](Arrays* a) { expect_sum(a, 1); }
#define TWO_SUMS [](Arrays* a) { expect_sum(a, 2); }

// clang-format off: one row per fault
static const Case cases[] = {
    {"missing_syncthreads", CASE(missing_syncthreads, 1, N, 0), ROTATED, WRONG, WRONG, RAW},
    {"missing_syncthreads_before", CASE(missing_syncthreads_before, 1, N, 0), SHIFTED, WRONG, WRONG, RAW},
    {"missing_syncthreads_reuse", CASE(missing_syncthreads_reuse, 1, N, 0), TWO_SUMS, WRONG, WRONG, WAR},
    {"missing_syncthreads_device", CASE(missing_syncthreads_device, 1, N, 0), expect_reversed, WRONG, WRONG, WAW},
    {"missing_syncthreads_device_reuse", CASE(missing_syncthreads_device_reuse, 1, N, 0), expect_reversed, WRONG, WRONG,
     WAR},
    {"missing_syncwarp", CASE(missing_syncwarp, 1, N, 0), SWAPPED, WRONG, WRONG, RAW},
    {"early_named_barrier", CASE(early_named_barrier, 1, 64, 0), TILES_REVERSED, WRONG, WRONG, WAR},
    {"missing_named_barrier", CASE(missing_named_barrier, 1, 64, 0), TILES_REVERSED, "twice", "twice", "twice"},
    {"atomic_then_read", CASE(atomic_then_read, 1, N, 0), SUM, WRONG, WRONG, "race"},
    {"missing_async_wait", CASE(missing_async_wait, 1, N, 0), expect_reversed, WRONG, WRONG, IN_FLIGHT},
    {"missing_async_commit", CASE(missing_async_commit, 1, N, 0), expect_reversed, WRONG, WRONG, IN_FLIGHT},
    {"missing_async_barrier", CASE(missing_async_barrier, 1, N, 0), expect_reversed, WRONG, WRONG, RAW},
    {"missing_ring_barrier", CASE(missing_ring_barrier, 1, 64, 0), TILES_REVERSED, WRONG, WRONG, WAR},
    {"misaligned_async", CASE(misaligned_async, 1, N, 0), NULL, "misaligned", "misaligned", "misaligned"},
    {"shared_past_end", CASE(shared_past_end, 1, N, 0), NULL, NULL, BOUNDS, BOUNDS},
    {"dynamic_past_end", CASE(dynamic_past_end, 1, N, N * sizeof(float)), NULL, NULL, "AddressSanitizer", BOUNDS},
    {"device_read_past_end", CASE(device_read_past_end, 1, N, 0), NULL, NULL, "heap-buffer-overflow", BOUNDS},
    {"device_write_past_end", CASE(device_write_past_end, 1, N, 0), NULL, "past the end", "heap-buffer-overflow",
     BOUNDS},
    {"use_after_free", use_after_free, NULL, WRONG, "heap-use-after-free", BOUNDS},
    {"uninitialised_shared", CASE(uninitialised_shared, 1, N, 0), SUM, WRONG, WRONG, UNWRITTEN},
    {"uninitialised_device", CASE(uninitialised_device, 1, N, 0), NULL, WRONG, WRONG, UNWRITTEN},
    {"misaligned_ldmatrix", CASE(misaligned_ldmatrix, 1, N, 0), NULL, "misaligned", "misaligned", "misaligned"},
    {"misaligned_vector", CASE(misaligned_vector, 1, N, 0), NULL, NULL, "misaligned address", NULL},
    {"divergent_barriers", CASE(divergent_barriers, 1, N, 0), NULL, DEADLOCK, DEADLOCK, DEADLOCK},
    {"ended_before_barrier", CASE(ended_before_barrier, 1, N, 0), NULL, "__syncthreads", "__syncthreads",
     "__syncthreads"},
    {"divergent_collectives", CASE(divergent_collectives, 1, N, 0), NULL, "divergent warp", "divergent warp",
     "divergent warp"},
    {"overlapping_masks", CASE(overlapping_masks, 1, N, 0), NULL, "overlaps", "overlaps", "overlaps"},
    {"shuffle_outside_mask", CASE(shuffle_outside_mask, 1, N, 0), NULL, "does not take part", "does not take part",
     "does not take part"},
    {"blocks_accumulate", accumulate, expect_first_sum, NULL, NULL, "race between blocks"},
    {"blocks_overwrite", overwrite, NULL, NULL, NULL, "another block read this"},
    {"blocks_hand_over", CASE(blocks_hand_over, N, 32, 0), NULL, WRONG, WRONG, "race between blocks"},
    {"too_much_shared", too_much_shared, NULL, "opt in", "opt in", "opt in"},
    {"host_dereference", host_dereference, NULL, "signal 11", NULL, "host code"},
    {"ignored_fault", ignored_fault, NULL, "__trap", "__trap", "__trap"},
    {"ignored_past_end", ignored_past_end, NULL, "past the end", "heap-buffer-overflow", BOUNDS},
    {"copy_past_end", copy_past_end, NULL, "past the end", "past the end", "past the end"},
    {"copy_wrong_way", copy_wrong_way, NULL, "a copy of kind", "a copy of kind", "a copy of kind"},
};
// clang-format on

// Runs the case here and ends the process: status 0 if nothing was found.
[[noreturn]] static void run_case(const Case* c, bool bug, unsigned seed) {
    emu::config().seed = seed;
    emu::config().protect = true;
    Arrays a;
    for (int i = 0; i < N; i++) { a.host_in[i] = a.want[i] = (float)(i * 7 % 13 + 1); }
    if (c->expect) { c->expect(&a); }
    a.in = device_copy(a.host_in, N);
    a.out = device_array<float>(N);
    c->run(&a, bug);
    if (cudaGetLastError() != cudaSuccess) { exit(1); }
    if (cudaMemcpy(a.host_out, a.out, sizeof a.host_out, cudaMemcpyDeviceToHost) != cudaSuccess) { exit(1); }
    for (int i = 0; i < N; i++) {
        if (!(a.host_out[i] == a.want[i])) {
            fprintf(stderr, "wrong result: element %d is %g, expected %g\n", i, (double)a.host_out[i],
                    (double)a.want[i]);
            exit(1);
        }
    }
    if (cudaFree(a.in) != cudaSuccess || cudaFree(a.out) != cudaSuccess) { exit(1); }
    _exit(0);
}

// The same in a child process; output receives what it printed. True if it ended with status 0.
static bool run_child(const Case* c, bool bug, unsigned seed, char* output, size_t bytes) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        signal(SIGSEGV, SIG_DFL);  // cmocka would catch it
        run_case(c, bug, seed);
    }
    close(ends[1]);
    size_t n = 0;
    char rest[512];
    for (ssize_t got; (got = read(ends[0], rest, sizeof rest)) > 0;) {
        size_t fits = (size_t)got < bytes - 1 - n ? (size_t)got : bytes - 1 - n;
        memcpy(output + n, rest, fits);
        n += fits;
    }
    output[n] = '\0';
    close(ends[0]);
    int status;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) { snprintf(output + n, bytes - n, "ended by signal %d", WTERMSIG(status)); }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#if defined(EMU_RACE)
enum { SEEDS = 2 };
static const char* claim(const Case* c) { return c->race; }
#elif defined(__SANITIZE_ADDRESS__)
enum { SEEDS = 4 };
static const char* claim(const Case* c) { return c->asan; }
#else
enum { SEEDS = 4 };
static const char* claim(const Case* c) { return c->plain; }
#endif

static void test_twin_passes(void** state) {
    static char output[16384];
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        if (run_child((const Case*)*state, false, seed, output, sizeof output)) { continue; }
        print_error("the correct kernel fails with seed %u: %s\n", seed, output);
        fail();
    }
}

static void test_fault_is_found(void** state) {
    static char output[16384];
    const Case* c = (const Case*)*state;
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        if (!run_child(c, true, seed, output, sizeof output) && strstr(output, claim(c))) { return; }
    }
    print_error("not found: expected '%s' in the report, got '%s'\n", claim(c), output);
    fail();
}

int main(void) {
    enum { CASES = sizeof cases / sizeof cases[0] };
    struct CMUnitTest tests[2 * CASES];
    size_t n = 0;
    for (const Case& c : cases) {
        void* state = const_cast<Case*>(&c);
        tests[n++] = {c.name, test_twin_passes, NULL, NULL, state};
        if (claim(&c)) { tests[n++] = {c.name, test_fault_is_found, NULL, NULL, state}; }
    }
    return _cmocka_run_group_tests("planted faults", tests, n, NULL, NULL);
}
