// The host side that all launchers share: grid sizes, launch errors, and the way from a DType to a template argument.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/launchers.h"

namespace ls::cuda {

inline int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

inline bool is_aligned(const void* p, int64_t n_bytes) { return reinterpret_cast<uintptr_t>(p) % n_bytes == 0; }

// The smallest power of two that is at least n, kept within [1, limit]; limit is a power of two.
inline int pow2_at_least(int64_t n, int limit) {
  int p = 1;
  while (p < n && p < limit) p *= 2;
  return p;
}

// A one-dimensional grid. Everything is counted in x, which reaches 2^31 - 1 blocks where y and z end at 65,535; with the
// block shapes used here that is more than 10^11 elements. Beyond, refuse rather than leave elements undone.
inline dim3 grid_of(const char* op, int64_t n_blocks) {
  constexpr int64_t kMaxBlocks = 0x7FFFFFFF;
  if (n_blocks > kMaxBlocks)
    throw std::runtime_error(std::string(op) + ": input needs " + std::to_string(n_blocks) +
                             " thread blocks, expected at most " + std::to_string(kMaxBlocks) +
                             "; split the input along its first dimension");
  return dim3(static_cast<unsigned>(n_blocks));
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(op) + ": launch failed: " + cudaGetErrorString(error));
}

template <typename T>
struct Type {
  using type = T;
};

// Calls body(Type<scalar_t>{}) for the element type that dtype names.
template <typename Body>
void with_scalar_type(const char* op, DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Type<float>{});
    case DType::kFloat16:
      return body(Type<c10::Half>{});
    case DType::kBFloat16:
      return body(Type<c10::BFloat16>{});
  }
  throw std::runtime_error(std::string(op) + ": dtype code " + std::to_string(static_cast<int>(dtype)) +
                           " is none of float32, float16, bfloat16");
}

}  // namespace ls::cuda
