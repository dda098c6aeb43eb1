#include "ops/ops.h"

#include "ops/binding.h"

namespace ls {
namespace {

AttentionScores attention_scores(const char* op, const char* name, const Tensor& scores, const OptionalTensor& key_padding_mask,
                                 const OptionalTensor& bias, bool causal, double scale) {
  LS_CHECK(scores.dim() == 4, op, ": ", name, " must have shape (B, H, T, S), got ", shape_of(scores));
  check_contiguous(op, name, scores);
  AttentionScores z{};
  z.n_heads = scores.size(1), z.n_queries = scores.size(2), z.n_keys = scores.size(3);
  z.n_rows = scores.size(0) * z.n_heads * z.n_queries;
  z.scale = static_cast<float>(scale), z.causal = causal;
  if (key_padding_mask) {
    const Tensor& mask = *key_padding_mask;
    LS_CHECK(mask.dim() == 2 && mask.size(0) == scores.size(0) && mask.size(1) == z.n_keys, op,
             ": key_padding_mask must have shape (B, S) = (", scores.size(0), ", ", z.n_keys, "), got ", shape_of(mask));
    check_dtype(op, "key_padding_mask", mask, ScalarType::Bool);
    check_device(op, "key_padding_mask", mask, scores);
    check_contiguous(op, "key_padding_mask", mask);
    z.padding = in<bool>(mask, "key_padding_mask");
  }
  if (bias) {
    check_same_shape(op, "bias", *bias, name, scores);
    check_dtype(op, "bias", *bias, scores.scalar_type());
    check_device(op, "bias", *bias, scores);
    LS_CHECK(bias->stride(3) == 1 || z.n_keys <= 1, op, ": bias must have stride 1 over its last dimension, got ",
             bias->stride(3));
    for (int i = 0; i < 3; ++i) z.bias_strides[i] = bias->stride(i);
    z.bias = in_strided(*bias, "bias");
  }
  return z;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_softmax_forward(const Tensor& scores, const OptionalTensor& key_padding_mask,
                                                     const OptionalTensor& bias, bool causal, double scale, double p,
                                                     const OptionalTensor& seed, int64_t offset, bool needs_row_stats) {
  const char* op = "attention_softmax";
  AttentionSoftmaxForward a{};
  a.dtype = dtype_of(op, "scores", scores);
  a.z = attention_scores(op, "scores", scores, key_padding_mask, bias, causal, scale);
  a.dropout = make_dropout(op, p, seed, offset, scores);
  Tensor probs = new_like(scores);
  Tensor row_stats = needs_row_stats ? new_empty(scores, {2, scores.size(0), scores.size(1), scores.size(2)}, ScalarType::Float)
                                     : new_empty(scores, {0}, ScalarType::Float);
  a.scores = in(scores, "scores");
  a.probs = out(probs, "probs");
  if (needs_row_stats) a.row_max = out<float>(row_stats, "row_stats"), a.row_factor = a.row_max + a.z.n_rows;
  if (scores.numel() > 0) LS_RUN(attention_softmax_forward, a, scores);
  return {probs, row_stats};
}

Tensor attention_softmax_backward(const Tensor& grad_probs, const Tensor& saved, const OptionalTensor& row_stats,
                                  const OptionalTensor& key_padding_mask, const OptionalTensor& bias, bool causal, double scale,
                                  double p, const OptionalTensor& seed, int64_t offset) {
  const char* op = "attention_softmax_backward";
  AttentionSoftmaxBackward a{};
  a.dtype = dtype_of(op, "saved", saved);
  a.z = attention_scores(op, "saved", saved, key_padding_mask, bias, causal, scale);
  a.dropout = make_dropout(op, p, seed, offset, saved);
  check_like(op, "grad_probs", grad_probs, "saved", saved);
  LS_CHECK(p == 0.0 || row_stats.has_value(), op, ": p = ", p,
           " needs row_stats and, in saved, the scores; got row_stats None");
  if (row_stats) {
    LS_CHECK(row_stats->numel() == 2 * a.z.n_rows, op, ": row_stats must have two elements per row, ", 2 * a.z.n_rows,
             ", got shape ", shape_of(*row_stats), "; call the forward with needs_row_stats");
    check_dtype(op, "row_stats", *row_stats, ScalarType::Float);
    check_device(op, "row_stats", *row_stats, saved);
    check_contiguous(op, "row_stats", *row_stats);
    a.row_max = in<float>(*row_stats, "row_stats"), a.row_factor = a.row_max + a.z.n_rows;
  }
  Tensor grad_scores = new_like(saved);
  a.grad_probs = in(grad_probs, "grad_probs"), a.saved = in(saved, "saved");
  a.grad_scores = out(grad_scores, "grad_scores");
  if (saved.numel() > 0) LS_RUN(attention_softmax_backward, a, saved);
  return grad_scores;
}

}  // namespace ls
