// cuda_emu.h -- run CUDA C++ kernels on the CPU from the same source nvcc compiles (C++17, g++, x86-64).
// Included only when -DCUDA_EMULATOR is given (by g++); the nvcc build uses the #else branch of gpu.h.
// The real toolkit headers supply types and API prototypes; cuda_emu_rt.cpp supplies the definitions (link-time shim).
#pragma once
#pragma GCC system_header
#ifdef __CUDACC__
#error "cuda_emu.h is for the host compiler only"
#endif
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// __shared__ needs macros: SHARED(T,name,[dims]) and DYN_SHARED(T,name).  A bare __shared__ would silently become a
// per-thread local variable in a plain g++ build, so make it a compile error.
#undef __launch_bounds__
#define __launch_bounds__(...)
#ifndef __grid_constant__
#define __grid_constant__
#endif
#undef __shared__
#define __shared__ static_assert(false, "use SHARED()/DYN_SHARED()");

namespace emu {
struct Block;
struct Warp;
struct Thread {                 // the part of a CUDA thread that headers may look at
  uint3 tid;
  unsigned lane, linear;
  Warp* warp;
  Block* block;
};
struct Block {
  uint3 bid;
  dim3 bdim, gdim;
  uint64_t gen;                 // unique per executed block (for SHARED slots)
  unsigned char* dyn;           // dynamic shared memory
  size_t dyn_bytes;
};
extern __thread Thread* cur;    // running CUDA thread of this OS thread; nullptr in host code
inline Thread& self() { return *cur; }

struct Config {
  unsigned seed = 0;            // 0: ascending order, 1: descending, >=2: random (EMU_SEED)
  int workers = 0;              // 0: all cores (EMU_WORKERS)
  bool poison = true;           // NaN-fill shared memory per block and cudaMalloc memory (EMU_POISON)
  bool strict_exit = false;     // error if __syncthreads() is completed by threads having exited
  size_t stack = 128 << 10;
  size_t smem_limit = 166912;   // sm_80: 163 KiB per block opt-in
};
Config& config();
struct Stats { uint64_t switches = 0, collectives = 0, barriers = 0, blocks = 0; };
Stats stats(bool reset);

struct Error : std::runtime_error { using std::runtime_error::runtime_error; };
[[noreturn]] void fail(const char* fmt, ...) __attribute__((format(printf, 1, 2)));   // from kernel code: aborts the launch

// ---- launch -------------------------------------------------------------------------------------------------------
void launch_raw(const void* fn, const char* name, dim3 g, dim3 b, size_t smem, void (*body)(void*), void* arg);
template <class... P, class... A>
void launch(const char* name, void (*k)(P...), dim3 g, dim3 b, size_t smem, cudaStream_t, A&&... a) {
  static_assert(sizeof...(P) == sizeof...(A), "wrong number of kernel arguments");
  struct Pack { void (*k)(P...); std::tuple<P...> args; } p{k, std::tuple<P...>(std::forward<A>(a)...)};
  launch_raw((const void*)k, name, g, b, smem, [](void* q) { auto* p = (Pack*)q; std::apply(p->k, p->args); }, &p);
}
// ---- shared memory ------------------------------------------------------------------------------------------------
struct SharedSlot { uint64_t gen; void* p; };
void* shared_alloc(SharedSlot& s, size_t bytes, size_t align);
inline void* shared_get(SharedSlot& s, size_t bytes, size_t align) {
  return s.gen == cur->block->gen ? s.p : shared_alloc(s, bytes, align);
}
// ---- barriers, warp collectives -----------------------------------------------------------------------------------
void bar_sync(int id, int count);            // count 0: whole block
void bar_arrive(int id, int count);
int bar_red(int op, int pred);               // 0 count, 1 and, 2 or
void yield();                                // __nanosleep
struct ShflArg { uint64_t in, out; int sel, width; };
void syncwarp(unsigned mask);
void shfl(unsigned mask, int mode, ShflArg* a);        // mode 0 idx 1 up 2 down 3 xor
unsigned vote(unsigned mask, int mode, int pred);      // 0 ballot 1 any 2 all
unsigned reduce(unsigned mask, int mode, unsigned v);  // 0 addu 1 minu 2 maxu 3 mins 4 maxs 5 and 6 or 7 xor
unsigned match_any(unsigned mask, uint64_t v);
void mma_bf16_16816(float* d, const uint32_t* a, const uint32_t* b, const float* c);
void ldmatrix(uint32_t* r, const void* row, int n, bool trans);
void cp_async(void* dst, const void* src, int bytes, int src_bytes);
void cp_async_commit();
void cp_async_wait(int n);                   // -1: wait_all
template <class T> inline T shfl_t(unsigned m, int mode, T v, int sel, int w) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "");
  ShflArg a{0, 0, sel, w};
  memcpy(&a.in, &v, sizeof v);
  shfl(m, mode, &a);
  memcpy(&v, &a.out, sizeof v);
  return v;
}
}  // namespace emu

#define threadIdx (::emu::self().tid)
#define blockIdx (::emu::self().block->bid)
#define blockDim (::emu::self().block->bdim)
#define gridDim (::emu::self().block->gdim)

