// Small matrix products that stay in the cache: packing into fp32 scratch, and C = A B by register tiles of 6 rows x 2 vectors.
//
// 12 accumulators, 2 vectors of B and one broadcast element of A fill the 16 registers of AVX2 (and half of AVX-512's), and 12 sums in
// flight cover the latency of two multiply-adds per cycle. B comes in panels of kPanel columns, each contiguous over k, so that whatever
// the leading dimension, a panel is read straight through the first-level cache. Half types are widened when packed. All is fp32.
#pragma once

#include <algorithm>

#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

constexpr int kTileRows = 6, kTileVectors = 2;
constexpr int64_t kPanel = kTileVectors * kLanes;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A matrix as the right factor: element (k, j) lies at data[j / kPanel * panel_stride + k * row_stride + j % kPanel].
struct Panels {
  float* data;
  int64_t row_stride, panel_stride;
};
// Panels one after another, each (n_rows, kPanel): for long matrices, whose rows apart would fall on few sets of the cache.
inline Panels panels(float* data, int64_t n_rows) { return {data, kPanel, n_rows * kPanel}; }
// An ordinary row-major matrix.
inline Panels row_major(float* data, int64_t pitch) { return {data, pitch, kPanel}; }
// Floats that either takes for n_rows x n_cols.
inline int64_t panels_size(int64_t n_rows, int64_t n_cols) { return n_rows * round_up(n_cols, kPanel); }

// out(i, j) = x[i * stride + j] * scale, (n_rows, n_cols); the columns up to a whole panel are zero. Row by row, because rows of a
// strided tensor lie on pages of their own.
template <typename scalar_t>
inline void pack_rows(const scalar_t* x, int64_t stride, int64_t n_rows, int64_t n_cols, float scale, Panels out) {
  for (int64_t i = 0; i < n_rows; ++i) {
    const scalar_t* from = x + i * stride;
    float* to = out.data + i * out.row_stride;
    int64_t j = 0;
    for (; j + kPanel <= n_cols; j += kPanel, to += out.panel_stride)
      for (int v = 0; v < kTileVectors; ++v) store(to + v * kLanes, load(from + j + v * kLanes) * scale);
    if (j < n_cols) {
      for (int v = 0; v < kTileVectors; ++v, j += kLanes) {
        const vfloat x_j = j + kLanes <= n_cols ? load(from + j) : load_tail(from + j, n_cols - j);
        store(to + v * kLanes, x_j * scale);
      }
    }
  }
}

// Two vectors swap blocks of kWidth lanes: the first keeps its even blocks and gets the second's even ones, the second keeps its odd ones.
template <int kWidth>
inline void swap_blocks(vfloat& first, vfloat& second) {
  const vfloat a = first, b = second;
#if defined(__clang__)
  for (int l = 0; l < kLanes; ++l) {
    first[l] = l & kWidth ? b[l - kWidth] : a[l];
    second[l] = l & kWidth ? b[l] : a[l + kWidth];
  }
#else
  vint take_first, take_second;  // lanes of the pair, the second vector's from kLanes on
  for (int l = 0; l < kLanes; ++l) {
    take_first[l] = l & kWidth ? kLanes + l - kWidth : l;
    take_second[l] = l & kWidth ? kLanes + l : l + kWidth;
  }
  first = __builtin_shuffle(a, b, take_first);
  second = __builtin_shuffle(a, b, take_second);
#endif
}

// x[i][j] becomes x[j][i], for kLanes x kLanes elements: at each step pairs of rows `width` apart swap blocks of that width.
template <int kWidth = 1>
inline void transpose(vfloat (&x)[kLanes]) {
  if constexpr (kWidth < kLanes) {
    for (int i = 0; i < kLanes; ++i)
      if ((i & kWidth) == 0) swap_blocks<kWidth>(x[i], x[i + kWidth]);
    transpose<2 * kWidth>(x);
  }
}

// The sums of kLanes vectors' lanes, lane i that of x[i]: at each step two vectors of partial sums become one.
template <int kWidth = kLanes / 2>
inline vfloat sums_of_lanes(vfloat (&x)[kLanes]) {
  if constexpr (kWidth == 0) {
    return x[0];
  } else {
    for (int i = 0; i < kWidth; ++i) {
      swap_blocks<kWidth>(x[i], x[i + kWidth]);
      x[i] += x[i + kWidth];
    }
    return sums_of_lanes<kWidth / 2>(x);
  }
}

// out(j, i) = x(i, j), (n_cols, n_rows), from a packed x of (n_rows, n_cols); the columns of out up to a whole panel are zero.
inline void transpose_panels(Panels x, int64_t n_rows, int64_t n_cols, Panels out) {
  for (int64_t i = 0; i < round_up(n_rows, kPanel); i += kLanes) {
    const int64_t n = std::clamp<int64_t>(n_rows - i, 0, kLanes);
    float* to = out.data + i / kPanel * out.panel_stride + i % kPanel;
    for (int64_t j = 0; j < n_cols; j += kLanes, to += kLanes * out.row_stride) {
      const float* from = x.data + j / kPanel * x.panel_stride + i * x.row_stride + j % kPanel;
      const int64_t height = std::min<int64_t>(n_cols - j, kLanes);
      vfloat block[kLanes];
      if (n == kLanes && height == kLanes) {
        for (int l = 0; l < kLanes; ++l) block[l] = load(from + l * x.row_stride);
        transpose(block);
        for (int l = 0; l < kLanes; ++l) store(to + l * out.row_stride, block[l]);
      } else {
        for (int l = 0; l < kLanes; ++l) block[l] = l < n ? load(from + l * x.row_stride) : vfloat{};
        transpose(block);
        for (int l = 0; l < height; ++l) store(to + l * out.row_stride, block[l]);
      }
    }
  }
}

