#include <algorithm>
#include <array>

#include "ops/binding.h"
#include "ops/ops.h"

namespace ls {
namespace {

// The tokens' shape and, on a CPU, their values: each in the vocabulary, and no sentence longer than the table of positions.
// A GPU would have to be waited for; there the kernel checks.
void check_tokens(const char* op, const Tensor& tokens, const Tensor& weight_or_grad, int64_t n_embeddings, bool has_positions,
                  int64_t n_positions, int64_t padding_idx) {
  LS_CHECK(tokens.dim() == 2, op, ": tokens must have shape (B, T), got ", shape_of(tokens));
  check_dtype(op, "tokens", tokens, ScalarType::Long);
  check_device(op, "tokens", tokens, weight_or_grad);
  check_contiguous(op, "tokens", tokens);
  LS_CHECK(padding_idx >= -1 && padding_idx < n_embeddings, op, ": padding_idx must lie in [0, V) = [0, ", n_embeddings,
           ") or be None, got ", padding_idx);
  if (!tokens.is_cpu()) return;
  const auto* values = static_cast<const int64_t*>(tokens.const_data_ptr());
  const int64_t n_sentences = tokens.size(0), n_tokens = tokens.size(1);
  for (int64_t b = 0; b < n_sentences; ++b) {
    const int64_t* sentence = values + b * n_tokens;
    bool inside = true;
    int64_t length = 0;
    for (int64_t t = 0; t < n_tokens; ++t) {
      inside &= sentence[t] >= 0 && sentence[t] < n_embeddings;
      length += sentence[t] != padding_idx;
    }
    if (!inside) {
      const int64_t t =
          std::find_if(sentence, sentence + n_tokens, [=](int64_t v) { return v < 0 || v >= n_embeddings; }) - sentence;
      fail(op, ": tokens must lie in [0, V) = [0, ", n_embeddings, "), the size of the dictionary, got ", sentence[t],
           " at position ", t, " of sentence ", b, "; was the data preprocessed with another dictionary?");
    }
    LS_CHECK(!has_positions || padding_idx + length < n_positions, op, ": sentence ", b, " has ", length,
             " tokens, but positions has rows for at most ", std::max<int64_t>(n_positions - padding_idx - 1, 0),
             "; shorten the sentence or enlarge the table (--max-source-positions, --max-target-positions)");
  }
}

// Ascending order of the tokens and where they stood, equal ones in the order of their places, by torch's own sort.
struct Sorted {
  Tensor tokens, rows;
};
Sorted sort(const Tensor& tokens) {
  Tensor flat = torch::stable::flatten(tokens);
  std::array<StableIValue, 4> stack{torch::stable::detail::from(flat), torch::stable::detail::from(std::optional<bool>(true)),
                                    torch::stable::detail::from(int64_t{-1}), torch::stable::detail::from(false)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

bool runs_on_cuda_kernels(const Tensor& t) {
#if defined(LS_SIMT)
  (void)t;
  return true;
#else
  return !t.is_cpu();
#endif
}

}  // namespace

Tensor embedding_forward(const Tensor& tokens, const Tensor& weight, const OptionalTensor& positions,
                         std::optional<int64_t> padding_idx, double scale, double p, const OptionalTensor& seed,
                         int64_t offset) {
  const char* op = "embedding";
  LS_CHECK(weight.dim() == 2, op, ": weight must have shape (V, C), got ", shape_of(weight));
  check_contiguous(op, "weight", weight);
  EmbeddingForward a{};
  a.dtype = dtype_of(op, "weight", weight);
  a.n_embeddings = weight.size(0), a.n_cols = weight.size(1);
  if (positions) {
    LS_CHECK(positions->dim() == 2 && positions->size(1) == a.n_cols, op, ": positions must have shape (n_positions, C) = (*, ",
             a.n_cols, "), got ", shape_of(*positions));
    check_dtype(op, "positions", *positions, weight.scalar_type());
    check_device(op, "positions", *positions, weight);
    check_contiguous(op, "positions", *positions);
    a.n_positions = positions->size(0);
  }
  a.padding_idx = padding_idx.value_or(-1);
  check_tokens(op, tokens, weight, a.n_embeddings, positions.has_value(), a.n_positions, a.padding_idx);
  a.n_sentences = tokens.size(0), a.n_tokens = tokens.size(1);
  a.scale = static_cast<float>(scale);
  a.dropout = make_dropout(op, p, seed, offset, weight);
  Tensor y = new_empty(weight, {a.n_sentences, a.n_tokens, a.n_cols}, weight.scalar_type());
  a.tokens = in<int64_t>(tokens, "tokens"), a.weight = in(weight, "weight"), a.positions = in(positions, "positions");
  a.y = out(y, "y");
  if (y.numel() > 0) LS_RUN(embedding_forward, a, weight);
  return y;
}

std::tuple<Tensor, Tensor> embedding_backward(const Tensor& grad_y, const Tensor& tokens, std::optional<int64_t> padding_idx,
                                              double scale, double p, const OptionalTensor& seed, int64_t offset,
                                              int64_t n_embeddings, int64_t n_positions, bool needs_weight_grad,
                                              bool needs_positions_grad, bool deterministic) {
  const char* op = "embedding_backward";
  const ScalarType dtype = grad_y.scalar_type();
  EmbeddingBackward a{};
  a.dtype = dtype_of(op, "grad_y", grad_y);
  a.padding_idx = padding_idx.value_or(-1);
  check_tokens(op, tokens, grad_y, n_embeddings, needs_positions_grad, n_positions, a.padding_idx);
  a.n_sentences = tokens.size(0), a.n_tokens = tokens.size(1);
  LS_CHECK(grad_y.dim() == 3 && grad_y.size(0) == a.n_sentences && grad_y.size(1) == a.n_tokens, op,
           ": grad_y must have shape (B, T, C) = (", a.n_sentences, ", ", a.n_tokens, ", *), got ", shape_of(grad_y));
  check_contiguous(op, "grad_y", grad_y);
  a.n_cols = grad_y.size(2), a.n_embeddings = n_embeddings, a.n_positions = n_positions;
  a.scale = static_cast<float>(scale);
  a.dropout = make_dropout(op, p, seed, offset, grad_y);
  const auto new_gradient = [&](bool needed, int64_t n_rows) {
    return needed ? new_empty(grad_y, {n_rows, a.n_cols}, dtype) : new_empty(grad_y, {0}, dtype);
  };
  Tensor grad_weight = new_gradient(needs_weight_grad, n_embeddings);
  Tensor grad_positions = new_gradient(needs_positions_grad, n_positions);
  a.grad_y = in(grad_y, "grad_y"), a.tokens = in<int64_t>(tokens, "tokens");
  advise_huge_pages(grad_weight);
  if (needs_weight_grad) a.grad_weight = out(grad_weight, "grad_weight");
  if (needs_positions_grad) a.grad_positions = out(grad_positions, "grad_positions");
  // Atomics of 16 bits would round at each addition. An fp32 scratch table for them costs 10 bytes an element of the table,
  // zeroed, read and converted, where sorting the tokens costs microseconds.
  std::optional<Sorted> sorted;
  Tensor token_at = new_empty(grad_y, {0}, ScalarType::Int);
  if (runs_on_cuda_kernels(grad_y)) {
    if (needs_weight_grad && (deterministic || dtype != ScalarType::Float)) {
      sorted = sort(tokens);
      a.sorted_tokens = in<int64_t>(sorted->tokens, "sorted_tokens");
      a.sorted_rows = in<int64_t>(sorted->rows, "sorted_rows");
    }
    if (needs_positions_grad) {
      token_at = new_empty(grad_y, {a.n_sentences, a.n_tokens}, ScalarType::Int);
      a.token_at = out<int32_t>(token_at, "token_at");
    }
  }
  if (grad_weight.numel() > 0 || grad_positions.numel() > 0) LS_RUN(embedding_backward, a, grad_y);
  return {grad_weight, grad_positions};
}

}  // namespace ls
