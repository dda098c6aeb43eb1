// Norm of the gradients, clip coefficient and overflow flag; formula in common/params.h.
//
// Memory: reads each gradient once. fp32 within a chunk of 16,384 elements, in kAccumulators * kLanes sums of a few hundred squares
// each, fp64 across chunks. Threads own chunks, so the result does not depend on their number.
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace ls::cpu::LS_ISA {

namespace {

constexpr int kAccumulators = 8;  // independent, to hide the latency of the additions

template <typename scalar_t>
float sum_of_squares(const scalar_t* x, int64_t n_elem) {
  vfloat sum[kAccumulators] = {};
  int64_t i = 0;
  for (; i + kAccumulators * kLanes <= n_elem; i += kAccumulators * kLanes)
    for (int k = 0; k < kAccumulators; ++k) {
      const vfloat v = load(x + i + k * kLanes);
      sum[k] += v * v;
    }
  for_each_vector(n_elem - i, [&](int64_t offset, auto n) {
    const vfloat v = load_n(x + i + offset, n);
    sum[0] += v * v;
  });
  for (int width = kAccumulators / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) sum[k] += sum[k + width];
  return reduce_add(sum[0]);
}

}  // namespace

void grad_norm_squares(const GradNormSquares& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* grad = static_cast<const scalar_t*>(a.grad);
    // Four chunks take about as long to read as a thread to wake.
    parallel_for(0, grad_norm_n_chunks(a.n_elem), 4, [&](int64_t chunk_begin, int64_t chunk_end) {
      for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
        const int64_t begin = chunk * kNormChunk;
        a.squares[chunk] = sum_of_squares(grad + begin, a.n_elem - begin < kNormChunk ? a.n_elem - begin : kNormChunk);
      }
    });
  });
}

void grad_norm_finish(const GradNormFinish& a) {
  double sum = 0.0;
  for (int64_t i = 0; i < a.n_squares; ++i) sum += a.squares[i];
  const float scale = a.scale == nullptr ? 1.0f : *a.scale;
  const float norm = static_cast<float>(std::fabs(static_cast<double>(scale)) * std::sqrt(sum));
  *a.norm = norm;
  *a.overflow = !std::isfinite(norm);
  const float clip = a.max_norm / (norm + 1e-6f);
  *a.coefficient = a.max_norm > 0.0f && !(clip > 1.0f) ? scale * clip : scale;
}

}  // namespace ls::cpu::LS_ISA
