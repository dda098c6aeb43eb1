// What a binding hands to a launcher: raw pointers, sizes and constants, free of torch. The same structs serve the CPU
// kernels, the CUDA kernels and the CUDA kernels under the SIMT harness.
//
// N: rows (tokens), B: sentences, T: tokens of each, C: model width, F: feed-forward width, V: vocabulary. `scalar` stands for
// the element type that `dtype` names. All tensors are contiguous and row-major; sizes and offsets are 64-bit. Outputs are
// overwritten (=) unless a comment says +=.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/philox.h"

namespace ls {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16 };

// fairseq's activation functions; ls_plugin/ops/bias_act_dropout.py names them in the same order. Its "linear" is
// bias_dropout_residual without a residual.
enum class Activation : int32_t { kRelu, kGelu, kGeluAccurate, kTanh, kReluSquared };
constexpr int32_t kNumActivations = 5;

// Calls body(std::integral_constant<Activation, ...>{}).
template <typename Body>
void with_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kRelu:
      return body(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kGelu:
      return body(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluAccurate:
      return body(std::integral_constant<Activation, Activation::kGeluAccurate>{});
    case Activation::kTanh:
      return body(std::integral_constant<Activation, Activation::kTanh>{});
    case Activation::kReluSquared:
      return body(std::integral_constant<Activation, Activation::kReluSquared>{});
  }
}

// y = dropout(act(x + bias))
struct BiasActDropoutForward {
  const void* x;     // scalar (N, F)
  const void* bias;  // scalar (F,) or null
  void* y;           // scalar (N, F)
  int64_t n_rows, n_cols;
  Activation activation;
  Dropout dropout;
  DType dtype;
};

// grad_x = dropout(grad_y) * act'(x + bias) with the forward's mask; grad_bias = sum over rows of grad_x (before rounding to scalar).
//
// relu and tanh save y, which the product that follows keeps alive anyway, the others x. For relu y tells the mask as well: an
// element was kept and positive exactly where y != 0 (the scale is at least 1, and a sum of two 16-bit numbers that is not 0 is no
// smaller than the smallest of them, so nothing underflows). Hence relu's backward makes no draw.
struct BiasActDropoutBackward {
  const void* grad_y;  // scalar (N, F)
  const void* saved;   // scalar (N, F): y where saves_output(activation), else x
  const void* bias;    // scalar (F,) or null; unread where y is saved
  void* grad_x;        // scalar (N, F)
  void* grad_bias;     // scalar (F,) or null
  float* partials;     // workspace (n_partials, F) when grad_bias is wanted, else null
  int64_t n_partials;
  int64_t n_rows, n_cols;
  Activation activation;
  Dropout dropout;
  DType dtype;
};
constexpr bool saves_output(Activation activation) {
  return activation == Activation::kRelu || activation == Activation::kTanh;
}

// y = residual + dropout(x + bias)
struct BiasDropoutResidualForward {
  const void* x;         // scalar (N, C)
  const void* bias;      // scalar (C,) or null
  const void* residual;  // scalar (N, C) or null
  void* y;               // scalar (N, C); may be x or residual themselves
  int64_t n_rows, n_cols;
  Dropout dropout;
  DType dtype;
};

// grad_x = dropout(grad_y) with the forward's mask; grad_bias = sum over rows of grad_x (before rounding to scalar).
// The residual's gradient is grad_y itself.
struct BiasDropoutResidualBackward {
  const void* grad_y;  // scalar (N, C)
  void* grad_x;     // scalar (N, C), may be grad_y itself; or null: only grad_bias is wanted (p == 0, where grad_x is grad_y)
  void* grad_bias;  // scalar (C,) or null
  float* partials;  // workspace (n_partials, C) when grad_bias is wanted, else null
  int64_t n_partials;
  int64_t n_rows, n_cols;
  Dropout dropout;
  DType dtype;
};

// y = (x - mean) * rstd * weight + bias, mean and rstd = 1 / sqrt(var + eps) per row, biased variance
struct LayerNormForward {
  const void* x;       // scalar (N, C)
  const void* weight;  // scalar (C,) or null (ones)
  const void* bias;    // scalar (C,) or null (zeros)
  void* y;             // scalar (N, C)
  float* mean;         // (N,)
  float* rstd;         // (N,)
  int64_t n_rows, n_cols;
  float eps;
  DType dtype;
};

