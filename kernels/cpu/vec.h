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

template <typename V, typename T>
inline V load_bits(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
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

// kLanes elements at p, any alignment.
inline vfloat load(const float* p) { return load_bits<vfloat>(p); }
inline void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof(v)); }

inline vfloat load(const bfloat16* p) {
  const vuint wide = widen(load_bits<vhalf>(p)) << 16;
  return reinterpret_cast<vfloat>(wide);
}
inline void store(bfloat16* p, vfloat v) {
  const vuint bits = reinterpret_cast<vuint>(v);
  const vuint rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const vuint nan = reinterpret_cast<vuint>(v != v);
  const vhalf narrow = __builtin_convertvector((rounded & ~nan) | (nan & 0x7FC0u), vhalf);
  std::memcpy(p, &narrow, sizeof(narrow));
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
  std::memcpy(p, &bits, sizeof(bits));
#elif defined(__F16C__)
  const __m128i bits = _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(p, &bits, sizeof(bits));
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

// The last vector of a row that is no multiple of kLanes, moved back to end with the row; `fresh` are the lanes that no vector
// before it held. A row's rest then costs a vector and not a loop over elements, which in rows of 27 is most of the time.
struct Overlap {
  vint fresh;
};
template <typename scalar_t>
inline vfloat load_n(const scalar_t* p, Overlap, float = 0.0f) {
  return load(p);
}
template <typename scalar_t>
inline void store_n(scalar_t* p, vfloat v, Overlap) {
  store(p, v);
}

// for_each_vector for bodies that may meet an element twice: those that write no input of theirs, and that sum only fresh(v, n).
// Rows shorter than a vector still go by load_tail and store_tail.
template <typename Body>
inline void for_each_vector_overlapping(int64_t n_elem, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n_elem; i += kLanes) body(i, std::integral_constant<int, kLanes>{});
  if (i == n_elem) return;
  if (n_elem < kLanes) return body(i, n_elem);
  vint lane;
  for (int k = 0; k < kLanes; ++k) lane[k] = k;
  const int64_t last = n_elem - kLanes;
  body(last, Overlap{lane >= static_cast<int32_t>(i - last)});
}
template <typename N>
inline vfloat fresh(vfloat v, N) {
  return v;
}
inline vfloat fresh(vfloat v, Overlap n) { return n.fresh ? v : vfloat{}; }

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
  float result = lane[0];
  for (int i = 1; i < kLanes; ++i) result = lane[i] > result ? lane[i] : result;
  return result;
}

// exp(x) for x <= 0 (softmax after its maximum is taken off); below -87.3 it is 0. Error under 1.5 ulp: Cody-Waite reduction
// to |r| <= ln(2) / 2 and a degree-6 polynomial (Remez-like coefficients of the Cephes expf). NaN stays NaN.
inline vfloat exp_nonpositive(vfloat x) {
  const vint underflow = x < -87.33654f;
  const float kRound = 0x1.8p23f;  // adding it leaves round(x / ln 2) in the low bits
  const vfloat shifted = x * 1.44269504088896341f + kRound;
  const vfloat n = shifted - kRound;
  vfloat r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vfloat p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vint exponent = (reinterpret_cast<vint>(shifted) - 0x4B400000 + 127) << 23;
  const vfloat result = p * reinterpret_cast<vfloat>(exponent);
  return underflow ? vfloat{} : result;
}

}  // namespace ls::cpu::LS_ISA
