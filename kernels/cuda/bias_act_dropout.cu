// y = dropout(act(x + bias)), and its backward.
//
//   x, y (N, F), bias (F,) in fp32, fp16 or bf16, computed in fp32 and rounded once; bias may be absent
//   forward  y      = keep * scale * act(x + bias)                    keep from Philox, see common/philox.h
//   backward grad_x = keep * scale * grad_y * act'(x + bias)          the same draws again; relu and tanh read y in place of x,
//            grad_bias = sum over rows of grad_x, before rounding     and relu draws nothing (common/params.h); two stages, column_sum.cuh
// All outputs are overwritten (=).
//
// A thread owns eight consecutive columns, which is one draw of Philox and one 16-byte vector in 16 bits (two in fp32), and
// walks over the rows of its block's tile with its part of the bias in registers.
// Papers: Hendrycks & Gimpel, Gaussian Error Linear Units (2016); Wang et al., LightSeq2 (SC'22).

#include "cuda/column_sum.cuh"
#include "cuda/dropout.cuh"

namespace ls::cuda {
namespace {

static_assert(kTileColumns == kDropoutGroup, "a thread's columns are one draw of dropout");

constexpr float kInverseSqrt2 = 0.7071067812f, kInverseSqrt2Pi = 0.3989422804f;
constexpr float kSqrt2OverPi = 0.7978845608f,
                kCubic = 0.044715f;  // gelu_accurate: v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))) / 2

// Beyond +-kTail gelu and gelu_accurate are 0 or v, and their derivatives 0 or 1, to the last bit. Their formulas are taken no further out,
// where infinity times 0 would be NaN.
constexpr float kTail = 20.0f;
__device__ __forceinline__ float at_least_tail(float v) { return v < -kTail ? -kTail : v; }
__device__ __forceinline__ float between_tails(float v) { return v > kTail ? kTail : at_least_tail(v); }

// Comparisons are put so that NaN stays NaN.
template <Activation kActivation>
__device__ __forceinline__ float activate(float v) {
  if constexpr (kActivation == Activation::kRelu) return v < 0.0f ? 0.0f : v;
  if constexpr (kActivation == Activation::kReluSquared) return v < 0.0f ? 0.0f : v * v;
  if constexpr (kActivation == Activation::kTanh) return tanhf(v);
  if constexpr (kActivation == Activation::kGelu) return at_least_tail(v) * 0.5f * (1.0f + erff(v * kInverseSqrt2));
  if constexpr (kActivation == Activation::kGeluAccurate)
    return 0.5f * at_least_tail(v) * (1.0f + tanhf(kSqrt2OverPi * (v + kCubic * v * v * v)));
}

// act'(v), for the activations that save their input.
template <Activation kActivation>
__device__ __forceinline__ float derivative(float v) {
  static_assert(!saves_output(kActivation), "its backward starts from y");
  if constexpr (kActivation == Activation::kReluSquared) return v < 0.0f ? 0.0f : 2.0f * v;
  if constexpr (kActivation == Activation::kGelu) {
    v = between_tails(v);
    return 0.5f * (1.0f + erff(v * kInverseSqrt2)) + v * kInverseSqrt2Pi * expf(-0.5f * v * v);
  }
  if constexpr (kActivation == Activation::kGeluAccurate) {
    v = between_tails(v);
    const float t = tanhf(kSqrt2OverPi * (v + kCubic * v * v * v));
    return 0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * kSqrt2OverPi * (1.0f + 3.0f * kCubic * v * v);
  }
}

template <typename scalar_t, int kWidth, Activation kActivation>
__global__ void __launch_bounds__(kTileThreads)
    bias_act_dropout_forward_kernel(const BiasActDropoutForward a, unsigned n_col_blocks, int64_t rows_per_chunk) {
  const auto* x = static_cast<const scalar_t*>(a.x);
  auto* y = static_cast<scalar_t*>(a.y);
  const TilePosition at(a.n_rows, a.n_cols, n_col_blocks, rows_per_chunk);
  const int64_t groups_per_row = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);

  float bias[kTileColumns] = {};
  if (a.bias != nullptr) load_group<kWidth>(static_cast<const scalar_t*>(a.bias) + at.col, at.n_valid, bias);
  for (int64_t row = at.row_begin; row < at.row_end; row += blockDim.y) {
    const int64_t offset = row * a.n_cols + at.col;
    float v[kTileColumns];
    load_group<kWidth>(x + offset, at.n_valid, v);
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) v[i] = activate<kActivation>(v[i] + bias[i]);
    if (a.dropout.threshold != 0) apply_dropout(a.dropout, seed, row * groups_per_row + at.col / kDropoutGroup, v);
    store_group<kWidth>(y + offset, at.n_valid, v);
  }
}