// With xhat = (x - mean) * rstd and g = grad_y * weight:
//   grad_x = rstd * (g - sum(g) / C - xhat * sum(g * xhat) / C)     both sums in one reduction
//   grad_weight = sum over rows of grad_y * xhat, grad_bias = sum over rows of grad_y
struct LayerNormBackward {
  const void* grad_y;  // scalar (N, C)
  const void* x;       // scalar (N, C)
  const void* weight;  // scalar (C,) or null (ones)
  const float* mean;   // (N,)
  const float* rstd;   // (N,)
  void* grad_x;        // scalar (N, C)
  void* grad_weight;   // scalar (C,) or null
  void* grad_bias;     // scalar (C,) or null
  float* partials;     // workspace (2, n_partials, C): weight's then bias's; null when neither is wanted
  int64_t n_partials;
  int64_t n_rows, n_cols;
  DType dtype;
};

// sum = residual + dropout(x + bias) and y = layer_norm(sum), of the sum as it is stored. norm.x is sum, norm.bias the norm's own.
struct ResidualLayerNormForward {
  const void* x;         // scalar (N, C)
  const void* bias;      // scalar (C,) or null
  const void* residual;  // scalar (N, C) or null
  void* sum;             // scalar (N, C)
  LayerNormForward norm;
  Dropout dropout;
};

// grad_residual = grad_sum + the norm's gradient of its x, grad_x = dropout(grad_residual) with the forward's mask, grad_bias =
// sum over rows of grad_x. norm.grad_x is grad_residual and may be null where only grad_x is wanted; grad_bias needs one of the two.
struct ResidualLayerNormBackward {
  LayerNormBackward
      norm;              // its workspace is (3, n_partials, C): the norm's weight and bias, then bias; null when none is wanted
  const void* grad_sum;  // scalar (N, C) or null
  void* grad_x;          // scalar (N, C); or null: not wanted, or p == 0, where it is grad_residual
  void* grad_bias;       // scalar (C,) or null
  Dropout dropout;
};

// With q = softmax(logits[n]), and p = 1 - epsilon at the target, epsilon / (V - 1) elsewhere (fairseq's convention):
//   nll[n] = -log q[target], loss[n] = -sum_v p_v log q_v, grad[n] = (q - p) * grad_scale
// A row whose target is ignore_index gives loss 0, nll 0 and a gradient of zeros. For V == 1 the loss is (1 - epsilon) nll = 0.
struct LabelSmoothedCrossEntropyForward {
  const void* logits;     // scalar (N, V)
  const int64_t* target;  // (N,), each in [0, V) or ignore_index
  void* grad;             // scalar (N, V) or null; may be logits itself
  float* loss;            // (N,)
  float* nll;             // (N,)
  int64_t n_rows, n_cols;
  int64_t ignore_index;
  float epsilon;
  float grad_scale;
  DType dtype;
};

// grad[n] *= grad_loss[n] * factor, in place; rows where that product is 1 are left alone, unread. Zeros stay zeros even where the
// product is not finite: an ignored row has no gradient.
struct LabelSmoothedCrossEntropyBackward {
  void* grad;                // scalar (N, V)
  const float* grad_loss;    // (N,) with stride grad_loss_stride
  int64_t grad_loss_stride;  // in elements; 0 when one value serves all rows
  int64_t n_rows, n_cols;
  float factor;
  DType dtype;
};

// A matrix of attention scores (B, H, T, S) and what bends it before the softmax. Row (b, h, t) sees key s unless padding[b, s] or,
// when causal, s > t + (S - T): the last query sees all keys. z = scale * score + bias where it sees, -inf elsewhere.
struct AttentionScores {
  const bool* padding;  // (B, S), true at padding, or null
  const void* bias;     // scalar, or null; element (b, h, t, s) at b, h, t by bias_strides and then s
  int64_t bias_strides[3];
  int64_t n_rows, n_heads, n_queries, n_keys;  // B * H * T, H, T, S
  float scale;
  bool causal;
};

// probs = dropout(softmax(z)). row_max is the largest z of a row and row_factor 1 / sum of exp(z - row_max), so that the backward computes
// P as exactly as the forward did: from their one log sum exp it would lose the digits that a z of 100 has before the point. A row
// that sees no key gives probs 0 and row_factor 0. Keys that causality hides are not read.
struct AttentionSoftmaxForward {
  AttentionScores z;
  const void* scores;  // scalar (B, H, T, S)
  void* probs;         // scalar (B, H, T, S)
  float* row_max;      // (B, H, T) or null
  float* row_factor;   // (B, H, T) or null
  Dropout dropout;
  DType dtype;
};

