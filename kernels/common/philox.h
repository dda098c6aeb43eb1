// Philox4x32-10, the counter-based generator behind every dropout of this library.
//
// One draw serves eight elements: four 32-bit words, read as eight 16-bit integers. An element at (row, col) of a
// matrix with n_cols columns belongs to
//     group = row * ceil(n_cols / 8) + col / 8        (64 bits: a row starts a new group, so rows are independent)
//     lane  = col % 8                                 word lane / 2, low half first
// with the counter (group low, group high, offset low, offset high) and the key (seed low, seed high). `offset` tells
// apart the draws made under one seed: its high half is the distributed rank, its low half is free for several draws of one seed (0 today).
// An element is kept when its 16-bit integer is >= threshold. Masks are therefore a function of (seed, offset, position)
// alone: the same on a CPU and on a GPU, at any thread count, and recomputed in the backward instead of stored.
//
// Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC'11).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LS_HOST_DEVICE inline
#endif

namespace ls {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // round multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // key increments (Weyl sequence)
constexpr int kPhiloxRounds = 10;
constexpr int kDropoutGroup = 8;  // elements served by one draw

struct Philox4 {
  uint32_t word[4];
};

LS_HOST_DEVICE Philox4 philox4x32_10(uint64_t seed, uint64_t group, uint64_t offset) {
  uint32_t c0 = static_cast<uint32_t>(group), c1 = static_cast<uint32_t>(group >> 32);
  uint32_t c2 = static_cast<uint32_t>(offset), c3 = static_cast<uint32_t>(offset >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return Philox4{{c0, c1, c2, c3}};
}

// The 16-bit integer of `lane` (0..7) in a draw.
LS_HOST_DEVICE uint32_t philox_lane(const Philox4& r, int lane) { return (r.word[lane >> 1] >> ((lane & 1) * 16)) & 0xFFFFu; }

// Dropout as the kernels see it. `threshold` = round(65536 p), at least 1 when p > 0 and 65536 only when p == 1;
// `scale` = 65536 / (65536 - threshold), so that the expectation is exact for the probability really used; 0 when p == 1.
// threshold == 0 means no dropout: no draw is made.
struct Dropout {
  uint64_t seed = 0;
  const int64_t* seed_ptr = nullptr;  // when not null, the seed lies on the device and is read by the kernel
  uint64_t offset = 0;
  uint32_t threshold = 0;
  float scale = 1.0f;
};

inline int64_t dropout_groups_per_row(int64_t n_cols) { return (n_cols + kDropoutGroup - 1) / kDropoutGroup; }

}  // namespace ls
