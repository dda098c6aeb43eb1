// y = residual + dropout(x + bias) and its backward; shapes and meaning in common/params.h.
//
// Memory: forward reads x and residual and writes y (12 bytes per fp32 element), backward reads grad_y and writes grad_x (8);
// the draws stay in the first-level cache. Arithmetic is fp32. Threads own whole rows (forward) or whole chunks of
// rows (backward, where a chunk owns one row of partial bias gradients).
#include "cpu/column_sum.h"
#include "cpu/dropout.h"
#include "cpu/parallel.h"

namespace ls::cpu::LS_ISA {

void bias_dropout_residual_forward(const BiasDropoutResidualForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* x = static_cast<const scalar_t*>(a.x);
    const auto* bias = static_cast<const scalar_t*>(a.bias);
    const auto* residual = static_cast<const scalar_t*>(a.residual);
    auto* y = static_cast<scalar_t*>(a.y);
    parallel_for(0, a.n_rows, rows_per_thread(a.n_cols), [&](int64_t row_begin, int64_t row_end) {
      bias_dropout_residual_rows(x, bias, residual, y, a.dropout, row_begin, row_end, a.n_cols);
    });
  });
}

void bias_dropout_residual_backward(const BiasDropoutResidualBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* grad_y = static_cast<const scalar_t*>(a.grad_y);
    auto* grad_x = static_cast<scalar_t*>(a.grad_x);
    const int64_t n_chunks = column_sum_n_partials(a.n_rows);
    for_each_chunk_in_parallel(a.n_rows, a.n_cols, [&](int64_t chunk, int64_t row_begin, int64_t row_end) {
      float* partial = zeroed_chunk_sums(a.partials, 0, chunk, n_chunks, a.n_cols);
      for_each_dropout_segment(a.dropout, row_begin, row_end, a.n_cols,
                               [&](int64_t row, int64_t col_begin, int64_t col_end, const uint16_t* draws) {
                                 const int64_t first = row * a.n_cols + col_begin;
                                 for_each_vector(col_end - col_begin, [&](int64_t i, auto n) {
                                   vfloat g = load_n(grad_y + first + i, n);
                                   if (draws != nullptr)
                                     g = keep_lanes(draws + i, a.dropout.threshold) ? g * a.dropout.scale : vfloat{};
                                   if (grad_x != nullptr) store_n(grad_x + first + i, g, n);
                                   if (partial != nullptr) {
                                     float* sum = partial + col_begin + i;
                                     store_n(sum, load_n(sum, n) + g, n);
                                   }
                                 });
                               });
    });
    finish_chunk_sums<scalar_t>(a.partials, 0, n_chunks, a.n_cols, a.grad_bias);
  });
}

}  // namespace ls::cpu::LS_ISA
