// The softmax of attention: scale, padding, causality, bias, softmax and dropout in one pass, and its backward.
//
//   scores, probs, grad_probs, grad_scores (B, H, T, S), bias by strides, in fp32, fp16 or bf16; padding (B, S) bool; row_max and
//   row_factor (B, H, T) fp32; computed in fp32 and rounded once. A row is one (b, h, t); the maths is in common/params.h.
//   forward   probs = dropout(P), P = softmax(z), z = scale * scores + bias, -inf where hidden; row_max = max z,
//             row_factor = 1 / sum of exp(z - row_max)
//   backward  grad_scores = scale * P * (g - sum(g P)), g = dropout(grad_probs)                          one reduction
//             P is the saved output, or exp(z - row_max) * row_factor from the saved scores: with dropout the output is not P, and neither P nor
//             the mask is stored
// All outputs are overwritten (=). What causality hides is written as 0 and not read, but for the rest of a vector on the diagonal.
//
// A thread owns groups of eight consecutive keys: one draw of Philox, one 16-byte vector in 16 bits (two in fp32). Up to
// kMaxTeamKeys keys a team of lanes owns a row, as many as the row has groups, at most a warp, and keeps it in registers; up to
// kMaxBlockKeys a block does. Longer rows are read twice by their block, the second time from a cache: the forward computes
// maximum and sum online, the backward its sum, before anything is written.
// Papers: Milakov & Gimelshein, Online normalizer calculation for softmax (2018); Dao et al., FlashAttention (2022), for the
// log-sum-exp; Wang et al., LightSeq2 (SC'22).

#include <cfloat>
#include <cmath>

#include "cuda/dropout.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace ls::cuda {
namespace {

constexpr int kGroup = kDropoutGroup;

// A warp's limit, 1,024 keys, counted from nvcc's report for sm_90 and not yet measured: with four groups per thread the backward
// holds 64 floats of P and g in 116 registers, four blocks of 128 threads to a multiprocessor. These 16 rows, with two matrices of
// 16 bits, are 64 KB in flight, against the 15 KB that an H100's bandwidth times 600 ns asks for of each of 132. Eight groups would
// be 128 floats: two blocks at most, and rows of up to 2,048 keys with no more bytes in flight than in a block's registers.
// Four warps a block, so that small batches still spread over the multiprocessors.
constexpr int kTeamThreads = 128;
constexpr int kMaxTeamGroups = 4;
constexpr int kMaxTeamKeys = kMaxTeamGroups * kWarpSize * kGroup;
// Blocks: two groups per thread are 56 registers, so that 1,024 threads share a multiprocessor: eight rows of 2,048 keys, two of
// 8,192. Longer ones would need a block of 1,024 threads, alone on its multiprocessor while it waits at its barriers.
constexpr int kBlockThreads = 512;
constexpr int kBlockGroups = 2;
constexpr int kMaxBlockKeys = kBlockGroups * kBlockThreads * kGroup;

struct Max {
  float value;

  static __device__ __forceinline__ Max merge(const Max& a, const Max& b) { return {fmaxf(a.value, b.value)}; }
  template <typename F>
  __device__ __forceinline__ Max map(F f) const {
    return {f(value)};
  }
};

// The threads that share a row: 2^log2_lanes lanes of a warp. How many is an argument and no template parameter: the steps of the
// butterfly that reach beyond the team are shuffled and not taken, 10 instructions beside the 150 or so of a group with dropout.
// So a row of 27 keys takes four lanes and a warp serves eight of them, without an instance for every power of two.
template <bool kBlock>
struct Team {
  int lane, n_lanes;
  int64_t row;

  explicit __device__ __forceinline__ Team(int log2_lanes)
      : lane(threadIdx.x & ((1 << log2_lanes) - 1)),
        n_lanes(1 << log2_lanes),
        row(static_cast<int64_t>(blockIdx.x) * (kTeamThreads >> log2_lanes) + (threadIdx.x >> log2_lanes)) {}
  template <typename T>
  __device__ __forceinline__ float reduce(T v) const {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const T merged = T::merge(v, v.map([offset](float x) { return __shfl_xor_sync(kFullMask, x, offset); }));
      if (offset < n_lanes) v = merged;
    }
    return v.value;
  }
};
// A block of 32 2^k threads; reduce may be called once for each T.
template <>
struct Team<true> {
  int lane, n_lanes;
  int64_t row;

