// Philox in vectors: the draws of common/philox.h, kLanes groups at a time.
#pragma once

#include <algorithm>

#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

// 32 x 32 -> 64-bit products of the even 32-bit lanes.
inline vuint64 multiply_even(vuint64 a, vuint64 b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vuint64>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vuint64>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<vuint64>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// Interleave the low (high) 64-bit halves of each 128-bit quarter of a and b.
inline vuint64 unpack_low(vuint64 a, vuint64 b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vuint64>(_mm512_unpacklo_epi64(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vuint64>(_mm256_unpacklo_epi64(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else  // one quarter
  return vuint64{a[0], b[0]};
#endif
}
inline vuint64 unpack_high(vuint64 a, vuint64 b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vuint64>(_mm512_unpackhi_epi64(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vuint64>(_mm256_unpackhi_epi64(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return vuint64{a[1], b[1]};
#endif
}

// Draws of the groups [first, first + kLanes), as the 16-bit integers of 8 kLanes consecutive elements.
//
// A 64-bit lane holds one group and the low 32 bits count: the products are 64 bits wide, the multiplier ignores the upper half
// of its factors, and what xor leaves there does no harm. So a round is 2 products, 2 shifts and 4 xors, with no blends.
inline void philox_block(uint64_t seed, uint64_t first, uint64_t offset, uint16_t* out) {
  constexpr int kQuarters = kLanes / 4;   // 128-bit quarters of a vector
  constexpr uint64_t kHalf = kLanes / 2;  // groups in one vector; two vectors, so that one works while the other waits
  vuint64 order{};
  for (int q = 0; q < kQuarters; ++q) {
    order[2 * q] = q;  // the two stores below then come out in order
    order[2 * q + 1] = kQuarters + q;
  }
  vuint64 c0[2], c1[2], c2[2], c3[2];
  for (int h = 0; h < 2; ++h) {
    c0[h] = order + (first + h * kHalf);
    c1[h] = c0[h] >> 32;
    c2[h] = (offset & 0xFFFFFFFFu) - vuint64{};
    c3[h] = (offset >> 32) - vuint64{};
  }
  const vuint64 m0 = uint64_t{kPhiloxM0} - vuint64{}, m1 = uint64_t{kPhiloxM1} - vuint64{};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int h = 0; h < 2; ++h) {
      const vuint64 p0 = multiply_even(c0[h], m0), p1 = multiply_even(c2[h], m1);
      c0[h] = (p1 >> 32) ^ c1[h] ^ uint64_t { k0 };
      c2[h] = (p0 >> 32) ^ c3[h] ^ uint64_t { k1 };
      c1[h] = p1;
      c3[h] = p0;
    }
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  for (int h = 0; h < 2; ++h) {
    const vuint64 words01 = (c0[h] & 0xFFFFFFFFu) | (c1[h] << 32), words23 = (c2[h] & 0xFFFFFFFFu) | (c3[h] << 32);
    const vuint64 groups[2] = {unpack_low(words01, words23), unpack_high(words01, words23)};
    std::memcpy(out + h * kHalf * kDropoutGroup, groups, sizeof(groups));
  }
}

// Calls body(row, col_begin, col_end, draws) until the rows [row_begin, row_end) are covered; draws[i] is the 16-bit integer
// of column col_begin + i, or null when nothing is dropped. Short rows share a block of draws, long ones are cut.
template <typename Body>
inline void for_each_dropout_segment(const Dropout& dropout, int64_t row_begin, int64_t row_end, int64_t n_cols, Body&& body) {
  if (dropout.threshold == 0) {
    for (int64_t row = row_begin; row < row_end; ++row) body(row, int64_t{0}, n_cols, static_cast<const uint16_t*>(nullptr));
    return;
  }
  constexpr int64_t kBufferGroups = 256;  // 4 KB of draws: they stay in the first-level cache beside the rows
  alignas(64) uint16_t draws[(kBufferGroups + kLanes) * kDropoutGroup];
  const int64_t groups_per_row = dropout_groups_per_row(n_cols);
  const auto fill = [&](int64_t first_group, int64_t n_groups) {
    for (int64_t g = 0; g < n_groups; g += kLanes)
      philox_block(dropout.seed, static_cast<uint64_t>(first_group + g), dropout.offset, draws + g * kDropoutGroup);
  };
  if (groups_per_row <= kBufferGroups) {
    const int64_t rows_per_fill = kBufferGroups / groups_per_row;
    for (int64_t row = row_begin; row < row_end; row += rows_per_fill) {
      const int64_t n_rows = std::min(rows_per_fill, row_end - row);
      fill(row * groups_per_row, n_rows * groups_per_row);
      for (int64_t r = 0; r < n_rows; ++r)
        body(row + r, int64_t{0}, n_cols, static_cast<const uint16_t*>(draws + r * groups_per_row * kDropoutGroup));
    }
    return;
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t g = 0; g < groups_per_row; g += kBufferGroups) {
      fill(row * groups_per_row + g, std::min(kBufferGroups, groups_per_row - g));
      body(row, g * kDropoutGroup, std::min(n_cols, (g + kBufferGroups) * kDropoutGroup), static_cast<const uint16_t*>(draws));
    }
  }
}

// Lanes to keep among the kLanes elements that start at draws. Reading past the last element of a tail is harmless: the
// buffer is whole groups and a vector longer.
inline vint keep_lanes(const uint16_t* draws, uint32_t threshold) {
  const vint values = reinterpret_cast<vint>(widen(load_bits<vhalf>(draws)));
  return values >= static_cast<int32_t>(threshold);
}

}  // namespace ls::cpu::LS_ISA
