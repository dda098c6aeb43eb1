#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm_forward(const Tensor& x, const OptionalTensor& any_bias,
                                                                       const OptionalTensor& residual,
                                                                       const OptionalTensor& any_weight,
                                                                       const OptionalTensor& any_norm_bias, double p,
                                                                       const OptionalTensor& seed, int64_t offset, double eps) {
  const char* op = "residual_layer_norm";
  const Matrix m = as_matrix(op, "x", x);
  const OptionalTensor bias = row_vector(op, "bias", any_bias, x);
  if (residual) check_like(op, "residual", *residual, "x", x);
  const OptionalTensor weight = row_vector(op, "weight", any_weight, x);
  const OptionalTensor norm_bias = row_vector(op, "norm_bias", any_norm_bias, x);
  ResidualLayerNormForward a{};
  a.dropout = make_dropout(op, p, seed, offset, x);
  a.norm.dtype = dtype_of(op, "x", x);
  a.norm.n_rows = m.n_rows, a.norm.n_cols = m.n_cols, a.norm.eps = static_cast<float>(eps);
  Tensor sum = new_like(x), y = new_like(x);
  Tensor mean = new_empty(x, {m.n_rows}, ScalarType::Float), rstd = new_empty(x, {m.n_rows}, ScalarType::Float);
  a.x = in(x, "x"), a.bias = in(bias, "bias"), a.residual = in(residual, "residual");
  a.sum = out(sum, "sum");
  a.norm.x = a.sum, a.norm.weight = in(weight, "weight"), a.norm.bias = in(norm_bias, "norm_bias");
  a.norm.y = out(y, "y"), a.norm.mean = out<float>(mean, "mean"), a.norm.rstd = out<float>(rstd, "rstd");
  if (m.n_rows > 0) LS_RUN(residual_layer_norm_forward, a, x);
  return {sum, y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> residual_layer_norm_backward(
    const OptionalTensor& grad_sum, const Tensor& grad_y, const Tensor& sum, const OptionalTensor& any_weight,
    const Tensor& mean, const Tensor& rstd, double p, const OptionalTensor& seed, int64_t offset, bool needs_x_grad,
    bool needs_residual_grad, bool needs_bias_grad, bool needs_weight_grad, bool needs_norm_bias_grad) {
  const char* op = "residual_layer_norm_backward";
  const Matrix m = as_matrix(op, "sum", sum);
  check_like(op, "grad_y", grad_y, "sum", sum);
  if (grad_sum) check_like(op, "grad_sum", *grad_sum, "sum", sum);
  const OptionalTensor weight = row_vector(op, "weight", any_weight, sum);
  check_row_statistic(op, "mean", mean, m.n_rows, sum);
  check_row_statistic(op, "rstd", rstd, m.n_rows, sum);
  ResidualLayerNormBackward a{};
  a.dropout = make_dropout(op, p, seed, offset, sum);
  a.norm.dtype = dtype_of(op, "sum", sum);
  a.norm.n_rows = m.n_rows, a.norm.n_cols = m.n_cols;
  // Without dropout grad_x is grad_residual, and is not written a second time. The bias gradient brings along what it is the sum of.
  const bool drops = a.dropout.threshold != 0, needs_dropped = needs_x_grad || needs_bias_grad;
  const bool writes_residual = needs_residual_grad || (needs_dropped && !drops), writes_x = needs_dropped && drops;
  const bool needs_sums = needs_bias_grad || needs_weight_grad || needs_norm_bias_grad;
  const auto matrix = [&](bool needed) { return needed ? new_like(sum) : new_empty(sum, {0}, sum.scalar_type()); };
  const auto vector = [&](bool needed) { return new_empty(sum, {needed ? m.n_cols : 0}, sum.scalar_type()); };
  Tensor grad_residual = matrix(writes_residual), grad_x = matrix(writes_x);
  Tensor grad_bias = vector(needs_bias_grad), grad_weight = vector(needs_weight_grad),
         grad_norm_bias = vector(needs_norm_bias_grad);
  a.norm.n_partials = needs_sums ? column_sum_n_partials(m.n_rows) : 0;
  Tensor partials = new_empty(sum, {3, a.norm.n_partials, m.n_cols}, ScalarType::Float);
  a.grad_sum = in(grad_sum, "grad_sum");
  a.norm.grad_y = in(grad_y, "grad_y"), a.norm.x = in(sum, "sum"), a.norm.weight = in(weight, "weight");
  a.norm.mean = in<float>(mean, "mean"), a.norm.rstd = in<float>(rstd, "rstd");
  if (writes_residual) a.norm.grad_x = out(grad_residual, "grad_residual");
  if (writes_x) a.grad_x = out(grad_x, "grad_x");
  if (needs_bias_grad) a.grad_bias = out(grad_bias, "grad_bias");
  if (needs_weight_grad) a.norm.grad_weight = out(grad_weight, "grad_weight");
  if (needs_norm_bias_grad) a.norm.grad_bias = out(grad_norm_bias, "grad_norm_bias");
  if (needs_sums) a.norm.partials = out<float>(partials, "partials");
  // No rows still give parameter gradients, of zeros.
  if (m.n_cols > 0 && (m.n_rows > 0 || needs_sums)) LS_RUN(residual_layer_norm_backward, a, sum);
  return {grad_x, grad_residual, grad_bias, grad_weight, grad_norm_bias};
}

}  // namespace ls