// With P = softmax(z) and g = dropout(grad_probs) by the forward's mask: grad_scores = scale * P * (g - sum(g P)), one reduction.
// Without dropout P is the forward's output, else it is computed again as exp(z - row_max) * row_factor.
struct AttentionSoftmaxBackward {
  AttentionScores z;
  const void* grad_probs;  // scalar (B, H, T, S)
  const void* saved;       // scalar (B, H, T, S): the scores when row_max is given, else P
  const float* row_max;    // (B, H, T) or null
  const float* row_factor;
  void* grad_scores;  // scalar (B, H, T, S), 0 where the row does not see the key
  Dropout dropout;
  DType dtype;
};

// squares[c] = sum of g * g over the c-th kNormChunk elements of one gradient buffer, in fp32
struct GradNormSquares {
  const void* grad;  // scalar (n_elem,)
  float* squares;    // (grad_norm_n_chunks(n_elem),)
  int64_t n_elem;
  DType dtype;
};

// From the squares of all buffers, added up in fp64, with s = *scale or 1:
//   norm = |s| sqrt(sum of squares), coefficient = s min(1, max_norm / (norm + 1e-6)), overflow = norm is not finite
// max_norm <= 0: no clipping, coefficient = s. As in fairseq.utils.clip_grad_norm_, NaN stays NaN.
struct GradNormFinish {
  const float* squares;  // (n_squares,)
  const float* scale;    // one value on the device, or null for 1
  float* norm;           // one value each
  float* coefficient;
  bool* overflow;
  int64_t n_squares;
  float max_norm;
};

// Elements whose squares are added up in fp32. A split by position alone: the same buffer gives the same bits at any number of
// threads or multiprocessors.
constexpr int64_t kNormChunk = 16384;
inline int64_t grad_norm_n_chunks(int64_t n_elem) { return (n_elem + kNormChunk - 1) / kNormChunk; }

// y = dropout(scale * weight[token] + positions[position]) for each token, where
//   position = padding_idx + the number of tokens that are not padding up to this one in its sentence; of padding, padding_idx
// (fairseq's make_positions). With padding_idx = -1 no token is padding, and the position is that in the sentence, from 0.
struct EmbeddingForward {
  const int64_t* tokens;          // (B, T), each in [0, V)
  const void* weight;             // scalar (V, C)
  const void* positions;          // scalar (n_positions, C) or null (zeros)
  void* y;                        // scalar (B, T, C)
  int64_t n_sentences, n_tokens;  // B, T
  int64_t n_embeddings;           // V
  int64_t n_positions, n_cols;
  int64_t padding_idx;
  float scale;
  Dropout dropout;
  DType dtype;
};

// With g = dropout(grad_y) by the forward's mask, and zero in the rows padding_idx of both:
//   grad_weight[v] = scale * sum of g over the tokens v, grad_positions[p] = sum of g over the tokens at p
struct EmbeddingBackward {
  const void* grad_y;     // scalar (B, T, C)
  const int64_t* tokens;  // (B, T)
  void* grad_weight;      // scalar (V, C) or null
  void* grad_positions;   // scalar (n_positions, C) or null
  // CUDA only:
  const int64_t* sorted_tokens;  // (N,) the tokens in ascending order, and their places in (B, T); equal ones in the order of
  const int64_t* sorted_rows;    // their places. Null: grad_weight by atomics, fp32 only
  int32_t* token_at;             // workspace (B, T) when grad_positions is wanted, else null
  int64_t n_sentences, n_tokens;
  int64_t n_embeddings;
  int64_t n_positions, n_cols;
  int64_t padding_idx;
  float scale;
  Dropout dropout;
  DType dtype;
};

// Distances in elements between consecutive batches, heads and rows of a (B, H, T, D) tensor; elements of a row are neighbours.
struct HeadStrides {
  int64_t batch, head, row;
};

// out = dropout(P) V with P = softmax(scale q k^T + bias) over the keys that a row may see, per batch b and head h. Row t sees key s
// unless key_padding_mask[b][s], or causal and s > t + S - T; a row that sees none has P = 0. Dropout takes P as a matrix of B * H * T
// rows, (b * H + h) * T + t, and S columns.
struct FusedAttention {
  const void* q;                 // scalar (B, H, T, D)
  const void* k;                 // scalar (B, H, S, D)
  const void* v;                 // scalar (B, H, S, D)
  const bool* key_padding_mask;  // (B, S) contiguous, or null
  const void* bias;              // scalar (B, H, T, S), stride 0 where it is broadcast, or null
  HeadStrides q_strides, k_strides, v_strides, bias_strides;
  int64_t n_batch, n_heads, n_rows, n_keys, head_dim;  // B, H, T, S, D
  bool causal;
  float scale;
  Dropout dropout;
  DType dtype;
};