// c(i, j) = or += sum over k of A(i, k) b[k * row_stride + j] for a tile of kRows x (kVectors kLanes) elements.
// A(i, k) = a[k * lda + i] if kTransposed, else a[i * lda + k].
template <int kRows, int kVectors, bool kTransposed, typename scalar_t>
__attribute__((noinline)) void multiply_tile(int64_t n_k, const float* a, int64_t lda, const scalar_t* b, int64_t row_stride,
                                             float* c, int64_t ldc, bool add) {
  vfloat sum[kRows][kVectors] = {};
  // Unrolled: the processor's front end, and not its multipliers, is what such a loop waits for. 4 x 3 vectors on two Zen 3 cores: 150
  // GFLOP/s, unrolled 176, of 201 that multiply-adds alone reach.
#pragma GCC unroll 8
  for (int64_t k = 0; k < n_k; ++k) {
    vfloat right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * row_stride + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const vfloat left = broadcast(kTransposed ? a[k * lda + i] : a[i * lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[i][v] += left * right[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + i * ldc + v * kLanes;
      store(to, add ? load(to) + sum[i][v] : sum[i][v]);
    }
  }
}

// The part of k that a tile of C needs.
struct Range {
  int64_t begin, end;
};

// C (n_rows, n_cols) = or += A B; C is written in whole vectors. A's rows are split into equal tiles of at most kTileRows, and
// range(i, rows, j) tells which k matter to the tile of rows [i, i + rows) that begins in column j.
template <bool kTransposed, typename TileRange>
inline void multiply(int64_t n_rows, int64_t n_cols, const float* a, int64_t lda, Panels b, float* c, int64_t ldc, bool add,
                     TileRange&& range) {
  const int64_t n_tiles = (n_rows + kTileRows - 1) / kTileRows;
  for (int64_t j = 0; j < n_cols; j += kPanel) {
    const float* panel = b.data + j / kPanel * b.panel_stride;
    for (int64_t t = 0; t < n_tiles; ++t) {
      const int64_t i = t * n_rows / n_tiles, rows = (t + 1) * n_rows / n_tiles - i;
      const Range k = range(i, rows, j);
      const float* left = kTransposed ? a + k.begin * lda + i : a + i * lda + k.begin;
      const float* right = panel + k.begin * b.row_stride;
      const auto tile = [&](auto n) {
        if (n_cols - j > kLanes)
          multiply_tile<n, kTileVectors, kTransposed>(k.end - k.begin, left, lda, right, b.row_stride, c + i * ldc + j, ldc,
                                                      add);
        else
          multiply_tile<n, 1, kTransposed>(k.end - k.begin, left, lda, right, b.row_stride, c + i * ldc + j, ldc, add);
      };
      switch (rows) {
        case 6:
          tile(std::integral_constant<int, 6>{});
          break;
        case 5:
          tile(std::integral_constant<int, 5>{});
          break;
        case 4:
          tile(std::integral_constant<int, 4>{});
          break;
        case 3:
          tile(std::integral_constant<int, 3>{});
          break;
        case 2:
          tile(std::integral_constant<int, 2>{});
          break;
        default:
          tile(std::integral_constant<int, 1>{});
      }
    }
  }
}

// The products of few rows A, whose arithmetic is less than packing B would cost: B is read where it lies, in its own type. The columns
// of B are whole vectors.

// C = A B^T, A (n_rows, n_k), B (n_cols, n_k); C is written in whole vectors, with anything finite B holds in the lanes beyond. kLanes rows of B go
// together, whose sums make a vector of C.
template <typename scalar_t>
inline void multiply_few_by_transposed(int64_t n_rows, int64_t n_cols, int64_t n_k, const float* a, int64_t lda,
                                       const scalar_t* b, int64_t ldb, float* c, int64_t ldc) {
  for (int64_t j = 0; j < n_cols; j += kLanes) {
    const scalar_t* right[kLanes];
    for (int l = 0; l < kLanes; ++l) right[l] = b + std::min(j + l, n_cols - 1) * ldb;
    for (int64_t i = 0; i < n_rows; ++i) {
      vfloat sum[kLanes] = {};
      for (int64_t k = 0; k < n_k; k += kLanes) {
        const vfloat left = load(a + i * lda + k);
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; ++l) sum[l] += left * load(right[l] + k);
      }
      store(c + i * ldc + j, sums_of_lanes(sum));
    }
  }
}

// kRows rows of C = A B, in tiles of kVectors vectors and what is left in narrower ones.
template <int kRows, int kVectors, typename scalar_t>
inline void multiply_rows(int64_t n_cols, int64_t n_k, const float* a, int64_t lda, const scalar_t* b, int64_t ldb, float* c,
                          int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + kVectors * kLanes <= n_cols; j += kVectors * kLanes)
    multiply_tile<kRows, kVectors, false>(n_k, a, lda, b + j, ldb, c + j, ldc, add);
  if constexpr (kVectors > 1) multiply_rows<kRows, kVectors / 2>(n_cols - j, n_k, a, lda, b + j, ldb, c + j, ldc, add);
}

// C = or += A B, A (n_rows, n_k), B (n_k, n_cols): 8 sums in flight, of one row or of two.
template <typename scalar_t>
inline void multiply_few(int64_t n_rows, int64_t n_cols, int64_t n_k, const float* a, int64_t lda, const scalar_t* b,
                         int64_t ldb, float* c, int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + 2 <= n_rows; i += 2) multiply_rows<2, 4>(n_cols, n_k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
  if (i < n_rows) multiply_rows<1, 8>(n_cols, n_k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
}

}  // namespace ls::cpu::LS_ISA
