// SIMD for the CPU kernels: one vector of kLanes floats, written with the compiler's vector extensions, plus the few
// instructions those cannot express.
//
// Every kernel file is compiled once per instruction set (setup.py), each time into the namespace ls::cpu::LS_ISA, and
// dispatch.cpp picks one at run time: a binary built here runs on any x86-64, and "plain" on other processors as well.
// Nothing in this header has external linkage outside that namespace, so code of two sets never meets at link time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "common/params.h"

#if !defined(LS_ISA)
#error "compile with -DLS_ISA=plain, avx2 or avx512"
#endif

// For functions of vectors that are more than a few instructions. Where gcc calls one, each vector goes through memory and every
// constant is loaded anew: gelu took 2.2 ms per million elements instead of 1.5.
#define LS_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace ls::cpu::LS_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using vfloat = float __attribute__((vector_size(4 * kLanes)));
using vint = int32_t __attribute__((vector_size(4 * kLanes)));
using vuint = uint32_t __attribute__((vector_size(4 * kLanes)));
using vuint64 = uint64_t __attribute__((vector_size(4 * kLanes)));
using vhalf = uint16_t __attribute__((vector_size(2 * kLanes)));  // kLanes 16-bit integers

// Storage types of the half formats: plain bits with a name.
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

// Calls body(scalar_t{}) with the storage type that dtype names.
template <typename Body>
inline void dispatch_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat16:
      return body(float16{});
    case DType::kBFloat16:
      return body(bfloat16{});
  }
}

// At any alignment, of any type. Not memcpy: gcc 12 keeps what it copied in integer registers, and in memory when it runs out of them.
template <typename V, typename T>
inline V load_bits(const T* p) {
  typedef V Unaligned __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const Unaligned*>(p);
}
template <typename V, typename T>
inline void store_bits(T* p, V v) {
  typedef V Unaligned __attribute__((aligned(1), may_alias));
  *reinterpret_cast<Unaligned*>(p) = v;
}

// Asks for what lies 2 KB beyond p, in kernels that make draws between their accesses, where the hardware prefetchers fall behind. One thread
// of an EPYC, data in memory: activation 0.8 to 0.95, residual and norm 0.85 to 1.0 of the time without; data in the cache: 0.98 to 1.05.
template <bool kWrites, typename scalar_t>
inline void prefetch_ahead(const scalar_t* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + 2048, kWrites, 3);
}

inline vfloat broadcast(float value) { return value - vfloat{}; }

// Scalar conversions: the tails, and the lanes of "plain".
inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float to_float(float16 value) {
  // Shift the exponent and mantissa into place and rescale by 2^112: exact, subnormals included.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7FFFu);
  const uint32_t bits = rest >= 0x7C00u ? 0x7F800000u | ((rest & 0x3FFu) << 13) : rest << 13;
  float out;
  std::memcpy(&out, &bits, 4);
  if (rest < 0x7C00u) out *= 0x1p112f;
  std::memcpy(const_cast<uint32_t*>(&bits), &out, 4);
  const uint32_t with_sign = bits | sign;
  std::memcpy(&out, &with_sign, 4);
  return out;
}
inline void from_float(float value, float* out) { *out = value; }
inline void from_float(float value, bfloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  out->bits = value != value ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
inline void from_float(float value, float16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (value != value) {
    out->bits = 0x7E00;
  } else if (magnitude >= 65520.0f) {  // rounds to infinity
    out->bits = sign | 0x7C00;
  } else if (magnitude < 0x1p-14f) {  // subnormal: the float adder rounds to a multiple of 2^-24
    const float rounded = magnitude + 0.5f;
    uint32_t rounded_bits;
    std::memcpy(&rounded_bits, &rounded, 4);
    out->bits = sign | static_cast<uint16_t>(rounded_bits - 0x3F000000u);
  } else {
    const uint32_t m = bits & 0x7FFFFFFFu;
    out->bits = sign | static_cast<uint16_t>((m - 0x38000000u + 0xFFFu + ((m >> 13) & 1u)) >> 13);
  }
}

// kLanes 16-bit integers, widened. Written out because gcc 12 widens the two halves of a vector one by one: 5 instructions for 1.
inline vuint widen(vhalf v) {
#if defined(__AVX512F__)
  return reinterpret_cast<vuint>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<vuint>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, vuint);
#endif
}
// The low halves of kLanes integers below 65,536.
inline vhalf narrow(vuint v) {
#if defined(__AVX512F__)
  return reinterpret_cast<vhalf>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32(reinterpret_cast<__m256i>(v), reinterpret_cast<__m256i>(v));
  return reinterpret_cast<vhalf>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  return __builtin_convertvector(v, vhalf);
#endif
}

// kLanes elements at p, any alignment.
inline vfloat load(const float* p) { return load_bits<vfloat>(p); }
inline void store(float* p, vfloat v) { store_bits(p, v); }

inline vfloat load(const bfloat16* p) {
  const vuint wide = widen(load_bits<vhalf>(p)) << 16;
  return reinterpret_cast<vfloat>(wide);
}
inline void store(bfloat16* p, vfloat v) {
  const vuint bits = reinterpret_cast<vuint>(v);
  const vuint rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  store_bits(p, narrow(v != v ? 0x7FC0u - vuint{} : rounded));
}

