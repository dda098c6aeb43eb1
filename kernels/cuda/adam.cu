// One Adam step over flat buffers, fairseq's formula, element by element in fp32.
//
//   param (n,) and grad (n,), each fp32 or one 16-bit type; exp_avg, exp_avg_sq (n,) fp32
//   g          = grad * grad_scale                      grad_scale lies on the device: no host synchronisation
//   exp_avg    = beta1 exp_avg + (1 - beta1) g
//   exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g g
//   param      = param - weight_decay_step param, then - step_size exp_avg / (sqrt(exp_avg_sq) + eps)
// param, exp_avg and exp_avg_sq are updated in place; grad becomes zero if asked, else stays. Where *overflow is set, that is all
// that happens. param may have a 16-bit copy, or be the upper half of an fp32 master (common/params.h).
//
// A thread owns four consecutive elements: in fp32 four 16-byte loads, all issued before the first use, and three stores,
// 112 bytes against some 60 instructions. A buffer may be a slice that starts anywhere: threads count from the last multiple
// of four elements before it, and the first and the last thread do what is theirs of their four one by one.
// Papers: Kingma & Ba, Adam (2015); Loshchilov & Hutter, Decoupled weight decay regularization (2019).

#include "cuda/launch.cuh"
#include "cuda/vector.cuh"

namespace ls::cuda {
namespace {

// One vector per thread and as many threads as vectors. At 37 to 40 registers 1,536 threads are resident on a multiprocessor: 96 KB
// of loads in flight in fp32 (64 bytes each), some four times what an H200's bandwidth needs.
constexpr int kThreads = 256;
constexpr int kElements = 4;

struct AdamConstants {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
};

// Every rounding is written out, so that all instances and both paths below give the same bits.
__device__ __forceinline__ void update(const AdamStep& a, const AdamConstants& c, float grad, float& param, float& exp_avg,
                                       float& exp_avg_sq) {
  exp_avg = fmaf(c.beta1, exp_avg, c.one_minus_beta1 * grad);
  exp_avg_sq = fmaf(c.beta2, exp_avg_sq, c.one_minus_beta2 * grad * grad);
  param = fmaf(-a.weight_decay_step, param, param);
  param = fmaf(-a.step_size, exp_avg / (sqrtf(exp_avg_sq) + a.eps), param);
}

// Where the fp32 value of a parameter is kept: kWidth elements from i on. half_t: the 16-bit type there, or float.
template <typename scalar_t>
struct Plain {
  using half_t = scalar_t;

  template <int kWidth>
  static __device__ __forceinline__ void load(const AdamStep& a, int64_t i, float* value) {
    load_floats<kWidth>(static_cast<const scalar_t*>(a.param) + i, value);
  }
  template <int kWidth>
  static __device__ __forceinline__ void store(const AdamStep& a, int64_t i, const float* value) {
    store_floats<kWidth>(static_cast<scalar_t*>(a.param) + i, value);
  }
};

template <typename scalar_t>
struct WithCopy : Plain<float> {
  using half_t = scalar_t;

  template <int kWidth>
  static __device__ __forceinline__ void store(const AdamStep& a, int64_t i, const float* value) {
    Plain<float>::store<kWidth>(a, i, value);
    store_floats<kWidth>(static_cast<scalar_t*>(a.param_copy) + i, value);
  }
};

struct Split {
  using half_t = c10::BFloat16;

