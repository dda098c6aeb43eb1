// y = dropout(scale * weight[token] + positions[position]), and the gradients of both tables.
//
//   tokens (B, T) int64, weight (V, C), positions (n_positions, C) or absent, y (B, T, C) in fp32, fp16 or bf16
//   position = padding_idx + tokens up to this one that are not padding; padding stands at padding_idx
//   forward  y = keep * dropout_scale * (scale * weight[token] + positions[position])     computed in fp32 and rounded once
//   backward grad_weight[v]    = scale * sum over the tokens v of g,  g = keep * dropout_scale * grad_y, same draws again
//            grad_positions[p] = sum over the tokens at p of g        both without the row padding_idx, which is zero
// All outputs are overwritten (=); sums are fp32. Saved for backward: tokens and the seed.
//
// Forward: a team of threads owns a token, each thread groups of eight columns (one draw of Philox); the block counts the tokens
// before its own together, 256 at a time, so that no table of positions and no mask is made.
// grad_weight: zeros, then by atomics, a team per token (fp32); or, given the sorted tokens, a team per distinct token, which
// adds that token's rows in order and stores once: the same bits in every run. grad_positions: a team per position, which
// adds the sentences in order; the table of which token stands at a position is made first, a warp per sentence.
// Paper: Wang et al., LightSeq2: Accelerated Training for Transformer-Based Models on GPUs (SC'22).

#include "cuda/dropout.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace ls::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTeams = kThreads / kWarpSize;  // of a block, at most: a team is one warp or more

// Rows of grad_y that a thread has in flight while it adds them in order. Single elements are a path for odd shapes: not worth spills.
template <int kWidth>
constexpr int kBatch = kWidth == 1 ? 1 : 4;

// threadIdx.x counts groups of eight columns, threadIdx.y teams.
dim3 team_block(int64_t n_cols) {
  int team = pow2_at_least(ceil_div(n_cols, kDropoutGroup), kThreads);
  team = team < kWarpSize ? kWarpSize : team;
  return dim3(team, kThreads / team);
}

// printf's arguments lie on the stack: the only bytes of it that ptxas reports.
__device__ inline void refuse_token(int64_t row, int64_t token, int64_t n_embeddings) {
  printf(
      "embedding: token %lld at position %lld of the batch is outside the vocabulary of %lld entries; was the data "
      "preprocessed "
      "with another dictionary?\n",
      static_cast<long long>(token), static_cast<long long>(row), static_cast<long long>(n_embeddings));
  __trap();
}

__device__ inline void refuse_position(int64_t sentence, int64_t position, int64_t n_positions) {
  printf("embedding: sentence %lld needs position %lld of a table of %lld; shorten the sentence or enlarge the table\n",
         static_cast<long long>(sentence), static_cast<long long>(position), static_cast<long long>(n_positions));
  __trap();
}

