// fairseq's Adam over a contiguous buffer; formula in common/params.h.
//
// Memory: reads param, grad and both moments, writes param, both moments and, when asked, a 16-bit copy and zeros: 28 to 34 bytes
// per element with an fp32 param, where stock's sequence of operators moves about 80. Elements are independent; threads own blocks.
//
// Ordinary stores: all lines but those of a copy have just been read. Non-temporal ones for the copy alone save 3 % of 10 million
// parameters' time and cost up to 6 % where the buffers fit the caches; for everything they double it. Prefetching the next block
// costs 8 % (EPYC, two threads).
#include <type_traits>

#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

namespace {

// Where the fp32 value of a parameter is kept. half_t: the 16-bit type there, or float.
template <typename scalar_t>
struct Plain {
  using half_t = scalar_t;
  scalar_t* param;

  template <typename N>
  vfloat load(int64_t i, N n) const {
    return load_n(param + i, n);
  }
  template <typename N>
  void store(int64_t i, vfloat value, N n) const {
    store_n(param + i, value, n);
  }
};

template <typename scalar_t>
struct WithCopy {
  using half_t = scalar_t;
  float* param;
  scalar_t* copy;

  template <typename N>
  vfloat load(int64_t i, N n) const {
    return load_n(param + i, n);
  }
  template <typename N>
  void store(int64_t i, vfloat value, N n) const {
    store_n(param + i, value, n);
    store_n(copy + i, value, n);
  }
};

// (param << 16) + param_low, see common/params.h.
struct Split {
  using half_t = bfloat16;
  bfloat16* param;
  int16_t* low;

  static vfloat join(vhalf high, vhalf low) {
    const vint extended = reinterpret_cast<vint>(widen(low) << 16) >> 16;
    return reinterpret_cast<vfloat>((widen(high) << 16) + reinterpret_cast<vuint>(extended));
  }

  vfloat load(int64_t i, std::integral_constant<int, kLanes>) const {
    return join(load_bits<vhalf>(param + i), load_bits<vhalf>(low + i));
  }
  vfloat load(int64_t i, int64_t n) const {
    vhalf h{}, l{};
    for (int64_t k = 0; k < n; ++k) h[k] = param[i + k].bits, l[k] = static_cast<uint16_t>(low[i + k]);
    return join(h, l);
  }

  template <typename N>
  void store(int64_t i, vfloat value, N n) const {
    const vuint nan = reinterpret_cast<vuint>(value != value);
    const vuint bits = reinterpret_cast<vuint>(value) & ~nan;
    const vhalf h = __builtin_convertvector(((bits + 0x8000u) >> 16) | (nan & 0x7FC0u), vhalf);
    const vhalf l = __builtin_convertvector(bits & 0xFFFFu, vhalf);
    if constexpr (std::is_same_v<N, int64_t>) {
      for (int64_t k = 0; k < n; ++k) param[i + k].bits = h[k], low[i + k] = static_cast<int16_t>(l[k]);
    } else {
      std::memcpy(param + i, &h, sizeof(h));
      std::memcpy(low + i, &l, sizeof(l));
    }
  }
};

constexpr int64_t kBlock = 4096;  // a multiple of any vector: aligned buffers are read at aligned places by all threads

template <typename Storage, typename grad_t>
void update(const AdamStep& a, const Storage& param, grad_t* grad) {
  const float beta1 = static_cast<float>(a.beta1), one_minus_beta1 = static_cast<float>(1.0 - a.beta1);
  const float beta2 = static_cast<float>(a.beta2), one_minus_beta2 = static_cast<float>(1.0 - a.beta2);
  const float grad_scale = a.grad_scale == nullptr ? 1.0f : *a.grad_scale;
  parallel_for(0, (a.n_elem + kBlock - 1) / kBlock, 4, [&](int64_t block_begin, int64_t block_end) {
    const int64_t begin = block_begin * kBlock, end = block_end * kBlock < a.n_elem ? block_end * kBlock : a.n_elem;
    for_each_vector(end - begin, [&](int64_t offset, auto n) {
      const int64_t i = begin + offset;
      const vfloat g = load_n(grad + i, n) * grad_scale;
      const vfloat m = load_n(a.exp_avg + i, n) * beta1 + g * one_minus_beta1;
      const vfloat v = load_n(a.exp_avg_sq + i, n) * beta2 + g * g * one_minus_beta2;
      vfloat p = param.load(i, n);
      p = p - p * a.weight_decay_step;
      p = p - m / (vsqrt(v) + a.eps) * a.step_size;
      store_n(a.exp_avg + i, m, n);
      store_n(a.exp_avg_sq + i, v, n);
      param.store(i, p, n);
      if (a.zero_grad) store_n(grad + i, vfloat{}, n);
    });
  });
}

template <typename Storage>
void update(const AdamStep& a, const Storage& param) {
  dispatch_dtype(a.grad_dtype, [&](auto grad_scalar) {
    using grad_t = decltype(grad_scalar);
    using half_t = typename Storage::half_t;
    if constexpr (std::is_same_v<half_t, float> || std::is_same_v<grad_t, float> || std::is_same_v<grad_t, half_t>)
      update(a, param, static_cast<grad_t*>(a.grad));
  });
}

}  // namespace

void adam_step(const AdamStep& a) {
  if (a.overflow != nullptr && *a.overflow) {
    const int64_t n_bytes = a.n_elem * (a.grad_dtype == DType::kFloat32 ? 4 : 2);
    if (a.zero_grad) std::memset(a.grad, 0, n_bytes);
    return;
  }
  if (a.param_low != nullptr) return update(a, Split{static_cast<bfloat16*>(a.param), a.param_low});
  if (a.param_copy != nullptr) {
    auto* param = static_cast<float*>(a.param);
    if (a.copy_dtype == DType::kFloat16) return update(a, WithCopy<float16>{param, static_cast<float16*>(a.param_copy)});
    return update(a, WithCopy<bfloat16>{param, static_cast<bfloat16*>(a.param_copy)});
  }
  dispatch_dtype(a.dtype, [&](auto scalar) { update(a, Plain<decltype(scalar)>{static_cast<decltype(scalar)*>(a.param)}); });
}

}  // namespace ls::cpu::LS_ISA
