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

// Interleave the low (high) halves of each 128-bit quarter of a and b, in units of 32 or 64 bits.
#if defined(__AVX512F__)
#define LS_UNPACK(name, instruction)                                                                                  \
  inline vuint name(vuint a, vuint b) {                                                                               \
    return reinterpret_cast<vuint>(_mm512_##instruction(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b))); \
  }
#elif defined(__AVX2__)
#define LS_UNPACK(name, instruction)                                                                                  \
  inline vuint name(vuint a, vuint b) {                                                                               \
    return reinterpret_cast<vuint>(_mm256_##instruction(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b))); \
  }
#elif defined(__SSE2__)
#define LS_UNPACK(name, instruction)                                                                               \
  inline vuint name(vuint a, vuint b) {                                                                            \
    return reinterpret_cast<vuint>(_mm_##instruction(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b))); \
  }
#endif
#if defined(LS_UNPACK)
LS_UNPACK(unpack_low32, unpacklo_epi32)
LS_UNPACK(unpack_high32, unpackhi_epi32)
LS_UNPACK(unpack_low64, unpacklo_epi64)
LS_UNPACK(unpack_high64, unpackhi_epi64)
#undef LS_UNPACK
#else  // kLanes is 4
inline vuint unpack_low32(vuint a, vuint b) { return vuint{a[0], b[0], a[1], b[1]}; }
inline vuint unpack_high32(vuint a, vuint b) { return vuint{a[2], b[2], a[3], b[3]}; }
inline vuint unpack_low64(vuint a, vuint b) { return vuint{a[0], a[1], b[0], b[1]}; }
inline vuint unpack_high64(vuint a, vuint b) { return vuint{a[2], a[3], b[2], b[3]}; }
#endif

inline void multiply_high_low(vuint a, uint32_t b, vuint* high, vuint* low) {
  const vuint64 factor = b - vuint64{};
  const vuint64 even = multiply_even(reinterpret_cast<vuint64>(a), factor);
  const vuint64 odd = multiply_even(reinterpret_cast<vuint64>(a) >> 32, factor);
  *high = reinterpret_cast<vuint>((even >> 32) | (odd & 0xFFFFFFFF00000000u));
  *low = reinterpret_cast<vuint>((even & 0xFFFFFFFFu) | (odd << 32));
}

// Draws of the groups [first, first + kLanes), as the 16-bit integers of 8 kLanes consecutive elements.
inline void philox_block(uint64_t seed, uint64_t first, uint64_t offset, uint16_t* out) {
  // Lane (quarter q, place j) of the four output words belongs to group 4 q + j of its 128-bit quarter after the
  // transposition below; giving that lane the counter of group j * kQuarters + q makes the stores come out in order.
  constexpr int kQuarters = kLanes / 4;
  vuint c0, c1;
  for (int q = 0; q < kQuarters; ++q) {
    for (int j = 0; j < 4; ++j) {
      const uint64_t group = first + static_cast<uint64_t>(j * kQuarters + q);
      c0[4 * q + j] = static_cast<uint32_t>(group);
      c1[4 * q + j] = static_cast<uint32_t>(group >> 32);
    }
  }
  vuint c2 = static_cast<uint32_t>(offset) - vuint{}, c3 = static_cast<uint32_t>(offset >> 32) - vuint{};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    vuint high0, low0, high1, low1;
    multiply_high_low(c0, kPhiloxM0, &high0, &low0);
    multiply_high_low(c2, kPhiloxM1, &high1, &low1);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  // 4 x 4 transposition inside each 128-bit quarter: vector j then holds, quarter by quarter, whole groups.
  const vuint low01 = unpack_low32(c0, c1), high01 = unpack_high32(c0, c1);
  const vuint low23 = unpack_low32(c2, c3), high23 = unpack_high32(c2, c3);
  const vuint groups[4] = {unpack_low64(low01, low23), unpack_high64(low01, low23), unpack_low64(high01, high23),
                           unpack_high64(high01, high23)};
  std::memcpy(out, groups, sizeof(groups));
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
  const vint values = reinterpret_cast<vint>(__builtin_convertvector(load_bits<vhalf>(draws), vuint));
  return values >= static_cast<int32_t>(threshold);
}

}  // namespace ls::cpu::LS_ISA