#define LAUNCH(kernel, grid, block, smem, stream, ...) ::emu::launch(#kernel, kernel, grid, block, smem, stream, ##__VA_ARGS__)
#define SHARED(T, name, ...)                                                   \
  using name##_shared_t = T __VA_ARGS__;                                       \
  static thread_local ::emu::SharedSlot name##_slot;                           \
  name##_shared_t& name = *(name##_shared_t*)::emu::shared_get(name##_slot, sizeof(name##_shared_t), \
      alignof(name##_shared_t) > 16 ? alignof(name##_shared_t) : 16)
#define DYN_SHARED(T, name) T* const name = (T*)::emu::self().block->dyn

inline void __syncthreads() { emu::bar_sync(0, 0); }
inline int __syncthreads_count(int p) { return emu::bar_red(0, p); }
inline int __syncthreads_and(int p) { return emu::bar_red(1, p); }
inline int __syncthreads_or(int p) { return emu::bar_red(2, p); }
inline void __syncwarp(unsigned m = 0xffffffffu) { emu::syncwarp(m); }
template <class T> inline T __shfl_sync(unsigned m, T v, int s, int w = 32) { return emu::shfl_t(m, 0, v, s, w); }
template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned s, int w = 32) { return emu::shfl_t(m, 1, v, (int)s, w); }
template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned s, int w = 32) { return emu::shfl_t(m, 2, v, (int)s, w); }
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int s, int w = 32) { return emu::shfl_t(m, 3, v, s, w); }
inline unsigned __ballot_sync(unsigned m, int p) { return emu::vote(m, 0, p); }
inline int __any_sync(unsigned m, int p) { return (int)emu::vote(m, 1, p); }
inline int __all_sync(unsigned m, int p) { return (int)emu::vote(m, 2, p); }
inline unsigned __reduce_add_sync(unsigned m, unsigned v) { return emu::reduce(m, 0, v); }
inline int __reduce_add_sync(unsigned m, int v) { return (int)emu::reduce(m, 0, (unsigned)v); }
inline unsigned __reduce_min_sync(unsigned m, unsigned v) { return emu::reduce(m, 1, v); }
inline unsigned __reduce_max_sync(unsigned m, unsigned v) { return emu::reduce(m, 2, v); }
inline int __reduce_min_sync(unsigned m, int v) { return (int)emu::reduce(m, 3, (unsigned)v); }
inline int __reduce_max_sync(unsigned m, int v) { return (int)emu::reduce(m, 4, (unsigned)v); }
inline unsigned __reduce_and_sync(unsigned m, unsigned v) { return emu::reduce(m, 5, v); }
inline unsigned __reduce_or_sync(unsigned m, unsigned v) { return emu::reduce(m, 6, v); }
inline unsigned __reduce_xor_sync(unsigned m, unsigned v) { return emu::reduce(m, 7, v); }
template <class T> inline unsigned __match_any_sync(unsigned m, T v) { uint64_t x = 0; memcpy(&x, &v, sizeof v); return emu::match_any(m, x); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::yield(); }

float atomicAdd(float*, float);
double atomicAdd(double*, double);
int atomicAdd(int*, int);
unsigned atomicAdd(unsigned*, unsigned);
unsigned long long atomicAdd(unsigned long long*, unsigned long long);
__nv_bfloat162 atomicAdd(__nv_bfloat162*, __nv_bfloat162);
int atomicMax(int*, int);
unsigned atomicMax(unsigned*, unsigned);
int atomicMin(int*, int);
unsigned atomicMin(unsigned*, unsigned);
int atomicExch(int*, int);
unsigned atomicExch(unsigned*, unsigned);
float atomicExch(float*, float);
int atomicCAS(int*, int, int);
unsigned atomicCAS(unsigned*, unsigned, unsigned);
unsigned long long atomicCAS(unsigned long long*, unsigned long long, unsigned long long);
unsigned atomicOr(unsigned*, unsigned);
unsigned atomicAnd(unsigned*, unsigned);

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *(const volatile T*)p; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stwt(T* p, T v) { *p = v; }
template <class T> inline void __stwb(T* p, T v) { *p = v; }

namespace emu { template <class D, class S> inline D bits(S s) { static_assert(sizeof(D) == sizeof(S), ""); D d; memcpy((void*)&d, &s, sizeof d); return d; } }
inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline double __longlong_as_double(long long x) { return emu::bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) { x = __builtin_bswap32(x); x = ((x >> 4) & 0x0f0f0f0f) | ((x & 0x0f0f0f0f) << 4); x = ((x >> 2) & 0x33333333) | ((x & 0x33333333) << 2); return ((x >> 1) & 0x55555555) | ((x & 0x55555555) << 1); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { s &= 31; return s ? (hi << s) | (lo >> (32 - s)) : hi; }
inline void __trap() { emu::fail("__trap()"); }
#define __CUDA_EMU_MINMAX(T) inline T min(T a, T b) { return b < a ? b : a; } inline T max(T a, T b) { return a < b ? b : a; }
__CUDA_EMU_MINMAX(int) __CUDA_EMU_MINMAX(unsigned) __CUDA_EMU_MINMAX(long) __CUDA_EMU_MINMAX(unsigned long)
__CUDA_EMU_MINMAX(long long) __CUDA_EMU_MINMAX(unsigned long long)
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
// C++ overloads that cuda_runtime.h offers only to nvcc
template <class R, class... P> inline cudaError_t cudaFuncSetAttribute(R (*k)(P...), cudaFuncAttribute a, int v) { return ::cudaFuncSetAttribute((const void*)k, a, v); }
template <class R, class... P> inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, R (*k)(P...), int b, size_t s) { return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, (const void*)k, b, s); }
template <class R, class... P> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, R (*k)(P...)) { return ::cudaFuncGetAttributes(a, (const void*)k); }
