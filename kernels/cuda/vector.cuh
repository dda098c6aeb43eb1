// Loads and stores of kWidth consecutive elements in one access, converted to and from fp32.
//
// A memory-bound kernel wants 16 bytes per access: a quarter of the instructions of 4-byte ones, and more bytes in flight
// per thread. Every kernel is therefore instantiated for kWidth = kVecWidth<scalar_t> (16 bytes) and for kWidth = 1, which
// serves pointers and row strides that are not multiples of 16 bytes.
#pragma once

#include "common/cuda_or_simt.h"

namespace ls::cuda {

constexpr int kVecBytes = 16;

template <typename scalar_t>
constexpr int kVecWidth = kVecBytes / static_cast<int>(sizeof(scalar_t));

// Its alignment makes the compiler move it in one instruction (LDG.E.128 at 16 bytes). A struct with the elements as
// members, not a uint4: an access through it may alias scalar_t.
template <typename scalar_t, int kWidth>
struct alignas(sizeof(scalar_t) * kWidth) Vec {
  scalar_t elem[kWidth];
};

template <int kWidth, typename scalar_t>
__device__ __forceinline__ Vec<scalar_t, kWidth> load_vec(const scalar_t* p) {
  return *reinterpret_cast<const Vec<scalar_t, kWidth>*>(p);
}

template <typename scalar_t, int kWidth>
__device__ __forceinline__ void store_vec(scalar_t* p, const Vec<scalar_t, kWidth>& v) {
  *reinterpret_cast<Vec<scalar_t, kWidth>*>(p) = v;
}

template <int kWidth, typename scalar_t>
__device__ __forceinline__ void load_floats(const scalar_t* p, float* out) {
  const Vec<scalar_t, kWidth> v = load_vec<kWidth>(p);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out[i] = static_cast<float>(v.elem[i]);
}

template <int kWidth, typename scalar_t>
__device__ __forceinline__ void store_floats(scalar_t* p, const float* in) {
  Vec<scalar_t, kWidth> v;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) v.elem[i] = static_cast<scalar_t>(in[i]);
  store_vec(p, v);
}

// The first n_valid (<= kCount) of kCount elements, in accesses of kWidth; n_valid is a multiple of kWidth. The rest of `out`
// becomes zero. Unrolled with guards, so that `out` stays in registers.
template <int kWidth, int kCount, typename scalar_t>
__device__ __forceinline__ void load_group(const scalar_t* p, int64_t n_valid, float (&out)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += kWidth) {
    if (i < n_valid) {
      load_floats<kWidth>(p + i, out + i);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) out[i + j] = 0.0f;
    }
  }
}

template <int kWidth, int kCount, typename scalar_t>
__device__ __forceinline__ void store_group(scalar_t* p, int64_t n_valid, const float (&in)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += kWidth)
    if (i < n_valid) store_floats<kWidth>(p + i, in + i);
}

}  // namespace ls::cuda
