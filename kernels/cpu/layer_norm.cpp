// Layer norm and its backward; formulas and shapes in common/params.h, the rows themselves in norm.h.
//
// Memory: forward reads x once and writes y (8 bytes per fp32 element), backward reads grad_y and x and writes grad_x (12).
// Arithmetic is fp32. A thread owns whole blocks of rows (forward) or whole chunks of rows (backward, with one row of
// partial gamma and beta gradients per chunk).
#include "cpu/norm.h"

namespace ls::cpu::LS_ISA {

void layer_norm_forward(const LayerNormForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    for_each_row_block_in_parallel(a.n_rows, a.n_cols,
                                   [&](int64_t row, auto n_rows) { normalize_rows<scalar_t, n_rows>(a, row); });
  });
}

void layer_norm_backward(const LayerNormBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* weight = static_cast<const scalar_t*>(a.weight);
    const int64_t n_cols = a.n_cols, n_chunks = column_sum_n_partials(a.n_rows);
    for_each_chunk_in_parallel(a.n_rows, n_cols, [&](int64_t chunk, int64_t chunk_begin, int64_t chunk_end) {
      float* sum_weight = zeroed_chunk_sums(a.partials, 0, chunk, n_chunks, n_cols);
      float* sum_bias = zeroed_chunk_sums(a.partials, 1, chunk, n_chunks, n_cols);
      for_each_row_block(chunk_begin, chunk_end, [&](int64_t row, auto n_rows) {
        constexpr int kRows = decltype(n_rows)::value;
        RowGradient gradients[kRows];
        row_gradients<scalar_t, kRows>(a, row, sum_weight, sum_bias, gradients);
        const auto* grad_y = static_cast<const scalar_t*>(a.grad_y) + row * n_cols;
        const auto* x = static_cast<const scalar_t*>(a.x) + row * n_cols;
        auto* grad_x = static_cast<scalar_t*>(a.grad_x) + row * n_cols;
        for_each_vector(n_cols, [&](int64_t i, auto n) {
          const vfloat w = weight == nullptr ? broadcast(1.0f) : load_n(weight + i, n);
          vfloat out[kRows];
          for (int r = 0; r < kRows; ++r)
            out[r] = gradients[r](load_n(grad_y + r * n_cols + i, n), load_n(x + r * n_cols + i, n), w);
          for (int r = 0; r < kRows; ++r) store_n(grad_x + r * n_cols + i, out[r], n);
        });
      });
    });
    finish_chunk_sums<scalar_t>(a.partials, 0, n_chunks, n_cols, a.grad_weight);
    finish_chunk_sums<scalar_t>(a.partials, 1, n_chunks, n_cols, a.grad_bias);
  });
}

}  // namespace ls::cpu::LS_ISA
