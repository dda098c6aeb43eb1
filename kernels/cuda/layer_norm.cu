// Layer norm over the last dimension, forward and backward.
//
//   x, y, grad_y, grad_x (N, C), weight, bias (C,) in fp32, fp16 or bf16; mean, rstd (N,) fp32; computed in fp32.
//   forward   y = (x - mean) * rstd * weight + bias        rstd = 1 / sqrt(var + eps), biased variance; saves mean, rstd
//   backward  grad_x = rstd * (g - sum(g) / C - xhat * sum(g * xhat) / C)      g = grad_y * weight, xhat = (x - mean) * rstd
//             grad_weight = sum over rows of grad_y * xhat, grad_bias = sum over rows of grad_y        (column_sum.cuh)
// All outputs are overwritten (=). Both sums of the backward travel in one reduction.
//
// Rows of up to kMaxTeamColumns: a team of lanes, mostly a warp, owns a row and keeps it in registers; x, and in the
// backward grad_y, are read once, and there is no barrier. The row being in registers, the variance is the exact two-pass
// one: a second reduction by shuffles, no second read. In the backward each lane keeps the gamma and beta sums of its columns
// over all the rows of its block's chunk, so that stage 1 of the column sums costs no traffic but its partials.
// Longer rows: a block owns a row and makes one pass for the statistics (Welford) or the two sums, then reads the row again,
// by now in L1 or L2 (a row of 8,192 columns in 16 bits is 16 KB); the column sums are a kernel of their own.
// Papers: Ba et al., Layer normalization (2016); Wang et al., LightSeq2 (SC'22), for the single reduction of the backward.

#include "cuda/column_sum.cuh"

namespace ls::cuda {
namespace {

// The shapes of a row in registers: kLanes lanes hold kPerLane elements each. Lane l's k-th access covers the columns from
// (k * kLanes + l) * kWidth on.
template <int kLanes_, int kPerLane_>
struct RowShape {
  static constexpr int kLanes = kLanes_, kPerLane = kPerLane_, kColumns = kLanes * kPerLane;
  // Forward: four warps, so that small batches still spread over the multiprocessors.
  static constexpr int kForwardThreads = 128;
  // Backward: a multiprocessor may hold one block only (there are at most 256 chunks), which must keep enough bytes in
  // flight: 16 warps while a thread fits in 128 registers, 8 warps of up to 255 beyond. Single elements of 16 bits take a
  // whole register each.
  static constexpr int backward_threads(int width) { return kPerLane <= (width == 1 ? 8 : 16) ? 512 : 256; }
};
// Rows stay packed as they were read, which in 16 bits halves their registers, and are converted at each use.
constexpr int kMaxTeamColumns = 1024;  // 32 elements of x, grad_y, weight and both sums are some 200 registers of 255

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

// Rows beyond kMaxTeamColumns: a row of 2,048 columns in 16 bits is one vector for each of 256 threads, and eight such blocks
// share a multiprocessor.
constexpr int kLongRowThreads = 256;

template <int kWidth, typename scalar_t>
__device__ __forceinline__ void load_or(const scalar_t* p, int64_t offset, float absent, float (&out)[kWidth]) {
  if (p != nullptr) {
    load_floats<kWidth>(p + offset, out);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = absent;
  }
}

// y for the columns from col on, x being theirs.
template <typename scalar_t, int kWidth>
__device__ __forceinline__ void normalize(const LayerNormForward& a, int64_t row, int64_t col, const Vec<scalar_t, kWidth>& x,
                                          float mean, float rstd) {
  float weight[kWidth], bias[kWidth], y[kWidth];
  load_or<kWidth>(static_cast<const scalar_t*>(a.weight), col, 1.0f, weight);
  load_or<kWidth>(static_cast<const scalar_t*>(a.bias), col, 0.0f, bias);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) y[j] = (static_cast<float>(x.elem[j]) - mean) * rstd * weight[j] + bias[j];
  store_floats<kWidth>(static_cast<scalar_t*>(a.y) + row * a.n_cols + col, y);
}

template <typename scalar_t, int kWidth, typename Shape>
__global__ void __launch_bounds__(Shape::kForwardThreads) layer_norm_forward_kernel(const LayerNormForward a) {
  constexpr int kLanes = Shape::kLanes, kAccesses = Shape::kPerLane / kWidth;
  using V = Vec<scalar_t, kWidth>;
  const int lane = threadIdx.x % kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (Shape::kForwardThreads / kLanes) + threadIdx.x / kLanes;
  const bool valid = row < a.n_rows;  // a team without a row still takes part in its warp's shuffles
  const auto* x_row = static_cast<const scalar_t*>(a.x) + row * a.n_cols;

  V x[kAccesses];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kAccesses; ++k) {
    const int col = (k * kLanes + lane) * kWidth;
    x[k] = valid && col < a.n_cols ? load_vec<kWidth>(x_row + col) : zero_vec<scalar_t, kWidth>();
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += static_cast<float>(x[k].elem[j]);
  }
  const float mean = team_sum<kLanes>(sum) / a.n_cols;

