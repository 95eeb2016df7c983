/*
The device that the operators count on, real or emulated: coordinates, shared memory, barriers, warp collectives,
bf16, tensor-core layouts, asynchronous copies, posenc.h on the device, the runtime's errors. The same program runs
under the emulator and, built with nvcc, on a GPU, so that the emulator is held to what the hardware does.
*/
#include "emu_util.h"

#include "../llmc/posenc.h"

// ----------------------------------------------------------------------------
// coordinates and shared memory

static __global__ void coordinates_kernel(unsigned* out) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}

static void test_coordinates(void**) {
    enum { BLOCKS = 3 * 2 * 4, THREADS = 5 * 3 * 2 };
    unsigned* device = device_array<unsigned>(BLOCKS * THREADS);
    unsigned out[BLOCKS * THREADS];
    LAUNCH(coordinates_kernel, dim3(3, 2, 4), dim3(5, 3, 2), 0, 0, device);
    fetch(out, device, BLOCKS * THREADS);
    for (unsigned i = 0; i < BLOCKS * THREADS; i++) { assert_int_equal(out[i], i / THREADS * 1000 + i % THREADS); }
    check_cuda(cudaFree(device));
}

static __constant__ float scales[2];

// out[columns,rows] = in[rows,columns] transposed, row r times scales[r % 2].
template <int TILE>
__global__ void __launch_bounds__(TILE * 4)
    transpose_kernel(const float* __restrict__ in, float* __restrict__ out, int rows, int columns) {
    SHARED(float, tile, [TILE][TILE + 1]);
    SHARED(int, loaded);
    DYN_SHARED(float, scale);
    if (threadIdx.x == 0 && threadIdx.y == 0) { loaded = 0; }
    __syncthreads();
    int x = (int)blockIdx.x * TILE + (int)threadIdx.x;
    for (int j = (int)threadIdx.y; j < TILE; j += (int)blockDim.y) {
        int y = (int)blockIdx.y * TILE + j;
        if (threadIdx.x == 0) { scale[j] = scales[y % 2]; }
        if (x < columns && y < rows) {
            tile[j][threadIdx.x] = in[y * columns + x];
            atomicAdd(&loaded, 1);
        }
    }
    __syncthreads();
    int row = (int)blockIdx.y * TILE + (int)threadIdx.x;
    for (int j = (int)threadIdx.y; j < TILE; j += (int)blockDim.y) {
        int column = (int)blockIdx.x * TILE + j;
        int expected = min(TILE, columns - (int)blockIdx.x * TILE) * min(TILE, rows - (int)blockIdx.y * TILE);
        if (row < rows && column < columns && loaded == expected) {
            out[column * rows + row] = tile[threadIdx.x][j] * scale[threadIdx.x];
        }
    }
}

static void test_shared_memory(void**) {
    enum { ROWS = 70, COLUMNS = 45, N = ROWS * COLUMNS };
    const float host_scales[2] = {1.0f, -2.0f};
    check_cuda(cudaMemcpyToSymbol(scales, host_scales, sizeof host_scales));
    float in[N], out[N];
    for (int i = 0; i < N; i++) { in[i] = (float)(i * 37 % 1009); }
    float *device_in = device_copy(in, N), *device_out = device_array<float>(N);
    check_cuda(cudaMemset(device_out, 0, sizeof out));
    LAUNCH((transpose_kernel<32>), dim3(2, 3), dim3(32, 4), 32 * sizeof(float), 0, device_in, device_out, ROWS,
           COLUMNS);
    fetch(out, device_out, N);
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            assert_true(out[c * ROWS + r] == in[r * COLUMNS + c] * host_scales[r % 2]);
        }
    }
    check_cuda(cudaFree(device_in));
    check_cuda(cudaFree(device_out));
}

// ----------------------------------------------------------------------------
// barriers and warp collectives

enum { RESULTS = 12, LANES = 64 };

