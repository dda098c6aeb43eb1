// The index of the library: every op's schema and the devices that have it. Fake kernels and autograd are in ls_plugin/ops.
// `(a!)` marks what an op overwrites. Shapes and maths: common/params.h.
#include <torch/csrc/stable/library.h>

#include <exception>
#include <string>

#include "ops/binding.h"
#include "ops/ops.h"

#if defined(LS_SIMT)
#define LS_NAMESPACE ls_simt  // the CUDA kernels on CPU tensors, for the tests
#else
#define LS_NAMESPACE ls
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(LS_NAMESPACE, m) {
  m.def("bias_act_dropout_forward(Tensor x, Tensor? bias, int activation, float p, Tensor? seed, int offset) -> Tensor");
  m.def(
      "bias_act_dropout_backward(Tensor grad_y, Tensor saved, Tensor? bias, int activation, float p, Tensor? seed, int offset,"
      " bool needs_bias_grad) -> (Tensor grad_x, Tensor grad_bias)");
  m.def("bias_dropout_residual_forward(Tensor x, Tensor? bias, Tensor? residual, float p, Tensor? seed, int offset) -> Tensor");
  m.def(
      "bias_dropout_residual_backward(Tensor grad_y, float p, Tensor? seed, int offset, bool needs_x_grad,"
      " bool needs_bias_grad) -> (Tensor grad_x, Tensor grad_bias)");
  m.def(
      "embedding_forward(Tensor tokens, Tensor weight, Tensor? positions, int? padding_idx, float scale, float p, Tensor? seed,"
      " int offset) -> Tensor");
  m.def(
      "embedding_backward(Tensor grad_y, Tensor tokens, int? padding_idx, float scale, float p, Tensor? seed, int offset,"
      " int n_embeddings, int n_positions, bool needs_weight_grad, bool needs_positions_grad, bool deterministic)"
      " -> (Tensor grad_weight, Tensor grad_positions)");
  m.def("layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool needs_weight_grad,"
      " bool needs_bias_grad) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "residual_layer_norm_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? weight, Tensor? norm_bias, float p,"
      " Tensor? seed, int offset, float eps) -> (Tensor sum, Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "residual_layer_norm_backward(Tensor? grad_sum, Tensor grad_y, Tensor sum, Tensor? weight, Tensor mean, Tensor rstd, "
      "float p,"
      " Tensor? seed, int offset, bool needs_x_grad, bool needs_residual_grad, bool needs_bias_grad, bool needs_weight_grad,"
      " bool needs_norm_bias_grad)"
      " -> (Tensor grad_x, Tensor grad_residual, Tensor grad_bias, Tensor grad_weight, Tensor grad_norm_bias)");
  m.def(
      "label_smoothed_cross_entropy_forward(Tensor logits, Tensor target, Tensor(a!)? grad, float epsilon, int ignore_index,"
      " float grad_scale) -> (Tensor loss, Tensor nll)");
  m.def("label_smoothed_cross_entropy_backward(Tensor(a!) grad, Tensor grad_loss, float factor) -> ()");
  // A sequence of products and the op before; written in ls_plugin/ops.
  m.def(
      "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor target, Tensor? token_weight, float epsilon, int "
      "ignore_index,"
      " bool needs_x_grad, bool needs_weight_grad) -> (Tensor loss, Tensor nll, Tensor grad_x, Tensor grad_weight)");
  m.def(
      "attention_softmax_forward(Tensor scores, Tensor? key_padding_mask, Tensor? bias, bool causal, float scale, float p,"
      " Tensor? seed, int offset, bool needs_row_stats) -> (Tensor probs, Tensor row_stats)");
  m.def(
      "attention_softmax_backward(Tensor grad_probs, Tensor saved, Tensor? row_stats, Tensor? key_padding_mask, Tensor? bias, "
      "bool "
      "causal,"
      " float scale, float p, Tensor? seed, int offset) -> Tensor grad_scores");
  m.def("grad_norm(Tensor[] grads, Tensor? scale, float max_norm) -> (Tensor norm, Tensor coefficient, Tensor overflow)");
  // On the CPU only: on a GPU, ls_plugin/ops/fused_attention.py composes it of other ops.
  m.def(
      "fused_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? key_padding_mask, Tensor? bias, bool causal, float scale,"
      " float p, Tensor? seed, int offset) -> (Tensor out, Tensor row_stats)");
  m.def(
      "fused_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor row_stats, Tensor? key_padding_mask,"
      " Tensor? bias, bool causal, float scale, float p, Tensor? seed, int offset, Tensor(a!) grad_q, Tensor(b!) grad_k,"
      " Tensor(c!) grad_v) -> ()");
  // On the CPU only: on a GPU, torch's is cuBLAS.
  m.def("product(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out, float alpha, bool add) -> ()");
  m.def(
      "adam_step(Tensor(a!) param, Tensor(b!) grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, Tensor(e!)? param_copy,"
      " Tensor(f!)? param_low, Tensor? grad_scale, Tensor? overflow, float lr, float beta1, float beta2, float eps,"
      " float weight_decay, int step, bool zero_grad) -> ()");
}

namespace {

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("bias_act_dropout_forward", TORCH_BOX(&ls::bias_act_dropout_forward));
  m.impl("bias_act_dropout_backward", TORCH_BOX(&ls::bias_act_dropout_backward));
  m.impl("bias_dropout_residual_forward", TORCH_BOX(&ls::bias_dropout_residual_forward));
  m.impl("bias_dropout_residual_backward", TORCH_BOX(&ls::bias_dropout_residual_backward));
  m.impl("embedding_forward", TORCH_BOX(&ls::embedding_forward));
  m.impl("embedding_backward", TORCH_BOX(&ls::embedding_backward));
  m.impl("layer_norm_forward", TORCH_BOX(&ls::layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&ls::layer_norm_backward));
  m.impl("residual_layer_norm_forward", TORCH_BOX(&ls::residual_layer_norm_forward));
  m.impl("residual_layer_norm_backward", TORCH_BOX(&ls::residual_layer_norm_backward));
  m.impl("label_smoothed_cross_entropy_forward", TORCH_BOX(&ls::label_smoothed_cross_entropy_forward));
  m.impl("label_smoothed_cross_entropy_backward", TORCH_BOX(&ls::label_smoothed_cross_entropy_backward));
  m.impl("attention_softmax_forward", TORCH_BOX(&ls::attention_softmax_forward));
  m.impl("attention_softmax_backward", TORCH_BOX(&ls::attention_softmax_backward));
  m.impl("grad_norm", TORCH_BOX(&ls::grad_norm));
  m.impl("adam_step", TORCH_BOX(&ls::adam_step));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(LS_NAMESPACE, CPU, m) {
  implement(m);
#if !defined(LS_SIMT)
  m.impl("fused_attention_forward", TORCH_BOX(&ls::fused_attention_forward));
  m.impl("fused_attention_backward", TORCH_BOX(&ls::fused_attention_backward));
  m.impl("product", TORCH_BOX(&ls::product));
#endif
}
#if defined(LS_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(LS_NAMESPACE, CUDA, m) { implement(m); }
#endif

#if !defined(LS_SIMT)
// Read by ls_plugin/_library.py.
extern "C" {

// "avx512", "avx2" or "plain"; "error: ..." when LS_CPU_ISA asks for what cannot be had.
__attribute__((visibility("default"))) const char* ls_cpu_isa() {
  static std::string answer;
  try {
    answer = ls::cpu::isa_name();
  } catch (const std::exception& error) {
    answer = std::string("error: ") + error.what();
  }
  return answer.c_str();
}

// The CUDA architectures in the library, as LS_CUDA_ARCH names them; empty in a CPU build.
__attribute__((visibility("default"))) const char* ls_cuda_archs() {
#if defined(LS_WITH_CUDA)
  return LS_CUDA_ARCHS;
#else
  return "";
#endif
}
}
#endif