  float m2 = 0.0f;
#pragma unroll
  for (int k = 0; k < kAccesses; ++k) {
    if ((k * kLanes + lane) * kWidth < a.n_cols) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float deviation = static_cast<float>(x[k].elem[j]) - mean;
        m2 += deviation * deviation;
      }
    }
  }
  const float rstd = rsqrtf(team_sum<kLanes>(m2) / a.n_cols + a.eps);

  if (!valid) return;
  if (lane == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
#pragma unroll
  for (int k = 0; k < kAccesses; ++k) {
    const int col = (k * kLanes + lane) * kWidth;
    if (col < a.n_cols) normalize(a, row, col, x[k], mean, rstd);
  }
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kLongRowThreads) layer_norm_forward_long_kernel(const LayerNormForward a) {
  LS_SHARED(Welford, shared, kMaxWarps);
  const int64_t row = blockIdx.x;
  const auto* x_row = static_cast<const scalar_t*>(a.x) + row * a.n_cols;

  Welford stats = {0.0f, 0.0f, 0.0f};
  for (int64_t col = threadIdx.x * kWidth; col < a.n_cols; col += kLongRowThreads * kWidth) {
    float x[kWidth];
    load_floats<kWidth>(x_row + col, x);
    stats = Welford::merge(stats, Welford::of(x));  // one division per vector
  }
  stats = block_reduce(stats, shared);
  const float rstd = rsqrtf(stats.m2 / a.n_cols + a.eps);

  if (threadIdx.x == 0) {
    a.mean[row] = stats.mean;
    a.rstd[row] = rstd;
  }
  for (int64_t col = threadIdx.x * kWidth; col < a.n_cols; col += kLongRowThreads * kWidth) {
    normalize(a, row, col, load_vec<kWidth>(x_row + col), stats.mean, rstd);
  }
}

