// Bias, dropout, residual and layer norm, forward and backward.
//
//   x, residual, sum, y and their gradients (N, C), bias, weight, norm_bias (C,) in fp32, fp16 or bf16; mean, rstd (N,) fp32;
//   computed in fp32. bias, residual, weight and norm_bias may be absent.
//   forward   sum = residual + keep * scale * (x + bias)                           keep from Philox, see common/philox.h
//             y   = (sum - mean) * rstd * weight + norm_bias                       of the sum as stored; saves mean, rstd
//   backward  grad_residual = grad_sum + rstd * g + (alpha * (sum - mean) + beta)  g = grad_y * weight; alpha, beta: norm.cuh
//             grad_x        = keep * scale * grad_residual                         the same draws again
//             grad_bias     = sum over rows of grad_x, before rounding; grad_weight, grad_norm_bias as layer_norm's
// All outputs are overwritten (=). grad_sum may be absent, grad_residual and grad_x null.
//
// Rows of up to kMaxTeamColumns: a warp owns a row and keeps it in registers, as in layer_norm.cu; every matrix is read or
// written once. A lane owns runs of eight columns, which is one draw of Philox and one 16-byte vector in 16 bits (two in fp32). In the
// backward it keeps three column sums (bias, gamma, beta) over its block's rows, for which the weight gives up its registers: it is read
// again for each row, from L1. The gradient of the sum is not kept either, but read where it is added.
// Longer rows: a block owns a row; sum is written and read back, in the backward grad_y and sum are read twice, from a cache.
// The gamma and beta sums are a kernel of their own, the bias sums those of bias_dropout_residual on grad_x as stored.
// Papers: Ba et al., Layer normalization (2016); Wang et al., LightSeq2 (SC'22).

#include "cuda/dropout.cuh"
#include "cuda/norm.cuh"

