#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {

Tensor bias_dropout_residual_forward(const Tensor& x, const OptionalTensor& any_bias, const OptionalTensor& residual, double p,
                                     const OptionalTensor& seed, int64_t offset) {
  const char* op = "bias_dropout_residual";
  const Matrix m = as_matrix(op, "x", x);
  const OptionalTensor bias = row_vector(op, "bias", any_bias, x);
  if (residual) check_like(op, "residual", *residual, "x", x);
  BiasDropoutResidualForward a{};
  a.dtype = dtype_of(op, "x", x);
  a.dropout = make_dropout(op, p, seed, offset, x);
  Tensor y = new_like(x);
  a.n_rows = m.n_rows, a.n_cols = m.n_cols;
  a.x = in(x, "x"), a.bias = in(bias, "bias"), a.residual = in(residual, "residual");
  a.y = out(y, "y");
  if (m.n_rows > 0) LS_RUN(bias_dropout_residual_forward, a, x);
  return y;
}

std::tuple<Tensor, Tensor> bias_dropout_residual_backward(const Tensor& grad_y, double p, const OptionalTensor& seed,
                                                          int64_t offset, bool needs_x_grad, bool needs_bias_grad) {
  const char* op = "bias_dropout_residual_backward";
  const Matrix m = as_matrix(op, "grad_y", grad_y);
  const ScalarType dtype = grad_y.scalar_type();
  BiasDropoutResidualBackward a{};
  a.dtype = dtype_of(op, "grad_y", grad_y);
  a.dropout = make_dropout(op, p, seed, offset, grad_y);
  a.n_rows = m.n_rows, a.n_cols = m.n_cols;
  Tensor grad_x = needs_x_grad ? new_like(grad_y) : new_empty(grad_y, {0}, dtype);
  Tensor grad_bias = new_empty(grad_y, {needs_bias_grad ? m.n_cols : 0}, dtype);
  a.n_partials = needs_bias_grad ? column_sum_n_partials(m.n_rows) : 0;
  Tensor partials = new_empty(grad_y, {a.n_partials, m.n_cols}, ScalarType::Float);
  a.grad_y = in(grad_y, "grad_y");
  if (needs_x_grad) a.grad_x = out(grad_x, "grad_x");
  if (needs_bias_grad) {
    a.grad_bias = out(grad_bias, "grad_bias");
    a.partials = out<float>(partials, "partials");
  }
  // No rows still give a bias gradient, of zeros.
  if (m.n_cols > 0 && (m.n_rows > 0 || needs_bias_grad)) LS_RUN(bias_dropout_residual_backward, a, grad_y);
  return {grad_x, grad_bias};
}

}  // namespace ls