  explicit __device__ __forceinline__ Team(int) : lane(threadIdx.x), n_lanes(blockDim.x), row(blockIdx.x) {}
  template <typename T>
  __device__ __forceinline__ float reduce(T v) const {
    LS_SHARED(T, shared, kMaxWarps);
    return block_reduce(v, shared).value;
  }
};

// What belongs to a row, and how many keys it may see; none where there is no such row.
template <typename scalar_t>
struct Row {
  int64_t offset, n_keys, n_visible;  // offset: of the row in the matrix
  const bool* padding;
  const scalar_t* bias;

  __device__ __forceinline__ Row(const AttentionScores& z, int64_t row)
      : offset(row * z.n_keys),
        n_keys(z.n_keys),
        n_visible(row < z.n_rows ? z.n_keys : 0),
        padding(z.padding),
        bias(static_cast<const scalar_t*>(z.bias)) {
    if (row >= z.n_rows || (padding == nullptr && bias == nullptr && !z.causal)) return;  // spares the divisions
    const int64_t matrix = row / z.n_queries, t = row - matrix * z.n_queries, batch = matrix / z.n_heads;
    if (z.causal) n_visible = t + 1 + z.n_keys - z.n_queries;  // negative in the first rows when T > S + 1
    if (padding != nullptr) padding += batch * z.n_keys;
    if (bias != nullptr)
      bias += batch * z.bias_strides[0] + (matrix - batch * z.n_heads) * z.bias_strides[1] + t * z.bias_strides[2];
  }
};

// z of the keys from col on; -inf for the hidden ones.
template <int kWidth, typename scalar_t>
__device__ __forceinline__ void load_z(const AttentionScores& a, const Row<scalar_t>& row, const void* scores, int64_t col,
                                       float (&z)[kGroup]) {
  const int64_t n_visible = row.n_visible - col;
  load_group<kWidth>(static_cast<const scalar_t*>(scores) + row.offset + col, n_visible, z);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) z[i] *= a.scale;
  if (row.bias != nullptr) {
    float bias[kGroup];
    load_group<kWidth>(row.bias + col, n_visible, bias);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] += bias[i];
  }
  if (row.padding != nullptr) {
#pragma unroll
    for (int i = 0; i < kGroup; i += kWidth) {
      if (i < n_visible) {
        const auto hidden = load_vec<kWidth>(row.padding + col + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) z[i + j] = hidden.elem[j] ? -INFINITY : z[i + j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) z[i] = i < n_visible ? z[i] : -INFINITY;
}

// 16-bit probabilities carry 2^-9 or 2^-12 of relative error themselves: the fast exponential's 2^-21 is enough for them, and
// its two or three instructions leave more of the issue slots to Philox than expf's eight.
template <typename scalar_t>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(scalar_t) == 2 ? __expf(x) : expf(x);
}

// probs of a group from its e = exp(z - max), with factor = 1 / sum.
template <int kWidth, typename scalar_t>
__device__ __forceinline__ void store_probs(const AttentionSoftmaxForward& a, const Row<scalar_t>& row, int64_t row_index,
                                            uint64_t seed, int64_t col, float factor, float (&e)[kGroup]) {
  if (col >= row.n_keys) return;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) e[i] *= factor;
  if (a.dropout.threshold != 0 && col < row.n_visible)
    apply_dropout(a.dropout, seed, row_index * ((row.n_keys + kGroup - 1) / kGroup) + col / kGroup, e);
  store_group<kWidth>(static_cast<scalar_t*>(a.probs) + row.offset + col, row.n_keys - col, e);
}

// Maxima start at -FLT_MAX, not -inf: where all keys are hidden, exp(-inf - max) is then 0, and so is the sum.
__device__ __forceinline__ float inverse_sum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