static __global__ void collectives_kernel(const int* in, int* out) {
    unsigned i = threadIdx.x, all = 0xffffffffu;
    int v = in[i];
    out[0 * LANES + i] = __shfl_sync(all, v, (int)(i * 7) % 32);
    out[1 * LANES + i] = __shfl_up_sync(all, v, 3, 8);
    out[2 * LANES + i] = __shfl_down_sync(all, v, 5);
    out[3 * LANES + i] = __shfl_xor_sync(all, v, 9, 16);
    out[4 * LANES + i] = (int)__ballot_sync(all, v % 2);
    out[5 * LANES + i] = __any_sync(all, v == 5) + 2 * __all_sync(all, v >= 0);
    out[6 * LANES + i] = __reduce_add_sync(all, v);
    out[7 * LANES + i] = __reduce_max_sync(all, -v);
    out[8 * LANES + i] = (int)__match_any_sync(all, v % 3);
    if (i & 16) {
        out[9 * LANES + i] = __shfl_xor_sync(0xffff0000u, v, 1);
    } else {
        out[9 * LANES + i] = __shfl_xor_sync(0x0000ffffu, v, 2);
    }
    out[10 * LANES + i] = __syncthreads_count(v % 2);
    out[11 * LANES + i] = (__syncthreads_and(v >= 0) != 0) + 2 * (__syncthreads_or(v == 5) != 0);
}

// What lane l of the warp that starts at `warp` must get.
static int expected_collective(const int* in, int result, int warp, int l) {
    const int* v = in + warp;
    int votes = 0, sum = 0, lowest = v[0], same = 0, odd = 0;
    bool five = false;
    for (int k = 0; k < 32; k++) {
        votes |= (v[k] % 2) << k;
        sum += v[k];
        if (v[k] < lowest) { lowest = v[k]; }
        if (v[k] % 3 == v[l] % 3) { same |= (int)(1u << k); }
        five = five || v[k] == 5;
    }
    for (int k = 0; k < LANES; k++) { odd += in[k] % 2; }
    switch (result) {
        case 0: return v[l * 7 % 32];
        case 1: return l % 8 >= 3 ? v[l - 3] : v[l];
        case 2: return l + 5 < 32 ? v[l + 5] : v[l];
        case 3: return v[l ^ 9];
        case 4: return votes;
        case 5: return five + 2;
        case 6: return sum;
        case 7: return -lowest;
        case 8: return same;
        case 9: return l & 16 ? v[l ^ 1] : v[l ^ 2];
        case 10: return odd;
        default: return 3;
    }
}

static void test_collectives(void**) {
    int in[LANES], out[RESULTS * LANES];
    for (int i = 0; i < LANES; i++) { in[i] = i * 29 % 97 + 6; }
    in[40] = 5;
    int *device_in = device_copy(in, LANES), *device_out = device_array<int>(RESULTS * LANES);
    LAUNCH(collectives_kernel, 1, LANES, 0, 0, device_in, device_out);
    fetch(out, device_out, RESULTS * LANES);
    for (int r = 0; r < RESULTS; r++) {
        for (int i = 0; i < LANES; i++) {
            int want = expected_collective(in, r, i / 32 * 32, i % 32);
            if (out[r * LANES + i] != want) { print_error("result %d of thread %d\n", r, i); }
            assert_int_equal(out[r * LANES + i], want);
        }
    }
    check_cuda(cudaFree(device_in));
    check_cuda(cudaFree(device_out));
}

// sums[block] of `columns` values each, and the total by an atomic.
static __global__ void block_sum_kernel(const float* in, float* sums, double* total, int columns) {
    SHARED(float, parts, [32]);
    float v = 0;
    for (int i = (int)threadIdx.x; i < columns; i += (int)blockDim.x) { v += in[(int)blockIdx.x * columns + i]; }
    for (int o = 16; o; o /= 2) { v += __shfl_xor_sync(0xffffffffu, v, o); }
    if (threadIdx.x % 32 == 0) { parts[threadIdx.x / 32] = v; }
    __syncthreads();
    if (threadIdx.x >= 32) { return; }
    v = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0f;
    for (int o = 16; o; o /= 2) { v += __shfl_down_sync(0xffffffffu, v, (unsigned)o); }
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = v;
        atomicAdd(total, (double)v);
    }
}

