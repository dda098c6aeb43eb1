// One Adam step over flat buffers, fairseq's formula, element by element in fp32.
//
//   param (n,) and grad (n,), each fp32, fp16 or bf16 on its own; exp_avg, exp_avg_sq (n,) fp32
//   g          = grad * grad_scale                      grad_scale lies on the device: no host synchronisation
//   exp_avg    = beta1 exp_avg + (1 - beta1) g
//   exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g g
//   param      = param - weight_decay_step param, then - step_size exp_avg / (sqrt(exp_avg_sq) + eps)
// param, exp_avg and exp_avg_sq are updated in place; grad becomes zero if asked, else stays.
//
// A thread owns four consecutive elements: in fp32 four 16-byte loads, all issued before the first use, and three stores,
// 112 bytes against some 60 instructions. A buffer may be a slice that starts anywhere: threads count from the last multiple
// of four elements before it, and the first and the last thread do what is theirs of their four one by one.
// Papers: Kingma & Ba, Adam (2015); Loshchilov & Hutter, Decoupled weight decay regularization (2019).

#include "cuda/launch.cuh"
#include "cuda/vector.cuh"

namespace ls::cuda {
namespace {

// One vector per thread and as many threads as vectors: a full multiprocessor has 128 KB of loads in flight (2,048 threads x
// 64 bytes), five times what an H200's bandwidth needs.
constexpr int kThreads = 256;
constexpr int kElements = 4;

struct AdamConstants {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
};

__device__ __forceinline__ void update(const AdamStep& a, const AdamConstants& c, float grad, float& param, float& exp_avg,
                                       float& exp_avg_sq) {
  exp_avg = c.beta1 * exp_avg + c.one_minus_beta1 * grad;
  exp_avg_sq = c.beta2 * exp_avg_sq + c.one_minus_beta2 * grad * grad;
  param -= a.weight_decay_step * param;
  param -= a.step_size * (exp_avg / (sqrtf(exp_avg_sq) + a.eps));
}

// kVectorized: all four buffers are `misplaced` elements past a multiple of four elements. Otherwise misplaced is 0.
template <typename param_t, typename grad_t, bool kVectorized>
__global__ void __launch_bounds__(kThreads) adam_step_kernel(const AdamStep a, const AdamConstants constants, int misplaced) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kElements - misplaced;
  auto* param = static_cast<param_t*>(a.param);
  auto* grad = static_cast<grad_t*>(a.grad);
  const float grad_scale = a.grad_scale != nullptr ? *a.grad_scale : 1.0f;

  if (kVectorized && begin >= 0 && begin + kElements <= a.n_elem) {
    float p[kElements], g[kElements], m[kElements], v[kElements];
    load_floats<kElements>(param + begin, p);
    load_floats<kElements>(grad + begin, g);
    load_floats<kElements>(a.exp_avg + begin, m);
    load_floats<kElements>(a.exp_avg_sq + begin, v);
#pragma unroll
    for (int i = 0; i < kElements; ++i) update(a, constants, g[i] * grad_scale, p[i], m[i], v[i]);
    store_floats<kElements>(param + begin, p);
    store_floats<kElements>(a.exp_avg + begin, m);
    store_floats<kElements>(a.exp_avg_sq + begin, v);
    if (a.zero_grad) {
      const float zero[kElements] = {};
      store_floats<kElements>(grad + begin, zero);
    }
    return;
  }
#pragma unroll 1  // unrolled, this cold loop would cost the vectors above their registers
  for (int64_t i = begin < 0 ? 0 : begin; i < begin + kElements && i < a.n_elem; ++i) {
    float p = static_cast<float>(param[i]), m = a.exp_avg[i], v = a.exp_avg_sq[i];
    update(a, constants, static_cast<float>(grad[i]) * grad_scale, p, m, v);
    param[i] = static_cast<param_t>(p);
    a.exp_avg[i] = m;
    a.exp_avg_sq[i] = v;
    if (a.zero_grad) grad[i] = static_cast<grad_t>(0.0f);
  }
}

// How many elements p lies past a multiple of kElements elements.
template <typename T>
int misplacement(const void* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T) % kElements);
}

}  // namespace

void adam_step(const AdamStep& a, cudaStream_t stream) {
  constexpr const char* kOp = "adam_step";
  if (a.n_elem == 0) return;
  const AdamConstants constants{static_cast<float>(a.beta1), static_cast<float>(1.0 - a.beta1), static_cast<float>(a.beta2),
                                static_cast<float>(1.0 - a.beta2)};
  with_scalar_type(kOp, a.dtype, [&](auto param_type) {
    with_scalar_type(kOp, a.grad_dtype, [&](auto grad_type) {
      using param_t = typename decltype(param_type)::type;
      using grad_t = typename decltype(grad_type)::type;
      const int misplaced = misplacement<param_t>(a.param);
      const bool vectorized = misplaced == misplacement<grad_t>(a.grad) && misplaced == misplacement<float>(a.exp_avg) &&
                              misplaced == misplacement<float>(a.exp_avg_sq);
      const int shift = vectorized ? misplaced : 0;
      const dim3 grid = grid_of(kOp, ceil_div(a.n_elem + shift, kThreads * kElements));
      if (vectorized)
        LS_LAUNCH((adam_step_kernel<param_t, grad_t, true>), grid, dim3(kThreads), 0, stream, a, constants, shift);
      else
        LS_LAUNCH((adam_step_kernel<param_t, grad_t, false>), grid, dim3(kThreads), 0, stream, a, constants, shift);
    });
  });
  check_launch(kOp);
}

}  // namespace ls::cuda
