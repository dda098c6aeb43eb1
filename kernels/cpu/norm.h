// Rows of layer norm and of its backward, for the ops that contain it (layer_norm, residual_layer_norm).
//
// One pass over memory: a row is read from memory once and from the first-level cache after that. Its statistics take one pass over
// the cached row as well, from a pivot, the mean of the row's first elements: sums of x - pivot and of its square. Nothing cancels while the
// pivot is within two deviations of the mean, unlike in E[x^2] - E[x]^2, whose pivot is 0; where it is not, the row is passed over once more.
// So the accuracy is that of two passes, mean first (tests/ops/test_layer_norm.py), in less time. Measured per vector of a
// forward with two rows at a time, 32 x 512 fp32 (bf16), one thread of an EPYC: pivot 2.0 ns (4.0), two passes 2.3 (4.4), Welford's
// update of every vector 2.3 (4.3), Chan's merging of blocks of four vectors 2.2 (4.1). The last two also lose digits to a large mean, which they
// round at every step: three times the error at mean 10,000 and deviation 1.
// kNormRows rows go together: their chains of additions fill each other's latency, and gamma, beta and the sums over rows are loaded
// once for all of them. One row at a time takes 1.1 to 1.3 times as long; four, of 1,024 columns in fp32, no longer fit in the cache.
// Chan, Golub & LeVeque, Algorithms for computing the sample variance (1983), on shifted data; the backward's coefficients: Wang et al.,
// LightSeq2 (SC'22).
#pragma once

#include <algorithm>

#include "cpu/column_sum.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

constexpr int kNormRows = 2;

// Calls body(row, n) for blocks of rows that cover [row_begin, row_end); n, a constant, is kNormRows, and 1 for a last odd row.
template <typename Body>
inline void for_each_row_block(int64_t row_begin, int64_t row_end, Body&& body) {
  int64_t row = row_begin;
  for (; row + kNormRows <= row_end; row += kNormRows) body(row, std::integral_constant<int, kNormRows>{});
  for (; row < row_end; ++row) body(row, std::integral_constant<int, 1>{});
}

// The same over all rows, shared out in whole blocks: which rows go together does not depend on the number of threads.
template <typename Body>
inline void for_each_row_block_in_parallel(int64_t n_rows, int64_t n_cols, Body&& body) {
  const int64_t n_blocks = (n_rows + kNormRows - 1) / kNormRows;
  parallel_for(0, n_blocks, 1 + rows_per_thread(n_cols) / kNormRows, [&](int64_t block_begin, int64_t block_end) {
    for_each_row_block(block_begin * kNormRows, std::min(block_end * kNormRows, n_rows), body);
  });
}

// Means over each of kRows rows of x - pivot and of its square. Sums of blocks are summed: in one running sum an outlier would swallow all
// that comes after it (a square of 1e8 leaves fp32 steps of 8).
template <int kRows, typename scalar_t>
inline void shifted_moments(const scalar_t* x, int64_t n_cols, const float* pivot, float* first, float* second) {
  constexpr std::integral_constant<int, kLanes> kFull{};
  constexpr int64_t kBlock = 64 * kLanes;
  vfloat total[kRows]{}, total_of_squares[kRows]{};
  for (int64_t begin = 0; begin < n_cols; begin += kBlock) {
    vfloat sum[kRows][2]{}, sum_of_squares[kRows][2]{};
    const auto add = [&](int which, int64_t i, auto n) {
      for (int r = 0; r < kRows; ++r) {
        const vfloat d = load_n(x + r * n_cols + i, n, pivot[r]) - pivot[r];
        sum[r][which] += d;
        sum_of_squares[r][which] += d * d;
      }
    };
    const int64_t end = std::min(begin + kBlock, n_cols);
    int64_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      add(0, i, kFull);
      add(1, i + kLanes, kFull);
    }
    if (i + kLanes <= end) {
      add(0, i, kFull);
      i += kLanes;
    }
    if (i < end) add(1, i, end - i);
    for (int r = 0; r < kRows; ++r) {
      total[r] += sum[r][0] + sum[r][1];
      total_of_squares[r] += sum_of_squares[r][0] + sum_of_squares[r][1];
    }
  }
  const float inverse_n = 1.0f / static_cast<float>(n_cols);
  for (int r = 0; r < kRows; ++r) {
    first[r] = reduce_add(total[r]) * inverse_n;
    second[r] = reduce_add(total_of_squares[r]) * inverse_n;
  }
}