static void test_block_sum(void**) {
    enum { BLOCKS = 5, COLUMNS = 1000 };
    static float in[BLOCKS * COLUMNS];
    float sums[BLOCKS];
    double total = 0, want_total = 0;
    for (int i = 0; i < BLOCKS * COLUMNS; i++) { in[i] = (float)(i * 31 % 256); }  // sums are exact in fp32
    float *device_in = device_copy(in, BLOCKS * COLUMNS), *device_sums = device_array<float>(BLOCKS);
    double* device_total = device_copy(&total, 1);
    LAUNCH(block_sum_kernel, BLOCKS, 256, 0, 0, device_in, device_sums, device_total, COLUMNS);
    fetch(sums, device_sums, BLOCKS);
    fetch(&total, device_total, 1);
    for (int b = 0; b < BLOCKS; b++) {
        double want = 0;
        for (int i = 0; i < COLUMNS; i++) { want += in[b * COLUMNS + i]; }
        assert_true(sums[b] == want);
        want_total += want;
    }
    assert_true(total == want_total);
    check_cuda(cudaFree(device_in));
    check_cuda(cudaFree(device_sums));
    check_cuda(cudaFree(device_total));
}

// Warp 0 produces, warp 1 consumes: barrier 1 says full, barrier 2 says empty.
static __global__ void producer_consumer_kernel(int* out, int rounds) {
    SHARED(int, buffer, [32]);
    int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < rounds; i++) {
        if (threadIdx.x < 32) {
            if (i > 0) { named_bar_sync(2, 64); }
            buffer[lane] = i * 100 + lane;
            named_bar_arrive(1, 64);
        } else {
            named_bar_sync(1, 64);
            out[i * 32 + lane] = buffer[31 - lane];
            if (i + 1 < rounds) { named_bar_arrive(2, 64); }
        }
    }
}

static void test_named_barriers(void**) {
    enum { ROUNDS = 9 };
    int out[ROUNDS * 32], *device = device_array<int>(ROUNDS * 32);
    LAUNCH(producer_consumer_kernel, 1, 64, 0, 0, device, ROUNDS);
    fetch(out, device, ROUNDS * 32);
    for (int i = 0; i < ROUNDS * 32; i++) { assert_int_equal(out[i], i / 32 * 100 + 31 - i % 32); }
    check_cuda(cudaFree(device));
}

// ----------------------------------------------------------------------------
// bf16 and vector types

static __global__ void bf16_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* out, int n) {
    int i = (int)threadIdx.x;
    float x = __bfloat162float(__ldg(a + i)), y = __bfloat162float(b[i]);
    out[i] = __float2bfloat16(x * 2.0f + y);
    out[n + i] = a[i] * b[i];
    uint32_t pair = pack_bf16(x, y);
    out[2 * n + i] = __ushort_as_bfloat16((unsigned short)(pair >> 16));
    out[3 * n + i] = __ushort_as_bfloat16((unsigned short)(pair & 0xffff));
    if (i < n / 8) { __stcs((uint4*)(out + 4 * n) + i, __ldcs((const uint4*)a + i)); }
}

// Written apart from the library: fp32 to bf16, ties to even, and back.
static float to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u = (u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &u, 4);
    return x;
}

static uint16_t bf16_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)(u >> 16);
}

static float bf16_value(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void test_bf16(void**) {
    enum { N = 256 };
    uint16_t a[N], b[N], out[5 * N];
    Random r = random_stream(3, 0);
    for (int i = 0; i < N; i++) {
        a[i] = bf16_bits(to_bf16((float)random_normal(&r)));
        b[i] = bf16_bits(to_bf16((float)random_normal(&r)));
    }
    uint16_t *device_a = device_copy(a, N), *device_b = device_copy(b, N), *device_out = device_array<uint16_t>(5 * N);
    LAUNCH(bf16_kernel, 1, N, 0, 0, (__nv_bfloat16*)device_a, (__nv_bfloat16*)device_b, (__nv_bfloat16*)device_out, N);
    fetch(out, device_out, 5 * N);
    for (int i = 0; i < N; i++) {
        float x = bf16_value(a[i]), y = bf16_value(b[i]);
        assert_int_equal(out[i], bf16_bits(to_bf16(x * 2.0f + y)));
        assert_int_equal(out[N + i], bf16_bits(to_bf16(x * y)));
        assert_int_equal(out[2 * N + i], b[i]);
        assert_int_equal(out[3 * N + i], a[i]);
        assert_int_equal(out[4 * N + i], a[i]);
    }
    check_cuda(cudaFree(device_a));
    check_cuda(cudaFree(device_b));
    check_cuda(cudaFree(device_out));
}

// ----------------------------------------------------------------------------
// tensor cores

static __global__ void mma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
    uint32_t ra[4], rb[2];
    float rc[4], rd[4];
    for (int i = 0; i < 4; i++) { ra[i] = a[threadIdx.x * 4 + i], rc[i] = c[threadIdx.x * 4 + i]; }
    for (int i = 0; i < 2; i++) { rb[i] = b[threadIdx.x * 2 + i]; }
    mma_bf16_16816(rd, ra, rb, rc);
    for (int i = 0; i < 4; i++) { d[threadIdx.x * 4 + i] = rd[i]; }
}

