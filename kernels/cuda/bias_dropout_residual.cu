// y = residual + dropout(x + bias), and its backward.
//
//   x, residual, y (N, C), bias (C,) in fp32, fp16 or bf16, computed in fp32 and rounded once; bias and residual may be absent
//   forward  y      = residual + keep * scale * (x + bias)            keep from Philox, see common/philox.h
//   backward grad_x = keep * scale * grad_y                           the same draws again: nothing is saved
//            grad_bias = sum over rows of grad_x, before rounding     two stages, column_sum.cuh
// All outputs are overwritten (=). y may be x or residual, grad_x may be grad_y, or null when only grad_bias is wanted: each
// element is read, then written, by the same thread.
//
// A thread owns eight consecutive columns, which is one draw of Philox and one 16-byte vector in 16 bits (two in fp32), and
// walks over the rows of its block's tile with its part of the bias in registers.
// Paper: Wang et al., LightSeq2: Accelerated Training for Transformer-Based Models on GPUs (SC'22).

#include "cuda/column_sum.cuh"
#include "cuda/dropout.cuh"

namespace ls::cuda {
namespace {

static_assert(kTileColumns == kDropoutGroup, "a thread's columns are one draw of dropout");

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kTileThreads)
    bias_dropout_residual_forward_kernel(const BiasDropoutResidualForward a, unsigned n_col_blocks, int64_t rows_per_chunk) {
  const auto* x = static_cast<const scalar_t*>(a.x);
  const auto* residual = static_cast<const scalar_t*>(a.residual);
  auto* y = static_cast<scalar_t*>(a.y);
  const TilePosition at(a.n_rows, a.n_cols, n_col_blocks, rows_per_chunk);
  const int64_t groups_per_row = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);

  float bias[kTileColumns] = {};
  if (a.bias != nullptr) load_group<kWidth>(static_cast<const scalar_t*>(a.bias) + at.col, at.n_valid, bias);
  for (int64_t row = at.row_begin; row < at.row_end; row += blockDim.y) {
    const int64_t offset = row * a.n_cols + at.col;
    float v[kTileColumns], r[kTileColumns] = {};
    load_group<kWidth>(x + offset, at.n_valid, v);
    if (residual != nullptr) load_group<kWidth>(residual + offset, at.n_valid, r);  // in flight during the draw
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) v[i] += bias[i];
    if (a.dropout.threshold != 0) apply_dropout(a.dropout, seed, row * groups_per_row + at.col / kDropoutGroup, v);
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) v[i] += r[i];
    store_group<kWidth>(y + offset, at.n_valid, v);
  }
}

// With kGradBias a chunk is the rows of one partial, else any number of rows.
template <typename scalar_t, int kWidth, bool kGradBias>
__global__ void __launch_bounds__(kTileThreads)
    bias_dropout_residual_backward_kernel(const BiasDropoutResidualBackward a, unsigned n_col_blocks, int64_t rows_per_chunk) {
  const auto* grad_y = static_cast<const scalar_t*>(a.grad_y);
  auto* grad_x = static_cast<scalar_t*>(a.grad_x);
  const TilePosition at(a.n_rows, a.n_cols, n_col_blocks, rows_per_chunk);
  const int64_t groups_per_row = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);

  float sum[kTileColumns] = {};
  for (int64_t row = at.row_begin; row < at.row_end; row += blockDim.y) {
    const int64_t offset = row * a.n_cols + at.col;
    float g[kTileColumns];
    load_group<kWidth>(grad_y + offset, at.n_valid, g);
    if (a.dropout.threshold != 0) apply_dropout(a.dropout, seed, row * groups_per_row + at.col / kDropoutGroup, g);
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) sum[i] += g[i];
    if (grad_x != nullptr) store_group<kWidth>(grad_x + offset, at.n_valid, g);
  }
  if constexpr (kGradBias) {
    LS_SHARED(float, shared, kTileSharedFloats);
    const int64_t tile_col = at.col - threadIdx.x * kTileColumns;
    sum_tile_columns(sum, shared, a.n_cols - tile_col, a.partials + at.chunk * a.n_cols + tile_col);
  }
}

}  // namespace

void bias_dropout_residual_forward(const BiasDropoutResidualForward& a, cudaStream_t stream) {
  constexpr const char* kOp = "bias_dropout_residual_forward";
  if (a.n_rows == 0 || a.n_cols == 0) return;
  const Tile tile(a.n_rows, a.n_cols);
  const int64_t rows_per_chunk = rows_per_chunk_without_sums(tile, a.n_rows);
  const dim3 grid = grid_of(kOp, ceil_div(a.n_rows, rows_per_chunk) * tile.n_col_blocks);
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    constexpr int kVec = kVecWidth<scalar_t>;
    const bool vectorized = a.n_cols % kVec == 0 && is_aligned(a.x, kVecBytes) && is_aligned(a.bias, kVecBytes) &&
                            is_aligned(a.residual, kVecBytes) && is_aligned(a.y, kVecBytes);
    const unsigned n_col_blocks = static_cast<unsigned>(tile.n_col_blocks);
    if (vectorized)
      LS_LAUNCH((bias_dropout_residual_forward_kernel<scalar_t, kVec>), grid, tile.block, 0, stream, a, n_col_blocks,
                rows_per_chunk);
    else
      LS_LAUNCH((bias_dropout_residual_forward_kernel<scalar_t, 1>), grid, tile.block, 0, stream, a, n_col_blocks,
                rows_per_chunk);
  });
  check_launch(kOp);
}

void bias_dropout_residual_backward(const BiasDropoutResidualBackward& a, cudaStream_t stream) {
  constexpr const char* kOp = "bias_dropout_residual_backward";
  if (a.n_cols == 0) return;
  const bool grad_bias = a.grad_bias != nullptr;
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    if (a.n_rows > 0) {
      const Tile tile(a.n_rows, a.n_cols);
      const int64_t rows_per_chunk =
          grad_bias ? column_sum_rows_per_partial(a.n_rows) : rows_per_chunk_without_sums(tile, a.n_rows);
      const dim3 grid = grid_of(kOp, ceil_div(a.n_rows, rows_per_chunk) * tile.n_col_blocks);
      const auto launch = [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const unsigned n_col_blocks = static_cast<unsigned>(tile.n_col_blocks);
        if (grad_bias)
          LS_LAUNCH((bias_dropout_residual_backward_kernel<scalar_t, kWidth, true>), grid, tile.block, 0, stream, a,
                    n_col_blocks, rows_per_chunk);
        else
          LS_LAUNCH((bias_dropout_residual_backward_kernel<scalar_t, kWidth, false>), grid, tile.block, 0, stream, a,
                    n_col_blocks, rows_per_chunk);
      };
      constexpr int kVec = kVecWidth<scalar_t>;
      if (a.n_cols % kVec == 0 && is_aligned(a.grad_y, kVecBytes) && is_aligned(a.grad_x, kVecBytes))
        launch(std::integral_constant<int, kVec>{});
      else
        launch(std::integral_constant<int, 1>{});
      check_launch(kOp);
    }
    if (grad_bias) finish_column_sums<scalar_t>(kOp, a.partials, a.n_partials, a.n_cols, a.grad_bias, nullptr, stream);
  });
}

}  // namespace ls::cuda
