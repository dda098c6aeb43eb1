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
