// y = dropout(act(x + bias)) and its backward; shapes and meaning in common/params.h.
//
// Memory: forward reads x and writes y (8 bytes per fp32 element), backward reads grad_y and y or x and writes grad_x (12); the draws
// stay in the first-level cache. Arithmetic is fp32. Threads own whole rows (forward) or whole chunks of rows (backward, where
// a chunk owns one row of partial bias gradients).
#include "cpu/column_sum.h"
#include "cpu/dropout.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"

namespace ls::cpu::LS_ISA {
namespace {

constexpr float kInverseSqrt2Pi = 0.3989422804f;

// gelu_accurate(v) = v (1 + tanh(u)) / 2 = v s(2 u) with s the logistic function and u = sqrt(2 / pi) (v + 0.044715 v^3). With
// e = exp(-|2 u|), s is 1 / (1 + e) or e / (1 + e), which never cancels, and s' is e / (1 + e)^2.
constexpr float kTwoSqrt2OverPi = 1.5957691216f, kCubic = 0.044715f;
struct Logistic {
  vfloat e, inverse, value;
};
LS_ALWAYS_INLINE Logistic logistic_of_gelu_accurate(vfloat v) {
  const vfloat u2 = v * (kTwoSqrt2OverPi + kTwoSqrt2OverPi * kCubic * (v * v));
  const vfloat e = exp_nonpositive(-vabs(u2)), inverse = 1.0f / (1.0f + e);
  return {e, inverse, u2 < 0.0f ? e * inverse : inverse};
}

// Beyond +-kTail gelu and gelu_accurate are 0 or v, and their derivatives 0 or 1, to the last bit. Their formulas are taken no further out,
// where infinity times 0 would be NaN.
constexpr float kTail = 20.0f;
LS_ALWAYS_INLINE vfloat at_least_tail(vfloat v) { return v < -kTail ? broadcast(-kTail) : v; }
LS_ALWAYS_INLINE vfloat between_tails(vfloat v) { return v > kTail ? broadcast(kTail) : at_least_tail(v); }

template <Activation kActivation>
LS_ALWAYS_INLINE vfloat activate(vfloat v) {
  // Comparisons are put so that NaN stays NaN.
  if constexpr (kActivation == Activation::kRelu) return v < 0.0f ? vfloat{} : v;
  if constexpr (kActivation == Activation::kReluSquared) return v < 0.0f ? vfloat{} : v * v;
  if constexpr (kActivation == Activation::kTanh) return vtanh(v);
  if constexpr (kActivation == Activation::kGelu) return at_least_tail(v) * normal(v).cdf;
  if constexpr (kActivation == Activation::kGeluAccurate) return at_least_tail(v) * logistic_of_gelu_accurate(v).value;
}

// act'(v), for the activations that save their input.
template <Activation kActivation>
LS_ALWAYS_INLINE vfloat derivative(vfloat v) {
  static_assert(!saves_output(kActivation));
  if constexpr (kActivation == Activation::kReluSquared) return v < 0.0f ? vfloat{} : v + v;
  if constexpr (kActivation == Activation::kGelu) {
    v = between_tails(v);
    const Normal n = normal(v);
    return n.cdf + v * (kInverseSqrt2Pi * n.exp);
  }
  if constexpr (kActivation == Activation::kGeluAccurate) {
    v = between_tails(v);
    const Logistic s = logistic_of_gelu_accurate(v);
    const vfloat slope = kTwoSqrt2OverPi + 3.0f * kTwoSqrt2OverPi * kCubic * (v * v);  // of 2 u
    return s.value + v * (s.e * s.inverse * s.inverse) * slope;
  }
}

// body(kept) with kept(i, v) = v * scale where the element i of the segment is kept, else 0; without draws, v.
template <typename Body>
inline void with_dropout(const Dropout& dropout, const uint16_t* draws, Body&& body) {
  const float scale = dropout.scale;
  const uint32_t threshold = dropout.threshold;
  if (draws == nullptr)
    body([](int64_t, vfloat v) { return v; });
  else
    body([=](int64_t i, vfloat v) { return keep_lanes(draws + i, threshold) ? v * scale : vfloat{}; });
}

template <typename scalar_t, Activation kActivation>
void forward(const BiasActDropoutForward& a) {
  const auto* bias = static_cast<const scalar_t*>(a.bias);
  parallel_for(0, a.n_rows, rows_per_thread(a.n_cols), [&](int64_t row_begin, int64_t row_end) {
    for_each_dropout_segment(a.dropout, row_begin, row_end, a.n_cols,
                             [&](int64_t row, int64_t col_begin, int64_t col_end, const uint16_t* draws) {
                               const auto* x = static_cast<const scalar_t*>(a.x) + row * a.n_cols + col_begin;
                               auto* y = static_cast<scalar_t*>(a.y) + row * a.n_cols + col_begin;
                               const scalar_t* b = bias == nullptr ? nullptr : bias + col_begin;
                               with_dropout(a.dropout, draws, [=](auto kept) {
                                 for_each_vector(col_end - col_begin, [=](int64_t i, auto n) {
                                   prefetch_ahead<false>(x + i);
                                   prefetch_ahead<true>(y + i);
                                   vfloat v = load_n(x + i, n);
                                   if (b != nullptr) v += load_n(b + i, n);
                                   store_n(y + i, kept(i, activate<kActivation>(v)), n);
                                 });
                               });
                             });
  });
}

template <typename scalar_t, Activation kActivation>
void backward(const BiasActDropoutBackward& a) {
  constexpr bool kIsRelu = kActivation == Activation::kRelu;
  const auto* bias = saves_output(kActivation) ? nullptr : static_cast<const scalar_t*>(a.bias);
  const int64_t n_chunks = column_sum_n_partials(a.n_rows);
  const float scale = a.dropout.scale;
  const float inverse_scale = 1.0f - static_cast<float>(a.dropout.threshold) / 65536.0f;  // exact
  Dropout dropout = a.dropout;
  if (kIsRelu) dropout.threshold = 0;  // no draws: y knows
  for_each_chunk_in_parallel(a.n_rows, a.n_cols, [&](int64_t chunk, int64_t row_begin, int64_t row_end) {
    float* partial = zeroed_chunk_sums(a.partials, 0, chunk, n_chunks, a.n_cols);
    for_each_dropout_segment(dropout, row_begin, row_end, a.n_cols,
                             [&](int64_t row, int64_t col_begin, int64_t col_end, const uint16_t* draws) {
                               const int64_t first = row * a.n_cols + col_begin;
                               const auto* grad_y = static_cast<const scalar_t*>(a.grad_y) + first;
                               const auto* saved = static_cast<const scalar_t*>(a.saved) + first;
                               auto* grad_x = static_cast<scalar_t*>(a.grad_x) + first;
                               const scalar_t* b = bias == nullptr ? nullptr : bias + col_begin;
                               float* sum = partial == nullptr ? nullptr : partial + col_begin;
                               with_dropout(dropout, draws, [=](auto kept) {
                                 for_each_vector(col_end - col_begin, [=](int64_t i, auto n) {
                                   vfloat g = load_n(grad_y + i, n), v = load_n(saved + i, n);
                                   if constexpr (kIsRelu) {
                                     g = v != 0.0f ? g * scale : vfloat{};
                                   } else if constexpr (kActivation == Activation::kTanh) {
                                     v *= inverse_scale;
                                     g = kept(i, g * (1.0f - v * v));
                                   } else {
                                     if (b != nullptr) v += load_n(b + i, n);
                                     g = kept(i, g * derivative<kActivation>(v));
                                   }
                                   store_n(grad_x + i, g, n);
                                   if (sum != nullptr) store_n(sum + i, load_n(sum + i, n) + g, n);
                                 });
                               });
                             });
  });
  finish_chunk_sums<scalar_t>(a.partials, 0, n_chunks, a.n_cols, a.grad_bias);
}

}  // namespace

void bias_act_dropout_forward(const BiasActDropoutForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    with_activation(a.activation, [&](auto activation) { forward<decltype(scalar), decltype(activation)::value>(a); });
  });
}

void bias_act_dropout_backward(const BiasActDropoutBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    with_activation(a.activation, [&](auto activation) { backward<decltype(scalar), decltype(activation)::value>(a); });
  });
}

}  // namespace ls::cpu::LS_ISA
