// Layer norm over the last dimension, forward and backward.
//
//   x, y, grad_y, grad_x (N, C), weight, bias (C,) in fp32, fp16 or bf16; mean, rstd (N,) fp32; computed in fp32.
//   forward   y = (x - mean) * rstd * weight + bias        rstd = 1 / sqrt(var + eps), biased variance; saves mean, rstd
//   backward  grad_x = rstd * (g - sum(g) / C - xhat * sum(g * xhat) / C)      g = grad_y * weight, xhat = (x - mean) * rstd
//            in two coefficients of the row, RowGradient in norm.cuh
//             grad_weight = sum over rows of grad_y * xhat, grad_bias = sum over rows of grad_y        (column_sum.cuh)
// All outputs are overwritten (=). Both sums of the backward travel in one reduction.
//
// Rows of up to kMaxTeamColumns: a team of lanes, mostly a warp, owns a row and keeps it in registers; x, and in the
// backward grad_y, are read once, and there is no barrier. The row being in registers, the statistics are the exact two-pass
// ones: a second reduction by shuffles, no second read. In the backward each lane keeps the gamma and beta sums of its columns
// over all the rows of its block's chunk, so that stage 1 of the column sums costs no traffic but its partials.
// Longer rows: a block owns a row and makes one pass for the statistics (Welford) or the two sums, then reads the row again,
// by now in L1 or L2 (a row of 8,192 columns in 16 bits is 16 KB); the column sums are a kernel of their own.
// Papers: Ba et al., Layer normalization (2016); Wang et al., LightSeq2 (SC'22), for the single reduction of the backward.

#include "cuda/norm.cuh"

