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

// The draws of rows that are asked for in order. Short rows share a block of draws; of long ones, only the columns asked for
// are drawn, which spares a causal matrix half of them.
class RowDraws {
 public:
  RowDraws(const Dropout& dropout, int64_t n_cols, int64_t row_end)
      : dropout_(dropout), groups_per_row_(dropout_groups_per_row(n_cols)), row_end_(row_end) {
    if (dropout.threshold == 0) return;
    constexpr int64_t kSharedGroups = 256;  // 4 KB: they stay in the first-level cache beside the rows
    if (groups_per_row_ < 4 * kLanes) rows_per_fill_ = kSharedGroups / groups_per_row_;
    draws_.reset(new uint16_t[(rows_per_fill_ * groups_per_row_ + 2 * kLanes) * kDropoutGroup]);
  }
  // The 16-bit integers of the columns from 0 on, of which [begin, end) may be read; null when nothing is dropped.
  const uint16_t* of(int64_t row, int64_t begin, int64_t end) {
    if (dropout_.threshold == 0) return nullptr;
    if (rows_per_fill_ == 1) {
      const int64_t first = begin / kDropoutGroup;
      philox_fill(dropout_, row * groups_per_row_ + first, dropout_groups_per_row(end) - first,
                  draws_.get() + first * kDropoutGroup);
      return draws_.get();
    }
    if (row >= filled_end_) {
      filled_begin_ = row, filled_end_ = std::min(row + rows_per_fill_, row_end_);
      philox_fill(dropout_, row * groups_per_row_, (filled_end_ - row) * groups_per_row_, draws_.get());
    }
    return draws_.get() + (row - filled_begin_) * groups_per_row_ * kDropoutGroup;
  }

 private:
  const Dropout& dropout_;
  int64_t groups_per_row_, row_end_, rows_per_fill_ = 1, filled_begin_ = 0, filled_end_ = 0;
  std::unique_ptr<uint16_t[]> draws_;
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
    Row r{row, begin, std::max<int64_t>(end - begin, 0), padding.hidden(), 0, nullptr};
    if (r.hidden != nullptr) r.hidden += begin;
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

// z of kLanes keys. The idle lanes of a tail repeat the first key, which padding never hides.
template <bool kBias, bool kHoles, typename scalar_t, typename N>
inline vfloat scaled_scores(const scalar_t* x, const scalar_t* bias, const int32_t* hidden, float scale, int64_t i, N n) {
  vfloat v = load_n(x + i, n, to_float(x[0])) * scale;
  if constexpr (kBias) v += load_n(bias + i, n, to_float(bias[0]));
  if constexpr (kHoles) v = load_bits<vint>(hidden + i) ? broadcast(-kInfinity) : v;
  return v;
}

// Zeros where the row sees nothing.
template <typename scalar_t>
inline void zero_hidden(scalar_t* out, const Row& row, int64_t n_keys) {
  std::fill(out, out + row.begin, scalar_t{});
  std::fill(out + row.begin + row.n, out + n_keys, scalar_t{});
}

}  // namespace

