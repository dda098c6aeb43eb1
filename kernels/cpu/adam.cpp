// fairseq's Adam over a contiguous buffer; formula in common/params.h.
//
// Memory: reads param, grad and both moments, writes param, both moments and, when asked, zeros: 28 to 32 bytes per element
// in fp32, where stock's sequence of operators moves about 80. Elements are independent; threads own ranges.
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

void adam_step(const AdamStep& a) {
  const float beta1 = static_cast<float>(a.beta1), one_minus_beta1 = static_cast<float>(1.0 - a.beta1);
  const float beta2 = static_cast<float>(a.beta2), one_minus_beta2 = static_cast<float>(1.0 - a.beta2);
  const float grad_scale = a.grad_scale == nullptr ? 1.0f : *a.grad_scale;
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    dispatch_dtype(a.grad_dtype, [&](auto grad_scalar) {
      using grad_t = decltype(grad_scalar);
      auto* param = static_cast<scalar_t*>(a.param);
      auto* grad = static_cast<grad_t*>(a.grad);
      parallel_for(0, a.n_elem, 16384, [&](int64_t begin, int64_t end) {
        for_each_vector(end - begin, [&](int64_t offset, auto n) {
          const int64_t i = begin + offset;
          const vfloat g = load_n(grad + i, n) * grad_scale;
          const vfloat m = load_n(a.exp_avg + i, n) * beta1 + g * one_minus_beta1;
          const vfloat v = load_n(a.exp_avg_sq + i, n) * beta2 + g * g * one_minus_beta2;
          vfloat p = load_n(param + i, n);
          p = p - p * a.weight_decay_step;
          p = p - m / (vsqrt(v) + a.eps) * a.step_size;
          store_n(a.exp_avg + i, m, n);
          store_n(a.exp_avg_sq + i, v, n);
          store_n(param + i, p, n);
          if (a.zero_grad) store_n(grad + i, vfloat{}, n);
        });
      });
    });
  });
}

}  // namespace ls::cpu::LS_ISA