inline vfloat load(const float16* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vfloat>(_mm512_cvtph_ps(load_bits<__m256i>(p)));
#elif defined(__F16C__)
  return reinterpret_cast<vfloat>(_mm256_cvtph_ps(load_bits<__m128i>(p)));
#else
  vfloat v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
inline void store(float16* p, vfloat v) {
#if defined(__AVX512F__)
  const __m256i bits = _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  store_bits(p, bits);
#elif defined(__F16C__)
  const __m128i bits = _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  store_bits(p, bits);
#else
  for (int i = 0; i < kLanes; ++i) from_float(v[i], &p[i]);
#endif
}

// The first n < kLanes elements; the other lanes are `fill` and are not touched in memory.
template <typename scalar_t>
inline vfloat load_tail(const scalar_t* p, int64_t n, float fill = 0.0f) {
  vfloat v = broadcast(fill);
  for (int64_t i = 0; i < n; ++i) v[i] = to_float(p[i]);
  return v;
}
template <typename scalar_t>
inline void store_tail(scalar_t* p, vfloat v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) from_float(v[i], &p[i]);
}

// body(i, n) over [0, n_elem) in vectors: n == kLanes but for the last call. load_n/store_n pick the full or the tail form.
template <typename Body>
inline void for_each_vector(int64_t n_elem, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n_elem; i += kLanes) body(i, std::integral_constant<int, kLanes>{});
  if (i < n_elem) body(i, n_elem - i);
}
template <typename scalar_t>
inline vfloat load_n(const scalar_t* p, std::integral_constant<int, kLanes>, float = 0.0f) {
  return load(p);
}
template <typename scalar_t>
inline vfloat load_n(const scalar_t* p, int64_t n, float fill = 0.0f) {
  return load_tail(p, n, fill);
}
template <typename scalar_t>
inline void store_n(scalar_t* p, vfloat v, std::integral_constant<int, kLanes>) {
  store(p, v);
}
template <typename scalar_t>
inline void store_n(scalar_t* p, vfloat v, int64_t n) {
  store_tail(p, v, n);
}

// The rest of a row that is no multiple of kLanes, n < kLanes elements, for rows that a thread walks in order: where memory goes on (`whole`)
// it is loaded and stored as a vector, and what lands in the next row is overwritten when that is written. A loop over elements would be
// most of the time of a row of 27.
struct Rest {
  int64_t n;
  bool whole;
};
template <typename scalar_t>
inline vfloat load_n(const scalar_t* p, Rest rest, float fill = 0.0f) {
  return rest.whole ? load(p) : load_tail(p, rest.n, fill);
}
template <typename scalar_t>
inline void store_n(scalar_t* p, vfloat v, Rest rest) {
  rest.whole ? store(p, v) : store_tail(p, v, rest.n);
}

// for_each_vector of a row that `n_more` elements follow, which may be read, and written before they get their values.
template <typename Body>
inline void for_each_vector_of_row(int64_t n_elem, int64_t n_more, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n_elem; i += kLanes) body(i, std::integral_constant<int, kLanes>{});
  if (i < n_elem) body(i, Rest{n_elem - i, n_more >= kLanes});
}
// v with zeros in the lanes that are not the row's.
inline vfloat only(std::integral_constant<int, kLanes>, vfloat v) { return v; }
inline vfloat only(Rest rest, vfloat v) {
  vint lane;
  for (int k = 0; k < kLanes; ++k) lane[k] = k;
  return lane < static_cast<int32_t>(rest.n) ? v : vfloat{};
}

inline vfloat vsqrt(vfloat v) {
#if defined(__AVX512F__)
  return reinterpret_cast<vfloat>(_mm512_sqrt_ps(reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<vfloat>(_mm256_sqrt_ps(reinterpret_cast<__m256>(v)));
#elif defined(__SSE2__)
  return reinterpret_cast<vfloat>(_mm_sqrt_ps(reinterpret_cast<__m128>(v)));
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

inline float reduce_add(vfloat v) {
  float lane[kLanes];
  store(lane, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}
inline float reduce_max(vfloat v) {
  float lane[kLanes];
  store(lane, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i + width] > lane[i] ? lane[i + width] : lane[i];
  return lane[0];
}

// exp(x) for x <= 0 (softmax after its maximum is taken off); below -87.3 it is 0. Error under 1.5 ulp: Cody-Waite reduction
// to |r| <= ln(2) / 2 and a degree-5 polynomial of least relative error, 0.8 ulp. NaN stays NaN.
LS_ALWAYS_INLINE vfloat exp_nonpositive(vfloat x) {
  const vint underflow = x < -87.33654f;
  const float kRound = 0x1.8p23f;  // adding it leaves round(x / ln 2) in the low bits
  const vfloat shifted = x * 1.44269504088896341f + kRound;
  const vfloat n = shifted - kRound;
  vfloat r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vfloat p = broadcast(8.2903062066e-3f);
  p = p * r + 4.1897976101e-2f;
  p = p * r + 1.6667636586e-1f;
  p = p * r + 4.9999149187e-1f;
  p = p * r + 9.9999970701e-1f;
  p = p * r + 1.0f;
  const vint exponent = (reinterpret_cast<vint>(shifted) - 0x4B400000 + 127) << 23;
  const vfloat result = p * reinterpret_cast<vfloat>(exponent);
  return underflow ? vfloat{} : result;
}

}  // namespace ls::cpu::LS_ISA
