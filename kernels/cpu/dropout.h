// Philox in vectors: the draws of common/philox.h, kLanes groups at a time.
#pragma once

#include <algorithm>
#include <memory>

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

// The low 32 bits of each 64-bit lane from `low`, the high ones from the low bits of `high`.
inline vuint64 join(vuint64 low, vuint64 high) {
#if defined(__AVX512F__)
  return reinterpret_cast<vuint64>(
      _mm512_mask_blend_epi32(0xAAAA, reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high << 32)));
#elif defined(__AVX2__)
  return reinterpret_cast<vuint64>(
      _mm256_blend_epi32(reinterpret_cast<__m256i>(low), reinterpret_cast<__m256i>(high << 32), 0xAA));
#else
  return (low & 0xFFFFFFFFu) | (high << 32);
#endif
}

// The keys of the ten rounds, as vectors: broadcast in each round they would cost a quarter of the time.
struct PhiloxKeys {
  vuint64 key0[kPhiloxRounds], key1[kPhiloxRounds];
  vuint64 offset_low, offset_high;

  explicit PhiloxKeys(const Dropout& dropout) {
    uint32_t k0 = static_cast<uint32_t>(dropout.seed), k1 = static_cast<uint32_t>(dropout.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
      key0[round] = uint64_t{k0} - vuint64{};
      key1[round] = uint64_t{k1} - vuint64{};
    }
    offset_low = (dropout.offset & 0xFFFFFFFFu) - vuint64{};
    offset_high = (dropout.offset >> 32) - vuint64{};
  }
};

