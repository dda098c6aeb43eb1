#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& x, const OptionalTensor& any_weight,
                                                      const OptionalTensor& any_bias, double eps) {
  const char* op = "layer_norm";
  const Matrix m = as_matrix(op, "x", x);
  const OptionalTensor weight = row_vector(op, "weight", any_weight, x);
  const OptionalTensor bias = row_vector(op, "bias", any_bias, x);
  LayerNormForward a{};
  a.dtype = dtype_of(op, "x", x);
  Tensor y = new_like(x);
  Tensor mean = new_empty(x, {m.n_rows}, ScalarType::Float), rstd = new_empty(x, {m.n_rows}, ScalarType::Float);
  a.n_rows = m.n_rows, a.n_cols = m.n_cols, a.eps = static_cast<float>(eps);
  a.x = in(x, "x"), a.weight = in(weight, "weight"), a.bias = in(bias, "bias");
  a.y = out(y, "y"), a.mean = out<float>(mean, "mean"), a.rstd = out<float>(rstd, "rstd");
  if (m.n_rows > 0) LS_RUN(layer_norm_forward, a, x);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_y, const Tensor& x, const OptionalTensor& any_weight,
                                                       const Tensor& mean, const Tensor& rstd, bool needs_weight_grad,
                                                       bool needs_bias_grad) {
  const char* op = "layer_norm_backward";
  const Matrix m = as_matrix(op, "x", x);
  check_like(op, "grad_y", grad_y, "x", x);
  const OptionalTensor weight = row_vector(op, "weight", any_weight, x);
  check_row_statistic(op, "mean", mean, m.n_rows, x);
  check_row_statistic(op, "rstd", rstd, m.n_rows, x);
  LayerNormBackward a{};
  a.dtype = dtype_of(op, "x", x);
  a.n_rows = m.n_rows, a.n_cols = m.n_cols;
  Tensor grad_x = new_like(x);
  Tensor grad_weight = new_empty(x, {needs_weight_grad ? m.n_cols : 0}, x.scalar_type());
  Tensor grad_bias = new_empty(x, {needs_bias_grad ? m.n_cols : 0}, x.scalar_type());
  a.n_partials = needs_weight_grad || needs_bias_grad ? column_sum_n_partials(m.n_rows) : 0;
  Tensor partials = new_empty(x, {2, a.n_partials, m.n_cols}, ScalarType::Float);
  a.grad_y = in(grad_y, "grad_y"), a.x = in(x, "x"), a.weight = in(weight, "weight");
  a.mean = in<float>(mean, "mean"), a.rstd = in<float>(rstd, "rstd");
  a.grad_x = out(grad_x, "grad_x");
  if (needs_weight_grad) a.grad_weight = out(grad_weight, "grad_weight");
  if (needs_bias_grad) a.grad_bias = out(grad_bias, "grad_bias");
  if (needs_weight_grad || needs_bias_grad) a.partials = out<float>(partials, "partials");
  // No rows still give parameter gradients, of zeros.
  if (m.n_cols > 0 && (m.n_rows > 0 || needs_weight_grad || needs_bias_grad)) LS_RUN(layer_norm_backward, a, x);
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace ls
