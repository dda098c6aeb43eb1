// Cross entropy with fairseq's label smoothing: loss, nll and the gradient q - p from one pass over the logits.
//
//   logits, grad (N, V) in fp32, fp16 or bf16; target (N,) int64; loss, nll (N,) fp32; computed in fp32.
//   q = softmax(logits[n]), p = 1 - epsilon at the target, epsilon / (V - 1) elsewhere
//   nll  = -log q[target]
//   loss = -sum_v p_v log q_v = (1 - epsilon - epsilon / (V - 1)) nll + epsilon / (V - 1) sum_v -log q_v
//   grad = (q - p) * grad_scale          may be written over the logits
// All outputs are overwritten (=). A row whose target is ignore_index gives zeros and its logits are not read. A target
// outside [0, V) prints a message and traps: never a read out of bounds, never a silent loss.
//
// A block owns a row. Pass 1 reduces the maximum, the sum of exponentials (online: rescaled when the maximum grows) and the
// sum of the logits together, with one barrier; pass 2 writes the gradient. Rows of up to kMaxCacheBytes wait in shared
// memory, each thread taking back the vectors that it put there itself. Longer rows are read again, in 16 bits mostly from
// L2: three rows of 64 KB (V = 32,000) on each of 132 multiprocessors are 25 MB of an H100's 50 MB.
// Rows may start at any element: up to kWidth - 1 elements at either end are done one by one, the rest in 16-byte vectors.
// Papers: Milakov & Gimelshein, Online normalizer calculation for softmax (2018); Wang et al., LightSeq2 (SC'22).

#include <cfloat>
#include <cmath>
#include <cstdio>

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace ls::cuda {
namespace {

// 16 warps: four rows at a time on a multiprocessor of 2,048 threads, and a vocabulary of 32,000 in 16 bits is eight vectors
// per thread. Short rows take fewer threads, so that each has at least one vector.
constexpr int kMaxThreads = 512;

// Vectors that a thread loads before it uses the first: the exponentials then overlap with the next loads.
constexpr int kBatch = 2;

// What a block may have without asking for more is 48 KB; 1 KB is left to the reduction. That is V <= 12,032 in fp32, 24,064
// in 16 bits.
constexpr int kMaxCacheBytes = 47 * 1024;

// The maximum, the sum of exp(x - max) and the sum of x - shift of a set of logits. `max` starts at -FLT_MAX, not -inf, so
// that logits of -inf (a masked class) give exp(-inf) = 0 and not exp(-inf + inf) = NaN.
struct SoftmaxStats {
  float max, sum_exp, sum;

  static __device__ __forceinline__ SoftmaxStats none() { return {-FLT_MAX, 0.0f, 0.0f}; }
  static __device__ __forceinline__ SoftmaxStats merge(const SoftmaxStats& a, const SoftmaxStats& b) {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum_exp * expf(a.max - max) + b.sum_exp * expf(b.max - max), a.sum + b.sum};
  }
  template <typename F>
  __device__ __forceinline__ SoftmaxStats map(F f) const {
    return {f(max), f(sum_exp), f(sum)};
  }
};

// 16-bit logits carry 2^-9 or 2^-12 of relative error themselves: the fast exponential's 2^-21 is enough for them, and its
// two or three instructions keep the kernel memory-bound where expf's eight might not: an H100's bandwidth brings 3.7 elements
// per cycle to a multiprocessor, each is exponentiated twice, and 128 lanes are issued per cycle.
template <typename scalar_t>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(scalar_t) == 2 ? __expf(x) : expf(x);
}

template <typename scalar_t, int kCount>
__device__ __forceinline__ void accumulate(SoftmaxStats& stats, const Vec<scalar_t, kCount>& v, float shift) {
  float max = stats.max;
#pragma unroll
  for (int j = 0; j < kCount; ++j) max = fmaxf(max, static_cast<float>(v.elem[j]));
  float sum_exp = stats.sum_exp * exponential<scalar_t>(stats.max - max);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    sum_exp += exponential<scalar_t>(static_cast<float>(v.elem[j]) - max);
    stats.sum += static_cast<float>(v.elem[j]) - shift;
  }
  stats.max = max;
  stats.sum_exp = sum_exp;
}

// How a row that starts at p splits: `head` single elements up to a multiple of 16 bytes, `n_vec` vectors, then single
// elements again. `n_edge` counts the single ones, at most 2 (kWidth - 1); edge(i) is the column of the i-th.
template <int kWidth>
struct RowSplit {
  int64_t head, n_vec, n_edge, n_cols;

  template <typename scalar_t>
  __device__ __forceinline__ RowSplit(const scalar_t* p, int64_t n_cols_) : n_cols(n_cols_) {
    const int misplaced = static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(scalar_t) % kWidth);
    head = (kWidth - misplaced) % kWidth;
    if (head > n_cols) head = n_cols;
    n_vec = (n_cols - head) / kWidth;
    n_edge = n_cols - n_vec * kWidth;
  }
  __device__ __forceinline__ int64_t edge(int64_t i) const { return i < head ? i : n_cols - n_edge + i; }
};

