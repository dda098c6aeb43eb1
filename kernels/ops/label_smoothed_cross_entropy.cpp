#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {

std::tuple<Tensor, Tensor> label_smoothed_cross_entropy_forward(const Tensor& logits, const Tensor& target,
                                                                const OptionalTensor& grad, double epsilon,
                                                                int64_t ignore_index, double grad_scale) {
  const char* op = "label_smoothed_cross_entropy";
  LS_CHECK(logits.dim() == 2, op, ": logits must have shape (N, V), got ", shape_of(logits));
  check_contiguous(op, "logits", logits);
  const int64_t n_rows = logits.size(0), n_classes = logits.size(1);
  LS_CHECK(target.dim() == 1 && target.size(0) == n_rows, op, ": target must have shape (N,) = (", n_rows, ",), got ",
           shape_of(target));
  check_dtype(op, "target", target, ScalarType::Long);
  check_device(op, "target", target, logits);
  check_contiguous(op, "target", target);
  LS_CHECK(epsilon >= 0.0 && epsilon <= 1.0, op, ": epsilon must lie in [0, 1], got ", epsilon);
  if (grad) check_like(op, "grad", *grad, "logits", logits);
  LabelSmoothedCrossEntropyForward a{};
  a.dtype = dtype_of(op, "logits", logits);
  if (target.is_cpu()) {
    const auto* values = static_cast<const int64_t*>(target.const_data_ptr());
    for (int64_t row = 0; row < n_rows; ++row) {
      LS_CHECK(values[row] == ignore_index || (values[row] >= 0 && values[row] < n_classes), op, ": target ", values[row],
               " at position ", row, " is outside the vocabulary of ", n_classes,
               " entries; was the data preprocessed with another dictionary?");
    }
  }
  Tensor loss = new_empty(logits, {n_rows}, ScalarType::Float), nll = new_empty(logits, {n_rows}, ScalarType::Float);
  a.n_rows = n_rows, a.n_cols = n_classes, a.ignore_index = ignore_index;
  a.epsilon = static_cast<float>(epsilon), a.grad_scale = static_cast<float>(grad_scale);
  a.logits = in(logits, "logits"), a.target = in<int64_t>(target, "target");
  if (grad) a.grad = out(*grad, "grad");
  a.loss = out<float>(loss, "loss"), a.nll = out<float>(nll, "nll");
  if (n_rows > 0) LS_RUN(label_smoothed_cross_entropy_forward, a, logits);
  return {loss, nll};
}

void label_smoothed_cross_entropy_backward(const Tensor& grad, const Tensor& grad_loss, double factor) {
  const char* op = "label_smoothed_cross_entropy_backward";
  LS_CHECK(grad.dim() == 2, op, ": grad must have shape (N, V), got ", shape_of(grad));
  check_contiguous(op, "grad", grad);
  LS_CHECK(grad_loss.dim() == 1 && grad_loss.size(0) == grad.size(0), op, ": grad_loss must have shape (N,) = (", grad.size(0),
           ",), got ", shape_of(grad_loss));
  check_dtype(op, "grad_loss", grad_loss, ScalarType::Float);
  check_device(op, "grad_loss", grad_loss, grad);
  LabelSmoothedCrossEntropyBackward a{};
  a.dtype = dtype_of(op, "grad", grad);
  a.n_rows = grad.size(0), a.n_cols = grad.size(1);
  a.grad = out(grad, "grad"), a.grad_loss = in<float>(grad_loss, "grad_loss");
  a.grad_loss_stride = grad_loss.stride(0), a.factor = static_cast<float>(factor);
  if (grad.numel() > 0) LS_RUN(label_smoothed_cross_entropy_backward, a, grad);
}

}  // namespace ls
