// Rows of layer norm and of its backward in registers or in a block, for the kernels that contain it (layer_norm,
// residual_layer_norm). Formulas: common/params.h; which thread owns what: the head of layer_norm.cu.
#pragma once

#include "cuda/column_sum.cuh"

namespace ls::cuda {

// The shapes of a row in registers: kLanes lanes hold kPerLane elements each, in runs of kRun consecutive columns. Lane l's
// r-th run starts at column (r * kLanes + l) * kRun. kRun 0 stands for one access, the widest that the kernel makes.
template <int kLanes_, int kPerLane_, int kRun_ = 0>
struct RowShape {
  static constexpr int kLanes = kLanes_, kPerLane = kPerLane_, kColumns = kLanes * kPerLane;
  static constexpr int run(int width) { return kRun_ == 0 ? width : kRun_; }
  // Forward: four warps, so that small batches still spread over the multiprocessors.
  static constexpr int kForwardThreads = 128;
  // Backward: a multiprocessor may hold one block only (there are at most 256 chunks), which must keep enough bytes in
  // flight: 16 warps while a thread fits in 128 registers, 8 warps of up to 255 beyond. Single elements of 16 bits take a
  // whole register each.
  static constexpr int backward_threads(int width) { return kPerLane <= (width == 1 ? 8 : 16) ? 512 : 256; }
};
// Rows stay packed as they were read, which in 16 bits halves their registers, and are converted at each use.
constexpr int kMaxTeamColumns = 1024;  // 32 elements of x, grad_y, weight and both sums are some 200 registers of 255

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

// The forward of the rows of a block of Shape::kForwardThreads threads, a team of lanes to a row. load_run(row, col, x) fills
// x, the accesses of one run, with the row to be normalised from column col on; zeros beyond the last column.
template <typename scalar_t, int kWidth, typename Shape, typename LoadRun>
__device__ __forceinline__ void normalize_rows_in_registers(const LayerNormForward& a, LoadRun load_run) {
  constexpr int kLanes = Shape::kLanes, kRun = Shape::run(kWidth), kRuns = Shape::kPerLane / kRun, kAccesses = kRun / kWidth;
  const int lane = threadIdx.x % kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (Shape::kForwardThreads / kLanes) + threadIdx.x / kLanes;
  const bool valid = row < a.n_rows;  // a team without a row still takes part in its warp's shuffles

  Vec<scalar_t, kWidth> x[kRuns][kAccesses];
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int col = (r * kLanes + lane) * kRun;
    if (valid && col < a.n_cols) {
      load_run(row, col, x[r]);
    } else {
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) x[r][k] = zero_vec<scalar_t, kWidth>();
    }
#pragma unroll
    for (int k = 0; k < kAccesses; ++k)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += static_cast<float>(x[r][k].elem[j]);
  }
  // Deviations from `from`, summed as they are or squared.
  const auto sum_of_deviations = [&](float from, bool squared) {
    float sum_of = 0.0f;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) {
        if ((r * kLanes + lane) * kRun + k * kWidth < a.n_cols) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const float deviation = static_cast<float>(x[r][k].elem[j]) - from;
            sum_of += squared ? deviation * deviation : deviation;
          }
        }
      }
    }
    return team_sum<kLanes>(sum_of);
  };
  // Where the mean is large against the deviation, the sum has rounded off a step or two of it, which the deviations still know; and the
  // mean is rounded to fp32 whatever is done, so the squares around it are taken back to the true one.
  const float per_col = 1.0f / static_cast<float>(static_cast<int>(a.n_cols));
  const float first_mean = team_sum<kLanes>(sum) * per_col;
  const float shift = sum_of_deviations(first_mean, false) * per_col;
  const float mean = first_mean + shift;
  const float rest = (first_mean - mean) + shift;
  const float rstd = rsqrtf(fmaxf(sum_of_deviations(mean, true) * per_col - rest * rest, 0.0f) + a.eps);

  if (!valid) return;
  if (lane == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int col = (r * kLanes + lane) * kRun + k * kWidth;
      if (col < a.n_cols) normalize(a, row, col, x[r][k], mean, rstd);
    }
  }
}

