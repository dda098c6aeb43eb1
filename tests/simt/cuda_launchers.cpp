// Calls of the CUDA launchers that the bindings would not let through, for test_cuda_kernels.py. Each gives what was thrown.
#include "cuda/launchers.h"
#include "kernels/support.h"

// A target that the vocabulary lacks reaches the kernel only on a GPU: there the binding does not look at the targets, which
// would mean waiting for the device.
TEST(target_outside_the_vocabulary, {
  Buffer<float> logits(3 * 8, "logits", false, 1.0f);
  Buffer<int64_t> target(3, "target", false, 0);
  Buffer<float> loss(3, "loss"), nll(3, "nll");
  target.host[1] = 8;
  ls::LabelSmoothedCrossEntropyForward a{};
  a.logits = logits.data(), a.target = target.data(), a.loss = loss.data(), a.nll = nll.data();
  a.n_rows = 3, a.n_cols = 8, a.ignore_index = 1;
  ls::cuda::label_smoothed_cross_entropy_forward(a, nullptr);
})

// Two sentences of three tokens on tables of eight rows: `token` stands last in the second.
static void embed(int64_t token, int64_t n_positions) {
  Buffer<int64_t> tokens(6, "tokens", false, 2);
  Buffer<float> weight(8 * 4, "weight", false, 1.0f), positions(8 * 4, "positions", false, 1.0f), y(6 * 4, "y");
  tokens.host[5] = token;
  ls::EmbeddingForward a{};
  a.tokens = tokens.data(), a.weight = weight.data(), a.positions = positions.data(), a.y = y.data();
  a.n_sentences = 2, a.n_tokens = 3, a.n_embeddings = 8, a.n_positions = n_positions, a.n_cols = 4, a.padding_idx = 1;
  ls::cuda::embedding_forward(a, nullptr);
}
TEST(token_outside_the_vocabulary, { embed(8, 8); })
TEST(sentence_beyond_the_table_of_positions, { embed(7, 4); })

// 2^31 rows of a block each are one more than a grid can have.
TEST(more_blocks_than_a_grid_has, {
  ls::LayerNormForward a{};
  a.n_rows = int64_t{1} << 31, a.n_cols = 2048;
  ls::cuda::layer_norm_forward(a, nullptr);
})

TEST(unknown_dtype, {
  ls::AdamStep a{};
  a.n_elem = 1, a.dtype = static_cast<ls::DType>(7);
  ls::cuda::adam_step(a, nullptr);
})