// Block: `blockDim.y` consecutive tokens of one sentence.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads) embedding_forward_kernel(const EmbeddingForward a, unsigned n_chunks) {
  LS_SHARED(int64_t, chunk, kTeams);
  const int64_t sentence = blockIdx.x / n_chunks;
  const int64_t first = static_cast<int64_t>(blockIdx.x % n_chunks) * blockDim.y;
  const int64_t* tokens = a.tokens + sentence * a.n_tokens;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread < blockDim.y) chunk[thread] = first + thread < a.n_tokens ? tokens[first + thread] : a.padding_idx;
  int64_t count = first;  // of tokens before the chunk that are not padding
  if (a.positions != nullptr && a.padding_idx >= 0) {
    count = 0;
    for (int64_t i = thread; i - thread < first; i += kThreads)
      count += __syncthreads_count(i < first && tokens[i] != a.padding_idx);
  }
  __syncthreads();
  const int64_t row = sentence * a.n_tokens + first + threadIdx.y, token = chunk[threadIdx.y];
  if (first + threadIdx.y >= a.n_tokens) return;
  if (token < 0 || token >= a.n_embeddings) {
    if (threadIdx.x == 0) refuse_token(row, token, a.n_embeddings);
    return;
  }
  int64_t position = a.padding_idx;
  if (token != a.padding_idx) {
    for (int i = 0; i < threadIdx.y; ++i) count += chunk[i] != a.padding_idx;
    position += count + 1;
  }
  if (a.positions != nullptr && position >= a.n_positions) {
    if (threadIdx.x == 0) refuse_position(sentence, position, a.n_positions);
    return;
  }
  const auto* weight = static_cast<const scalar_t*>(a.weight) + token * a.n_cols;
  const auto* positions = static_cast<const scalar_t*>(a.positions);
  if (positions != nullptr) positions += position * a.n_cols;
  auto* y = static_cast<scalar_t*>(a.y) + row * a.n_cols;
  const int64_t n_groups = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);
  for (int64_t group = threadIdx.x; group < n_groups; group += blockDim.x) {
    const int64_t col = group * kDropoutGroup, n_valid = a.n_cols - col;
    float v[kDropoutGroup], p[kDropoutGroup] = {};
    load_group<kWidth>(weight + col, n_valid, v);
    if (positions != nullptr) load_group<kWidth>(positions + col, n_valid, p);
#pragma unroll
    for (int i = 0; i < kDropoutGroup; ++i) v[i] = v[i] * a.scale + p[i];
    if (a.dropout.threshold != 0) apply_dropout(a.dropout, seed, row * n_groups + group, v);
    store_group<kWidth>(y + col, n_valid, v);
  }
}

// A team per token. The eight columns of a thread are exchanged through shared memory, so that an atomic instruction of a warp
// meets 128 consecutive bytes: by eights it would touch a 32-byte sector per lane and instruction, eight times as many.
// grad_weight += ; zeroed before.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) embedding_grad_weight_atomic_kernel(const EmbeddingBackward a) {
  constexpr int kTileCols = kWarpSize * kDropoutGroup, kPitch = kDropoutGroup + 1;  // odd: no bank conflict
  LS_SHARED(float, shared, kTeams * kWarpSize * kPitch);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.n_sentences * a.n_tokens) return;
  const int64_t token = a.tokens[row];
  if (token == a.padding_idx) return;
  if (token < 0 || token >= a.n_embeddings) {
    if (threadIdx.x == 0) refuse_token(row, token, a.n_embeddings);
    return;
  }
  const auto* grad_y = static_cast<const float*>(a.grad_y) + row * a.n_cols;
  auto* grad_weight = static_cast<float*>(a.grad_weight) + token * a.n_cols;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % kWarpSize;
  float* tile = shared + (thread - lane) * kPitch;
  const int64_t n_groups = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);
  // A warp stays together: its first group decides, lanes beyond the last column carry zeros.
  for (int64_t first = threadIdx.x - lane; first < n_groups; first += blockDim.x) {
    const int64_t group = first + lane;
    float g[kDropoutGroup];
    load_group<kWidth>(grad_y + group * kDropoutGroup, a.n_cols - group * kDropoutGroup, g);
    if (a.dropout.threshold != 0) apply_dropout(a.dropout, seed, row * n_groups + group, g);
#pragma unroll
    for (int i = 0; i < kDropoutGroup; ++i) tile[lane * kPitch + i] = g[i] * a.scale;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTileCols; i += kWarpSize) {
      const int64_t col = first * kDropoutGroup + i + lane;
      const int at = i + lane;
      if (col < a.n_cols) atomicAdd(grad_weight + col, tile[at / kDropoutGroup * kPitch + at % kDropoutGroup]);
    }
    __syncwarp();
  }
}

// sum += g of the rows, in order; a negative row stands for none. All loads are under way before the first addition.
template <int kWidth, typename scalar_t>
__device__ __forceinline__ void add_rows(const EmbeddingBackward& a, const scalar_t* grad_y, uint64_t seed, int64_t n_groups,
                                         int64_t group, const int64_t (&rows)[kBatch<kWidth>], float (&sum)[kDropoutGroup]) {
  const int64_t col = group * kDropoutGroup;
  float g[kBatch<kWidth>][kDropoutGroup];
#pragma unroll
  for (int b = 0; b < kBatch<kWidth>; ++b)
    load_group<kWidth>(grad_y + rows[b] * a.n_cols + col, rows[b] >= 0 ? a.n_cols - col : 0, g[b]);
#pragma unroll
  for (int b = 0; b < kBatch<kWidth>; ++b) {
    if (rows[b] < 0) continue;
    if (a.dropout.threshold != 0) apply_dropout(a.dropout, seed, rows[b] * n_groups + group, g[b]);
#pragma unroll
    for (int i = 0; i < kDropoutGroup; ++i) sum[i] += g[b][i];
  }
}