  template <int kWidth>
  static __device__ __forceinline__ void load(const AdamStep& a, int64_t i, float* value) {
    const auto high = load_vec<kWidth>(static_cast<const uint16_t*>(a.param) + i);
    const auto low = load_vec<kWidth>(a.param_low + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      value[k] = __uint_as_float((static_cast<unsigned>(high.elem[k]) << 16) + static_cast<unsigned>(low.elem[k]));
  }
  template <int kWidth>
  static __device__ __forceinline__ void store(const AdamStep& a, int64_t i, const float* value) {
    Vec<uint16_t, kWidth> high;
    Vec<int16_t, kWidth> low;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const bool nan = value[k] != value[k];
      const unsigned bits = __float_as_uint(value[k]);
      high.elem[k] = nan ? 0x7FC0 : static_cast<uint16_t>((bits + 0x8000u) >> 16);
      low.elem[k] = nan ? 0 : static_cast<int16_t>(bits & 0xFFFFu);
    }
    store_vec(static_cast<uint16_t*>(a.param) + i, high);
    store_vec(a.param_low + i, low);
  }
};

// kWidth elements from i on, all loads before the first use: also that of the flag, which is hardly ever set.
template <int kWidth, typename Storage, typename grad_t>
__device__ __forceinline__ void step(const AdamStep& a, const AdamConstants& constants, int64_t i) {
  auto* grad = static_cast<grad_t*>(a.grad) + i;
  float p[kWidth], g[kWidth], m[kWidth], v[kWidth];
  Storage::template load<kWidth>(a, i, p);
  load_floats<kWidth>(grad, g);
  load_floats<kWidth>(a.exp_avg + i, m);
  load_floats<kWidth>(a.exp_avg_sq + i, v);
  const float grad_scale = a.grad_scale != nullptr ? *a.grad_scale : 1.0f;
  const bool overflow = a.overflow != nullptr && *a.overflow;
  if (!overflow) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) update(a, constants, g[k] * grad_scale, p[k], m[k], v[k]);
    Storage::template store<kWidth>(a, i, p);
    store_floats<kWidth>(a.exp_avg + i, m);
    store_floats<kWidth>(a.exp_avg_sq + i, v);
  }
  if (a.zero_grad) store_vec(grad, zero_vec<grad_t, kWidth>());
}

// vectorized: all buffers are `misplaced` elements past a multiple of four elements. Otherwise misplaced is 0.
template <typename Storage, typename grad_t>
__global__ void __launch_bounds__(kThreads)
    adam_step_kernel(const AdamStep a, const AdamConstants constants, bool vectorized, int misplaced) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kElements - misplaced;
  if (vectorized && begin >= 0 && begin + kElements <= a.n_elem) {
    step<kElements, Storage, grad_t>(a, constants, begin);
    return;
  }
#pragma unroll 1  // unrolled, this cold loop would cost the vectors above their registers
  for (int64_t i = begin < 0 ? 0 : begin; i < begin + kElements && i < a.n_elem; ++i) step<1, Storage, grad_t>(a, constants, i);
}

// How many elements of n_bytes p lies past a multiple of kElements elements.
int misplacement(const void* p, int n_bytes) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) / n_bytes % kElements); }

template <typename Storage>
void launch(const char* op, const AdamStep& a, cudaStream_t stream) {
  const AdamConstants constants{static_cast<float>(a.beta1), static_cast<float>(1.0 - a.beta1), static_cast<float>(a.beta2),
                                static_cast<float>(1.0 - a.beta2)};
  const auto n_bytes = [](DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; };
  const int misplaced = misplacement(a.param, n_bytes(a.dtype));
  const bool vectorized = misplaced == misplacement(a.grad, n_bytes(a.grad_dtype)) && misplaced == misplacement(a.exp_avg, 4) &&
                          misplaced == misplacement(a.exp_avg_sq, 4) &&
                          (a.param_copy == nullptr || misplaced == misplacement(a.param_copy, 2)) &&
                          (a.param_low == nullptr || misplaced == misplacement(a.param_low, 2));
  const int shift = vectorized ? misplaced : 0;
  const dim3 grid = grid_of(op, ceil_div(a.n_elem + shift, kThreads * kElements));
  with_scalar_type(op, a.grad_dtype, [&](auto grad_type) {
    using grad_t = typename decltype(grad_type)::type;
    using half_t = typename Storage::half_t;
    if constexpr (std::is_same_v<half_t, float> || std::is_same_v<grad_t, float> || std::is_same_v<grad_t, half_t>)
      LS_LAUNCH((adam_step_kernel<Storage, grad_t>), grid, dim3(kThreads), 0, stream, a, constants, vectorized, shift);
  });
  check_launch(op);
}

}  // namespace

void adam_step(const AdamStep& a, cudaStream_t stream) {
  constexpr const char* kOp = "adam_step";
  if (a.n_elem == 0) return;
  if (a.param_low != nullptr) return launch<Split>(kOp, a, stream);
  if (a.param_copy != nullptr && a.copy_dtype == DType::kFloat16) return launch<WithCopy<c10::Half>>(kOp, a, stream);
  if (a.param_copy != nullptr) return launch<WithCopy<c10::BFloat16>>(kOp, a, stream);
  with_scalar_type(kOp, a.dtype, [&](auto type) { launch<Plain<typename decltype(type)::type>>(kOp, a, stream); });
}

}  // namespace ls::cuda