namespace ls::cuda {
namespace {

constexpr int kRun = kDropoutGroup;

// Instances: a warp with 8, 16 or 32 elements per lane. Pruned against layer_norm: 8 lanes, and 24 elements; lanes idle there.
template <typename Body>
void with_row_shape(int64_t n_cols, Body&& body) {
  if (n_cols <= 256) return body(RowShape<32, 8, kRun>{});
  if (n_cols <= 512) return body(RowShape<32, 16, kRun>{});
  return body(RowShape<32, 32, kRun>{});
}

// The forward's sum for the run of columns from col on: computed, rounded, stored and kept.
template <typename scalar_t, int kWidth>
__device__ __forceinline__ void add_run(const ResidualLayerNormForward& a, uint64_t seed, int64_t row, int64_t col,
                                        Vec<scalar_t, kWidth> (&out)[kRun / kWidth]) {
  const int64_t n_cols = a.norm.n_cols, n_valid = n_cols - col, offset = row * n_cols + col;
  float v[kRun], bias[kRun] = {}, residual[kRun] = {};
  load_group<kWidth>(static_cast<const scalar_t*>(a.x) + offset, n_valid, v);
  if (a.residual != nullptr) load_group<kWidth>(static_cast<const scalar_t*>(a.residual) + offset, n_valid, residual);
  if (a.bias != nullptr) load_group<kWidth>(static_cast<const scalar_t*>(a.bias) + col, n_valid, bias);
#pragma unroll
  for (int i = 0; i < kRun; ++i) v[i] += bias[i];
  if (a.dropout.threshold != 0) {
    const int64_t groups_per_row = (n_cols + kDropoutGroup - 1) / kDropoutGroup;
    apply_dropout(a.dropout, seed, row * groups_per_row + col / kDropoutGroup, v);
  }
#pragma unroll
  for (int k = 0; k < kRun / kWidth; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[k].elem[j] = static_cast<scalar_t>(v[k * kWidth + j] + residual[k * kWidth + j]);
    if (k * kWidth < n_valid) store_vec(static_cast<scalar_t*>(a.sum) + offset + k * kWidth, out[k]);
  }
}

template <typename scalar_t, int kWidth, typename Shape>
__global__ void __launch_bounds__(Shape::kForwardThreads) residual_layer_norm_forward_kernel(const ResidualLayerNormForward a) {
  const uint64_t seed = dropout_seed(a.dropout);
  normalize_rows_in_registers<scalar_t, kWidth, Shape>(a.norm,
                                                       [&](int64_t row, int64_t col, Vec<scalar_t, kWidth>(&x)[kRun / kWidth]) {
                                                         add_run<scalar_t, kWidth>(a, seed, row, col, x);
                                                       });
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kLongRowThreads) residual_layer_norm_forward_long_kernel(const ResidualLayerNormForward a) {
  const uint64_t seed = dropout_seed(a.dropout);
  const int64_t row = blockIdx.x;
  normalize_long_row<scalar_t, kWidth, kRun>(a.norm, row, [&](int64_t col, Vec<scalar_t, kWidth>(&x)[kRun / kWidth]) {
    add_run<scalar_t, kWidth>(a, seed, row, col, x);
  });
}

// Finishes the gradients of a run of columns, grad being the norm's: adds grad_sum, stores grad_residual, drops, stores grad_x, which it leaves in
// grad.
template <typename scalar_t, int kWidth>
__device__ __forceinline__ void finish_run(const ResidualLayerNormBackward& a, uint64_t seed, int64_t row, int64_t col,
                                           float (&grad)[kRun]) {
  const int64_t n_cols = a.norm.n_cols, n_valid = n_cols - col, offset = row * n_cols + col;
  if (a.grad_sum != nullptr) {
    float grad_sum[kRun];
    load_group<kWidth>(static_cast<const scalar_t*>(a.grad_sum) + offset, n_valid, grad_sum);
#pragma unroll
    for (int i = 0; i < kRun; ++i) grad[i] += grad_sum[i];
  }
  if (a.norm.grad_x != nullptr) store_group<kWidth>(static_cast<scalar_t*>(a.norm.grad_x) + offset, n_valid, grad);
  if (a.dropout.threshold != 0) {
    const int64_t groups_per_row = (n_cols + kDropoutGroup - 1) / kDropoutGroup;
    apply_dropout(a.dropout, seed, row * groups_per_row + col / kDropoutGroup, grad);
  }
  if (a.grad_x != nullptr) store_group<kWidth>(static_cast<scalar_t*>(a.grad_x) + offset, n_valid, grad);
}

// Block b owns the rows of chunk b. The column sums are formed even where nobody wants them: frozen parameters are rare, and
// leaving them out would double the instances.
template <typename scalar_t, int kWidth, typename Shape>
__global__ void __launch_bounds__(Shape::backward_threads(kWidth))
    residual_layer_norm_backward_kernel(const ResidualLayerNormBackward a, int64_t rows_per_chunk) {
  const uint64_t seed = dropout_seed(a.dropout);
  float sum_weight[Shape::kPerLane] = {}, sum_norm_bias[Shape::kPerLane] = {}, sum_bias[Shape::kPerLane] = {};
  const int64_t n_rows = a.norm.n_rows, n_cols = a.norm.n_cols, row_begin = blockIdx.x * rows_per_chunk;
  const int64_t row_end = row_begin + rows_per_chunk < n_rows ? row_begin + rows_per_chunk : n_rows;
  row_gradients_in_registers<scalar_t, kWidth, Shape, /*kGradParams=*/true, /*kKeepWeight=*/false>(
      a.norm, row_begin, row_end, sum_weight, sum_norm_bias,
      [&](int run, int64_t row, int64_t col, int64_t /*n_valid*/, float (&grad)[kRun]) {
        finish_run<scalar_t, kWidth>(a, seed, row, col, grad);
#pragma unroll
        for (int i = 0; i < kRun; ++i) sum_bias[run * kRun + i] += grad[i];
      });
  if (a.norm.partials == nullptr) return;
  LS_SHARED(float, shared, (kTeamSharedFloats<kWidth, Shape>));
  float* partials = a.norm.partials + blockIdx.x * n_cols;
  store_team_sums<kWidth, Shape>(sum_weight, shared, n_cols, partials);
  __syncthreads();
  store_team_sums<kWidth, Shape>(sum_norm_bias, shared, n_cols, partials + a.norm.n_partials * n_cols);
  if (a.grad_bias == nullptr) return;
  __syncthreads();
  store_team_sums<kWidth, Shape>(sum_bias, shared, n_cols, partials + 2 * a.norm.n_partials * n_cols);
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kLongRowThreads) residual_layer_norm_backward_long_kernel(const ResidualLayerNormBackward a) {
  const uint64_t seed = dropout_seed(a.dropout);
  const int64_t row = blockIdx.x;
  long_row_gradient<scalar_t, kWidth, kRun>(a.norm, row, [&](int64_t col, int64_t /*n_valid*/, float (&grad)[kRun]) {
    finish_run<scalar_t, kWidth>(a, seed, row, col, grad);
  });
}

template <typename scalar_t, int kWidth>
void forward(const char* op, const ResidualLayerNormForward& a, cudaStream_t stream) {
  const int64_t n_rows = a.norm.n_rows, n_cols = a.norm.n_cols;
  if (n_cols > kMaxTeamColumns) {
    LS_LAUNCH((residual_layer_norm_forward_long_kernel<scalar_t, kWidth>), grid_of(op, n_rows), dim3(kLongRowThreads), 0,
              stream, a);
    return;
  }
  with_row_shape(n_cols, [&](auto shape) {
    using Shape = decltype(shape);
    constexpr int kThreads = Shape::kForwardThreads;
    const dim3 grid = grid_of(op, ceil_div(n_rows, kThreads / Shape::kLanes));
    LS_LAUNCH((residual_layer_norm_forward_kernel<scalar_t, kWidth, Shape>), grid, dim3(kThreads), 0, stream, a);
  });
}

template <typename scalar_t, int kWidth>
void backward(const char* op, const ResidualLayerNormBackward& a, cudaStream_t stream) {
  const int64_t n_rows = a.norm.n_rows, n_cols = a.norm.n_cols, rows_per_partial = column_sum_rows_per_partial(n_rows);
  if (n_cols > kMaxTeamColumns) {
    LS_LAUNCH((residual_layer_norm_backward_long_kernel<scalar_t, kWidth>), grid_of(op, n_rows), dim3(kLongRowThreads), 0,
              stream, a);
    check_launch(op);
    if (a.norm.grad_weight != nullptr || a.norm.grad_bias != nullptr)
      layer_norm_grad_params<scalar_t, kWidth>(op, a.norm, stream);
    return;
  }
  with_row_shape(n_cols, [&](auto shape) {
    using Shape = decltype(shape);
    LS_LAUNCH((residual_layer_norm_backward_kernel<scalar_t, kWidth, Shape>), grid_of(op, column_sum_n_partials(n_rows)),
              dim3(Shape::backward_threads(kWidth)), 0, stream, a, rows_per_partial);
  });
}

}  // namespace

void residual_layer_norm_forward(const ResidualLayerNormForward& a, cudaStream_t stream) {
  constexpr const char* kOp = "residual_layer_norm_forward";
  if (a.norm.n_rows == 0 || a.norm.n_cols == 0) return;
  with_scalar_type(kOp, a.norm.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    constexpr int kVec = kVecWidth<scalar_t>;
    bool vectorized = a.norm.n_cols % kVec == 0;
    for (const void* p : {a.x, a.bias, a.residual, a.norm.x, a.norm.weight, a.norm.bias, static_cast<const void*>(a.norm.y)})
      vectorized = vectorized && is_aligned(p, kVecBytes);
    if (vectorized)
      forward<scalar_t, kVec>(kOp, a, stream);
    else
      forward<scalar_t, 1>(kOp, a, stream);
  });
  check_launch(kOp);
}