// A team per place in the sorted tokens; the first of equal ones does the work. Rows of other tokens were zeroed before.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads) embedding_grad_weight_sorted_kernel(const EmbeddingBackward a) {
  const int64_t n_rows = a.n_sentences * a.n_tokens;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (first >= n_rows) return;
  const int64_t token = a.sorted_tokens[first];
  if (token == a.padding_idx || (first > 0 && a.sorted_tokens[first - 1] == token)) return;
  if (token < 0 || token >= a.n_embeddings) {
    if (threadIdx.x == 0) refuse_token(a.sorted_rows[first], token, a.n_embeddings);
    return;
  }
  const auto* grad_y = static_cast<const scalar_t*>(a.grad_y);
  auto* grad_weight = static_cast<scalar_t*>(a.grad_weight) + token * a.n_cols;
  const int64_t n_groups = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);
  for (int64_t group = threadIdx.x; group < n_groups; group += blockDim.x) {
    float sum[kDropoutGroup] = {};
    bool more = true;
    for (int64_t i = first; more; i += kBatch<kWidth>) {
      int64_t rows[kBatch<kWidth>];
#pragma unroll
      for (int b = 0; b < kBatch<kWidth>; ++b) {
        more = more && i + b < n_rows && a.sorted_tokens[i + b] == token;
        rows[b] = more ? a.sorted_rows[i + b] : -1;
      }
      add_rows<kWidth>(a, grad_y, seed, n_groups, group, rows, sum);
    }
#pragma unroll
    for (int i = 0; i < kDropoutGroup; ++i) sum[i] *= a.scale;
    store_group<kWidth>(grad_weight + group * kDropoutGroup, a.n_cols - group * kDropoutGroup, sum);
  }
}

// token_at[b][k] = place in its sentence of the k-th token that is not padding, or -1. A warp per sentence.
__global__ void __launch_bounds__(kThreads) embedding_token_at_kernel(const EmbeddingBackward a) {
  const int64_t sentence = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (sentence >= a.n_sentences) return;
  const int lane = threadIdx.x;
  const int64_t* tokens = a.tokens + sentence * a.n_tokens;
  int32_t* token_at = a.token_at + sentence * a.n_tokens;
  int64_t count = 0;
  for (int64_t first = 0; first < a.n_tokens; first += kWarpSize) {
    const int64_t t = first + lane;
    const bool is_token = t < a.n_tokens && tokens[t] != a.padding_idx;
    const unsigned lanes = __ballot_sync(kFullMask, is_token);
    if (is_token) token_at[count + __popc(lanes & ((1u << lane) - 1))] = static_cast<int32_t>(t);
    count += __popc(lanes);
  }
  for (int64_t k = count + lane; k < a.n_tokens; k += kWarpSize) token_at[k] = -1;
}

// A team per row of the table.
template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kThreads) embedding_grad_positions_kernel(const EmbeddingBackward a) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (position >= a.n_positions) return;
  const int64_t k = position - a.padding_idx - 1;
  const int64_t n_sentences = k >= 0 && k < a.n_tokens ? a.n_sentences : 0;
  const auto* grad_y = static_cast<const scalar_t*>(a.grad_y);
  auto* grad_positions = static_cast<scalar_t*>(a.grad_positions) + position * a.n_cols;
  const int64_t n_groups = (a.n_cols + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t seed = dropout_seed(a.dropout);
  for (int64_t group = threadIdx.x; group < n_groups; group += blockDim.x) {
    float sum[kDropoutGroup] = {};
    for (int64_t first = 0; first < n_sentences; first += kBatch<kWidth>) {
      int64_t rows[kBatch<kWidth>];
#pragma unroll
      for (int b = 0; b < kBatch<kWidth>; ++b) {
        const int64_t row = (first + b) * a.n_tokens, t = first + b < n_sentences ? a.token_at[row + k] : -1;
        rows[b] = t < 0 ? -1 : row + t;
      }
      add_rows<kWidth>(a, grad_y, seed, n_groups, group, rows, sum);
    }
    store_group<kWidth>(grad_positions + group * kDropoutGroup, a.n_cols - group * kDropoutGroup, sum);
  }
}

}  // namespace

