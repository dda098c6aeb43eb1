// Layer norm and its backward; formulas and shapes in common/params.h.
//
// Memory: forward reads x once and writes y (8 bytes per fp32 element), backward reads grad_y and x and writes grad_x (12). A
// row is read from memory once and from the first-level cache after that, so the mean is known before the squared
// deviations are summed: the accuracy of two passes at the traffic of one. Arithmetic is fp32. A thread owns whole
// rows (forward) or whole chunks of rows (backward, with one row of partial gamma and beta gradients per chunk).
#include <algorithm>

#include "cpu/column_sum.h"
#include "cpu/parallel.h"

namespace ls::cpu::LS_ISA {
namespace {

// Sum over the row of body(i, n), with two vector accumulators to hide the latency of the adder.
template <typename Body>
inline float row_sum(int64_t n_cols, Body&& body) {
  vfloat sum0{}, sum1{};
  int64_t i = 0;
  constexpr std::integral_constant<int, kLanes> kFull{};
  for (; i + 2 * kLanes <= n_cols; i += 2 * kLanes) {
    sum0 += body(i, kFull);
    sum1 += body(i + kLanes, kFull);
  }
  if (i + kLanes <= n_cols) {
    sum0 += body(i, kFull);
    i += kLanes;
  }
  if (i < n_cols) sum1 += body(i, n_cols - i);
  return reduce_add(sum0 + sum1);
}

}  // namespace

void layer_norm_forward(const LayerNormForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* weight = static_cast<const scalar_t*>(a.weight);
    const auto* bias = static_cast<const scalar_t*>(a.bias);
    const float inverse_n = 1.0f / static_cast<float>(a.n_cols);
    parallel_for(0, a.n_rows, rows_per_thread(a.n_cols), [&](int64_t row_begin, int64_t row_end) {
      for (int64_t row = row_begin; row < row_end; ++row) {
        const auto* x = static_cast<const scalar_t*>(a.x) + row * a.n_cols;
        auto* y = static_cast<scalar_t*>(a.y) + row * a.n_cols;
        // Summed from the first element on, not from 0: a mean that is large against the deviation keeps its digits.
        const float pivot = to_float(x[0]);
        const float mean =
            pivot + row_sum(a.n_cols, [&](int64_t i, auto n) { return load_n(x + i, n, pivot) - pivot; }) * inverse_n;
        const float variance = row_sum(a.n_cols,
                                       [&](int64_t i, auto n) {
                                         const vfloat centred = load_n(x + i, n, mean) - mean;
                                         return centred * centred;
                                       }) *
                               inverse_n;
        const float rstd = 1.0f / std::sqrt(variance + a.eps);
        for_each_vector(a.n_cols, [&](int64_t i, auto n) {
          vfloat v = (load_n(x + i, n) - mean) * rstd;
          if (weight != nullptr) v *= load_n(weight + i, n);
          if (bias != nullptr) v += load_n(bias + i, n);
          store_n(y + i, v, n);
        });
        a.mean[row] = mean;
        a.rstd[row] = rstd;
      }
    });
  });
}

void layer_norm_backward(const LayerNormBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* weight = static_cast<const scalar_t*>(a.weight);
    const float inverse_n = 1.0f / static_cast<float>(a.n_cols);
    const int64_t rows_per_chunk = column_sum_rows_per_partial(a.n_rows);
    const int64_t n_chunks = column_sum_n_partials(a.n_rows);
    float* partial_bias = a.partials == nullptr ? nullptr : a.partials + n_chunks * a.n_cols;
    parallel_for(0, n_chunks, chunks_per_thread(a.n_rows, a.n_cols), [&](int64_t chunk_begin, int64_t chunk_end) {
      for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
        float* sum_weight = a.partials == nullptr ? nullptr : a.partials + chunk * a.n_cols;
        float* sum_bias = a.partials == nullptr ? nullptr : partial_bias + chunk * a.n_cols;
        if (a.partials != nullptr) {
          std::fill(sum_weight, sum_weight + a.n_cols, 0.0f);
          std::fill(sum_bias, sum_bias + a.n_cols, 0.0f);
        }
        const int64_t row_begin = chunk * rows_per_chunk, row_end = std::min(row_begin + rows_per_chunk, a.n_rows);
        for (int64_t row = row_begin; row < row_end; ++row) {
          const auto* grad_y = static_cast<const scalar_t*>(a.grad_y) + row * a.n_cols;
          const auto* x = static_cast<const scalar_t*>(a.x) + row * a.n_cols;
          auto* grad_x = static_cast<scalar_t*>(a.grad_x) + row * a.n_cols;
          const float mean = a.mean[row], rstd = a.rstd[row];
          vfloat sum_g{}, sum_g_xhat{};
          for_each_vector(a.n_cols, [&](int64_t i, auto n) {
            const vfloat dy = load_n(grad_y + i, n);
            const vfloat xhat = (load_n(x + i, n) - mean) * rstd;  // a tail's idle lanes meet dy = 0 below
            if (a.partials != nullptr) {
              store_n(sum_weight + i, load_n(sum_weight + i, n) + dy * xhat, n);
              store_n(sum_bias + i, load_n(sum_bias + i, n) + dy, n);
            }
            const vfloat g = weight == nullptr ? dy : dy * load_n(weight + i, n);
            sum_g += g;
            sum_g_xhat += g * xhat;
          });
          const float mean_g = reduce_add(sum_g) * inverse_n, mean_g_xhat = reduce_add(sum_g_xhat) * inverse_n;
          for_each_vector(a.n_cols, [&](int64_t i, auto n) {
            const vfloat dy = load_n(grad_y + i, n);
            const vfloat xhat = (load_n(x + i, n) - mean) * rstd;
            const vfloat g = weight == nullptr ? dy : dy * load_n(weight + i, n);
            store_n(grad_x + i, (g - mean_g - xhat * mean_g_xhat) * rstd, n);
          });
        }
      }
    });
    if (a.grad_weight != nullptr) sum_partials(a.partials, n_chunks, a.n_cols, static_cast<scalar_t*>(a.grad_weight));
    if (a.grad_bias != nullptr) sum_partials(partial_bias, n_chunks, a.n_cols, static_cast<scalar_t*>(a.grad_bias));
  });
}

}  // namespace ls::cpu::LS_ISA
