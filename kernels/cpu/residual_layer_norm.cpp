// sum = residual + dropout(x + bias), y = layer_norm(sum), and their backward; shapes and meaning in common/params.h, the rows
// of the norm in norm.h.
//
// Memory: forward reads x and residual and writes sum and y (16 bytes per fp32 element; apart, the two ops move 20), backward
// reads grad_sum, grad_y and sum and writes grad_residual and grad_x (20). Arithmetic is fp32. The statistics are those of the sum as
// stored: in 16 bits its rounding is part of the function, so the backward, which reads the stored sum, differentiates what was computed.
// A thread owns whole blocks of rows (forward) or whole chunks of rows (backward, with a row of partial sums for each parameter per chunk).
#include "cpu/dropout.h"
#include "cpu/norm.h"

namespace ls::cpu::LS_ISA {

void residual_layer_norm_forward(const ResidualLayerNormForward& a) {
  dispatch_dtype(a.norm.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* x = static_cast<const scalar_t*>(a.x);
    const auto* bias = static_cast<const scalar_t*>(a.bias);
    const auto* residual = static_cast<const scalar_t*>(a.residual);
    auto* sum = static_cast<scalar_t*>(a.sum);
    const int64_t n_cols = a.norm.n_cols;
    for_each_row_block_in_parallel(a.norm.n_rows, n_cols, [&](int64_t row_begin, auto n_rows) {
      bias_dropout_residual_rows(x, bias, residual, sum, a.dropout, row_begin, row_begin + n_rows, n_cols);
      normalize_rows<scalar_t, n_rows>(a.norm, row_begin);
    });
  });
}

void residual_layer_norm_backward(const ResidualLayerNormBackward& a) {
  dispatch_dtype(a.norm.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* weight = static_cast<const scalar_t*>(a.norm.weight);
    const auto* grad_y = static_cast<const scalar_t*>(a.norm.grad_y);
    const auto* sum = static_cast<const scalar_t*>(a.norm.x);
    const auto* grad_sum = static_cast<const scalar_t*>(a.grad_sum);
    auto* grad_residual = static_cast<scalar_t*>(a.norm.grad_x);
    auto* grad_x = static_cast<scalar_t*>(a.grad_x);
    const int64_t n_cols = a.norm.n_cols, n_chunks = column_sum_n_partials(a.norm.n_rows);
    for_each_chunk_in_parallel(a.norm.n_rows, n_cols, [&](int64_t chunk, int64_t chunk_begin, int64_t chunk_end) {
      float* sum_weight = zeroed_chunk_sums(a.norm.partials, 0, chunk, n_chunks, n_cols);
      float* sum_norm_bias = zeroed_chunk_sums(a.norm.partials, 1, chunk, n_chunks, n_cols);
      float* sum_bias = a.grad_bias == nullptr ? nullptr : zeroed_chunk_sums(a.norm.partials, 2, chunk, n_chunks, n_cols);
      for_each_row_block(chunk_begin, chunk_end, [&](int64_t row_begin, auto n_rows) {
        RowGradient gradients[decltype(n_rows)::value];
        row_gradients<scalar_t, n_rows>(a.norm, row_begin, sum_weight, sum_norm_bias, gradients);
        for_each_dropout_segment(a.dropout, row_begin, row_begin + n_rows, n_cols,
                                 [&](int64_t row, int64_t col_begin, int64_t col_end, const uint16_t* draws) {
                                   const RowGradient gradient = gradients[row - row_begin];
                                   const int64_t first = row * n_cols + col_begin;
                                   for_each_vector(col_end - col_begin, [&](int64_t i, auto n) {
                                     const vfloat w = weight == nullptr ? broadcast(1.0f) : load_n(weight + col_begin + i, n);
                                     prefetch_ahead<false>(grad_y + first + i);
                                     prefetch_ahead<false>(sum + first + i);
                                     vfloat g = gradient(load_n(grad_y + first + i, n), load_n(sum + first + i, n), w);
                                     if (grad_sum != nullptr) {
                                       prefetch_ahead<false>(grad_sum + first + i);
                                       g += load_n(grad_sum + first + i, n);
                                     }
                                     if (grad_residual != nullptr) {
                                       prefetch_ahead<true>(grad_residual + first + i);
                                       store_n(grad_residual + first + i, g, n);
                                     }
                                     if (draws != nullptr)
                                       g = keep_lanes(draws + i, a.dropout.threshold) ? g * a.dropout.scale : vfloat{};
                                     if (grad_x != nullptr) {
                                       prefetch_ahead<true>(grad_x + first + i);
                                       store_n(grad_x + first + i, g, n);
                                     }
                                     if (sum_bias != nullptr) {
                                       float* s = sum_bias + col_begin + i;
                                       store_n(s, load_n(s, n) + g, n);
                                     }
                                   });
                                 });
      });
    });
    finish_chunk_sums<scalar_t>(a.norm.partials, 0, n_chunks, n_cols, a.norm.grad_weight);
    finish_chunk_sums<scalar_t>(a.norm.partials, 1, n_chunks, n_cols, a.norm.grad_bias);
    finish_chunk_sums<scalar_t>(a.norm.partials, 2, n_chunks, n_cols, a.grad_bias);
  });
}

}  // namespace ls::cpu::LS_ISA