// Draws of the groups [first, first + n_groups), rounded up to kLanes of them, as the 16-bit integers of 8 consecutive elements each.
//
// A 64-bit lane holds one group and the low 32 bits count: the products are 64 bits wide, the multiplier ignores the upper half
// of its factors, and what xor leaves there does no harm. So a round is 2 products, 2 shifts and 4 xors, with no blends. Two vectors
// at a time, so that one works while the other waits; with more, the registers run out. On an EPYC 0.41 ms per million elements
// and core.
inline void philox_fill(const PhiloxKeys& keys, uint64_t first, int64_t n_groups, uint16_t* out) {
  constexpr int kQuarters = kLanes / 4;   // 128-bit quarters of a vector
  constexpr uint64_t kHalf = kLanes / 2;  // groups in one vector
  vuint64 order{};
  for (int q = 0; q < kQuarters; ++q) {
    order[2 * q] = q;  // the two stores below then come out in order
    order[2 * q + 1] = kQuarters + q;
  }
  const vuint64 m0 = uint64_t{kPhiloxM0} - vuint64{}, m1 = uint64_t{kPhiloxM1} - vuint64{};
  for (int64_t g = 0; g < n_groups; g += kLanes) {
    vuint64 c0[2], c1[2], c2[2], c3[2];
    for (int h = 0; h < 2; ++h) {
      c0[h] = order + (first + g + h * kHalf);
      c1[h] = c0[h] >> 32;
      c2[h] = keys.offset_low;
      c3[h] = keys.offset_high;
    }
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int h = 0; h < 2; ++h) {
        const vuint64 p0 = multiply_even(c0[h], m0), p1 = multiply_even(c2[h], m1);
        c0[h] = (p1 >> 32) ^ (c1[h] ^ keys.key0[round]);
        c2[h] = (p0 >> 32) ^ (c3[h] ^ keys.key1[round]);
        c1[h] = p1;
        c3[h] = p0;
      }
    }
    for (int h = 0; h < 2; ++h) {
      const vuint64 words01 = join(c0[h], c1[h]), words23 = join(c2[h], c3[h]);
      const vuint64 groups[2] = {unpack_low(words01, words23), unpack_high(words01, words23)};
      std::memcpy(out + (g + h * kHalf) * kDropoutGroup, groups, sizeof(groups));
    }
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
  // Few enough that the memory traffic of one segment is under way while the draws of the next are computed (256 groups: 0.90 ms per
  // million fp32 elements of relu, 32: 0.72), and enough to be worth the segment's own cost.
  constexpr int64_t kBufferGroups = 32;
  alignas(64) uint16_t draws[(kBufferGroups + kLanes) * kDropoutGroup];
  const PhiloxKeys keys(dropout);
  const int64_t groups_per_row = dropout_groups_per_row(n_cols);
  const auto fill = [&](int64_t first_group, int64_t n_groups) {
    philox_fill(keys, static_cast<uint64_t>(first_group), n_groups, draws);
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

// The draws of rows that are asked for in order. Short rows share a block of draws; of long ones, only the columns asked for
// are drawn, which spares a causal matrix half of them.
class RowDraws {
 public:
  RowDraws(const Dropout& dropout, int64_t n_cols, int64_t row_end)
      : keys_(dropout), drops_(dropout.threshold != 0), groups_per_row_(dropout_groups_per_row(n_cols)), row_end_(row_end) {
    if (!drops_) return;
    constexpr int64_t kSharedGroups = 256;  // 4 KB: they stay in the first-level cache beside the rows
    if (groups_per_row_ < 4 * kLanes) rows_per_fill_ = kSharedGroups / std::max<int64_t>(groups_per_row_, 1);
    draws_.reset(new uint16_t[(rows_per_fill_ * groups_per_row_ + 2 * kLanes) * kDropoutGroup]);
  }
  // The 16-bit integers of the columns from 0 on, of which [begin, end) may be read; null when nothing is dropped.
  const uint16_t* of(int64_t row, int64_t begin, int64_t end) {
    if (!drops_) return nullptr;
    if (rows_per_fill_ == 1) {
      const int64_t first = begin / kDropoutGroup;
      philox_fill(keys_, row * groups_per_row_ + first, dropout_groups_per_row(end) - first,
                  draws_.get() + first * kDropoutGroup);
      return draws_.get();
    }
    if (row >= filled_end_) {
      filled_begin_ = row, filled_end_ = std::min(row + rows_per_fill_, row_end_);
      philox_fill(keys_, row * groups_per_row_, (filled_end_ - row) * groups_per_row_, draws_.get());
    }
    return draws_.get() + (row - filled_begin_) * groups_per_row_ * kDropoutGroup;
  }

 private:
  const PhiloxKeys keys_;
  const bool drops_;
  int64_t groups_per_row_, row_end_, rows_per_fill_ = 1, filled_begin_ = 0, filled_end_ = 0;
  std::unique_ptr<uint16_t[]> draws_;
};

// Lanes to keep among the kLanes elements that start at draws. Reading past the last element of a tail is harmless: the
// buffer is whole groups and a vector longer.
inline vint keep_lanes(const uint16_t* draws, uint32_t threshold) {
  const vint values = reinterpret_cast<vint>(widen(load_bits<vhalf>(draws)));
  return values >= static_cast<int32_t>(threshold);
}

// y = residual + dropout(x + bias) for the rows [row_begin, row_end) of (N, C) matrices; bias and residual may be null.
template <typename scalar_t>
inline void bias_dropout_residual_rows(const scalar_t* x, const scalar_t* bias, const scalar_t* residual, scalar_t* y,
                                       const Dropout& dropout, int64_t row_begin, int64_t row_end, int64_t n_cols) {
  for_each_dropout_segment(dropout, row_begin, row_end, n_cols,
                           [&](int64_t row, int64_t col_begin, int64_t col_end, const uint16_t* draws) {
                             const int64_t first = row * n_cols + col_begin;
                             for_each_vector(col_end - col_begin, [&](int64_t i, auto n) {
                               prefetch_ahead<false>(x + first + i);
                               prefetch_ahead<true>(y + first + i);
                               vfloat v = load_n(x + first + i, n);
                               if (bias != nullptr) v += load_n(bias + col_begin + i, n);
                               if (draws != nullptr)
                                 v = keep_lanes(draws + i, dropout.threshold) ? v * dropout.scale : vfloat{};
                               if (residual != nullptr) {
                                 prefetch_ahead<false>(residual + first + i);
                                 v += load_n(residual + first + i, n);
                               }
                               store_n(y + first + i, v, n);
                             });
                           });
}

}  // namespace ls::cpu::LS_ISA