// Where grad_bias is wanted, a chunk is the rows of one partial, else any number of rows.
template <typename scalar_t, int kWidth, Activation kActivation>
__global__ void __launch_bounds__(kTileThreads)
    bias_act_dropout_backward_kernel(const BiasActDropoutBackward a, unsigned n_col_blocks, int64_t rows_per_chunk) {
  const auto* grad_y = static_cast<const scalar_t*>(a.grad_y);
  const auto* saved = static_cast<const scalar_t*>(a.saved);
  auto* grad_x = static_cast<scalar_t*>(a.grad_x);
  const TilePosition at(a.n_rows, a.n_cols, n_col_blocks, rows_per_chunk);
  const int64_t groups_per_row = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);
  const float inverse_scale = 1.0f - static_cast<float>(a.dropout.threshold) / 65536.0f;  // exact

  float bias[kTileColumns] = {}, sum[kTileColumns] = {};
  if (!saves_output(kActivation) && a.bias != nullptr)
    load_group<kWidth>(static_cast<const scalar_t*>(a.bias) + at.col, at.n_valid, bias);
  for (int64_t row = at.row_begin; row < at.row_end; row += blockDim.y) {
    const int64_t offset = row * a.n_cols + at.col;
    float g[kTileColumns], v[kTileColumns];
    load_group<kWidth>(grad_y + offset, at.n_valid, g);
    load_group<kWidth>(saved + offset, at.n_valid, v);
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) {
      if constexpr (kActivation == Activation::kRelu) {
        g[i] = v[i] != 0.0f ? g[i] * a.dropout.scale : 0.0f;
      } else if constexpr (kActivation == Activation::kTanh) {
        const float t = v[i] * inverse_scale;
        g[i] *= 1.0f - t * t;
      } else {
        g[i] *= derivative<kActivation>(v[i] + bias[i]);
      }
    }
    if (kActivation != Activation::kRelu && a.dropout.threshold != 0)
      apply_dropout(a.dropout, seed, row * groups_per_row + at.col / kDropoutGroup, g);
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) sum[i] += g[i];
    store_group<kWidth>(grad_x + offset, at.n_valid, g);
  }
  if (a.partials != nullptr) {
    LS_SHARED(float, shared, kTileSharedFloats);
    const int64_t tile_col = at.col - threadIdx.x * kTileColumns;
    sum_tile_columns(sum, shared, a.n_cols - tile_col, a.partials + at.chunk * a.n_cols + tile_col);
  }
}

// Calls body(Type<scalar_t>{}, activation, width), the last two integral constants.
template <typename Body>
void with_instance(const char* op, DType dtype, Activation activation, bool aligned, int64_t n_cols, Body&& body) {
  with_scalar_type(op, dtype, [&](auto type) {
    constexpr int kVec = kVecWidth<typename decltype(type)::type>;
    with_activation(activation, [&](auto constant) {
      if (aligned && n_cols % kVec == 0)
        body(type, constant, std::integral_constant<int, kVec>{});
      else
        body(type, constant, std::integral_constant<int, 1>{});
    });
  });
}

}  // namespace

void bias_act_dropout_forward(const BiasActDropoutForward& a, cudaStream_t stream) {
  constexpr const char* kOp = "bias_act_dropout_forward";
  if (a.n_rows == 0 || a.n_cols == 0) return;
  const Tile tile(a.n_rows, a.n_cols);
  const int64_t rows_per_chunk = rows_per_chunk_without_sums(tile, a.n_rows);
  const dim3 grid = grid_of(kOp, ceil_div(a.n_rows, rows_per_chunk) * tile.n_col_blocks);
  const bool aligned = is_aligned(a.x, kVecBytes) && is_aligned(a.bias, kVecBytes) && is_aligned(a.y, kVecBytes);
  with_instance(kOp, a.dtype, a.activation, aligned, a.n_cols, [&](auto type, auto activation, auto width) {
    using scalar_t = typename decltype(type)::type;
    constexpr Activation kActivation = decltype(activation)::value;
    constexpr int kWidth = decltype(width)::value;
    LS_LAUNCH((bias_act_dropout_forward_kernel<scalar_t, kWidth, kActivation>), grid, tile.block, 0, stream, a,
              static_cast<unsigned>(tile.n_col_blocks), rows_per_chunk);
  });
  check_launch(kOp);
}

void bias_act_dropout_backward(const BiasActDropoutBackward& a, cudaStream_t stream) {
  constexpr const char* kOp = "bias_act_dropout_backward";
  if (a.n_cols == 0) return;
  if (a.n_rows > 0) {
    const Tile tile(a.n_rows, a.n_cols);
    const int64_t rows_per_chunk =
        a.partials != nullptr ? column_sum_rows_per_partial(a.n_rows) : rows_per_chunk_without_sums(tile, a.n_rows);
    const dim3 grid = grid_of(kOp, ceil_div(a.n_rows, rows_per_chunk) * tile.n_col_blocks);
    const bool aligned = is_aligned(a.grad_y, kVecBytes) && is_aligned(a.saved, kVecBytes) && is_aligned(a.bias, kVecBytes) &&
                         is_aligned(a.grad_x, kVecBytes);
    with_instance(kOp, a.dtype, a.activation, aligned, a.n_cols, [&](auto type, auto activation, auto width) {
      using scalar_t = typename decltype(type)::type;
      constexpr Activation kActivation = decltype(activation)::value;
      constexpr int kWidth = decltype(width)::value;
      LS_LAUNCH((bias_act_dropout_backward_kernel<scalar_t, kWidth, kActivation>), grid, tile.block, 0, stream, a,
                static_cast<unsigned>(tile.n_col_blocks), rows_per_chunk);
    });
    check_launch(kOp);
  }
  if (a.grad_bias != nullptr)
    with_scalar_type(kOp, a.dtype, [&](auto type) {
      finish_column_sums<typename decltype(type)::type>(kOp, a.partials, a.n_partials, a.n_cols, a.grad_bias, nullptr, stream);
    });
}

}  // namespace ls::cuda
