// Dropout of eight consecutive columns by one thread: one Philox draw (common/philox.h), no mask in memory.
#pragma once

#include "common/cuda_or_simt.h"
#include "common/philox.h"

namespace ls::cuda {

__device__ __forceinline__ uint64_t dropout_seed(const Dropout& dropout) {
  return dropout.seed_ptr != nullptr ? static_cast<uint64_t>(*dropout.seed_ptr) : dropout.seed;
}

// v = keep ? v * scale : 0 for the eight elements of `group`. Selected, not multiplied by a mask: a dropped inf is 0.
// Costs about 80 instructions for eight elements, against the 400 that an H100 can issue while it moves their 48 bytes (x,
// residual and y in 16 bits), so the draw hides behind memory.
__device__ __forceinline__ void apply_dropout(const Dropout& dropout, uint64_t seed, int64_t group, float (&v)[kDropoutGroup]) {
  const Philox4 draw = philox4x32_10(seed, static_cast<uint64_t>(group), dropout.offset);
#pragma unroll
  for (int i = 0; i < kDropoutGroup; ++i) v[i] = philox_lane(draw, i) >= dropout.threshold ? v[i] * dropout.scale : 0.0f;
}

}  // namespace ls::cuda
