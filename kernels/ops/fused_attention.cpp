#include <algorithm>

#include "ops/binding.h"
#include "ops/ops.h"

namespace ls {
namespace {

constexpr const char* kOp = "fused_attention";

// The shape (B, H, rows, D) in words, for messages.
std::string shape_of_heads(const Tensor& q, const Tensor& rows) {
  std::ostringstream out;
  out << '(' << q.size(0) << ", " << q.size(1) << ", " << rows.size(2) << ", " << q.size(3) << ')';
  return out.str();
}

// `t` is (B, H, rows, D), with B, H and D of q and as many rows as `rows` has, and its rows are not cut up.
HeadStrides check_heads(const char* name, const Tensor& t, const Tensor& q, const Tensor& rows) {
  LS_CHECK(
      t.dim() == 4 && t.size(0) == q.size(0) && t.size(1) == q.size(1) && t.size(2) == rows.size(2) && t.size(3) == q.size(3),
      kOp, ": ", name, " must have shape ", shape_of_heads(q, rows), ", got ", shape_of(t));
  check_dtype(kOp, name, t, q.scalar_type());
  check_device(kOp, name, t, q);
  LS_CHECK(t.stride(3) == 1 || t.size(3) <= 1 || t.numel() == 0, kOp, ": ", name,
           " must have stride 1 in its last dimension, got ", t.stride(3), "; call .contiguous()");
  return {t.stride(0), t.stride(1), t.stride(2)};
}

// `bias` is a view of shape (B, H, T, S), which may repeat, but for the last dimension.
HeadStrides check_bias(const Tensor& bias, const Tensor& q, const Tensor& k) {
  LS_CHECK(bias.dim() == 4 && bias.size(0) == q.size(0) && bias.size(1) == q.size(1) && bias.size(2) == q.size(2) &&
               bias.size(3) == k.size(2),
           kOp, ": bias must have shape (B, H, T, S) = (", q.size(0), ", ", q.size(1), ", ", q.size(2), ", ", k.size(2),
           "), got ", shape_of(bias), "; call .expand()");
  check_dtype(kOp, "bias", bias, q.scalar_type());
  check_device(kOp, "bias", bias, q);
  LS_CHECK(bias.stride(3) == 1 || bias.size(3) <= 1 || bias.numel() == 0, kOp,
           ": bias must have stride 1 in its last dimension, got ", bias.stride(3));
  return {bias.stride(0), bias.stride(1), bias.stride(2)};
}

void set_inputs(FusedAttention& a, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& key_padding_mask,
                const OptionalTensor& bias, bool causal, double scale, double p, const OptionalTensor& seed, int64_t offset) {
  LS_CHECK(q.dim() == 4, kOp, ": q must have shape (B, H, T, D), got ", shape_of(q));
  LS_CHECK(k.dim() == 4, kOp, ": k must have shape (B, H, S, D), got ", shape_of(k));
  a.dtype = dtype_of(kOp, "q", q);
  a.q_strides = check_heads("q", q, q, q), a.k_strides = check_heads("k", k, q, k), a.v_strides = check_heads("v", v, q, k);
  a.q = q.const_data_ptr(), a.k = k.const_data_ptr(), a.v = v.const_data_ptr();
  a.n_batch = q.size(0), a.n_heads = q.size(1), a.n_rows = q.size(2), a.n_keys = k.size(2), a.head_dim = q.size(3);
  if (key_padding_mask) {
    const Tensor& mask = *key_padding_mask;
    LS_CHECK(mask.dim() == 2 && mask.size(0) == a.n_batch && mask.size(1) == a.n_keys, kOp,
             ": key_padding_mask must have shape (B, S) = (", a.n_batch, ", ", a.n_keys, "), got ", shape_of(mask));
    check_dtype(kOp, "key_padding_mask", mask, ScalarType::Bool);
    check_device(kOp, "key_padding_mask", mask, q);
    check_contiguous(kOp, "key_padding_mask", mask);
    a.key_padding_mask = static_cast<const bool*>(mask.const_data_ptr());
  }
  if (bias) {
    a.bias_strides = check_bias(*bias, q, k);
    a.bias = bias->const_data_ptr();
  }
  a.causal = causal, a.scale = static_cast<float>(scale);
  a.dropout = make_dropout(kOp, p, seed, offset, q);
}

// New memory for `like`, without gaps and with its heads, rows and batches one inside the other as they are there: q made by a product
// for (T, B, H * D) gives an output that is (T, B, H * D) again. Repeated by _new_in_order_of in ls_plugin/ops/fused_attention.py.
Tensor new_in_order_of(const Tensor& like) {
  int64_t order[] = {0, 1, 2}, strides[] = {0, 0, 0, 1};
  std::stable_sort(order, order + 3, [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  int64_t stride = like.size(3) > 0 ? like.size(3) : 1;
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= like.size(order[i]) > 0 ? like.size(order[i]) : 1;
  }
  return empty_strided(like, like.sizes().data(), strides, 4, like.scalar_type());
}

}  // namespace

std::tuple<Tensor, Tensor> fused_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const OptionalTensor& key_padding_mask, const OptionalTensor& bias,
                                                   bool causal, double scale, double p, const OptionalTensor& seed,
                                                   int64_t offset) {
  FusedAttentionForward a{};
  set_inputs(a, q, k, v, key_padding_mask, bias, causal, scale, p, seed, offset);
  Tensor out = new_in_order_of(q), row_stats = new_empty(q, {2, a.n_batch, a.n_heads, a.n_rows}, ScalarType::Float);
  a.out = out.mutable_data_ptr(), a.out_strides = {out.stride(0), out.stride(1), out.stride(2)};
  a.row_max = static_cast<float*>(row_stats.mutable_data_ptr()), a.row_factor = a.row_max + row_stats.numel() / 2;
  if (a.head_dim > 0) cpu::fused_attention_forward(a);
  return {out, row_stats};
}

void fused_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& row_stats, const OptionalTensor& key_padding_mask, const OptionalTensor& bias,
                              bool causal, double scale, double p, const OptionalTensor& seed, int64_t offset,
                              const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v) {
  FusedAttentionBackward a{};
  set_inputs(a, q, k, v, key_padding_mask, bias, causal, scale, p, seed, offset);
  a.grad_out_strides = check_heads("grad_out", grad_out, q, q);
  check_dtype(kOp, "row_stats", row_stats, ScalarType::Float);
  check_device(kOp, "row_stats", row_stats, q);
  check_contiguous(kOp, "row_stats", row_stats);
  LS_CHECK(row_stats.numel() == 2 * a.n_batch * a.n_heads * a.n_rows, kOp, ": row_stats must have shape (2, B, H, T) = (2, ",
           a.n_batch, ", ", a.n_heads, ", ", a.n_rows, "), got ", shape_of(row_stats));
  a.grad_q_strides = check_heads("grad_q", grad_q, q, q);
  a.grad_k_strides = check_heads("grad_k", grad_k, q, k);
  a.grad_v_strides = check_heads("grad_v", grad_v, q, k);
  a.grad_out = grad_out.const_data_ptr(), a.row_max = static_cast<const float*>(row_stats.const_data_ptr());
  a.row_factor = a.row_max + row_stats.numel() / 2;
  a.grad_q = grad_q.mutable_data_ptr(), a.grad_k = grad_k.mutable_data_ptr(), a.grad_v = grad_v.mutable_data_ptr();
  if (a.head_dim > 0) cpu::fused_attention_backward(a);
}

}  // namespace ls