// Block b owns the rows of chunk b, its teams every kTeams-th of them. Lanes without a column hold zeros for x, grad_y and
// weight, which add nothing to any sum.
template <typename scalar_t, int kWidth, typename Shape, bool kGradParams>
__global__ void __launch_bounds__(Shape::backward_threads(kWidth))
    layer_norm_backward_kernel(const LayerNormBackward a, int64_t rows_per_chunk) {
  constexpr int kLanes = Shape::kLanes, kPerLane = Shape::kPerLane, kAccesses = kPerLane / kWidth;
  constexpr int kTeams = Shape::backward_threads(kWidth) / kLanes;
  using V = Vec<scalar_t, kWidth>;
  const int lane = threadIdx.x % kLanes, team = threadIdx.x / kLanes;
  const auto* all_x = static_cast<const scalar_t*>(a.x);
  const auto* all_grad_y = static_cast<const scalar_t*>(a.grad_y);
  const auto* all_weight = static_cast<const scalar_t*>(a.weight);
  const float per_col = 1.0f / a.n_cols;

  V weight[kAccesses];
#pragma unroll
  for (int k = 0; k < kAccesses; ++k) {
    const int col = (k * kLanes + lane) * kWidth;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight[k].elem[j] = static_cast<scalar_t>(col < a.n_cols ? 1.0f : 0.0f);
    if (all_weight != nullptr && col < a.n_cols) weight[k] = load_vec<kWidth>(all_weight + col);
  }

  float sum_weight[kGradParams ? kPerLane : 1] = {}, sum_bias[kGradParams ? kPerLane : 1] = {};
  const int64_t row_begin = blockIdx.x * rows_per_chunk;
  const int64_t row_end = row_begin + rows_per_chunk < a.n_rows ? row_begin + rows_per_chunk : a.n_rows;
  for (int64_t first = row_begin; first < row_end; first += kTeams) {  // uniform: all lanes meet at the shuffles
    const int64_t row = first + team;
    const bool valid = row < row_end;
    const float mean = valid ? a.mean[row] : 0.0f, rstd = valid ? a.rstd[row] : 0.0f;

    V x[kAccesses], grad_y[kAccesses];
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int col = (k * kLanes + lane) * kWidth;
      const bool present = valid && col < a.n_cols;
      x[k] = present ? load_vec<kWidth>(all_x + row * a.n_cols + col) : zero_vec<scalar_t, kWidth>();
      grad_y[k] = present ? load_vec<kWidth>(all_grad_y + row * a.n_cols + col) : zero_vec<scalar_t, kWidth>();
    }

    float sum_g = 0.0f, sum_g_xhat = 0.0f;
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float xhat = (static_cast<float>(x[k].elem[j]) - mean) * rstd;
        const float dy = static_cast<float>(grad_y[k].elem[j]);
        const float g = dy * static_cast<float>(weight[k].elem[j]);
        sum_g += g;
        sum_g_xhat += g * xhat;
        if constexpr (kGradParams) {
          sum_weight[k * kWidth + j] += dy * xhat;
          sum_bias[k * kWidth + j] += dy;
        }
      }
    }
    const float mean_g = team_sum<kLanes>(sum_g) * per_col;
    const float mean_g_xhat = team_sum<kLanes>(sum_g_xhat) * per_col;

