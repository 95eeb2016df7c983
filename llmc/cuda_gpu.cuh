/*
What every kernel file includes: the switch between nvcc and the CPU emulator of test/emu, and thin wrappers
around the instructions that CUDA C++ has no name for. This is the only file with inline PTX.

Contract for kernels, so that the same source runs in both:
- launches go through LAUNCH((kernel<A, B>), grid, block, dynamic_bytes, stream, arguments...),
- shared memory is declared with SHARED(type, name, [dimensions]) and DYN_SHARED(type, name),
- mma and ldmatrix are executed by full warps,
- no cooperative groups, clusters, grid-wide barriers, __activemask() or __CUDA_ARCH__ in kernel bodies.
References: PTX ISA 8.0, sections 9.7.8 (cp.async), 9.7.12 (barriers), 9.7.13 (mma, ldmatrix).
*/
#ifndef CUDA_GPU_CUH
#define CUDA_GPU_CUH

#include <stdint.h>

#ifdef CUDA_EMULATOR
#include "../test/emu/cuda_emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define LAUNCH(kernel, grid, block, dynamic_bytes, stream, ...) \
    kernel<<<grid, block, dynamic_bytes, stream>>>(__VA_ARGS__)

#define SHARED(T, name, ...) __shared__ T name __VA_ARGS__

// Dynamic shared memory, aligned to 128 bytes. One symbol for all kernels: an extern array declared with two
// element types in one translation unit does not compile.
#define DYN_SHARED(T, name)                                                 \
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[]; \
    T* const name = reinterpret_cast<T*>(dynamic_shared_memory)
#endif

// ----------------------------------------------------------------------------
// tensor cores

// D[16,8] = A[16,16] B[16,8] + C[16,8] by one warp, bf16 factors, fp32 accumulation. With g = lane/4, t = lane%4:
// a[0], a[1], a[2], a[3] hold columns 2t, 2t+1 of A's rows g, g+8 and columns 2t+8, 2t+9 of rows g, g+8;
// b[0], b[1] hold rows 2t, 2t+1 and 2t+8, 2t+9 of B's column g; c and d hold columns 2t, 2t+1 of row g, then g+8.
__device__ __forceinline__ void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                               const float (&c)[4]) {
#ifdef CUDA_EMULATOR
    emu::mma_bf16_16816(d, a, b, c);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

// ldmatrix_x4(r, row): four 8x8 matrices of 16-bit elements from shared memory. Lane l gives the address of row
// l%8 of matrix l/8 (16 bytes, 16-byte aligned) and receives in r[i] the elements 2(l%4), 2(l%4)+1 of row l/4 of
// matrix i; the _trans versions deliver the transposed matrices. x2 reads two matrices, addressed by lanes 0..15.
#ifdef CUDA_EMULATOR
#define LDMATRIX_2(r, row, transposed, instruction) emu::ldmatrix(r, row, 2, transposed)
#define LDMATRIX_4(r, row, transposed, instruction) emu::ldmatrix(r, row, 4, transposed)
#else
#define LDMATRIX_2(r, row, transposed, instruction)                                       \
    asm volatile("ldmatrix.sync.aligned.m8n8." instruction ".shared.b16 {%0,%1}, [%2];\n" \
                 : "=r"(r[0]), "=r"(r[1])                                                 \
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))              \
                 : "memory")
#define LDMATRIX_4(r, row, transposed, instruction)                                             \
    asm volatile("ldmatrix.sync.aligned.m8n8." instruction ".shared.b16 {%0,%1,%2,%3}, [%4];\n" \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                               \
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))                    \
                 : "memory")
#endif

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) { LDMATRIX_4(r, row, false, "x4"); }
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    LDMATRIX_4(r, row, true, "x4.trans");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) { LDMATRIX_2(r, row, false, "x2"); }
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    LDMATRIX_2(r, row, true, "x2.trans");
}

// ----------------------------------------------------------------------------
// asynchronous copies

// Starts a copy of 16 bytes from global to shared memory, both aligned to 16; where !valid it writes zeros and
// does not read src. The destination is undefined until this thread has waited for the copy's group, and other
// threads see it after a barrier that follows the wait.
__device__ __forceinline__ void cp_async16(void* dst, const void* src, bool valid = true) {
#ifdef CUDA_EMULATOR
    emu::cp_async(dst, src, 16, valid ? 16 : 0);
#else
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(dst))),
        "l"(src), "r"(valid ? 16 : 0)
        : "memory");
#endif
}

// The same for 4 bytes, aligned to 4.
__device__ __forceinline__ void cp_async4(void* dst, const void* src, bool valid = true) {
#ifdef CUDA_EMULATOR
    emu::cp_async(dst, src, 4, valid ? 4 : 0);
#else
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(dst))),
        "l"(src), "r"(valid ? 4 : 0)
        : "memory");
#endif
}

// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() {
#ifdef CUDA_EMULATOR
    emu::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Waits until at most the N youngest groups of this thread are still in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#ifdef CUDA_EMULATOR
    emu::cp_async_wait(N);
#else
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#endif
}

// ----------------------------------------------------------------------------
// named barriers 1..15 for a part of the block; `threads` is a multiple of 32 and counts those who arrive as well

__device__ __forceinline__ void named_bar_sync(int id, int threads) {
#ifdef CUDA_EMULATOR
    emu::bar_sync(id, threads);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

__device__ __forceinline__ void named_bar_arrive(int id, int threads) {
#ifdef CUDA_EMULATOR
    emu::bar_arrive(id, threads);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// ----------------------------------------------------------------------------
// arithmetic

// 2^x to about 2 ulp; denormal results are flushed to zero.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef CUDA_EMULATOR
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Two bf16, rounded to nearest even, in one register: `low` in bits 0..15.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef CUDA_EMULATOR
    return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
           static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
#else
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
#endif
}

#endif