// The forward of a row by a block of kLongRowThreads. load_run(col, x) as above, for runs of kRun columns; it is called once per run. The
// normalisation reads them from a.x, each element by the thread that loaded it. Welford's statistics are those of x less a pivot, the mean
// of the first run of each thread: a mean that is large against the deviation would be rounded at each step.
template <typename scalar_t, int kWidth, int kRun, typename LoadRun>
__device__ __forceinline__ void normalize_long_row(const LayerNormForward& a, int64_t row, LoadRun load_run) {
  LS_SHARED(SumPair, shared_sums, kMaxWarps);
  LS_SHARED(Welford, shared_stats, kMaxWarps);
  constexpr int kAccesses = kRun / kWidth;
  Vec<scalar_t, kWidth> x[kAccesses];
  const auto for_each_access = [&](int64_t col, auto body) {  // of the loaded run
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      if (col + k * kWidth < a.n_cols) {
        float values[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j] = static_cast<float>(x[k].elem[j]);
        body(values);
      }
    }
  };

  int64_t col = threadIdx.x * kRun;
  SumPair first_runs = {0.0f, 0.0f};  // sum, count
  if (col < a.n_cols) {
    load_run(col, x);
    for_each_access(col, [&](const float (&values)[kWidth]) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) first_runs.first += values[j];
      first_runs.second += kWidth;
    });
  }
  first_runs = block_reduce(first_runs, shared_sums);
  const float pivot = first_runs.first / first_runs.second;

  Welford stats = {0.0f, 0.0f, 0.0f};
  while (col < a.n_cols) {
    for_each_access(col, [&](float (&values)[kWidth]) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] -= pivot;
      stats = Welford::merge(stats, Welford::of(values));  // one division per vector
    });
    col += kLongRowThreads * kRun;
    if (col < a.n_cols) load_run(col, x);
  }
  stats = block_reduce(stats, shared_stats);
  const float mean = pivot + stats.mean, rstd = rsqrtf(stats.m2 / a.n_cols + a.eps);

  if (threadIdx.x == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
  const auto* x_row = static_cast<const scalar_t*>(a.x) + row * a.n_cols;
  for (int64_t first = threadIdx.x * kRun; first < a.n_cols; first += kLongRowThreads * kRun) {
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int64_t col = first + k * kWidth;
      if (col < a.n_cols) normalize(a, row, col, load_vec<kWidth>(x_row + col), mean, rstd);
    }
  }
}

// What turns grad_y into the gradient of a row's x, one multiply-add after the product with the weight:
//   grad_x = rstd g - rstd (mean(g) + xhat mean(g xhat)) = rstd g + (alpha (x - mean) + beta),   g = grad_y weight
//   alpha = -rstd^2 mean(g xhat),  beta = -rstd mean(g)
// x stays centred: folding the mean into beta as well would lose its digits.
struct RowGradient {
  float mean, rstd, alpha, beta;

  __device__ __forceinline__ RowGradient(float mean_, float rstd_, float mean_g, float mean_g_xhat)
      : mean(mean_), rstd(rstd_), alpha(-rstd_ * rstd_ * mean_g_xhat), beta(-rstd_ * mean_g) {}
  __device__ __forceinline__ float operator()(float g, float x) const { return rstd * g + (alpha * (x - mean) + beta); }
};