void embedding_forward(const EmbeddingForward& a, cudaStream_t stream) {
  constexpr const char* kOp = "embedding_forward";
  if (a.n_sentences == 0 || a.n_tokens == 0 || a.n_cols == 0) return;
  const dim3 block = team_block(a.n_cols);
  const int64_t n_chunks = ceil_div(a.n_tokens, block.y);
  const dim3 grid = grid_of(kOp, a.n_sentences * n_chunks);
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    constexpr int kVec = kVecWidth<scalar_t>;
    const bool vectorized = a.n_cols % kVec == 0 && is_aligned(a.weight, kVecBytes) && is_aligned(a.positions, kVecBytes) &&
                            is_aligned(a.y, kVecBytes);
    if (vectorized)
      LS_LAUNCH((embedding_forward_kernel<scalar_t, kVec>), grid, block, 0, stream, a, static_cast<unsigned>(n_chunks));
    else
      LS_LAUNCH((embedding_forward_kernel<scalar_t, 1>), grid, block, 0, stream, a, static_cast<unsigned>(n_chunks));
  });
  check_launch(kOp);
}

void embedding_backward(const EmbeddingBackward& a, cudaStream_t stream) {
  constexpr const char* kOp = "embedding_backward";
  const int64_t n_rows = a.n_sentences * a.n_tokens;
  if (a.n_cols == 0) return;
  const dim3 block = team_block(a.n_cols);
  if (a.grad_positions != nullptr && n_rows > 0) {
    LS_LAUNCH(embedding_token_at_kernel, grid_of(kOp, ceil_div(a.n_sentences, kTeams)), dim3(kWarpSize, kTeams), 0, stream, a);
    check_launch(kOp);
  }
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    const auto launch = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      if (a.grad_weight != nullptr) {
        const cudaError_t error = cudaMemsetAsync(a.grad_weight, 0, a.n_embeddings * a.n_cols * sizeof(scalar_t), stream);
        if (error != cudaSuccess) throw std::runtime_error(std::string(kOp) + ": " + cudaGetErrorString(error));
      }
      if (a.grad_weight != nullptr && n_rows > 0) {
        const dim3 grid = grid_of(kOp, ceil_div(n_rows, block.y));
        if (a.sorted_tokens != nullptr) {
          LS_LAUNCH((embedding_grad_weight_sorted_kernel<scalar_t, kWidth>), grid, block, 0, stream, a);
        } else if constexpr (std::is_same<scalar_t, float>::value) {
          LS_LAUNCH((embedding_grad_weight_atomic_kernel<kWidth>), grid, block, 0, stream, a);
        } else {
          throw std::runtime_error(std::string(kOp) + ": 16-bit gradients need the sorted tokens");
        }
        check_launch(kOp);
      }
      if (a.grad_positions != nullptr && a.n_positions > 0) {
        LS_LAUNCH((embedding_grad_positions_kernel<scalar_t, kWidth>), grid_of(kOp, ceil_div(a.n_positions, block.y)), block, 0,
                  stream, a);
        check_launch(kOp);
      }
    };
    constexpr int kVec = kVecWidth<scalar_t>;
    if (a.n_cols % kVec == 0 && is_aligned(a.grad_y, kVecBytes) && is_aligned(a.grad_weight, kVecBytes) &&
        is_aligned(a.grad_positions, kVecBytes))
      launch(std::integral_constant<int, kVec>{});
    else
      launch(std::integral_constant<int, 1>{});
  });
}

}  // namespace ls::cuda
