#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {

void adam_step(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const OptionalTensor& grad_scale, double lr, double beta1, double beta2, double eps, double weight_decay,
               int64_t step, bool zero_grad) {
  const char* op = "adam_step";
  check_contiguous(op, "param", param);
  for (const auto& [name, buffer] :
       {std::pair("grad", &grad), std::pair("exp_avg", &exp_avg), std::pair("exp_avg_sq", &exp_avg_sq)}) {
    check_same_shape(op, name, *buffer, "param", param);
    check_device(op, name, *buffer, param);
    check_contiguous(op, name, *buffer);
  }
  check_dtype(op, "exp_avg", exp_avg, ScalarType::Float);
  check_dtype(op, "exp_avg_sq", exp_avg_sq, ScalarType::Float);
  LS_CHECK(step >= 1, op, ": step counts from 1, got ", step);
  LS_CHECK(beta1 >= 0.0 && beta1 < 1.0 && beta2 >= 0.0 && beta2 < 1.0, op, ": betas must lie in [0, 1), got ", beta1, " and ",
           beta2);
  AdamStep a{};
  a.dtype = dtype_of(op, "param", param), a.grad_dtype = dtype_of(op, "grad", grad);
  if (grad_scale) {
    LS_CHECK(grad_scale->numel() == 1, op, ": grad_scale must have one element, got shape ", shape_of(*grad_scale));
    check_dtype(op, "grad_scale", *grad_scale, ScalarType::Float);
    check_device(op, "grad_scale", *grad_scale, param);
    a.grad_scale = in<float>(*grad_scale, "grad_scale");
  }
  a.n_elem = param.numel();
  const double t = static_cast<double>(step);
  a.step_size = static_cast<float>(lr * std::sqrt(1.0 - std::pow(beta2, t)) / (1.0 - std::pow(beta1, t)));
  a.beta1 = beta1, a.beta2 = beta2;
  a.eps = static_cast<float>(eps), a.weight_decay_step = static_cast<float>(lr * weight_decay);
  a.zero_grad = zero_grad;
  a.param = out(param, "param"), a.grad = out(grad, "grad");
  a.exp_avg = out<float>(exp_avg, "exp_avg"), a.exp_avg_sq = out<float>(exp_avg_sq, "exp_avg_sq");
  if (a.n_elem > 0) LS_RUN(adam_step, a, param);
}

}  // namespace ls
