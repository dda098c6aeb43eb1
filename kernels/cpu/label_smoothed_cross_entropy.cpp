// Label-smoothed cross entropy: loss, nll and, when wanted, the gradient q - p; formulas in common/params.h.
//
// Memory: a row of logits is read from memory once and its gradient written once (8 bytes per fp32 logit): the second and
// third pass over a row find it in the cache (a row of 32,000 fp32 logits is 128 KB). exp is computed once per logit. A
// thread owns whole rows; arithmetic is fp32.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {
namespace {

// Row sums are folded into double every so many vectors: with V in the tens of thousands a float would lose digits.
constexpr int64_t kFold = 256 * kLanes;

}  // namespace

void label_smoothed_cross_entropy_forward(const LabelSmoothedCrossEntropyForward& a) {
  const int64_t n_classes = a.n_cols;
  const float epsilon_other = n_classes > 1 ? a.epsilon / static_cast<float>(n_classes - 1) : 0.0f;
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    parallel_for(0, a.n_rows, rows_per_thread(n_classes * 4), [&](int64_t row_begin, int64_t row_end) {
      // exp(x - max) of one row. fp32 gradients hold it themselves; half types would round it, so they borrow a buffer.
      std::unique_ptr<float[]> buffer;
      if (!std::is_same<scalar_t, float>::value && a.grad != nullptr) buffer.reset(new float[n_classes]);
      for (int64_t row = row_begin; row < row_end; ++row) {
        const auto* x = static_cast<const scalar_t*>(a.logits) + row * n_classes;
        auto* grad = a.grad == nullptr ? nullptr : static_cast<scalar_t*>(a.grad) + row * n_classes;
        const int64_t target = a.target[row];
        if (target == a.ignore_index) {
          a.loss[row] = a.nll[row] = 0.0f;
          if (grad != nullptr) std::fill(grad, grad + n_classes, scalar_t{});
          continue;
        }
        const float x_target = to_float(x[target]);
        vfloat running = broadcast(-std::numeric_limits<float>::infinity());
        for_each_vector(n_classes, [&](int64_t i, auto n) {
          const vfloat v = load_n(x + i, n, x_target);
          running = v > running || v != v ? v : running;  // a NaN stays
        });
        float max = reduce_max(running);
        float* e = nullptr;
        if constexpr (std::is_same<scalar_t, float>::value) {
          e = grad;
        } else {
          e = buffer.get();
        }
        // One pass for both sums: of exp(x - max) and, for the smoothed part, of x - max. `e` may be x itself.
        double sum_exp = 0.0, sum_shifted = 0.0;
        for (int64_t begin = 0; begin < n_classes; begin += kFold) {
          vfloat block_exp{}, block_shifted{};
          for_each_vector(std::min(kFold, n_classes - begin), [&](int64_t i, auto n) {
            const vfloat shifted = load_n(x + begin + i, n, max) - max;  // 0 in a tail's idle lanes
            const vfloat v = exp_nonpositive(load_n(x + begin + i, n, -std::numeric_limits<float>::infinity()) - max);
            if (e != nullptr) store_n(e + begin + i, v, n);
            block_exp += v;
            block_shifted += shifted;
          });
          sum_exp += reduce_add(block_exp);
          sum_shifted += reduce_add(block_shifted);
        }
        const double log_sum = std::log(sum_exp);
        const double nll = log_sum - (static_cast<double>(x_target) - max);
        double loss = (1.0 - a.epsilon) * nll;
        if (epsilon_other > 0.0f) loss += epsilon_other * (n_classes * log_sum - sum_shifted - nll);
        a.nll[row] = static_cast<float>(nll);
        a.loss[row] = static_cast<float>(loss);
        if (grad == nullptr) continue;
        const float inverse = static_cast<float>(a.grad_scale / sum_exp), other = epsilon_other * a.grad_scale;
        const float q_target = e[target] * inverse;
        for_each_vector(n_classes, [&](int64_t i, auto n) { store_n(grad + i, load_n(e + i, n) * inverse - other, n); });
        // With a single class p sums to 1 - epsilon alone, the gradient is (1 - epsilon) (q - 1) = 0.
        from_float(n_classes > 1 ? q_target - (1.0f - a.epsilon) * a.grad_scale : 0.0f, grad + target);
      }
    });
  });
}

void label_smoothed_cross_entropy_backward(const LabelSmoothedCrossEntropyBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    parallel_for(0, a.n_rows, rows_per_thread(a.n_cols), [&](int64_t row_begin, int64_t row_end) {
      for (int64_t row = row_begin; row < row_end; ++row) {
        const float factor = a.grad_loss[row * a.grad_loss_stride] * a.factor;
        if (factor == 1.0f) continue;
        auto* grad = static_cast<scalar_t*>(a.grad) + row * a.n_cols;
        for_each_vector(a.n_cols, [&](int64_t i, auto n) {
          const vfloat g = load_n(grad + i, n);
          store_n(grad + i, g == 0.0f ? g : g * factor, n);  // an ignored row stays 0 whatever arrives from above
        });
      }
    });
  });
}

}  // namespace ls::cpu::LS_ISA