// mean[r], rstd[r] of the kRows rows that start at x, n_cols > 0.
template <int kRows, typename scalar_t>
inline void row_statistics(const scalar_t* x, int64_t n_cols, float eps, float* mean, float* rstd) {
  constexpr int kSample = 4;  // vectors
  float pivot[kRows], shift[kRows], square[kRows];
  for (int r = 0; r < kRows; ++r) {
    const scalar_t* row = x + r * n_cols;
    pivot[r] = to_float(row[0]);
    if (n_cols >= kSample * kLanes)
      pivot[r] = reduce_add((load(row) + load(row + kLanes)) + (load(row + 2 * kLanes) + load(row + 3 * kLanes))) *
                 (1.0f / (kSample * kLanes));
  }
  shifted_moments<kRows>(x, n_cols, pivot, shift, square);
  for (int r = 0; r < kRows; ++r) {
    // The variance is square - shift^2, which loses less than two bits where the shift is small. Where it is not, the row's beginning was
    // far from its mean; that is known by now, and a second pass from there on is exact.
    if (shift[r] * shift[r] > 0.75f * square[r]) {
      pivot[r] += shift[r];
      shifted_moments<1>(x + r * n_cols, n_cols, pivot + r, shift + r, square + r);
    }
    mean[r] = pivot[r] + shift[r];
    const float variance = square[r] - shift[r] * shift[r];
    rstd[r] = 1.0f / std::sqrt((variance < 0.0f ? 0.0f : variance) + eps);  // NaN stays NaN
  }
}

// y, mean and rstd of the rows [row, row + kRows).
template <typename scalar_t, int kRows>
inline void normalize_rows(const LayerNormForward& a, int64_t row) {
  const auto* weight = static_cast<const scalar_t*>(a.weight);
  const auto* bias = static_cast<const scalar_t*>(a.bias);
  const int64_t n_cols = a.n_cols;  // a local, which no store can change
  const auto* x = static_cast<const scalar_t*>(a.x) + row * n_cols;
  auto* y = static_cast<scalar_t*>(a.y) + row * n_cols;
  float mean[kRows], rstd[kRows];
  row_statistics<kRows>(x, n_cols, a.eps, mean, rstd);
  for_each_vector(n_cols, [&](int64_t i, auto n) {
    const vfloat w = weight == nullptr ? broadcast(1.0f) : load_n(weight + i, n);
    const vfloat b = bias == nullptr ? vfloat{} : load_n(bias + i, n);
    vfloat out[kRows];  // all loads before the first store, which the compiler may not move across it
    for (int r = 0; r < kRows; ++r) out[r] = (load_n(x + r * n_cols + i, n) - mean[r]) * rstd[r] * w + b;
    for (int r = 0; r < kRows; ++r) store_n(y + r * n_cols + i, out[r], n);
  });
  for (int r = 0; r < kRows; ++r) a.mean[row + r] = mean[r], a.rstd[row + r] = rstd[r];
}

// The gradient of a row's x in two coefficients, one multiply-add after the product with gamma:
//   grad_x = rstd g - rstd (mean(g) + xhat mean(g xhat)) = rstd g + (alpha (x - mean) + beta),   g = grad_y weight
//   alpha  = -rstd^2 mean(g xhat),  beta = -rstd mean(g)
// x stays centred: folding the mean into beta as well would lose its digits.
struct RowGradient {
  float mean, rstd, alpha, beta;

  inline vfloat operator()(vfloat grad_y, vfloat x, vfloat weight) const {
    return grad_y * weight * rstd + ((x - mean) * alpha + beta);
  }
};

// The coefficients of the rows [row, row + kRows), in one reduction; adds the rows' terms to the gamma and beta sums (C,), which
// are both given or both null.
template <typename scalar_t, int kRows>
inline void row_gradients(const LayerNormBackward& a, int64_t row, float* sum_weight, float* sum_bias, RowGradient* out) {
  const auto* weight = static_cast<const scalar_t*>(a.weight);
  const int64_t n_cols = a.n_cols;
  const auto* x = static_cast<const scalar_t*>(a.x) + row * n_cols;
  const auto* grad_y = static_cast<const scalar_t*>(a.grad_y) + row * n_cols;
  float mean[kRows], rstd[kRows];
  for (int r = 0; r < kRows; ++r) mean[r] = a.mean[row + r], rstd[r] = a.rstd[row + r];
  vfloat sum_g[kRows]{}, sum_g_centred[kRows]{};
  for_each_vector(n_cols, [&](int64_t i, auto n) {
    const vfloat w = weight == nullptr ? broadcast(1.0f) : load_n(weight + i, n);
    vfloat of_weight{}, of_bias{};
    if (sum_weight != nullptr) of_weight = load_n(sum_weight + i, n), of_bias = load_n(sum_bias + i, n);
    for (int r = 0; r < kRows; ++r) {
      const vfloat dy = load_n(grad_y + r * n_cols + i, n);  // 0 in a tail's idle lanes, which so add nothing
      const vfloat dy_centred = dy * (load_n(x + r * n_cols + i, n) - mean[r]);
      of_weight += dy_centred * rstd[r];
      of_bias += dy;
      sum_g[r] += dy * w;
      sum_g_centred[r] += dy_centred * w;
    }
    if (sum_weight != nullptr) store_n(sum_weight + i, of_weight, n), store_n(sum_bias + i, of_bias, n);
  });
  const float inverse_n_cols = 1.0f / static_cast<float>(n_cols);
  for (int r = 0; r < kRows; ++r) {
    const float mean_g = reduce_add(sum_g[r]) * inverse_n_cols;
    const float mean_g_xhat = reduce_add(sum_g_centred[r]) * rstd[r] * inverse_n_cols;
    out[r] = {mean[r], rstd[r], -rstd[r] * rstd[r] * mean_g_xhat, -rstd[r] * mean_g};
  }
}

}  // namespace ls::cpu::LS_ISA