struct RowStatistics {
  float max, factor;
};
__device__ __forceinline__ RowStatistics load_statistics(const AttentionSoftmaxBackward& a, int64_t row) {
  return a.row_max != nullptr && row < a.z.n_rows ? RowStatistics{a.row_max[row], a.row_factor[row]} : RowStatistics{};
}

template <typename scalar_t, int kWidth, int kGroups, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kBlockThreads : kTeamThreads)
    attention_softmax_forward_kernel(const AttentionSoftmaxForward a, int log2_lanes) {
  const Team<kBlock> team(log2_lanes);
  const Row<scalar_t> row(a.z, team.row);
  float z[kGroups][kGroup];
#pragma unroll
  for (int k = 0; k < kGroups; ++k) load_z<kWidth>(a.z, row, a.scores, (k * team.n_lanes + team.lane) * kGroup, z[k]);
  float max = -FLT_MAX, sum = 0.0f;  // fmaxf passes over NaN, which the sum will meet
#pragma unroll
  for (int k = 0; k < kGroups; ++k)
#pragma unroll
    for (int i = 0; i < kGroup; ++i) max = fmaxf(max, z[k][i]);
  max = team.reduce(Max{max});
#pragma unroll
  for (int k = 0; k < kGroups; ++k)
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum += z[k][i] = exponential<scalar_t>(z[k][i] - max);
  sum = team.reduce(Sum{sum});

  if (team.row >= a.z.n_rows) return;
  const float factor = inverse_sum(sum);
  if (a.row_max != nullptr && team.lane == 0) a.row_max[team.row] = max, a.row_factor[team.row] = factor;
  const uint64_t seed = dropout_seed(a.dropout);
#pragma unroll
  for (int k = 0; k < kGroups; ++k)
    store_probs<kWidth>(a, row, team.row, seed, (k * team.n_lanes + team.lane) * kGroup, factor, z[k]);
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kBlockThreads) attention_softmax_forward_long_kernel(const AttentionSoftmaxForward a) {
  const Team<true> team(0);
  const Row<scalar_t> row(a.z, team.row);
  float own_max = -FLT_MAX, sum = 0.0f;
  for (int64_t col = team.lane * kGroup; col < row.n_visible; col += kBlockThreads * kGroup) {
    float z[kGroup];
    load_z<kWidth>(a.z, row, a.scores, col, z);
    float max = own_max;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) max = fmaxf(max, z[i]);
    sum *= exponential<scalar_t>(own_max - max);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum += exponential<scalar_t>(z[i] - max);
    own_max = max;
  }
  const float max = team.reduce(Max{own_max});
  sum = team.reduce(Sum{sum * exponential<scalar_t>(own_max - max)});

  const float factor = inverse_sum(sum);
  if (a.row_max != nullptr && team.lane == 0) a.row_max[team.row] = max, a.row_factor[team.row] = factor;
  const uint64_t seed = dropout_seed(a.dropout);
  for (int64_t col = team.lane * kGroup; col < row.n_keys; col += kBlockThreads * kGroup) {
    float z[kGroup];
    load_z<kWidth>(a.z, row, a.scores, col, z);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] = exponential<scalar_t>(z[i] - max);
    store_probs<kWidth>(a, row, team.row, seed, col, factor, z);
  }
}

// The keys from col on: what P is made of, and grad_probs.
template <int kWidth, typename scalar_t>
__device__ __forceinline__ void load_backward(const AttentionSoftmaxBackward& a, const Row<scalar_t>& row, int64_t col,
                                              float (&p)[kGroup], float (&g)[kGroup]) {
  load_group<kWidth>(static_cast<const scalar_t*>(a.grad_probs) + row.offset + col, row.n_visible - col, g);
  if (a.row_max != nullptr)
    load_z<kWidth>(a.z, row, a.saved, col, p);
  else  // 0 wherever the forward hid the key
    load_group<kWidth>(static_cast<const scalar_t*>(a.saved) + row.offset + col, row.n_visible - col, p);
}