// Fragments are filled by the tables of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type":
// element i of lane (group, thread) of A, of B and of C.
static void test_mma_layout(void**) {
    float A[16][16], B[16][8], C[16][8], c[32 * 4], d[32 * 4];
    uint16_t a[32 * 8], b[32 * 4];
    Random r = random_stream(4, 0);
    for (float& x : *(float(*)[256])A) { x = to_bf16((float)random_normal(&r)); }
    for (float& x : *(float(*)[128])B) { x = to_bf16((float)random_normal(&r)); }
    for (float& x : *(float(*)[128])C) { x = (float)random_normal(&r); }
    for (int lane = 0; lane < 32; lane++) {
        int group = lane >> 2, thread = lane % 4;
        for (int i = 0; i < 8; i++) {
            int row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
            int column = i < 4 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
            a[lane * 8 + i] = bf16_bits(A[row][column]);
        }
        for (int i = 0; i < 4; i++) {
            b[lane * 4 + i] = bf16_bits(B[i < 2 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8][group]);
            c[lane * 4 + i] = C[i < 2 ? group : group + 8][thread * 2 + (i & 1)];
        }
    }
    uint16_t *device_a = device_copy(a, 256), *device_b = device_copy(b, 128);
    float *device_c = device_copy(c, 128), *device_d = device_array<float>(128);
    LAUNCH(mma_kernel, 1, 32, 0, 0, (const uint32_t*)device_a, (const uint32_t*)device_b, device_c, device_d);
    fetch(d, device_d, 128);
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) {
            int row = i < 2 ? lane / 4 : lane / 4 + 8, column = lane % 4 * 2 + i % 2;
            double want = C[row][column], size = fabs(want);
            for (int k = 0; k < 16; k++) {
                want += (double)A[row][k] * B[k][column];
                size += fabs((double)A[row][k] * B[k][column]);
            }
            // 16 additions in fp32, which tensor cores truncate
            assert_true(fabs(d[lane * 4 + i] - want) <= 32 * 0x1p-24 * size);
        }
    }
    check_cuda(cudaFree(device_a));
    check_cuda(cudaFree(device_b));
    check_cuda(cudaFree(device_c));
    check_cuda(cudaFree(device_d));
}

// Loads four 8x8 matrices whose elements are numbered, by each of the four wrappers.
static __global__ void ldmatrix_kernel(uint32_t* out) {
    SHARED(uint16_t, x, [4][8][24]);  // rows 48 bytes apart
    unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) { x[i / 64][i / 8 % 8][i % 8] = (uint16_t)i; }
    __syncwarp();
    uint32_t r4[4], t4[4], r2[2], t2[2];
    const void *row = &x[lane / 8][lane % 8][0], *of_two = &x[lane / 8 % 2][lane % 8][0];
    ldmatrix_x4(r4, row);
    ldmatrix_x4_trans(t4, row);
    ldmatrix_x2(r2, of_two);
    ldmatrix_x2_trans(t2, of_two);
    for (int i = 0; i < 4; i++) { out[i * 32 + lane] = r4[i], out[(4 + i) * 32 + lane] = t4[i]; }
    for (int i = 0; i < 2; i++) { out[(8 + i) * 32 + lane] = r2[i], out[(10 + i) * 32 + lane] = t2[i]; }
}

static void test_ldmatrix_layout(void**) {
    const int matrices[12] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1};
    uint32_t out[12 * 32], *device = device_array<uint32_t>(12 * 32);
    LAUNCH(ldmatrix_kernel, 1, 32, 0, 0, device);
    fetch(out, device, 12 * 32);
    for (int i = 0; i < 12; i++) {
        bool transposed = (4 <= i && i < 8) || i >= 10;
        for (int lane = 0; lane < 32; lane++) {
            int row = lane / 4, column = lane % 4 * 2, first = matrices[i] * 64;
            int low = transposed ? column * 8 + row : row * 8 + column;
            int high = transposed ? low + 8 : low + 1;
            assert_int_equal(out[i * 32 + lane], (unsigned)(first + low) | (unsigned)(first + high) << 16);
        }
    }
    check_cuda(cudaFree(device));
}

