// The bindings, as schemas.cpp registers them; one file per op beside this one. Shapes and maths: common/params.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ls {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor bias_act_dropout_forward(const Tensor& x, const OptionalTensor& bias, int64_t activation, double p,
                                const OptionalTensor& seed, int64_t offset);
std::tuple<Tensor, Tensor> bias_act_dropout_backward(const Tensor& grad_y, const Tensor& saved, const OptionalTensor& bias,
                                                     int64_t activation, double p, const OptionalTensor& seed, int64_t offset,
                                                     bool needs_bias_grad);

Tensor bias_dropout_residual_forward(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, double p,
                                     const OptionalTensor& seed, int64_t offset);
std::tuple<Tensor, Tensor> bias_dropout_residual_backward(const Tensor& grad_y, double p, const OptionalTensor& seed,
                                                          int64_t offset, bool needs_x_grad, bool needs_bias_grad);

Tensor embedding_forward(const Tensor& tokens, const Tensor& weight, const OptionalTensor& positions,
                         std::optional<int64_t> padding_idx, double scale, double p, const OptionalTensor& seed,
                         int64_t offset);
std::tuple<Tensor, Tensor> embedding_backward(const Tensor& grad_y, const Tensor& tokens, std::optional<int64_t> padding_idx,
                                              double scale, double p, const OptionalTensor& seed, int64_t offset,
                                              int64_t n_embeddings, int64_t n_positions, bool needs_weight_grad,
                                              bool needs_positions_grad, bool deterministic);

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                                      double eps);
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_y, const Tensor& x, const OptionalTensor& weight,
                                                       const Tensor& mean, const Tensor& rstd, bool needs_weight_grad,
                                                       bool needs_bias_grad);

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm_forward(const Tensor& x, const OptionalTensor& bias,
                                                                       const OptionalTensor& residual,
                                                                       const OptionalTensor& weight,
                                                                       const OptionalTensor& norm_bias, double p,
                                                                       const OptionalTensor& seed, int64_t offset, double eps);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> residual_layer_norm_backward(
    const OptionalTensor& grad_sum, const Tensor& grad_y, const Tensor& sum, const OptionalTensor& weight, const Tensor& mean,
    const Tensor& rstd, double p, const OptionalTensor& seed, int64_t offset, bool needs_x_grad, bool needs_residual_grad,
    bool needs_bias_grad, bool needs_weight_grad, bool needs_norm_bias_grad);

std::tuple<Tensor, Tensor> label_smoothed_cross_entropy_forward(const Tensor& logits, const Tensor& target,
                                                                const OptionalTensor& grad, double epsilon,
                                                                int64_t ignore_index, double grad_scale);
void label_smoothed_cross_entropy_backward(const Tensor& grad, const Tensor& grad_loss, double factor);

std::tuple<Tensor, Tensor> attention_softmax_forward(const Tensor& scores, const OptionalTensor& key_padding_mask,
                                                     const OptionalTensor& bias, bool causal, double scale, double p,
                                                     const OptionalTensor& seed, int64_t offset, bool needs_row_stats);
Tensor attention_softmax_backward(const Tensor& grad_probs, const Tensor& saved, const OptionalTensor& row_stats,
                                  const OptionalTensor& key_padding_mask, const OptionalTensor& bias, bool causal, double scale,
                                  double p, const OptionalTensor& seed, int64_t offset);

std::tuple<Tensor, Tensor, Tensor> grad_norm(const std::vector<Tensor>& grads, const OptionalTensor& scale, double max_norm);

std::tuple<Tensor, Tensor> fused_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const OptionalTensor& key_padding_mask, const OptionalTensor& bias,
                                                   bool causal, double scale, double p, const OptionalTensor& seed,
                                                   int64_t offset);
void fused_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& row_stats, const OptionalTensor& key_padding_mask, const OptionalTensor& bias,
                              bool causal, double scale, double p, const OptionalTensor& seed, int64_t offset,
                              const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v);

void product(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Tensor& out, double alpha, bool add);

void adam_step(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const OptionalTensor& param_copy, const OptionalTensor& param_low, const OptionalTensor& grad_scale,
               const OptionalTensor& overflow, double lr, double beta1, double beta2, double eps, double weight_decay,
               int64_t step, bool zero_grad);

}  // namespace ls