// P and g from them. Gives their part of sum(g P). The gradient of a key without probability is not looked at.
template <typename scalar_t>
__device__ __forceinline__ float to_terms(const AttentionSoftmaxBackward& a, const Row<scalar_t>& row, int64_t row_index,
                                          RowStatistics statistics, uint64_t seed, int64_t col, float (&p)[kGroup],
                                          float (&g)[kGroup]) {
  if (a.row_max != nullptr) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) p[i] = exponential<scalar_t>(p[i] - statistics.max) * statistics.factor;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) g[i] = p[i] == 0.0f ? 0.0f : g[i];
  if (a.dropout.threshold != 0 && col < row.n_visible)
    apply_dropout(a.dropout, seed, row_index * ((row.n_keys + kGroup - 1) / kGroup) + col / kGroup, g);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) sum += p[i] * g[i];
  return sum;
}

template <int kWidth, typename scalar_t>
__device__ __forceinline__ void store_grad_scores(const AttentionSoftmaxBackward& a, const Row<scalar_t>& row, int64_t col,
                                                  float sum, const float (&p)[kGroup], float (&g)[kGroup]) {
  if (col >= row.n_keys) return;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) g[i] = a.z.scale * p[i] * (g[i] - sum);
  store_group<kWidth>(static_cast<scalar_t*>(a.grad_scores) + row.offset + col, row.n_keys - col, g);
}

template <typename scalar_t, int kWidth, int kGroups, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kBlockThreads : kTeamThreads)
    attention_softmax_backward_kernel(const AttentionSoftmaxBackward a, int log2_lanes) {
  const Team<kBlock> team(log2_lanes);
  const Row<scalar_t> row(a.z, team.row);
  const bool valid = team.row < a.z.n_rows;
  const RowStatistics statistics = load_statistics(a, team.row);
  const uint64_t seed = dropout_seed(a.dropout);
  float p[kGroups][kGroup], g[kGroups][kGroup], sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kGroups; ++k) load_backward<kWidth>(a, row, (k * team.n_lanes + team.lane) * kGroup, p[k], g[k]);
#pragma unroll
  for (int k = 0; k < kGroups; ++k)
    sum += to_terms(a, row, team.row, statistics, seed, (k * team.n_lanes + team.lane) * kGroup, p[k], g[k]);
  sum = team.reduce(Sum{sum});
  if (!valid) return;
#pragma unroll
  for (int k = 0; k < kGroups; ++k) store_grad_scores<kWidth>(a, row, (k * team.n_lanes + team.lane) * kGroup, sum, p[k], g[k]);
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kBlockThreads) attention_softmax_backward_long_kernel(const AttentionSoftmaxBackward a) {
  const Team<true> team(0);
  const Row<scalar_t> row(a.z, team.row);
  const RowStatistics statistics = load_statistics(a, team.row);
  const uint64_t seed = dropout_seed(a.dropout);
  float sum = 0.0f;
  for (int64_t col = team.lane * kGroup; col < row.n_visible; col += kBlockThreads * kGroup) {
    float p[kGroup], g[kGroup];
    load_backward<kWidth>(a, row, col, p, g);
    sum += to_terms(a, row, team.row, statistics, seed, col, p, g);
  }
  sum = team.reduce(Sum{sum});
  for (int64_t col = team.lane * kGroup; col < row.n_keys; col += kBlockThreads * kGroup) {
    float p[kGroup], g[kGroup];
    load_backward<kWidth>(a, row, col, p, g);
    to_terms(a, row, team.row, statistics, seed, col, p, g);
    store_grad_scores<kWidth>(a, row, col, sum, p, g);
  }
}

// Whether vectors of kWidth keys reach every row of everything that a kernel reads by rows of keys.
template <typename scalar_t>
bool vectors_reach(const AttentionScores& z, std::initializer_list<const void*> matrices) {
  constexpr int kWidth = kVecWidth<scalar_t>;
  bool reach = z.n_keys % kWidth == 0 && is_aligned(z.padding, kWidth) && is_aligned(z.bias, kVecBytes);
  for (const int64_t stride : z.bias_strides) reach = reach && stride % kWidth == 0;
  for (const void* matrix : matrices) reach = reach && is_aligned(matrix, kVecBytes);
  return reach;
}