void residual_layer_norm_backward(const ResidualLayerNormBackward& a, cudaStream_t stream) {
  constexpr const char* kOp = "residual_layer_norm_backward";
  const int64_t n_rows = a.norm.n_rows, n_cols = a.norm.n_cols, n_partials = a.norm.n_partials;
  if (n_cols == 0) return;
  const bool grad_norm_params = a.norm.grad_weight != nullptr || a.norm.grad_bias != nullptr;
  float* bias_partials = a.norm.partials == nullptr ? nullptr : a.norm.partials + 2 * n_partials * n_cols;
  with_scalar_type(kOp, a.norm.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    constexpr int kVec = kVecWidth<scalar_t>;
    if (n_rows > 0) {
      bool vectorized = n_cols % kVec == 0;
      for (const void* p : {a.grad_sum, a.norm.grad_y, a.norm.x, a.norm.weight, static_cast<const void*>(a.norm.grad_x),
                            static_cast<const void*>(a.grad_x)})
        vectorized = vectorized && is_aligned(p, kVecBytes);
      if (vectorized)
        backward<scalar_t, kVec>(kOp, a, stream);
      else
        backward<scalar_t, 1>(kOp, a, stream);
      check_launch(kOp);
    }
    if (grad_norm_params)
      finish_column_sums<scalar_t>(kOp, a.norm.partials, n_partials, n_cols, a.norm.grad_weight, a.norm.grad_bias, stream);
    if (a.grad_bias != nullptr && n_cols <= kMaxTeamColumns)
      finish_column_sums<scalar_t>(kOp, bias_partials, n_partials, n_cols, a.grad_bias, nullptr, stream);
  });
  if (a.grad_bias != nullptr && n_cols > kMaxTeamColumns) {
    BiasDropoutResidualBackward sum{};
    sum.grad_y = a.grad_x != nullptr ? a.grad_x : a.norm.grad_x;
    sum.grad_bias = a.grad_bias, sum.partials = bias_partials, sum.n_partials = n_partials;
    sum.n_rows = n_rows, sum.n_cols = n_cols, sum.dtype = a.norm.dtype;
    bias_dropout_residual_backward(sum, stream);
  }
}

}  // namespace ls::cuda