// ----------------------------------------------------------------------------
// asynchronous copies

// A ring of two stages, 64 threads copying 16 bytes each; rows at or beyond `valid` are filled with zeros.
static __global__ void ring_kernel(const int* in, int* out, int stages, int valid) {
    SHARED(int, ring, [2][256]);
    int i = (int)threadIdx.x;
    for (int s = 0; s <= stages; s++) {
        if (s < stages) { cp_async16(&ring[s % 2][i * 4], in + s * 256 + i * 4, s < valid); }
        cp_async_commit();
        if (s == 0) { continue; }
        cp_async_wait<1>();
        __syncthreads();
        for (int k = 0; k < 4; k++) { out[(s - 1) * 256 + i * 4 + k] = ring[(s - 1) % 2][255 - (i * 4 + k)]; }
        __syncthreads();
    }
}

static void test_async_copies(void**) {
    enum { STAGES = 5, VALID = 3, N = STAGES * 256 };
    int in[N], out[N];
    for (int i = 0; i < N; i++) { in[i] = i + 1; }
    int *device_in = device_copy(in, N), *device_out = device_array<int>(N);
    LAUNCH(ring_kernel, 1, 64, 0, 0, device_in, device_out, STAGES, VALID);
    fetch(out, device_out, N);
    for (int i = 0; i < N; i++) {
        int stage = i / 256;
        assert_int_equal(out[i], stage < VALID ? in[stage * 256 + 255 - i % 256] : 0);
    }
    check_cuda(cudaFree(device_in));
    check_cuda(cudaFree(device_out));
}

// ----------------------------------------------------------------------------
// arithmetic, the positional mathematics on the device

static __global__ void posenc_kernel(float* out, PosKind kind, size_t NH) {
    const double theta[POSENC_ALL_ROWS] = {0.7, 0.3, 1.5};
    out[blockIdx.x * blockDim.x + threadIdx.x] =
        posenc_bias(kind, theta, {blockIdx.x, NH, POSENC_DEFAULT_SETTINGS, NULL}, threadIdx.x);
}

static void test_posenc(void**) {
    enum { HEADS = 3, DISTANCES = 100 };
    const double theta[POSENC_ALL_ROWS] = {0.7, 0.3, 1.5};
    float out[HEADS * DISTANCES], *device = device_array<float>(HEADS * DISTANCES);
    const PosKind kinds[] = {POS_ALIBI, POS_BAM};
    for (PosKind kind : kinds) {
        LAUNCH(posenc_kernel, HEADS, DISTANCES, 0, 0, device, kind, (size_t)HEADS);
        fetch(out, device, HEADS * DISTANCES);
        for (size_t i = 0; i < HEADS * DISTANCES; i++) {
            float want = posenc_bias(kind, theta, {i / DISTANCES, HEADS, POSENC_DEFAULT_SETTINGS, NULL}, i % DISTANCES);
            // computed in double on both sides, so that only the last rounding may differ
            assert_true(fabsf(out[i] - want) <= 0x1p-23f * fabsf(want));
        }
    }
    check_cuda(cudaFree(device));
}

static __global__ void functions_kernel(const float* in, float* out, int n) {
    int i = (int)threadIdx.x;
    out[i] = fast_exp2(in[i]);
    out[n + i] = __expf(in[i]);
    out[2 * n + i] = rsqrtf(fabsf(in[i]));
    out[3 * n + i] = __fdividef(1.0f, in[i]);
    out[4 * n + i] = __uint_as_float(__float_as_uint(in[i]) ^ 0x80000000u);
}

static void test_functions(void**) {
    enum { N = 64, FUNCTIONS = 5 };
    float in[N], out[FUNCTIONS * N];
    for (int i = 0; i < N; i++) { in[i] = (float)(i - 31) * 0.37f - 0.1f; }
    float *device_in = device_copy(in, N), *device_out = device_array<float>(FUNCTIONS * N);
    LAUNCH(functions_kernel, 1, N, 0, 0, device_in, device_out, N);
    fetch(out, device_out, FUNCTIONS * N);
    for (int i = 0; i < N; i++) {
        double x = in[i], want[FUNCTIONS] = {exp2(x), exp(x), 1 / sqrt(fabs(x)), 1 / x, -x};
        for (int f = 0; f < FUNCTIONS; f++) {
            // the hardware's approximations: 2 ulp and, for __expf, 2 + 1.16 |x| ulp (CUDA guide, appendix E)
            double tolerance = f == FUNCTIONS - 1 ? 0 : (3 + 1.2 * fabs(x)) * 0x1p-23;
            assert_true(fabs(out[f * N + i] - want[f]) <= tolerance * fabs(want[f]));
        }
    }
    check_cuda(cudaFree(device_in));
    check_cuda(cudaFree(device_out));
}

