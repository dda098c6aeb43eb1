// The softmax of attention with its masks and its dropout, and the backward; formulas and shapes in common/params.h.
//
// Memory: forward reads the scores and writes the probabilities (8 bytes per fp32 element), backward reads grad_probs and the
// saved matrix and writes grad_scores (12); keys that padding at either end or causality hides are not read, their outputs are
// zeroed. Between the passes a row waits as fp32 in a buffer in the cache; exp is computed once per element. Threads own
// whole rows; arithmetic is fp32.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "cpu/dropout.h"
#include "cpu/parallel.h"

namespace ls::cpu::LS_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The keys [begin, begin + n) that a row may see, and what belongs to them, from `begin` on.
struct Row {
  int64_t index, begin, n;
  int64_t n_more;         // elements of the matrix after these that are the thread's own, and later ones
  const int32_t* hidden;  // -1 where padding lies between other keys; null when there is none
  int64_t bias_offset;    // to the bias of key `begin`
  const uint16_t* draws;  // null when nothing is dropped
};

// The padding of one batch: keys outside [begin, end) are padding, as are those inside that `hidden` marks.
class Padding {
 public:
  Padding(const bool* padding, int64_t n_keys) : padding_(padding), n_keys_(n_keys), end(n_keys) {
    if (padding != nullptr) lanes_.reset(new int32_t[n_keys + kLanes]());
  }
  void go_to(int64_t batch) {
    if (padding_ == nullptr) return;
    const bool* row = padding_ + batch * n_keys_;
    begin = std::find(row, row + n_keys_, false) - row;
    end = n_keys_;
    while (end > begin && row[end - 1]) --end;
    has_holes_ = std::find(row + begin, row + end, true) != row + end;
    if (has_holes_)
      for (int64_t s = 0; s < n_keys_; ++s) lanes_[s] = -static_cast<int32_t>(row[s]);
  }
  const int32_t* hidden() const { return has_holes_ ? lanes_.get() : nullptr; }

 private:
  const bool* padding_;
  int64_t n_keys_;
  bool has_holes_ = false;
  std::unique_ptr<int32_t[]> lanes_;

 public:
  int64_t begin = 0, end;
};

// body(row) for the rows [row_begin, row_end).
template <typename Body>
void for_each_row(const AttentionScores& z, const Dropout& dropout, int64_t row_begin, int64_t row_end, Body&& body) {
  Padding padding(z.padding, z.n_keys);
  RowDraws draws(dropout, z.n_keys, row_end);
  int64_t t = row_begin % z.n_queries, head = row_begin / z.n_queries % z.n_heads, batch = row_begin / z.n_queries / z.n_heads;
  padding.go_to(batch);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = padding.begin;
    const int64_t end = z.causal ? std::min(padding.end, t + 1 + z.n_keys - z.n_queries) : padding.end;
    Row r{};
    r.index = row, r.begin = begin, r.n = std::max<int64_t>(end - begin, 0);
    r.n_more = (row_end - row) * z.n_keys - begin - r.n;
    if (padding.hidden() != nullptr) r.hidden = padding.hidden() + begin;
    r.bias_offset = batch * z.bias_strides[0] + head * z.bias_strides[1] + t * z.bias_strides[2] + begin;
    if (r.n > 0) r.draws = draws.of(row, begin, end);
    if (r.draws != nullptr) r.draws += begin;
    body(r);
    if (++t < z.n_queries) continue;
    t = 0;
    if (++head < z.n_heads) continue;
    head = 0;
    if (++batch, row + 1 < row_end) padding.go_to(batch);
  }
}

// body(bias, holes), each a true_type where the row has it.
template <typename Body>
auto with_masks(const void* bias, const Row& row, Body&& body) {
  using std::false_type, std::true_type;
  if (bias == nullptr) return row.hidden == nullptr ? body(false_type{}, false_type{}) : body(false_type{}, true_type{});
  return row.hidden == nullptr ? body(true_type{}, false_type{}) : body(true_type{}, true_type{});
}

