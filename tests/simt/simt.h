// CUDA's vocabulary for g++: what a .cu file includes in place of <cuda_runtime.h> when LS_SIMT is defined.
//
// Only names are given here; what they do is in runtime.cpp. What the toolkit would refuse is refused here as well
// (__shared__ must be written LS_SHARED), and what has no meaning on one CPU thread is left out, so that its use does
// not compile. Compile with -fsanitize=thread and do not link libtsan: memory.cpp is the other end of its hooks.
#pragma once

#include <math.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "runtime.h"

// ---- Qualifiers ----

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ use_LS_SHARED_or_LS_DYNAMIC_SHARED

// ---- Launch and shared memory ----

#define LS_LAUNCH(kernel, grid, block, smem_bytes, stream, ...) \
  ::simt::launch(#kernel, kernel, grid, block, smem_bytes, stream, ##__VA_ARGS__)

// `type name[count]` shared by the block. The static's address tells source sites and template instances apart, as nvcc
// does; the reference keeps sizeof(name) and lets -fsanitize=bounds check the index.
#define LS_SHARED(type, name, count)                 \
  static char name##_key;                            \
  type(&name)[count] = *static_cast<type(*)[count]>( \
      ::simt::detail::shared_array(&name##_key, #name, sizeof(type) * (count), alignof(type), {__FILE__, __LINE__}))

#define LS_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::simt::detail::dynamic_shared(#name, alignof(type), {__FILE__, __LINE__}))

// ---- Built-in variables ----
// Constant for the code of one thread; the runtime rewrites them when it switches fibers. Being const they cost no hook,
// as long as their type has no constructor: hence uint3, where CUDA has dim3 for the last two.

#define SIMT_BUILTIN(name) extern const uint3 name __asm__("simt_" #name) __attribute__((visibility("hidden")))
SIMT_BUILTIN(threadIdx);
SIMT_BUILTIN(blockIdx);
SIMT_BUILTIN(blockDim);
SIMT_BUILTIN(gridDim);
#undef SIMT_BUILTIN
constexpr int warpSize = 32;

// ---- Vector types, aligned as in CUDA ----

#define SIMT_VECTOR(T, name, align2, align4)                                \
  struct name##1 { T x; };                                                  \
  struct alignas(align2) name##2 { T x, y; };                               \
  struct name##3 { T x, y, z; };                                            \
  struct alignas(align4) name##4 { T x, y, z, w; };                         \
  static inline name##1 make_##name##1(T x) { return {x}; }                 \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTOR(signed char, char, 2, 4)
SIMT_VECTOR(unsigned char, uchar, 2, 4)
SIMT_VECTOR(short, short, 4, 8)
SIMT_VECTOR(unsigned short, ushort, 4, 8)
SIMT_VECTOR(int, int, 8, 16)
SIMT_VECTOR(long long, longlong, 16, 16)
SIMT_VECTOR(unsigned long long, ulonglong, 16, 16)
SIMT_VECTOR(float, float, 8, 16)
SIMT_VECTOR(double, double, 16, 16)
#undef SIMT_VECTOR
struct uint1 {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline uint1 make_uint1(unsigned x) { return {x}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- Barriers ----
// The default arguments are evaluated where the call stands, so that a report can name file and line.

#define SIMT_SITE_PARAMS const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SIMT_SITE_PARAMS) { simt::detail::barrier(false, {file, line}, nullptr, nullptr); }
inline int __syncthreads_or(int predicate, SIMT_SITE_PARAMS) {
  unsigned any;
  simt::detail::barrier(predicate != 0, {file, line}, &any, nullptr);
  return static_cast<int>(any);
}
inline int __syncthreads_count(int predicate, SIMT_SITE_PARAMS) {
  unsigned count;
  simt::detail::barrier(predicate != 0, {file, line}, nullptr, &count);
  return static_cast<int>(count);
}
inline int __syncthreads_and(int predicate, SIMT_SITE_PARAMS) {
  unsigned count;
  simt::detail::barrier(predicate != 0, {file, line}, nullptr, &count);
  return count == blockDim.x * blockDim.y * blockDim.z;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE_PARAMS) {
  simt::detail::warp_collective(simt::detail::Collective::syncwarp, mask, 0, 0, warpSize, {file, line});
}
inline void __threadfence() { simt::detail::fence(); }
inline void __threadfence_system() { simt::detail::fence(); }
inline void __threadfence_block() {}

// ---- Warp shuffles and votes ----

namespace simt::detail {
template <typename T>
T shuffle(Collective kind, unsigned mask, T value, int param, int width, Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4- and 8-byte numbers");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_collective(kind, mask, bits, param, width, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace simt::detail

#define SIMT_SHUFFLE(name, kind, param_type)                                                                                 \
  template <typename T>                                                                                                      \
  T name(unsigned mask, T value, param_type param, int width = warpSize, SIMT_SITE_PARAMS) {                                 \
    return simt::detail::shuffle(simt::detail::Collective::kind, mask, value, static_cast<int>(param), width, {file, line}); \
  }
SIMT_SHUFFLE(__shfl_sync, shfl, int)
SIMT_SHUFFLE(__shfl_up_sync, shfl_up, unsigned)
SIMT_SHUFFLE(__shfl_down_sync, shfl_down, unsigned)
SIMT_SHUFFLE(__shfl_xor_sync, shfl_xor, int)
#undef SIMT_SHUFFLE

inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE_PARAMS) {
  using namespace simt::detail;
  return static_cast<unsigned>(warp_collective(Collective::ballot, mask, predicate != 0, 0, warpSize, {file, line}));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE_PARAMS) {
  using namespace simt::detail;
  return static_cast<int>(warp_collective(Collective::any, mask, predicate != 0, 0, warpSize, {file, line}));
}
inline int __all_sync(unsigned mask, int predicate, SIMT_SITE_PARAMS) {
  using namespace simt::detail;
  return static_cast<int>(warp_collective(Collective::all, mask, predicate != 0, 0, warpSize, {file, line}));
}
inline unsigned __activemask() {
  simt::detail::fail("__activemask() names whichever lanes happen to run together; pass a mask that the code knows");
}
#undef SIMT_SITE_PARAMS

// ---- Atomics ----
// Fibers do not interrupt each other, so a plain update is atomic. It is kept out of the instrumented code and announced
// to the race check as what it is.

namespace simt::detail {
template <typename T, typename F>
__attribute__((noinline, no_sanitize("thread"))) T atomic_update(T* ptr, F update) {
  before_atomic(ptr, sizeof(T), __builtin_return_address(0));
  const T old = *ptr;
  *ptr = update(old);
  return old;
}
}  // namespace simt::detail

#define SIMT_ATOMIC(name, T, expression)                                                 \
  inline T name(T* ptr, T value) {                                                       \
    return simt::detail::atomic_update(ptr, [value](T old) -> T { return expression; }); \
  }
SIMT_ATOMIC(atomicAdd, unsigned, old + value)
SIMT_ATOMIC(atomicAdd, unsigned long long, old + value)
SIMT_ATOMIC(atomicAdd, float, old + value)
SIMT_ATOMIC(atomicAdd, double, old + value)
SIMT_ATOMIC(atomicMax, int, old > value ? old : value)
SIMT_ATOMIC(atomicMax, unsigned, old > value ? old : value)
SIMT_ATOMIC(atomicMax, long long, old > value ? old : value)
SIMT_ATOMIC(atomicMax, unsigned long long, old > value ? old : value)
SIMT_ATOMIC(atomicMin, int, old < value ? old : value)
SIMT_ATOMIC(atomicMin, unsigned, old < value ? old : value)
SIMT_ATOMIC(atomicMin, long long, old < value ? old : value)
SIMT_ATOMIC(atomicMin, unsigned long long, old < value ? old : value)
SIMT_ATOMIC(atomicExch, int, (static_cast<void>(old), value))
SIMT_ATOMIC(atomicExch, unsigned, (static_cast<void>(old), value))
SIMT_ATOMIC(atomicExch, unsigned long long, (static_cast<void>(old), value))
SIMT_ATOMIC(atomicExch, float, (static_cast<void>(old), value))
SIMT_ATOMIC(atomicOr, int, old | value)
SIMT_ATOMIC(atomicOr, unsigned, old | value)
SIMT_ATOMIC(atomicAnd, int, old& value)
SIMT_ATOMIC(atomicAnd, unsigned, old& value)
SIMT_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1u)
#undef SIMT_ATOMIC
inline int atomicAdd(int* ptr, int value) {  // wraps, as on the device
  return static_cast<int>(atomicAdd(reinterpret_cast<unsigned*>(ptr), static_cast<unsigned>(value)));
}

#define SIMT_ATOMIC_CAS(T)                                                                                                \
  inline T atomicCAS(T* ptr, T expected, T desired) {                                                                     \
    return simt::detail::atomic_update(ptr, [expected, desired](T old) -> T { return old == expected ? desired : old; }); \
  }
SIMT_ATOMIC_CAS(int)
SIMT_ATOMIC_CAS(unsigned)
SIMT_ATOMIC_CAS(unsigned long long)
SIMT_ATOMIC_CAS(unsigned short)
#undef SIMT_ATOMIC_CAS

// ---- Arithmetic ----
// The fast intrinsics are the exact functions here: their error is the device's business and is measured on a device.
// Macros, because glibc already declares functions of the same names.

namespace simt::detail {
template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace simt::detail

#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __fdividef(x, y) ((x) / (y))
#define __fsqrt_rn(x) sqrtf(x)
#define __fmaf_rn(x, y, z) fmaf(x, y, z)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN gives 0, as in CUDA

inline int __float_as_int(float x) { return simt::detail::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return simt::detail::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return simt::detail::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return simt::detail::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return simt::detail::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return simt::detail::bit_cast<double>(x); }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <typename T>
T __ldg(const T* ptr) {
  return *ptr;
}
template <typename T>
T __ldcs(const T* ptr) {
  return *ptr;
}
template <typename T>
T __ldcg(const T* ptr) {
  return *ptr;
}
template <typename T>
void __stcs(T* ptr, T value) {
  *ptr = value;
}
template <typename T>
void __stcg(T* ptr, T value) {
  *ptr = value;
}

#define SIMT_MIN_MAX(T)                               \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

[[noreturn]] inline void __trap() { simt::detail::fail("__trap() was called"); }

// ---- Host side ----
// Launches finish before they return and throw when they fail, so there is never an error left to fetch.

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid argument"; }
inline cudaError_t cudaMemsetAsync(void* ptr, int value, size_t n_bytes, cudaStream_t = nullptr) {
  simt::detail::memset_global(ptr, value, n_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// Few multiprocessors, so that kernels sized by the device walk their grid-stride loops more than once.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 2 : 227 * 1024;
  return cudaSuccess;
}
template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int smem_bytes) {
  simt::detail::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), static_cast<size_t>(smem_bytes));
  return cudaSuccess;
}