// The 32 bytes of stack that ptxas reports for the forward kernels are printf's arguments, no spill.
__device__ inline void refuse_target(int64_t row, int64_t target, int64_t n_cols, int64_t ignore_index) {
  printf(
      "label_smoothed_cross_entropy: target[%lld] is %lld, expected 0 <= target < V = %lld or ignore_index = %lld; "
      "compare the dictionary that made the data with the model's\n",
      static_cast<long long>(row), static_cast<long long>(target), static_cast<long long>(n_cols),
      static_cast<long long>(ignore_index));
  __trap();
}

struct Smoothing {
  float loss_nll, loss_other;  // loss = loss_nll * nll + loss_other * sum_v -log q_v
  float p_target, p_other;     // of the gradient
};

// kGrad: write the gradient. kCached: the row's vectors fit in shared memory.
template <typename scalar_t, int kWidth, bool kGrad, bool kCached>
__global__ void __launch_bounds__(kMaxThreads)
    label_smoothed_cross_entropy_forward_kernel(const LabelSmoothedCrossEntropyForward a, const Smoothing smoothing) {
  using V = Vec<scalar_t, kWidth>;
  LS_SHARED(SoftmaxStats, shared, kMaxWarps);
  V* cache = nullptr;
  if constexpr (kCached) {
    LS_DYNAMIC_SHARED(V, row_cache);
    cache = row_cache;
  }
  const int64_t row = blockIdx.x, target = a.target[row];
  const auto* logits = static_cast<const scalar_t*>(a.logits) + row * a.n_cols;
  auto* grad = static_cast<scalar_t*>(a.grad) + row * a.n_cols;
  const RowSplit<kWidth> split(logits, a.n_cols);
  const int thread = threadIdx.x, n_threads = blockDim.x;

  if (target == a.ignore_index) {
    if (thread == 0) a.loss[row] = a.nll[row] = 0.0f;
    if constexpr (kGrad) {
      for (int64_t i = thread; i < split.n_vec; i += n_threads)
        store_vec(grad + split.head + i * kWidth, zero_vec<scalar_t, kWidth>());
      for (int64_t i = thread; i < split.n_edge; i += n_threads) grad[split.edge(i)] = static_cast<scalar_t>(0.0f);
    }
    return;
  }
  if (target < 0 || target >= a.n_cols) {
    if (thread == 0) refuse_target(row, target, a.n_cols, a.ignore_index);
    return;
  }

  // Logits enter sums and exponentials only as differences from the target's or the largest, which keeps their digits when
  // all of them are large. (Read before the barrier: after it, other threads may be writing the gradient over it.)
  const float target_logit = static_cast<float>(logits[target]);
  const float shift = target_logit > -INFINITY ? target_logit : 0.0f;
  SoftmaxStats stats = SoftmaxStats::none();
  for (int64_t i = thread; i < split.n_vec; i += kBatch * n_threads) {
    V v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (i + b * n_threads < split.n_vec) v[b] = load_vec<kWidth>(logits + split.head + (i + b * n_threads) * kWidth);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (i + b * n_threads < split.n_vec) {
        if constexpr (kCached) cache[i + b * n_threads] = v[b];
        accumulate(stats, v[b], shift);
      }
    }
  }
  for (int64_t i = thread; i < split.n_edge; i += n_threads) accumulate(stats, load_vec<1>(logits + split.edge(i)), shift);
  stats = block_reduce(stats, shared);

  if (thread == 0) {
    const float nll = logf(stats.sum_exp) + (stats.max - target_logit);
    float loss = smoothing.loss_nll * nll;
    // -log q_v = log sum exp - x_v. Without smoothing a logit of -inf costs nothing; 0 * inf would be NaN.
    if (smoothing.loss_other != 0.0f) {
      const float log_sum_exp_shifted = logf(stats.sum_exp) + (stats.max - shift);
      loss += smoothing.loss_other * (a.n_cols * log_sum_exp_shifted - stats.sum);
    }
    a.loss[row] = loss;
    a.nll[row] = nll;
  }
  if constexpr (kGrad) {
    const float scale = a.grad_scale / stats.sum_exp;
    const float p_target = smoothing.p_target * a.grad_scale, p_other = smoothing.p_other * a.grad_scale;
    // In place of the logits v of the columns from col on.
    const auto to_gradient = [&](auto& v, int64_t col) {
      constexpr int kCount = sizeof(v) / sizeof(scalar_t);
      const int64_t distance = target - col;
      const int target_at = distance >= 0 && distance < kCount ? static_cast<int>(distance) : -1;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float q = exponential<scalar_t>(static_cast<float>(v.elem[j]) - stats.max) * scale;
        v.elem[j] = static_cast<scalar_t>(q - (j == target_at ? p_target : p_other));
      }
    };