// The backward of the rows [row_begin, row_end) by a block of Shape::backward_threads(kWidth) threads, its teams taking every
// kTeams-th row. store_run(r, row, col, n_valid, grad) gets the norm's gradient of x for the r-th run of a lane, the columns from col on.
// Adds to the lane's gamma and beta sums when kGradParams. Lanes without a column hold zeros for x, grad_y and weight, which add
// nothing to any sum. The weight stays in registers when kKeepWeight, else it is read again, from L1, for each row.
template <typename scalar_t, int kWidth, typename Shape, bool kGradParams, bool kKeepWeight, typename StoreRun>
__device__ __forceinline__ void row_gradients_in_registers(const LayerNormBackward& a, int64_t row_begin, int64_t row_end,
                                                           float* sum_weight, float* sum_bias, StoreRun store_run) {
  constexpr int kLanes = Shape::kLanes, kRun = Shape::run(kWidth), kRuns = Shape::kPerLane / kRun, kAccesses = kRun / kWidth;
  constexpr int kTeams = Shape::backward_threads(kWidth) / kLanes;
  using V = Vec<scalar_t, kWidth>;
  const int lane = threadIdx.x % kLanes, team = threadIdx.x / kLanes;
  const auto* all_x = static_cast<const scalar_t*>(a.x);
  const auto* all_grad_y = static_cast<const scalar_t*>(a.grad_y);
  const auto* all_weight = static_cast<const scalar_t*>(a.weight);
  const float per_col = 1.0f / a.n_cols;
  const auto column = [&](int r, int k) { return (r * kLanes + lane) * kRun + k * kWidth; };
  const auto load_weight = [&](int col) {
    V weight;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight.elem[j] = static_cast<scalar_t>(col < a.n_cols ? 1.0f : 0.0f);
    if (all_weight != nullptr && col < a.n_cols) weight = load_vec<kWidth>(all_weight + col);
    return weight;
  };

  V kept_weight[kKeepWeight ? kRuns : 1][kAccesses];
  if constexpr (kKeepWeight) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) kept_weight[r][k] = load_weight(column(r, k));
  }
  const auto weight_of = [&](int r, int k) {
    if constexpr (kKeepWeight)
      return kept_weight[r][k];
    else
      return load_weight(column(r, k));
  };

  for (int64_t first = row_begin; first < row_end; first += kTeams) {  // uniform: all lanes meet at the shuffles
    const int64_t row = first + team;
    const bool valid = row < row_end;
    const float mean = valid ? a.mean[row] : 0.0f, rstd = valid ? a.rstd[row] : 0.0f;

    V x[kRuns][kAccesses], grad_y[kRuns][kAccesses];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) {
        const int col = column(r, k);
        const bool present = valid && col < a.n_cols;
        x[r][k] = present ? load_vec<kWidth>(all_x + row * a.n_cols + col) : zero_vec<scalar_t, kWidth>();
        grad_y[r][k] = present ? load_vec<kWidth>(all_grad_y + row * a.n_cols + col) : zero_vec<scalar_t, kWidth>();
      }
    }

    float sum_g = 0.0f, sum_g_xhat = 0.0f;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) {
        const V weight = weight_of(r, k);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float xhat = (static_cast<float>(x[r][k].elem[j]) - mean) * rstd;
          const float dy = static_cast<float>(grad_y[r][k].elem[j]);
          const float g = dy * static_cast<float>(weight.elem[j]);
          sum_g += g;
          sum_g_xhat += g * xhat;
          if constexpr (kGradParams) {
            sum_weight[r * kRun + k * kWidth + j] += dy * xhat;
            sum_bias[r * kRun + k * kWidth + j] += dy;
          }
        }
      }
    }
    const float mean_g = team_sum<kLanes>(sum_g) * per_col, mean_g_xhat = team_sum<kLanes>(sum_g_xhat) * per_col;
    const RowGradient gradient(mean, rstd, mean_g, mean_g_xhat);

#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      float grad[kRun];
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) {
        const V weight = weight_of(r, k);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float g = static_cast<float>(grad_y[r][k].elem[j]) * static_cast<float>(weight.elem[j]);
          grad[k * kWidth + j] = gradient(g, static_cast<float>(x[r][k].elem[j]));
        }
      }
      const int col = column(r, 0);
      if (valid && col < a.n_cols) store_run(r, row, col, a.n_cols - col, grad);
    }
  }
}