namespace ls::cuda {
namespace {

// Instances: 8 lanes up to 64 columns (per-head norms; four rows to a warp), then a warp with 8, 16, 24 or 32 elements per
// lane. Pruned: teams of 16 lanes (65 to 128 columns) and of fewer than 8 (under 32 columns), widths that models rarely
// have; there lanes idle, but results are right.
template <typename Body>
void with_row_shape(int64_t n_cols, Body&& body) {
  if (n_cols <= 64) return body(RowShape<8, 8>{});
  if (n_cols <= 256) return body(RowShape<32, 8>{});
  if (n_cols <= 512) return body(RowShape<32, 16>{});
  if (n_cols <= 768) return body(RowShape<32, 24>{});
  return body(RowShape<32, 32>{});
}

template <typename scalar_t, int kWidth, typename Shape>
__global__ void __launch_bounds__(Shape::kForwardThreads) layer_norm_forward_kernel(const LayerNormForward a) {
  normalize_rows_in_registers<scalar_t, kWidth, Shape>(a, [&](int64_t row, int64_t col, Vec<scalar_t, kWidth>(&x)[1]) {
    x[0] = load_vec<kWidth>(static_cast<const scalar_t*>(a.x) + row * a.n_cols + col);
  });
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kLongRowThreads) layer_norm_forward_long_kernel(const LayerNormForward a) {
  const int64_t row = blockIdx.x;
  normalize_long_row<scalar_t, kWidth, kWidth>(a, row, [&](int64_t col, Vec<scalar_t, kWidth>(&x)[1]) {
    x[0] = load_vec<kWidth>(static_cast<const scalar_t*>(a.x) + row * a.n_cols + col);
  });
}

// Block b owns the rows of chunk b.
template <typename scalar_t, int kWidth, typename Shape, bool kGradParams>
__global__ void __launch_bounds__(Shape::backward_threads(kWidth))
    layer_norm_backward_kernel(const LayerNormBackward a, int64_t rows_per_chunk) {
  float sum_weight[kGradParams ? Shape::kPerLane : 1] = {}, sum_bias[kGradParams ? Shape::kPerLane : 1] = {};
  const int64_t row_begin = blockIdx.x * rows_per_chunk;
  const int64_t row_end = row_begin + rows_per_chunk < a.n_rows ? row_begin + rows_per_chunk : a.n_rows;
  row_gradients_in_registers<scalar_t, kWidth, Shape, kGradParams, /*kKeepWeight=*/true>(
      a, row_begin, row_end, sum_weight, sum_bias,
      [&](int /*run*/, int64_t row, int64_t col, int64_t /*n_valid*/, const float (&grad)[kWidth]) {
        store_floats<kWidth>(static_cast<scalar_t*>(a.grad_x) + row * a.n_cols + col, grad);
      });
  if constexpr (kGradParams) {
    LS_SHARED(float, shared, (kTeamSharedFloats<kWidth, Shape>));
    store_team_sums<kWidth, Shape>(sum_weight, shared, a.n_cols, a.partials + blockIdx.x * a.n_cols);
    __syncthreads();
    store_team_sums<kWidth, Shape>(sum_bias, shared, a.n_cols, a.partials + (a.n_partials + blockIdx.x) * a.n_cols);
  }
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kLongRowThreads) layer_norm_backward_long_kernel(const LayerNormBackward a) {
  const int64_t row = blockIdx.x;
  long_row_gradient<scalar_t, kWidth, kWidth>(a, row, [&](int64_t col, int64_t /*n_valid*/, const float (&grad)[kWidth]) {
    store_floats<kWidth>(static_cast<scalar_t*>(a.grad_x) + row * a.n_cols + col, grad);
  });
}

template <typename scalar_t, int kWidth>
void forward(const char* op, const LayerNormForward& a, cudaStream_t stream) {
  if (a.n_cols > kMaxTeamColumns) {
    LS_LAUNCH((layer_norm_forward_long_kernel<scalar_t, kWidth>), grid_of(op, a.n_rows), dim3(kLongRowThreads), 0, stream, a);
    return;
  }
  with_row_shape(a.n_cols, [&](auto shape) {
    using Shape = decltype(shape);
    constexpr int kThreads = Shape::kForwardThreads;
    const dim3 grid = grid_of(op, ceil_div(a.n_rows, kThreads / Shape::kLanes));
    LS_LAUNCH((layer_norm_forward_kernel<scalar_t, kWidth, Shape>), grid, dim3(kThreads), 0, stream, a);
  });
}

template <typename scalar_t, int kWidth>
void backward(const char* op, const LayerNormBackward& a, cudaStream_t stream) {
  const bool grad_params = a.grad_weight != nullptr || a.grad_bias != nullptr;
  const int64_t rows_per_partial = column_sum_rows_per_partial(a.n_rows);
  if (a.n_cols > kMaxTeamColumns) {
    LS_LAUNCH((layer_norm_backward_long_kernel<scalar_t, kWidth>), grid_of(op, a.n_rows), dim3(kLongRowThreads), 0, stream, a);
    check_launch(op);
    if (grad_params) layer_norm_grad_params<scalar_t, kWidth>(op, a, stream);
    return;
  }
  with_row_shape(a.n_cols, [&](auto shape) {
    using Shape = decltype(shape);
    constexpr int kThreads = Shape::backward_threads(kWidth);
    constexpr int64_t kTeams = kThreads / Shape::kLanes;
    if (grad_params)
      LS_LAUNCH((layer_norm_backward_kernel<scalar_t, kWidth, Shape, true>), grid_of(op, a.n_partials), dim3(kThreads), 0,
                stream, a, rows_per_partial);
    else
      LS_LAUNCH((layer_norm_backward_kernel<scalar_t, kWidth, Shape, false>), grid_of(op, ceil_div(a.n_rows, kTeams)),
                dim3(kThreads), 0, stream, a, kTeams);
  });
}

}  // namespace

void layer_norm_forward(const LayerNormForward& a, cudaStream_t stream) {
  constexpr const char* kOp = "layer_norm_forward";
  if (a.n_rows == 0 || a.n_cols == 0) return;
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    constexpr int kVec = kVecWidth<scalar_t>;
    if (a.n_cols % kVec == 0 && is_aligned(a.x, kVecBytes) && is_aligned(a.weight, kVecBytes) &&
        is_aligned(a.bias, kVecBytes) && is_aligned(a.y, kVecBytes))
      forward<scalar_t, kVec>(kOp, a, stream);
    else
      forward<scalar_t, 1>(kOp, a, stream);
  });
  check_launch(kOp);
}

void layer_norm_backward(const LayerNormBackward& a, cudaStream_t stream) {
  constexpr const char* kOp = "layer_norm_backward";
  if (a.n_cols == 0) return;
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    constexpr int kVec = kVecWidth<scalar_t>;
    if (a.n_rows > 0) {
      if (a.n_cols % kVec == 0 && is_aligned(a.grad_y, kVecBytes) && is_aligned(a.x, kVecBytes) &&
          is_aligned(a.weight, kVecBytes) && is_aligned(a.grad_x, kVecBytes))
        backward<scalar_t, kVec>(kOp, a, stream);
      else
        backward<scalar_t, 1>(kOp, a, stream);
      check_launch(kOp);
    }
    if (a.grad_weight != nullptr || a.grad_bias != nullptr)
      finish_column_sums<scalar_t>(kOp, a.partials, a.n_partials, a.n_cols, a.grad_weight, a.grad_bias, stream);
  });
}

}  // namespace ls::cuda