// The launch shape of a row length: team(groups per thread, grid, log2 of the lanes), block(grid, threads) or long_rows(grid).
template <typename TeamBody, typename BlockBody, typename LongBody>
void with_launch_shape(const char* op, const AttentionScores& z, TeamBody&& team, BlockBody&& block, LongBody&& long_rows) {
  const int64_t n_groups = ceil_div(z.n_keys, kGroup);
  if (z.n_keys > kMaxBlockKeys) return long_rows(grid_of(op, z.n_rows));
  if (z.n_keys > kMaxTeamKeys)
    return block(grid_of(op, z.n_rows), dim3(pow2_at_least(ceil_div(n_groups, kBlockGroups), kBlockThreads)));
  const int n_lanes = pow2_at_least(n_groups, kWarpSize);
  int log2_lanes = 0;
  while ((1 << log2_lanes) < n_lanes) ++log2_lanes;
  const dim3 grid = grid_of(op, ceil_div(z.n_rows, kTeamThreads >> log2_lanes));
  if (n_groups <= n_lanes) return team(std::integral_constant<int, 1>{}, grid, log2_lanes);
  if (n_groups <= 2 * n_lanes) return team(std::integral_constant<int, 2>{}, grid, log2_lanes);
  return team(std::integral_constant<int, kMaxTeamGroups>{}, grid, log2_lanes);
}

template <typename scalar_t, int kWidth>
void forward(const char* op, const AttentionSoftmaxForward& a, cudaStream_t stream) {
  with_launch_shape(
      op, a.z,
      [&](auto groups, dim3 grid, int log2_lanes) {
        LS_LAUNCH((attention_softmax_forward_kernel<scalar_t, kWidth, decltype(groups)::value, false>), grid,
                  dim3(kTeamThreads), 0, stream, a, log2_lanes);
      },
      [&](dim3 grid, dim3 block) {
        LS_LAUNCH((attention_softmax_forward_kernel<scalar_t, kWidth, kBlockGroups, true>), grid, block, 0, stream, a, 0);
      },
      [&](dim3 grid) {
        LS_LAUNCH((attention_softmax_forward_long_kernel<scalar_t, kWidth>), grid, dim3(kBlockThreads), 0, stream, a);
      });
}

template <typename scalar_t, int kWidth>
void backward(const char* op, const AttentionSoftmaxBackward& a, cudaStream_t stream) {
  with_launch_shape(
      op, a.z,
      [&](auto groups, dim3 grid, int log2_lanes) {
        LS_LAUNCH((attention_softmax_backward_kernel<scalar_t, kWidth, decltype(groups)::value, false>), grid,
                  dim3(kTeamThreads), 0, stream, a, log2_lanes);
      },
      [&](dim3 grid, dim3 block) {
        LS_LAUNCH((attention_softmax_backward_kernel<scalar_t, kWidth, kBlockGroups, true>), grid, block, 0, stream, a, 0);
      },
      [&](dim3 grid) {
        LS_LAUNCH((attention_softmax_backward_long_kernel<scalar_t, kWidth>), grid, dim3(kBlockThreads), 0, stream, a);
      });
}

}  // namespace

void attention_softmax_forward(const AttentionSoftmaxForward& a, cudaStream_t stream) {
  constexpr const char* kOp = "attention_softmax_forward";
  if (a.z.n_rows == 0 || a.z.n_keys == 0) return;
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    if (vectors_reach<scalar_t>(a.z, {a.scores, a.probs}))
      forward<scalar_t, kVecWidth<scalar_t>>(kOp, a, stream);
    else
      forward<scalar_t, 1>(kOp, a, stream);
  });
  check_launch(kOp);
}

void attention_softmax_backward(const AttentionSoftmaxBackward& a, cudaStream_t stream) {
  constexpr const char* kOp = "attention_softmax_backward";
  if (a.z.n_rows == 0 || a.z.n_keys == 0) return;
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    if (vectors_reach<scalar_t>(a.z, {a.grad_probs, a.saved, a.grad_scores}))
      backward<scalar_t, kVecWidth<scalar_t>>(kOp, a, stream);
    else
      backward<scalar_t, 1>(kOp, a, stream);
  });
  check_launch(kOp);
}

}  // namespace ls::cuda