// z of kLanes keys. What the lanes beyond a rest hold is not looked at.
template <bool kBias, bool kHoles, typename scalar_t, typename N>
inline vfloat scaled_scores(const scalar_t* x, const scalar_t* bias, const int32_t* hidden, float scale, int64_t i, N n) {
  vfloat v = load_n(x + i, n) * scale;
  if constexpr (kBias && std::is_same<N, Rest>::value)
    v += load_tail(bias + i, n.n);  // a bias may end here
  else if constexpr (kBias)
    v += load_n(bias + i, n);
  if constexpr (kHoles) v = load_bits<vint>(hidden + i) ? broadcast(-kInfinity) : v;
  return v;
}

// Zeros where the row sees nothing.
template <typename scalar_t>
inline void zero_hidden(scalar_t* out, const Row& row, int64_t n_keys) {
  if (row.begin > 0) std::fill(out, out + row.begin, scalar_t{});
  if (row.begin + row.n < n_keys) std::fill(out + row.begin + row.n, out + n_keys, scalar_t{});
}

// The largest z of a row, and 1 / sum of exp(z - max).
struct RowStatistics {
  float max, factor;
};

// One row: probs, and its statistics. `buffer` has n + 2 kLanes floats.
template <typename scalar_t>
inline RowStatistics forward_row(const AttentionSoftmaxForward& a, const Row& row, float* buffer) {
  const int64_t n_keys = a.z.n_keys, first = row.index * n_keys + row.begin, n = row.n;
  const auto* x = static_cast<const scalar_t*>(a.scores) + first;
  auto* probs = static_cast<scalar_t*>(a.probs) + first;
  if (n == 0) {
    zero_hidden(probs - row.begin, row, n_keys);
    return {0.0f, 0.0f};
  }
  const float max = with_masks(a.z.bias, row, [&](auto has_bias, auto has_holes) {
    const auto* bias = static_cast<const scalar_t*>(a.z.bias) + row.bias_offset;
    const int32_t* hidden = row.hidden;
    const float scale = a.z.scale;
    for_each_vector_of_row(n, row.n_more, [=](int64_t i, auto count) {
      store(buffer + i, scaled_scores<has_bias, has_holes>(x, bias, hidden, scale, i, count));
    });
    store(buffer + n, broadcast(-kInfinity));                                    // from here on the row is whole vectors
    vfloat max0 = broadcast(std::numeric_limits<float>::lowest()), max1 = max0;  // they pass over NaN, which the sum will meet
    int64_t i = 0;
    for (; i + kLanes < n; i += 2 * kLanes) {
      const vfloat v0 = load(buffer + i), v1 = load(buffer + i + kLanes);
      max0 = v0 > max0 ? v0 : max0;
      max1 = v1 > max1 ? v1 : max1;
    }
    if (i < n) {
      const vfloat v = load(buffer + i);
      max0 = v > max0 ? v : max0;
    }
    return reduce_max(max0 > max1 ? max0 : max1);
  });
  vfloat sums{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vfloat e = exp_nonpositive(load(buffer + i) - max);
    sums += e;
    store(buffer + i, e);
  }
  const float sum = reduce_add(sums), inverse_sum = sum == 0.0f ? 0.0f : 1.0f / sum, factor = a.dropout.scale * inverse_sum;
  if (row.draws == nullptr) {
    for_each_vector_of_row(n, row.n_more, [=](int64_t i, auto count) { store_n(probs + i, load(buffer + i) * factor, count); });
  } else {
    const uint16_t* draws = row.draws;
    const uint32_t threshold = a.dropout.threshold;
    for_each_vector_of_row(n, row.n_more, [=](int64_t i, auto count) {
      store_n(probs + i, keep_lanes(draws + i, threshold) ? load(buffer + i) * factor : vfloat{}, count);
    });
  }
  zero_hidden(probs - row.begin, row, n_keys);
  return {max, inverse_sum};
}

