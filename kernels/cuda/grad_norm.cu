// Norm of the gradients, clip coefficient and overflow flag, without a host synchronisation; formula in common/params.h.
//
// grad_norm_squares, one launch per buffer: a block reads one chunk of kNormChunk elements once and writes the sum of their
// squares, fp32. grad_norm_finish, one launch: a block adds up the chunks of all buffers in fp64 and writes three values. No
// atomics, and the order of every sum is fixed by the position in the buffer, whatever its alignment: same input, same bits.
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace ls::cuda {
namespace {

// 64 elements per thread. In 16 KB of 16-byte loads per round (fp32), four rounds in flight, eight blocks on a multiprocessor keep
// several times the bytes in flight that an H200's bandwidth needs.
constexpr int kThreads = 256;
constexpr int kFinishThreads = kMaxWarps * kWarpSize;

// Round k of a chunk is kThreads groups of one 16-byte vector; thread t owns group t of each.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) grad_norm_squares_kernel(const GradNormSquares a, bool vectorized) {
  constexpr int kGroup = kVecWidth<scalar_t>, kRound = kThreads * kGroup;
  LS_SHARED(Sum, shared, kMaxWarps);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kNormChunk;
  const auto* grad = static_cast<const scalar_t*>(a.grad) + begin;
  const int64_t left = a.n_elem - begin;

  float sum = 0.0f;
  if (vectorized && left >= kNormChunk) {
#pragma unroll 4
    for (int first = threadIdx.x * kGroup; first < kNormChunk; first += kRound) {
      float x[kGroup];
      load_floats<kGroup>(grad + first, x);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) sum = fmaf(x[i], x[i], sum);
    }
  } else {
    const int64_t n_elem = left < kNormChunk ? left : kNormChunk;
#pragma unroll 1  // the last chunk of a buffer, or one that starts off a vector
    for (int64_t first = threadIdx.x * kGroup; first < n_elem; first += kRound)
      for (int64_t i = first; i < first + kGroup && i < n_elem; ++i) {
        const float x = static_cast<float>(grad[i]);
        sum = fmaf(x, x, sum);
      }
  }
  sum = block_reduce(Sum{sum}, shared).value;
  if (threadIdx.x == 0) a.squares[blockIdx.x] = sum;
}

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullMask, v, offset);
  return v;
}

__global__ void __launch_bounds__(kFinishThreads) grad_norm_finish_kernel(const GradNormFinish a) {
  LS_SHARED(double, shared, kMaxWarps);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < a.n_squares; i += kFinishThreads) sum += a.squares[i];
  sum = warp_sum(sum);
  if (lane == 0) shared[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  sum = warp_sum(shared[lane]);
  if (lane != 0) return;
  const float scale = a.scale == nullptr ? 1.0f : *a.scale;
  const float norm = static_cast<float>(fabs(static_cast<double>(scale)) * sqrt(sum));
  *a.norm = norm;
  *a.overflow = !isfinite(norm);
  const float clip = a.max_norm / (norm + 1e-6f);
  *a.coefficient = a.max_norm > 0.0f && !(clip > 1.0f) ? scale * clip : scale;
}

}  // namespace

void grad_norm_squares(const GradNormSquares& a, cudaStream_t stream) {
  constexpr const char* kOp = "grad_norm";
  if (a.n_elem == 0) return;
  with_scalar_type(kOp, a.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    const dim3 grid = grid_of(kOp, grad_norm_n_chunks(a.n_elem));
    LS_LAUNCH((grad_norm_squares_kernel<scalar_t>), grid, dim3(kThreads), 0, stream, a, is_aligned(a.grad, kVecBytes));
  });
  check_launch(kOp);
}

void grad_norm_finish(const GradNormFinish& a, cudaStream_t stream) {
  LS_LAUNCH(grad_norm_finish_kernel, dim3(1), dim3(kFinishThreads), 0, stream, a);
  check_launch("grad_norm");
}

}  // namespace ls::cuda
