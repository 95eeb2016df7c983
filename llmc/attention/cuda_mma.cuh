/*
Tiles in shared memory and fragments in registers for tensor-core attention (mma.m16n8k16, bf16 factors, fp32 sums).
Private to cuda_forward.cuh and cuda_backward.cuh.

Fragment layout (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane = 4*group + member. A thread of a 16x8 block
of sums holds rows group and group + 8, columns 2*member and 2*member + 1, in the order (row, column), (row, column
+ 1), (row + 8, column), (row + 8, column + 1). "Half rows" number the rows of a warp that a thread holds: half row
i is row 8*i + group. Rows in shared memory are D + 8 elements long: eight rows of 16 bytes then lie in different
banks. Heads smaller than D, the next native size, are padded with zeros there and nowhere else.
*/
#ifndef ATTENTION_CUDA_MMA_CUH
#define ATTENTION_CUDA_MMA_CUH

#include "cuda_tasks.cuh"

typedef uint32_t FragmentA[4];
typedef uint32_t FragmentB[2];
typedef float FragmentC[4];

constexpr unsigned FULL_WARP = 0xffffffffu;

// The shape of a block: 16-row tiles per warp, warps, and what is kept of the row operands in registers.
template <int D>
struct AttentionShape {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS, STRIDE = D + 8;
    static constexpr int ROW_TILES = D <= 64 ? 2 : 1;
    static constexpr int BLOCKS = 2;  // of the backward per multiprocessor: 255 registers; a third would spill
    static constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = WARPS * WARP_ROWS, HALF_ROWS = 2 * ROW_TILES;
    static constexpr int DEPTH = D / 16, COLUMNS = D / 8;    // steps along the head; blocks of 8 columns of a head
    static constexpr int DISTANCES = ROWS + ATTENTION_KEYS;  // distances between the rows and keys of a tile pair
};

static_assert(AttentionShape<64>::ROWS == attention_rows(64) && AttentionShape<128>::ROWS == attention_rows(128),
              "rows");

// The native size that a head is padded to.
constexpr int attention_native_size(int HS) {
    return HS <= 32 ? 32 : HS <= 48 ? 48 : HS <= 64 ? 64 : HS <= 96 ? 96 : 128;
}

// Calls F<D>(...) with the native size of HS.
#define WITH_NATIVE_SIZE(HS, F, ...)            \
    switch (attention_native_size((int)(HS))) { \
        case 32: F<32>(__VA_ARGS__); break;     \
        case 48: F<48>(__VA_ARGS__); break;     \
        case 64: F<64>(__VA_ARGS__); break;     \
        case 96: F<96>(__VA_ARGS__); break;     \
        default: F<128>(__VA_ARGS__); break;    \
    }

// ----------------------------------------------------------------------------
// shared memory

// tile[ROWS][D + 8] = rows first.. of a head; rows from `end` on and columns from HS on are 0. Asynchronous.
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(floatX* tile, const floatX* head, size_t stride, int first, int end, int HS) {
    constexpr int PIECES = D / 8, STEP = THREADS / PIECES;  // pieces of 16 bytes per row; rows at a time
    const int row = threadIdx.x / PIECES, column = threadIdx.x % PIECES * 8;
    const floatX* from = head + (size_t)(first + row) * stride + column;
    floatX* to = tile + row * (D + 8) + column;
#pragma unroll
    for (int n = 0; n < ROWS; n += STEP) {
        if ((THREADS % PIECES != 0 && row >= STEP) || (ROWS % STEP != 0 && n + row >= ROWS)) { break; }
        const bool real = first + n + row < end && column < HS;
        cp_async16(to + n * (D + 8), real ? from + n * stride : head, real);
    }
}

// window[n] = table[first + n], 0 outside 0..T-1. Asynchronous.
template <int COUNT, int THREADS>
__device__ __forceinline__ void load_distances(float* window, const float* table, int first, int T) {
#pragma unroll
    for (int n = 0; n < (COUNT + THREADS - 1) / THREADS; n++) {
        const int i = n * THREADS + threadIdx.x, distance = first + i;
        if (COUNT % THREADS != 0 && i >= COUNT) { break; }
        const bool real = distance >= 0 && distance < T;
        cp_async4(window + i, table + (real ? distance : 0), real);
    }
}

// ----------------------------------------------------------------------------
// fragments

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// A: 16 rows from `row` (this thread's first) and 16 columns from `column` (this thread's) of a head in global memory.
__device__ __forceinline__ void load_a_global(FragmentA& a, const floatX* head, size_t stride, int row, int end,
                                              int column, int HS) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = row + (i & 1) * 8, c = column + (i >> 1) * 8;
        const bool real = r < end && c < HS;
        a[i] = real ? *reinterpret_cast<const uint32_t*>(head + (size_t)r * stride + c) : 0u;
    }
}

// A: rows row.. and columns column.. of a tile.
__device__ __forceinline__ void load_a(FragmentA& a, const floatX* tile, int stride, int row, int column, int lane) {
    ldmatrix_x4(a, tile + (row + (lane & 15)) * stride + column + (lane >> 4) * 8);
}

// Two neighbouring B whose column n is row n of the tile: the product is with the transposed tile.
__device__ __forceinline__ void load_b_rows(FragmentB (&b)[2], const floatX* tile, int stride, int row, int column,
                                            int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile + (row + (lane & 7) + (lane >> 4) * 8) * stride + column + (lane >> 3 & 1) * 8);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Two neighbouring B whose depth k is row k of the tile: the product is with the tile.
__device__ __forceinline__ void load_b(FragmentB (&b)[2], const floatX* tile, int stride, int row, int column,
                                       int lane) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile + (row + (lane & 15)) * stride + column + (lane >> 4) * 8);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void fill_sums(FragmentC (&c)[ROWS][COLUMNS], float value) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) { c[i][j][0] = c[i][j][1] = c[i][j][2] = c[i][j][3] = value; }
    }
}

// c[.][n], c[.][n + 1] += a times b
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_pair(FragmentC (&c)[ROWS][COLUMNS], int n, const FragmentA (&a)[ROWS],
                                              const FragmentB (&b)[2]) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        mma_bf16_16816(c[i][n], a[i], b[0], c[i][n]);
        mma_bf16_16816(c[i][n + 1], a[i], b[1], c[i][n + 1]);
    }
}

__device__ __forceinline__ float sum_of_group(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

__device__ __forceinline__ float max_of_group(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// Writes one row of a head from its sums times `factor`; half is 0 or 1, see the layout above.
template <int COLUMNS>
__device__ __forceinline__ void store_row(floatX* row, const FragmentC (&sums)[COLUMNS], int half, float factor,
                                          int member, int HS) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
        if (n * 8 >= HS) { break; }
        const uint32_t pair = pack_bf16(sums[n][half * 2] * factor, sums[n][half * 2 + 1] * factor);
        *reinterpret_cast<uint32_t*>(row + n * 8 + member * 2) = pair;
    }
}

#endif
