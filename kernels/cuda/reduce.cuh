// Reductions over the lanes of a warp and over a block, and what is reduced: sums, pairs of sums, Welford statistics.
//
// The value of a reduction is the same on every thread that takes part, bit for bit, and its order is fixed by the launch
// shape, so two runs agree.
#pragma once

#include "common/cuda_or_simt.h"

namespace ls::cuda {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;  // of a block: 1,024 threads
constexpr unsigned kFullMask = 0xFFFFFFFFu;

// Sum over each aligned team of kLanes lanes (a power of two up to 32). All 32 lanes of the warp must call it.
template <int kLanes = kWarpSize>
__device__ __forceinline__ float team_sum(float v) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullMask, v, offset);
  return v;
}

// What block_reduce takes: an aggregate of floats with merge(a, b) and map(f), f being applied to every member.
struct Sum {
  float value;

  static __device__ __forceinline__ Sum merge(const Sum& a, const Sum& b) { return {a.value + b.value}; }
  template <typename F>
  __device__ __forceinline__ Sum map(F f) const {
    return {f(value)};
  }
};
struct SumPair {
  float first, second;

  static __device__ __forceinline__ SumPair merge(const SumPair& a, const SumPair& b) {
    return {a.first + b.first, a.second + b.second};
  }
  template <typename F>
  __device__ __forceinline__ SumPair map(F f) const {
    return {f(first), f(second)};
  }
};

// Count, mean and sum of squared deviations of a set of numbers. Merging two sets adds no cancellation, unlike
// E[x^2] - E[x]^2, which in fp32 loses the variance altogether once |mean| exceeds some 1,000 standard deviations.
// Welford, Note on a method for calculating corrected sums of squares and products (1962); Chan, Golub & LeVeque, Updating
// formulae and a pairwise algorithm for computing sample variances (1979).
struct Welford {
  float count, mean, m2;

  static __device__ __forceinline__ Welford merge(const Welford& a, const Welford& b) {
    const float count = a.count + b.count;
    const float weight_b = count > 0.0f ? b.count / count : 0.0f;
    const float delta = b.mean - a.mean;
    return {count, a.mean + delta * weight_b, a.m2 + b.m2 + delta * delta * a.count * weight_b};
  }
  template <typename F>
  __device__ __forceinline__ Welford map(F f) const {
    return {f(count), f(mean), f(m2)};
  }

  // The statistics of kCount values held in registers: exact two-pass, as they cost no memory access.
  template <int kCount>
  static __device__ __forceinline__ Welford of(const float (&x)[kCount]) {
    float sum = 0.0f, m2 = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += x[i];
    const float mean = sum * (1.0f / kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) m2 += (x[i] - mean) * (x[i] - mean);
    return {static_cast<float>(kCount), mean, m2};
  }
};

template <typename T>
__device__ __forceinline__ T butterfly(T v, int n_lanes) {
  for (int offset = n_lanes / 2; offset > 0; offset /= 2)
    v = T::merge(v, v.map([offset](float x) { return __shfl_xor_sync(kFullMask, x, offset); }));
  return v;
}

// Over all threads of a block whose size is a power of two times 32, threadIdx.x alone. One barrier: every warp merges the
// warps' results itself, instead of one warp merging and a second barrier publishing. `shared` may be used once per launch
// (a second call on it would need a barrier before).
template <typename T>
__device__ __forceinline__ T block_reduce(T v, T* shared) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int n_warps = blockDim.x / kWarpSize;
  v = butterfly(v, kWarpSize);
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  v = butterfly(shared[lane % n_warps], n_warps);
  // merge(a, b) and merge(b, a) may differ in the last bit; all threads take lane 0's, which is the same in every warp.
  return v.map([](float x) { return __shfl_sync(kFullMask, x, 0); });
}

}  // namespace ls::cuda