// Writes one row of partials, the sums over the teams of each lane's sums of its columns. All threads of the block call it; a
// second call on the same `shared` needs a barrier before.
template <int kWidth, typename Shape>
constexpr int kTeamSharedFloats = Shape::backward_threads(kWidth) / Shape::kLanes * skewed(Shape::kColumns);  // at most 33 KB
template <int kWidth, typename Shape>
__device__ __forceinline__ void store_team_sums(const float (&sum)[Shape::kPerLane], float* shared, int64_t n_cols,
                                                float* out) {
  constexpr int kLanes = Shape::kLanes, kRun = Shape::run(kWidth), kPitch = skewed(Shape::kColumns);
  const int lane = threadIdx.x % kLanes, team = threadIdx.x / kLanes;
#pragma unroll
  for (int i = 0; i < Shape::kPerLane; i += kRun)
#pragma unroll
    for (int j = 0; j < kRun; ++j) shared[team * kPitch + skewed(i * kLanes + lane * kRun + j)] = sum[i + j];
  __syncthreads();
  sum_over_teams(shared, Shape::backward_threads(kWidth) / kLanes, kPitch, n_cols, out);
}

// The backward of a row by a block of kLongRowThreads: store_run(col, n_valid, grad) gets the norm's gradient of x for the kRun columns from
// col on. grad_y and x are read twice, the second time from a cache.
template <typename scalar_t, int kWidth, int kRun, typename StoreRun>
__device__ __forceinline__ void long_row_gradient(const LayerNormBackward& a, int64_t row, StoreRun store_run) {
  LS_SHARED(SumPair, shared, kMaxWarps);
  const auto* x_row = static_cast<const scalar_t*>(a.x) + row * a.n_cols;
  const auto* grad_y_row = static_cast<const scalar_t*>(a.grad_y) + row * a.n_cols;
  const auto* weight = static_cast<const scalar_t*>(a.weight);
  const float mean = a.mean[row], rstd = a.rstd[row], per_col = 1.0f / a.n_cols;

  float x[kWidth], g[kWidth];
  const auto load = [&](int64_t col) {
    float w[kWidth];
    load_floats<kWidth>(x_row + col, x);
    load_floats<kWidth>(grad_y_row + col, g);
    load_or<kWidth>(weight, col, 1.0f, w);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) g[j] *= w[j];
  };
  SumPair sums = {0.0f, 0.0f};  // of g and of g * xhat
  for (int64_t col = threadIdx.x * kWidth; col < a.n_cols; col += kLongRowThreads * kWidth) {
    load(col);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums = {sums.first + g[j], sums.second + g[j] * ((x[j] - mean) * rstd)};
  }
  sums = block_reduce(sums, shared);
  const RowGradient gradient(mean, rstd, sums.first * per_col, sums.second * per_col);
  for (int64_t col = threadIdx.x * kRun; col < a.n_cols; col += kLongRowThreads * kRun) {
    float grad[kRun] = {};
#pragma unroll
    for (int k = 0; k < kRun; k += kWidth) {
      if (col + k < a.n_cols) {
        load(col + k);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) grad[k + j] = gradient(g[j], x[j]);
      }
    }
    store_run(col, a.n_cols - col, grad);
  }
}

// Stage 1 of the gamma and beta sums for long rows: a Tile's block per chunk of rows and 256 (or more) columns.
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
void layer_norm_grad_params(const char* op, const LayerNormBackward& a, cudaStream_t stream) {
  const Tile tile(a.n_rows, a.n_cols);
  LS_LAUNCH((layer_norm_grad_params_kernel<scalar_t, kWidth>), grid_of(op, a.n_partials * tile.n_col_blocks), tile.block, 0,
            stream, a, static_cast<unsigned>(tile.n_col_blocks), column_sum_rows_per_partial(a.n_rows));
  check_launch(op);
}

}  // namespace ls::cuda