// row_max and row_factor as in AttentionSoftmaxForward. Keys and values at padding count as zeros, whatever they hold.
struct FusedAttentionForward : FusedAttention {
  void* out;          // scalar (B, H, T, D)
  float* row_max;     // (B, H, T)
  float* row_factor;  // (B, H, T)
  HeadStrides out_strides;
};

// With P recomputed from row_max and row_factor, P~ = dropout(P), and dP = dropout(grad_out v^T) by the same mask:
//   grad_v = P~^T grad_out
//   dS = P * (dP - sum over keys of P dP)
//   grad_q = scale dS k,  grad_k = scale dS^T q
struct FusedAttentionBackward : FusedAttention {
  const void* grad_out;  // scalar (B, H, T, D)
  const float* row_max;  // (B, H, T)
  const float* row_factor;
  void* grad_q;  // scalar (B, H, T, D)
  void* grad_k;  // scalar (B, H, S, D)
  void* grad_v;  // scalar (B, H, S, D)
  HeadStrides grad_out_strides, grad_q_strides, grad_k_strides, grad_v_strides;
};

// out = alpha A B + bias, and += with add; sums in fp32. A is (n_rows, n_k), B (n_k, n_cols), either in any order of its two dimensions.
struct Product {
  const void* a;     // scalar, element (i, k) at i * a_row_stride + k * a_k_stride
  const void* b;     // scalar, element (k, j) at k * b_k_stride + j * b_col_stride
  const void* bias;  // scalar (n_cols,) or null
  void* out;         // out scalar, element (i, j) at i * out_row_stride + j
  int64_t n_rows, n_cols, n_k;
  int64_t a_row_stride, a_k_stride, b_k_stride, b_col_stride, out_row_stride;
  float alpha;
  bool add;
  DType dtype, out_dtype;  // out_dtype is dtype or fp32
};

// fairseq's Adam, element by element, in fp32:
//   g = grad * grad_scale
//   exp_avg    = beta1 exp_avg + (1 - beta1) g
//   exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g g
//   param      = param - weight_decay_step param          (weight_decay_step = lr * weight_decay)
//   param      = param - step_size exp_avg / (sqrt(exp_avg_sq) + eps)
// step_size = lr sqrt(1 - beta2^t) / (1 - beta1^t), computed in double by the caller. The betas stay double so that 1 - beta
// is rounded once, as torch rounds it: in fp32, 1 - 0.999f is off by 1.3e-5 of its value.
//
// With param_copy, param is fp32 and its value is also stored in 16 bits. With param_low, param is bf16 and what is updated is an
// fp32 master in two halves:
//   bits(master) = (bits(param) << 16) + param_low, param = (bits(master) + 0x8000) >> 16
// so param is the master rounded to nearest, ties away from zero, and param_low, signed, what that rounding left. (Ties to even
// would not fit: 65,537 masters round to an even param, and param_low has 65,536 values.) A NaN master becomes 0x7FC0 and 0.
// 16-bit types do not mix: param, grad and param_copy are fp32 or one of fp16 and bf16.
struct AdamStep {
  void* param;              // scalar (n_elem,)
  void* grad;               // grad_scalar (n_elem,); zeroed when zero_grad
  float* exp_avg;           // (n_elem,)
  float* exp_avg_sq;        // (n_elem,)
  void* param_copy;         // copy_scalar (n_elem,) or null
  int16_t* param_low;       // (n_elem,) or null
  const float* grad_scale;  // one value on the device, or null for 1
  const bool* overflow;     // one value on the device, or null for false; true: nothing is written but grad's zeros
  int64_t n_elem;
  double beta1, beta2;
  float step_size, eps, weight_decay_step;
  bool zero_grad;
  DType dtype, grad_dtype, copy_dtype;
};

// Rows summed into one partial of a column sum (bias, gamma and beta gradients). The split depends on the shape alone,
// never on the number of threads or multiprocessors, so the same input gives the same bits anywhere.
constexpr int64_t kRowsPerPartial = 32;
constexpr int64_t kMaxPartials = 256;
inline int64_t column_sum_rows_per_partial(int64_t n_rows) {
  const int64_t rows = (n_rows + kMaxPartials - 1) / kMaxPartials;
  return rows < kRowsPerPartial ? kRowsPerPartial : rows;
}
inline int64_t column_sum_n_partials(int64_t n_rows) {
  const int64_t rows = column_sum_rows_per_partial(n_rows);
  return (n_rows + rows - 1) / rows;
}

}  // namespace ls
