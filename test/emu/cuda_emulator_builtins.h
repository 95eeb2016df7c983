/*
CUDA's built-in device functions on the CPU, under their own names. Included by cuda_emulator.h only.
Approximate functions (__expf and the like) are exact here: accuracy must be checked on a GPU.
*/
#ifndef CUDA_EMULATOR_BUILTINS_H
#define CUDA_EMULATOR_BUILTINS_H

// ----------------------------------------------------------------------------
// synchronisation

inline void __syncthreads() { emu::bar_sync(0, 0); }
inline int __syncthreads_count(int p) { return emu::bar_reduce(emu::BARRIER_COUNT, p); }
inline int __syncthreads_and(int p) { return emu::bar_reduce(emu::BARRIER_AND, p); }
inline int __syncthreads_or(int p) { return emu::bar_reduce(emu::BARRIER_OR, p); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::syncwarp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::yield(); }
inline void __trap() { emu::kernel_fault("__trap()"); }

// ----------------------------------------------------------------------------
// warp collectives

template <class T>
inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
    return emu::shuffle_value(mask, emu::SHUFFLE_INDEX, v, lane, width);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    return emu::shuffle_value(mask, emu::SHUFFLE_UP, v, static_cast<int>(delta), width);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    return emu::shuffle_value(mask, emu::SHUFFLE_DOWN, v, static_cast<int>(delta), width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32) {
    return emu::shuffle_value(mask, emu::SHUFFLE_XOR, v, lanes, width);
}

inline unsigned __ballot_sync(unsigned mask, int p) {
    unsigned participants;
    return emu::ballot(mask, p != 0, &participants);
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) {
    unsigned participants, votes = emu::ballot(mask, p != 0, &participants);
    return votes == participants;
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::REDUCE_ADD, v); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::REDUCE_MIN, v); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::REDUCE_MAX, v); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::REDUCE_AND, v); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::REDUCE_OR, v); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::REDUCE_XOR, v); }
inline int __reduce_add_sync(unsigned mask, int v) {
    return static_cast<int>(emu::reduce(mask, emu::REDUCE_ADD, static_cast<unsigned>(v)));
}
inline int __reduce_min_sync(unsigned mask, int v) {
    return static_cast<int>(emu::reduce(mask, emu::REDUCE_MIN_SIGNED, static_cast<unsigned>(v)));
}
inline int __reduce_max_sync(unsigned mask, int v) {
    return static_cast<int>(emu::reduce(mask, emu::REDUCE_MAX_SIGNED, static_cast<unsigned>(v)));
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T v) {
    return emu::match_any(mask, emu::bits<uint64_t>(v));
}

// ----------------------------------------------------------------------------
// atomics; all return the value before

float atomicAdd(float*, float);
double atomicAdd(double*, double);
int atomicAdd(int*, int);
unsigned atomicAdd(unsigned*, unsigned);
unsigned long long atomicAdd(unsigned long long*, unsigned long long);
int atomicMax(int*, int);
unsigned atomicMax(unsigned*, unsigned);
int atomicMin(int*, int);
unsigned atomicMin(unsigned*, unsigned);
int atomicExch(int*, int);
unsigned atomicExch(unsigned*, unsigned);
int atomicCAS(int*, int, int);
unsigned atomicCAS(unsigned*, unsigned, unsigned);
unsigned long long atomicCAS(unsigned long long*, unsigned long long, unsigned long long);
unsigned atomicOr(unsigned*, unsigned);
unsigned atomicAnd(unsigned*, unsigned);

// ----------------------------------------------------------------------------
// loads and stores with a cache hint

template <class T>
inline T __ldg(const T* p) {
    return *p;
}
template <class T>
inline T __ldcs(const T* p) {
    return *p;
}
template <class T>
inline T __ldcg(const T* p) {
    return *p;
}
template <class T>
inline T __ldca(const T* p) {
    return *p;
}
template <class T>
inline T __ldlu(const T* p) {
    return *p;
}
template <class T>
inline void __stcs(T* p, T v) {
    *p = v;
}
template <class T>
inline void __stcg(T* p, T v) {
    *p = v;
}
template <class T>
inline void __stwt(T* p, T v) {
    *p = v;
}
template <class T>
inline void __stwb(T* p, T v) {
    *p = v;
}

// ----------------------------------------------------------------------------
// arithmetic

inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline double __longlong_as_double(long long x) { return emu::bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu::bits<long long>(x); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
// volatile: these three are never contracted to a fused multiply-add
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}
inline float __fadd_rn(float a, float b) {
    volatile float x = a, y = b;
    return x + y;
}
inline float __fsub_rn(float a, float b) {
    volatile float x = a, y = b;
    return x - y;
}

inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(nearbyintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

#define EMU_MIN_MAX(T)                               \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// ----------------------------------------------------------------------------
// what cuda_runtime.h declares for nvcc only

template <class R, class... P>
inline cudaError_t cudaFuncSetAttribute(R (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return ::cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class R, class... P>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, R (*kernel)(P...)) {
    return ::cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <class R, class... P>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, R (*kernel)(P...), int threads,
                                                                 size_t dynamic_bytes) {
    return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(kernel), threads,
                                                           dynamic_bytes);
}

#endif