// One row of grad_scores. `probs` and `grads`, n + kLanes floats each, receive P and g.
template <typename scalar_t>
inline void backward_row(const AttentionSoftmaxBackward& a, const Row& row, float* probs, float* grads) {
  const int64_t n_keys = a.z.n_keys, first = row.index * n_keys + row.begin, n = row.n;
  const auto* saved = static_cast<const scalar_t*>(a.saved) + first;
  const auto* grad_probs = static_cast<const scalar_t*>(a.grad_probs) + first;
  auto* grad_scores = static_cast<scalar_t*>(a.grad_scores) + first;
  const float scale = a.z.scale, dropout_scale = a.dropout.scale;
  const uint32_t threshold = a.dropout.threshold;
  const uint16_t* draws = row.draws;
  // The sum of g P, with P by probability(i, count). A masked key's g is not looked at.
  const auto dot = [=](auto&& probability, auto has_dropout) {
    vfloat sums{};
    for_each_vector_of_row(n, row.n_more, [=, &sums](int64_t i, auto count) {
      const vfloat p = only(count, probability(i, count));
      vfloat g = load_n(grad_probs + i, count);
      if constexpr (has_dropout) g = keep_lanes(draws + i, threshold) ? g * dropout_scale : vfloat{};
      g = p == 0.0f ? vfloat{} : g;
      sums += p * g;
      store(probs + i, p);
      store(grads + i, g);
    });
    return reduce_add(sums);
  };
  float sum;
  if (a.row_max == nullptr) {
    sum = dot([=](int64_t i, auto count) { return load_n(saved + i, count); }, std::false_type{});
  } else {
    const float max = a.row_max[row.index], factor = a.row_factor[row.index];
    sum = with_masks(a.z.bias, row, [=, &a](auto has_bias, auto has_holes) {
      const auto* bias = static_cast<const scalar_t*>(a.z.bias) + row.bias_offset;
      const int32_t* hidden = row.hidden;
      const auto probability = [=](int64_t i, auto count) {
        return exp_nonpositive(scaled_scores<has_bias, has_holes>(saved, bias, hidden, scale, i, count) - max) * factor;
      };
      return draws == nullptr ? dot(probability, std::false_type{}) : dot(probability, std::true_type{});
    });
  }
  for_each_vector_of_row(n, row.n_more, [=](int64_t i, auto count) {
    store_n(grad_scores + i, load(probs + i) * scale * (load(grads + i) - sum), count);
  });
  zero_hidden(grad_scores - row.begin, row, n_keys);
}

}  // namespace

void attention_softmax_forward(const AttentionSoftmaxForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    parallel_for(0, a.z.n_rows, rows_per_thread(a.z.n_keys), [&](int64_t row_begin, int64_t row_end) {
      const std::unique_ptr<float[]> buffer(new float[a.z.n_keys + 2 * kLanes]);
      for_each_row(a.z, a.dropout, row_begin, row_end, [&](const Row& row) {
        const RowStatistics row_statistics = forward_row<decltype(scalar)>(a, row, buffer.get());
        if (a.row_max != nullptr) a.row_max[row.index] = row_statistics.max, a.row_factor[row.index] = row_statistics.factor;
      });
    });
  });
}

void attention_softmax_backward(const AttentionSoftmaxBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    parallel_for(0, a.z.n_rows, rows_per_thread(a.z.n_keys), [&](int64_t row_begin, int64_t row_end) {
      const int64_t pitch = a.z.n_keys + kLanes;
      const std::unique_ptr<float[]> buffer(new float[2 * pitch]);
      for_each_row(a.z, a.dropout, row_begin, row_end,
                   [&](const Row& row) { backward_row<decltype(scalar)>(a, row, buffer.get(), buffer.get() + pitch); });
    });
  });
}

}  // namespace ls::cpu::LS_ISA
