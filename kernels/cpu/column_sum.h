// Second stage of the column sums (bias, gamma and beta gradients): the first stage leaves one row of partial sums per
// fixed chunk of rows (common/params.h); this adds the chunks in order, so the result does not depend on threads.
#pragma once

#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

// out[c] = sum over k of partials[k][c]; partials (n_partials, n_cols), fp32.
template <typename scalar_t>
inline void sum_partials(const float* partials, int64_t n_partials, int64_t n_cols, scalar_t* out) {
  const int64_t n_blocks = (n_cols + kLanes - 1) / kLanes;
  parallel_for(0, n_blocks, 1 + 16384 / (kLanes * (n_partials + 1)), [&](int64_t block_begin, int64_t block_end) {
    for (int64_t c = block_begin * kLanes; c < block_end * kLanes && c < n_cols; c += kLanes) {
      const int64_t n = n_cols - c;
      if (n >= kLanes) {
        vfloat sum{};
        for (int64_t k = 0; k < n_partials; ++k) sum += load(partials + k * n_cols + c);
        store(out + c, sum);
      } else {
        vfloat sum{};
        for (int64_t k = 0; k < n_partials; ++k) sum += load_tail(partials + k * n_cols + c, n);
        store_tail(out + c, sum, n);
      }
    }
  });
}

// Chunks of rows worth a thread in the first stage.
inline int64_t chunks_per_thread(int64_t n_rows, int64_t n_cols) {
  return 1 + rows_per_thread(n_cols) / column_sum_rows_per_partial(n_rows);
}

}  // namespace ls::cpu::LS_ISA
