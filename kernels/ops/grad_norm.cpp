#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {

std::tuple<Tensor, Tensor, Tensor> grad_norm(const std::vector<Tensor>& grads, const OptionalTensor& scale, double max_norm) {
  const char* op = "grad_norm";
  LS_CHECK(!grads.empty(), op, ": grads must hold at least one tensor, got none");
  const Tensor& first = grads.front();
  int64_t n_squares = 0;
  for (const Tensor& grad : grads) {
    dtype_of(op, "grads", grad);
    check_device(op, "grads", grad, first);
    check_contiguous(op, "grads", grad);
    n_squares += grad_norm_n_chunks(grad.numel());
  }
  check_device_scalar(op, "scale", scale, ScalarType::Float, first);

  const Tensor squares = new_empty(first, {n_squares}, ScalarType::Float);
  int64_t done = 0;
  for (const Tensor& grad : grads) {
    if (grad.numel() == 0) continue;
    GradNormSquares a{};
    a.grad = in(grad, "grad"), a.squares = out<float>(squares, "partials") + done;
    a.n_elem = grad.numel(), a.dtype = dtype_of(op, "grads", grad);
    LS_RUN(grad_norm_squares, a, first);
    done += grad_norm_n_chunks(grad.numel());
  }
  const Tensor norm = new_empty(first, {}, ScalarType::Float), coefficient = new_empty(first, {}, ScalarType::Float);
  const Tensor overflow = new_empty(first, {}, ScalarType::Bool);
  GradNormFinish a{};
  a.squares = in<float>(squares, "partials"), a.scale = static_cast<const float*>(in(scale, "scale"));
  a.norm = out<float>(norm, "norm"), a.coefficient = out<float>(coefficient, "coefficient");
  a.overflow = out<bool>(overflow, "overflow");
  a.n_squares = n_squares, a.max_norm = static_cast<float>(max_norm);
  LS_RUN(grad_norm_finish, a, first);
  return {norm, coefficient, overflow};
}

}  // namespace ls