// ----------------------------------------------------------------------------
// the runtime

static __global__ void dynamic_kernel(int* out, int n) {
    DYN_SHARED(int, x);
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) { x[i] = i; }
    __syncthreads();
    if (threadIdx.x == 0) { *out = x[n - 1]; }
}

static void test_refused_launches(void**) {
    enum { BYTES = 64 << 10, N = BYTES / 4 };
    int out = 0, *device = device_copy(&out, 1);
    LAUNCH(dynamic_kernel, 1, 2048, 0, 0, device, 0);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    LAUNCH(dynamic_kernel, dim3(1, 70000), 32, 0, 0, device, 0);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    LAUNCH(dynamic_kernel, 1, 32, BYTES, 0, device, N);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    assert_int_not_equal(cudaFuncSetAttribute(dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20),
                         cudaSuccess);
    assert_int_not_equal(cudaGetLastError(), cudaSuccess);
    check_cuda(cudaFuncSetAttribute(dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    LAUNCH(dynamic_kernel, 1, 32, BYTES, 0, device, N);
    fetch(&out, device, 1);
    assert_int_equal(out, N - 1);
    check_cuda(cudaFree(device));
}

static void test_memory(void**) {
    size_t free_before, free_after, total;
    check_cuda(cudaMemGetInfo(&free_before, &total));
    assert_true(free_before <= total);
    void* p = NULL;
    assert_int_equal(cudaMalloc(&p, total + (1 << 20)), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaSuccess);  // not sticky
    check_cuda(cudaMalloc(&p, 64 << 20));
    assert_int_equal((uintptr_t)p % 256, 0);
    check_cuda(cudaMemGetInfo(&free_after, &total));
    assert_true(free_after < free_before);

    unsigned char host[100];
    check_cuda(cudaMemset(p, 7, 100));
    check_cuda(cudaMemset(static_cast<unsigned char*>(p) + 10, 9, 20));
    fetch(host, static_cast<unsigned char*>(p), 100);
    for (int i = 0; i < 100; i++) { assert_int_equal(host[i], i >= 10 && i < 30 ? 9 : 7); }
    check_cuda(cudaFree(p));
}

static void test_device(void**) {
    int count = 0, blocks = 0, multiprocessors = 0;
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceCount(&count));
    assert_true(count >= 1);
    check_cuda(cudaGetDeviceProperties(&properties, 0));
    assert_int_equal(properties.warpSize, 32);
    assert_true(properties.major >= 8);
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    assert_int_equal(multiprocessors, properties.multiProcessorCount);
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, dynamic_kernel, 1024, 0));
    assert_in_range(blocks, 1, 2);

    cudaStream_t stream;
    cudaEvent_t start, end;
    float milliseconds = -1;
    check_cuda(cudaStreamCreate(&stream));
    check_cuda(cudaEventCreate(&start));
    check_cuda(cudaEventCreate(&end));
    check_cuda(cudaEventRecord(start, stream));
    check_cuda(cudaEventRecord(end, stream));
    check_cuda(cudaEventSynchronize(end));
    check_cuda(cudaEventElapsedTime(&milliseconds, start, end));
    assert_true(milliseconds >= 0);
    check_cuda(cudaEventDestroy(start));
    check_cuda(cudaEventDestroy(end));
    check_cuda(cudaStreamDestroy(stream));
    assert_string_equal(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_coordinates),    cmocka_unit_test(test_shared_memory),
        cmocka_unit_test(test_collectives),    cmocka_unit_test(test_block_sum),
        cmocka_unit_test(test_named_barriers), cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_mma_layout),     cmocka_unit_test(test_ldmatrix_layout),
        cmocka_unit_test(test_async_copies),   cmocka_unit_test(test_posenc),
        cmocka_unit_test(test_functions),      cmocka_unit_test(test_refused_launches),
        cmocka_unit_test(test_memory),         cmocka_unit_test(test_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