void attention_softmax_forward(const AttentionSoftmaxForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const int64_t n_keys = a.z.n_keys;
    parallel_for(0, a.z.n_rows, rows_per_thread(n_keys), [&](int64_t row_begin, int64_t row_end) {
      const std::unique_ptr<float[]> buffer(new float[n_keys + 2 * kLanes]);
      float* z = buffer.get();
      for_each_row(a.z, a.dropout, row_begin, row_end, [&](const Row& row) {
        const auto* x = static_cast<const scalar_t*>(a.scores) + row.index * n_keys + row.begin;
        auto* probs = static_cast<scalar_t*>(a.probs) + row.index * n_keys;
        zero_hidden(probs, row, n_keys);
        float sum = 0.0f, max = -kInfinity;
        if (row.n > 0) {
          max = with_masks(a.z.bias, row, [&](auto has_bias, auto has_holes) {
            const auto* bias = static_cast<const scalar_t*>(a.z.bias) + row.bias_offset;
            vfloat running = broadcast(-kInfinity);  // passes over NaN, which the sum will meet
            for_each_vector_overlapping(row.n, [&](int64_t i, auto n) {
              const vfloat v = scaled_scores<has_bias, has_holes>(x, bias, row.hidden, a.z.scale, i, n);
              running = v > running ? v : running;
              store(z + i, v);
            });
            return reduce_max(running);
          });
          store(z + row.n, broadcast(-kInfinity));  // the vector with the row's rest in it
          const float shift = max == -kInfinity ? 0.0f : max;
          vfloat sums{};
          for (int64_t i = 0; i < row.n; i += kLanes) {
            const vfloat e = exp_nonpositive(load(z + i) - shift);
            sums += e;
            store(z + i, e);
          }
          sum = reduce_add(sums);
          probs += row.begin;
          const float factor = sum == 0.0f ? 0.0f : a.dropout.scale / sum;
          if (row.draws == nullptr)
            for_each_vector_overlapping(row.n, [&](int64_t i, auto n) { store_n(probs + i, load(z + i) * factor, n); });
          else
            for_each_vector_overlapping(row.n, [&](int64_t i, auto n) {
              const vint keep = keep_lanes(row.draws + i, a.dropout.threshold);
              store_n(probs + i, keep ? load(z + i) * factor : vfloat{}, n);
            });
        }
        if (a.lse != nullptr) a.lse[row.index] = sum == 0.0f ? kInfinity : max + std::log(sum);
      });
    });
  });
}

void attention_softmax_backward(const AttentionSoftmaxBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const int64_t n_keys = a.z.n_keys;
    parallel_for(0, a.z.n_rows, rows_per_thread(n_keys), [&](int64_t row_begin, int64_t row_end) {
      const int64_t pitch = n_keys + kLanes;
      const std::unique_ptr<float[]> buffer(new float[2 * pitch]);
      float *probs = buffer.get(), *grads = probs + pitch;  // P and g of the row
      for_each_row(a.z, a.dropout, row_begin, row_end, [&](const Row& row) {
        const int64_t first = row.index * n_keys + row.begin;
        const auto* saved = static_cast<const scalar_t*>(a.saved) + first;
        const auto* grad_probs = static_cast<const scalar_t*>(a.grad_probs) + first;
        auto* grad_scores = static_cast<scalar_t*>(a.grad_scores) + first;
        zero_hidden(grad_scores - row.begin, row, n_keys);
        if (row.n == 0) return;
        // The sum of g P, with P by probability(i, n). A masked key's g is not looked at.
        const auto dot = [&](auto&& probability) {
          vfloat sums{};
          for_each_vector_overlapping(row.n, [&](int64_t i, auto n) {
            const vfloat p = probability(i, n);
            vfloat g = load_n(grad_probs + i, n);
            g = p == 0.0f ? vfloat{} : g;
            if (row.draws != nullptr) g = keep_lanes(row.draws + i, a.dropout.threshold) ? g * a.dropout.scale : vfloat{};
            sums += fresh(p * g, n);
            store(probs + i, p);
            store(grads + i, g);
          });
          return reduce_add(sums);
        };
        const float sum = a.lse == nullptr
                              ? dot([&](int64_t i, auto n) { return load_n(saved + i, n); })
                              : with_masks(a.z.bias, row, [&](auto has_bias, auto has_holes) {
                                  const auto* bias = static_cast<const scalar_t*>(a.z.bias) + row.bias_offset;
                                  const float lse = a.lse[row.index];
                                  return dot([&](int64_t i, auto n) {
                                    return exp_nonpositive(
                                        scaled_scores<has_bias, has_holes>(saved, bias, row.hidden, a.z.scale, i, n) - lse);
                                  });
                                });
        for_each_vector_overlapping(row.n, [&](int64_t i, auto n) {
          store_n(grad_scores + i, load(probs + i) * a.z.scale * (load(grads + i) - sum), n);
        });
      });
    });
  });
}

}  // namespace ls::cpu::LS_ISA
