#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {

void adam_step(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const OptionalTensor& param_copy, const OptionalTensor& param_low, const OptionalTensor& grad_scale,
               const OptionalTensor& overflow, double lr, double beta1, double beta2, double eps, double weight_decay,
               int64_t step, bool zero_grad) {
  const char* op = "adam_step";
  check_contiguous(op, "param", param);
  const auto check_buffer = [&](const char* name, const Tensor& buffer) {
    check_same_shape(op, name, buffer, "param", param);
    check_device(op, name, buffer, param);
    check_contiguous(op, name, buffer);
  };
  check_buffer("grad", grad);
  check_buffer("exp_avg", exp_avg);
  check_buffer("exp_avg_sq", exp_avg_sq);
  check_dtype(op, "exp_avg", exp_avg, ScalarType::Float);
  check_dtype(op, "exp_avg_sq", exp_avg_sq, ScalarType::Float);
  if (param_copy) {
    check_buffer("param_copy", *param_copy);
    check_dtype(op, "param, with a param_copy,", param, ScalarType::Float);
  }
  if (param_low) {
    check_buffer("param_low", *param_low);
    check_dtype(op, "param, with a param_low,", param, ScalarType::BFloat16);
    check_dtype(op, "param_low", *param_low, ScalarType::Short);
  }
  check_device_scalar(op, "grad_scale", grad_scale, ScalarType::Float, param);
  check_device_scalar(op, "overflow", overflow, ScalarType::Bool, param);
  LS_CHECK(step >= 1, op, ": step counts from 1, got ", step);
  LS_CHECK(beta1 >= 0.0 && beta1 < 1.0 && beta2 >= 0.0 && beta2 < 1.0, op, ": betas must lie in [0, 1), got ", beta1, " and ",
           beta2);

  AdamStep a{};
  a.dtype = dtype_of(op, "param", param), a.grad_dtype = dtype_of(op, "grad", grad);
  a.copy_dtype = param_copy ? dtype_of(op, "param_copy", *param_copy) : DType::kFloat32;
  LS_CHECK(!param_copy || a.copy_dtype != DType::kFloat32, op, ": param_copy must be Half or BFloat16, got Float");
  const DType half = a.dtype != DType::kFloat32 ? a.dtype : a.copy_dtype;
  LS_CHECK(half == DType::kFloat32 || a.grad_dtype == DType::kFloat32 || a.grad_dtype == half, op,
           ": grad must be Float or of the 16-bit type of param or param_copy, got ",
           torch::headeronly::toString(grad.scalar_type()));
  a.n_elem = param.numel();
  const double t = static_cast<double>(step);
  a.step_size = static_cast<float>(lr * std::sqrt(1.0 - std::pow(beta2, t)) / (1.0 - std::pow(beta1, t)));
  a.beta1 = beta1, a.beta2 = beta2;
  a.eps = static_cast<float>(eps), a.weight_decay_step = static_cast<float>(lr * weight_decay);
  a.zero_grad = zero_grad;
  a.grad_scale = static_cast<const float*>(in(grad_scale, "grad_scale"));
  a.overflow = static_cast<const bool*>(in(overflow, "overflow"));
  a.param = out(param, "param"), a.grad = out(grad, "grad");
  a.exp_avg = out<float>(exp_avg, "exp_avg"), a.exp_avg_sq = out<float>(exp_avg_sq, "exp_avg_sq");
  a.param_copy = out(param_copy, "param_copy");
  a.param_low = static_cast<int16_t*>(out(param_low, "param_low"));
  if (a.n_elem > 0) LS_RUN(adam_step, a, param);
}

}  // namespace ls
