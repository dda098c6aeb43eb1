#include "ops/binding.h"
#include "ops/ops.h"

namespace ls {

namespace {

Activation activation_of(const char* op, int64_t code) {
  LS_CHECK(code >= 0 && code < kNumActivations, op, ": activation must be a code from 0 to ", kNumActivations - 1, ", got ",
           code);
  return static_cast<Activation>(code);
}

}  // namespace

Tensor bias_act_dropout_forward(const Tensor& x, const OptionalTensor& any_bias, int64_t activation, double p,
                                const OptionalTensor& seed, int64_t offset) {
  const char* op = "bias_act_dropout";
  const Matrix m = as_matrix(op, "x", x);
  const OptionalTensor bias = row_vector(op, "bias", any_bias, x);
  BiasActDropoutForward a{};
  a.activation = activation_of(op, activation);
  a.dtype = dtype_of(op, "x", x);
  a.dropout = make_dropout(op, p, seed, offset, x);
  Tensor y = new_like(x);
  a.n_rows = m.n_rows, a.n_cols = m.n_cols;
  a.x = in(x, "x"), a.bias = in(bias, "bias");
  a.y = out(y, "y");
  if (m.n_rows > 0) LS_RUN(bias_act_dropout_forward, a, x);
  return y;
}

std::tuple<Tensor, Tensor> bias_act_dropout_backward(const Tensor& grad_y, const Tensor& saved, const OptionalTensor& any_bias,
                                                     int64_t activation, double p, const OptionalTensor& seed, int64_t offset,
                                                     bool needs_bias_grad) {
  const char* op = "bias_act_dropout_backward";
  const Matrix m = as_matrix(op, "grad_y", grad_y);
  check_like(op, "saved", saved, "grad_y", grad_y);
  const OptionalTensor bias = row_vector(op, "bias", any_bias, grad_y);
  BiasActDropoutBackward a{};
  a.activation = activation_of(op, activation);
  a.dtype = dtype_of(op, "grad_y", grad_y);
  a.dropout = make_dropout(op, p, seed, offset, grad_y);
  a.n_rows = m.n_rows, a.n_cols = m.n_cols;
  Tensor grad_x = new_like(grad_y);
  Tensor grad_bias = new_empty(grad_y, {needs_bias_grad ? m.n_cols : 0}, grad_y.scalar_type());
  a.n_partials = needs_bias_grad ? column_sum_n_partials(m.n_rows) : 0;
  Tensor partials = new_empty(grad_y, {a.n_partials, m.n_cols}, ScalarType::Float);
  a.grad_y = in(grad_y, "grad_y"), a.saved = in(saved, "saved"), a.bias = in(bias, "bias");
  a.grad_x = out(grad_x, "grad_x");
  if (needs_bias_grad) {
    a.grad_bias = out(grad_bias, "grad_bias");
    a.partials = out<float>(partials, "partials");
  }
  // No rows still give a bias gradient, of zeros.
  if (m.n_cols > 0 && (m.n_rows > 0 || needs_bias_grad)) LS_RUN(bias_act_dropout_backward, a, grad_y);
  return {grad_x, grad_bias};
}

}  // namespace ls