#pragma unroll 2
    for (int64_t i = thread; i < split.n_vec; i += n_threads) {
      const int64_t col = split.head + i * kWidth;
      V v = kCached ? cache[i] : load_vec<kWidth>(logits + col);
      to_gradient(v, col);
      store_vec(grad + col, v);
    }
    for (int64_t i = thread; i < split.n_edge; i += n_threads) {
      const int64_t col = split.edge(i);
      auto v = load_vec<1>(logits + col);
      to_gradient(v, col);
      store_vec(grad + col, v);
    }
  }
}

// A zero stays zero even where the scale is not finite: an ignored row has no gradient.
template <typename scalar_t>
__device__ __forceinline__ scalar_t scaled(scalar_t grad, float scale) {
  const float g = static_cast<float>(grad);
  return static_cast<scalar_t>(g == 0.0f ? g : g * scale);
}

template <typename scalar_t, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    label_smoothed_cross_entropy_backward_kernel(const LabelSmoothedCrossEntropyBackward a) {
  const int64_t row = blockIdx.x;
  const float scale = a.grad_loss[row * a.grad_loss_stride] * a.factor;
  if (scale == 1.0f) return;
  auto* grad = static_cast<scalar_t*>(a.grad) + row * a.n_cols;
  const RowSplit<kWidth> split(grad, a.n_cols);
  const int thread = threadIdx.x, n_threads = blockDim.x;
#pragma unroll 4
  for (int64_t i = thread; i < split.n_vec; i += n_threads) {
    auto v = load_vec<kWidth>(grad + split.head + i * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v.elem[j] = scaled(v.elem[j], scale);
    store_vec(grad + split.head + i * kWidth, v);
  }
  for (int64_t i = thread; i < split.n_edge; i += n_threads) {
    const int64_t col = split.edge(i);
    grad[col] = scaled(grad[col], scale);
  }
}

dim3 threads_for(int64_t n_vec) {
  const int threads = pow2_at_least(n_vec, kMaxThreads);
  return dim3(threads < kWarpSize ? kWarpSize : threads);
}

template <typename scalar_t, int kWidth>
void forward(const char* op, const LabelSmoothedCrossEntropyForward& a, const Smoothing& smoothing, cudaStream_t stream) {
  const int64_t n_vec = ceil_div(a.n_cols, kWidth);
  const dim3 grid = grid_of(op, a.n_rows), block = threads_for(n_vec);
  if (a.grad == nullptr) {
    LS_LAUNCH((label_smoothed_cross_entropy_forward_kernel<scalar_t, kWidth, false, false>), grid, block, 0, stream, a,
              smoothing);
  } else if (const int64_t cache_bytes = n_vec * sizeof(Vec<scalar_t, kWidth>); cache_bytes <= kMaxCacheBytes) {
    LS_LAUNCH((label_smoothed_cross_entropy_forward_kernel<scalar_t, kWidth, true, true>), grid, block, cache_bytes, stream, a,
              smoothing);
  } else {
    LS_LAUNCH((label_smoothed_cross_entropy_forward_kernel<scalar_t, kWidth, true, false>), grid, block, 0, stream, a,
              smoothing);
  }
}

}  // namespace

void label_smoothed_cross_entropy_forward(const LabelSmoothedCrossEntropyForward& a, cudaStream_t stream) {
  constexpr const char* kOp = "label_smoothed_cross_entropy_forward";
  if (a.n_rows == 0 || a.n_cols == 0) return;
  // With a single class log q is 0: no other class to smooth over, and a gradient of zero (q - 1, not q - (1 - epsilon)).
  const bool single = a.n_cols == 1;
  const float p_other = single ? 0.0f : a.epsilon / static_cast<float>(a.n_cols - 1);
  const Smoothing smoothing{1.0f - a.epsilon - p_other, p_other, single ? 1.0f : 1.0f - a.epsilon, p_other};
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    // Vectors reach every row of logits and grad alike only if both are misplaced by the same number of bytes.
    const auto misplaced = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVecBytes; };
    if (a.grad == nullptr || misplaced(a.grad) == misplaced(a.logits))
      forward<scalar_t, kVecWidth<scalar_t>>(kOp, a, smoothing, stream);
    else
      forward<scalar_t, 1>(kOp, a, smoothing, stream);
  });
  check_launch(kOp);
}

void label_smoothed_cross_entropy_backward(const LabelSmoothedCrossEntropyBackward& a, cudaStream_t stream) {
  constexpr const char* kOp = "label_smoothed_cross_entropy_backward";
  if (a.n_rows == 0 || a.n_cols == 0) return;
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    constexpr int kWidth = kVecWidth<scalar_t>;  // of any alignment: only one tensor is involved
    LS_LAUNCH((label_smoothed_cross_entropy_backward_kernel<scalar_t, kWidth>), grid_of(kOp, a.n_rows),
              threads_for(ceil_div(a.n_cols, kWidth)), 0, stream, a);
  });
  check_launch(kOp);
}

}  // namespace ls::cuda
