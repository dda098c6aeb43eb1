// Loads and stores of kWidth consecutive elements in one access, converted to and from fp32.
//
// A memory-bound kernel wants 16 bytes per access: a quarter of the instructions of 4-byte ones, and more bytes in flight
// per thread. Every kernel is therefore instantiated for kWidth = kVecWidth<scalar_t> (16 bytes) and for kWidth = 1, which
// serves pointers and row strides that are not multiples of 16 bytes.
#pragma once

#include <cstring>

#include "common/cuda_or_simt.h"

namespace ls::cuda {

constexpr int kVecBytes = 16;

template <typename scalar_t>
constexpr int kVecWidth = kVecBytes / static_cast<int>(sizeof(scalar_t));

// Its alignment makes a load one instruction, LDG.E.128 for 16 bytes. A struct of scalar_t, not a uint4: an access through it
// may alias scalar_t.
template <typename scalar_t, int kWidth>
struct alignas(sizeof(scalar_t) * kWidth) Vec {
  scalar_t elem[kWidth];
};

template <int kWidth, typename scalar_t>
__device__ __forceinline__ Vec<scalar_t, kWidth> load_vec(const scalar_t* p) {
  return *reinterpret_cast<const Vec<scalar_t, kWidth>*>(p);
}

// The stores are written out for nvcc: left to itself it takes the struct apart (a uint4 too), and where the elements come
// out of selects, as they do from dropout, stores them in pieces of 2 or 4 bytes.
template <typename scalar_t, int kWidth>
__device__ __forceinline__ void store_vec(scalar_t* p, const Vec<scalar_t, kWidth>& v) {
#if defined(__CUDA_ARCH__)
  constexpr int n_words = sizeof(v) / sizeof(unsigned);
  if constexpr (n_words == 2 || n_words == 4) {
    unsigned word[n_words];
    memcpy(word, &v, sizeof(v));
    if constexpr (n_words == 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(word[0]), "r"(word[1]),
                   "r"(word[2]), "r"(word[3])
                   : "memory");
    else
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(word[0]), "r"(word[1])
                   : "memory");
    return;
  }
#endif
  *reinterpret_cast<Vec<scalar_t, kWidth>*>(p) = v;
}

template <typename scalar_t, int kWidth>
__device__ __forceinline__ Vec<scalar_t, kWidth> zero_vec() {
  Vec<scalar_t, kWidth> v;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) v.elem[i] = static_cast<scalar_t>(0.0f);
  return v;
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

// The first n_valid (of at most kCount) elements, in accesses of kWidth; below kCount, n_valid is a multiple of kWidth. The
// rest of `out` becomes zero. Unrolled with guards, so that `out` stays in registers.
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
