// The two stages of the column sums (bias, gamma and beta gradients): the first leaves one row of partial sums per fixed chunk
// of rows (common/params.h), the second adds the chunks in order, so the result does not depend on threads.
#pragma once

#include <algorithm>

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

// Calls body(chunk, row_begin, row_end) for the chunks of rows whose column sums make one partial.
template <typename Body>
inline void for_each_chunk_in_parallel(int64_t n_rows, int64_t n_cols, Body&& body) {
  const int64_t rows_per_chunk = column_sum_rows_per_partial(n_rows);
  const int64_t chunks_per_thread = 1 + rows_per_thread(n_cols) / rows_per_chunk;
  parallel_for(0, column_sum_n_partials(n_rows), chunks_per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      body(chunk, chunk * rows_per_chunk, std::min((chunk + 1) * rows_per_chunk, n_rows));
  });
}

// A chunk's row of the `which`-th matrix of partial sums, (n_chunks, n_cols) each, set to zero; null where none are wanted.
inline float* zeroed_chunk_sums(float* partials, int which, int64_t chunk, int64_t n_chunks, int64_t n_cols) {
  if (partials == nullptr) return nullptr;
  float* sums = partials + (which * n_chunks + chunk) * n_cols;
  std::fill(sums, sums + n_cols, 0.0f);
  return sums;
}

// out (C,), unless null, = the sum of the `which`-th partials.
template <typename scalar_t>
inline void finish_chunk_sums(const float* partials, int which, int64_t n_chunks, int64_t n_cols, void* out) {
  if (out != nullptr) sum_partials(partials + which * n_chunks * n_cols, n_chunks, n_cols, static_cast<scalar_t*>(out));
}

}  // namespace ls::cpu::LS_ISA