#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int col = (k * kLanes + lane) * kWidth;
      float grad_x[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float xhat = (static_cast<float>(x[k].elem[j]) - mean) * rstd;
        const float g = static_cast<float>(grad_y[k].elem[j]) * static_cast<float>(weight[k].elem[j]);
        grad_x[j] = rstd * (g - mean_g - xhat * mean_g_xhat);
      }
      if (valid && col < a.n_cols) store_floats<kWidth>(static_cast<scalar_t*>(a.grad_x) + row * a.n_cols + col, grad_x);
    }
  }

  if constexpr (kGradParams) {
    constexpr int kPitch = skewed(Shape::kColumns);
    LS_SHARED(float, shared, kTeams* kPitch);  // at most 33 KB
    const auto store_partials = [&](const float* sum, float* out) {
#pragma unroll
      for (int k = 0; k < kPerLane; k += kWidth)
#pragma unroll
        for (int j = 0; j < kWidth; ++j) shared[team * kPitch + skewed(k * kLanes + lane * kWidth + j)] = sum[k + j];
      __syncthreads();
      sum_over_teams(shared, kTeams, kPitch, a.n_cols, out);
    };
    store_partials(sum_weight, a.partials + blockIdx.x * a.n_cols);
    __syncthreads();
    store_partials(sum_bias, a.partials + (a.n_partials + blockIdx.x) * a.n_cols);
  }
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kLongRowThreads) layer_norm_backward_long_kernel(const LayerNormBackward a) {
  LS_SHARED(SumPair, shared, kMaxWarps);
  const int64_t row = blockIdx.x;
  const auto* x = static_cast<const scalar_t*>(a.x) + row * a.n_cols;
  const auto* grad_y = static_cast<const scalar_t*>(a.grad_y) + row * a.n_cols;
  const auto* weight = static_cast<const scalar_t*>(a.weight);
  const float mean = a.mean[row], rstd = a.rstd[row], per_col = 1.0f / a.n_cols;

  float xhat[kWidth], g[kWidth];
  const auto load = [&](int64_t col) {
    float w[kWidth];
    load_floats<kWidth>(x + col, xhat);
    load_floats<kWidth>(grad_y + col, g);
    load_or<kWidth>(weight, col, 1.0f, w);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      xhat[j] = (xhat[j] - mean) * rstd;
      g[j] *= w[j];
    }
  };
  SumPair sums = {0.0f, 0.0f};  // of g and of g * xhat
  for (int64_t col = threadIdx.x * kWidth; col < a.n_cols; col += kLongRowThreads * kWidth) {
    load(col);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums = {sums.first + g[j], sums.second + g[j] * xhat[j]};
  }
  sums = block_reduce(sums, shared);
  for (int64_t col = threadIdx.x * kWidth; col < a.n_cols; col += kLongRowThreads * kWidth) {
    load(col);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) g[j] = rstd * (g[j] - sums.first * per_col - xhat[j] * (sums.second * per_col));
    store_floats<kWidth>(static_cast<scalar_t*>(a.grad_x) + row * a.n_cols + col, g);
  }
}

// Stage 1 of the column sums for long rows: a Tile's block per chunk of rows and 256 (or more) columns.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kTileThreads)
    layer_norm_grad_params_kernel(const LayerNormBackward a, unsigned n_col_blocks, int64_t rows_per_chunk) {
  LS_SHARED(float, shared, kTileSharedFloats);
  const int64_t chunk = blockIdx.x / n_col_blocks;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x % n_col_blocks) * blockDim.x * kTileColumns;
  const int64_t col = tile_col + threadIdx.x * kTileColumns, n_valid = a.n_cols - col;
  const int64_t chunk_end = (chunk + 1) * rows_per_chunk;
  const int64_t row_end = n_valid <= 0 ? 0 : chunk_end < a.n_rows ? chunk_end : a.n_rows;

  float sum_weight[kTileColumns] = {}, sum_bias[kTileColumns] = {};
  for (int64_t row = chunk * rows_per_chunk + threadIdx.y; row < row_end; row += blockDim.y) {
    const int64_t offset = row * a.n_cols + col;
    const float mean = a.mean[row], rstd = a.rstd[row];
    float x[kTileColumns], dy[kTileColumns];
    load_group<kWidth>(static_cast<const scalar_t*>(a.x) + offset, n_valid, x);
    load_group<kWidth>(static_cast<const scalar_t*>(a.grad_y) + offset, n_valid, dy);
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) {
      sum_weight[i] += dy[i] * ((x[i] - mean) * rstd);
      sum_bias[i] += dy[i];
    }
  }
  float* out = a.partials + chunk * a.n_cols + tile_col;
  sum_tile_columns(sum_weight, shared, a.n_cols - tile_col, out);
  __syncthreads();
  sum_tile_columns(sum_bias, shared, a.n_cols - tile_col, out + a.n_partials * a.n_cols);
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
    if (!grad_params) return;
    check_launch(op);
    const Tile tile(a.n_rows, a.n_cols);
    LS_LAUNCH((layer_norm_grad_params_kernel<scalar_t, kWidth>), grid_of(op, a.n_partials * tile.n_col_blocks), tile.block, 0,
              stream, a, static_cast<unsigned>(tile.n_col_blocks), rows_per_partial);
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
