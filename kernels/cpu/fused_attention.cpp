// out = dropout(softmax(scale q k^T + bias)) v and its backward; shapes and formulas in common/params.h.
//
// A thread owns whole (batch, head) pairs and so their gradients: the result does not depend on the number of threads. It packs the
// pair's keys and values into fp32 scratch (few rows read them where they lie) and goes over the query rows in blocks whose scores stay in
// the second-level cache: product, masks, softmax and dropout, product. Nothing of size T x S leaves it. Forward does 4 T S D operations, backward 10; what the masks
// bar is skipped where it is whole: keys before the first and after the last that a sentence has, and keys beyond a causal block.
// Memory: q, k, v and out are touched once (forward), and q, k, v, grad_out and the gradients (backward), all at their own strides.
//
// The recomputation in the backward from a row's statistics is that of Dao et al., FlashAttention (2022).
#include <cstddef>
#include <limits>
#include <memory>
#include <type_traits>

#include "cpu/dropout.h"
#include "cpu/matrix.h"
#include "cpu/parallel.h"

namespace ls::cpu::LS_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Query rows of a block: enough for the tiles of the products over rows (grad_k, grad_v), few enough for 128 KB of scores.
constexpr int64_t kMaxBlockRows = 64, kBlockScores = 32768;
inline int64_t block_rows(int64_t n_keys) {
  return std::clamp<int64_t>(kBlockScores / std::max<int64_t>(n_keys, 1), kTileRows, kMaxBlockRows);
}

// Row pitch of a block of scores: whole panels, and an odd number of cache lines, so that rows fall on different sets.
inline int64_t score_pitch(int64_t n_keys) { return (round_up(n_keys, std::max<int64_t>(kPanel, 16)) / 16 | 1) * 16; }

// Pairs worth a thread: a million operations, about 10 us. Reading a key and its value takes as long as 8 rows' operations on them, and a row as
// long as 10,000 whatever its length.
inline int64_t pairs_per_thread(const FusedAttention& a) {
  return std::max<int64_t>(1, 1'000'000 / (4 * (a.n_rows + 8) * a.n_keys * a.head_dim + 10'000 * a.n_rows + 1));
}

// Whether keys and values are read where they lie, as in decoding: packing them takes as long as some rows' arithmetic. Measured with AVX2, 80 x 4
// pairs of 40 keys, D = 64: 2.4 times as fast as packed at one row, 1.2 times at 8, with 200 keys 1.6 times and equally fast.
constexpr int64_t kFewRows = 8;
inline bool are_few_rows(const FusedAttention& a) { return a.n_rows <= kFewRows && a.head_dim % kLanes == 0; }

// Memory of a thread for one call, cut into parts that begin on cache lines.
class Scratch {
 public:
  explicit Scratch(int64_t n_floats) : memory_(new float[n_floats + kLine]), next_(memory_.get()) {
    next_ += (-reinterpret_cast<uintptr_t>(next_) % (kLine * sizeof(float))) / sizeof(float);
  }
  float* take(int64_t n_floats) {
    float* part = next_;
    next_ += size(n_floats);
    return part;
  }
  static int64_t size(int64_t n_floats) { return round_up(n_floats, kLine); }

 private:
  static constexpr int64_t kLine = 16;
  std::unique_ptr<float[]> memory_;
  float* next_;
};

template <typename scalar_t>
inline scalar_t* at(const void* tensor, const HeadStrides& strides, int64_t batch, int64_t head, int64_t row) {
  return static_cast<scalar_t*>(const_cast<void*>(tensor)) + batch * strides.batch + head * strides.head + row * strides.row;
}

// to[i][j] = from[i][j] * scale(i)
template <typename scalar_t, typename Scale>
inline void write_rows(const float* from, int64_t pitch, int64_t n_rows, int64_t n_cols, scalar_t* to, int64_t stride,
                       Scale&& scale) {
  for (int64_t i = 0; i < n_rows; ++i) {
    const float factor = scale(i);
    for_each_vector(n_cols, [&](int64_t j, auto n) { store_n(to + i * stride + j, load(from + i * pitch + j) * factor, n); });
  }
}

// The keys that a sentence has, from the first to the last that is not padding.
struct Keys {
  int64_t begin = 0, n = 0;  // columns [begin, begin + n); begin is a multiple of kUnit, so a vector and a draw begin there
  bool has_holes = false;    // padding among them, marked in `barred`
  const int32_t* holes = nullptr;
  static constexpr int64_t kUnit = 16;

  Keys(const FusedAttention& a, int64_t batch, vint* barred) : n(a.n_keys) {
    if (a.key_padding_mask == nullptr) return;
    const bool* mask = a.key_padding_mask + batch * a.n_keys;
    int64_t end = a.n_keys;
    while (end > 0 && mask[end - 1]) --end;
    while (begin < end && mask[begin]) ++begin;
    begin -= begin % kUnit;
    n = end - begin;
    has_holes = std::find(mask + begin, mask + end, true) != mask + end;
    if (!has_holes) return;
    auto* lanes = reinterpret_cast<int32_t*>(barred);
    for (int64_t i = 0; i < n; ++i) lanes[i] = -static_cast<int32_t>(mask[begin + i]);
    std::fill(lanes + n, lanes + round_up(n, kLanes), 0);
    holes = lanes;
  }

  // Rows of packed keys or values that are padding become zeros: 0 times what they hold might be NaN.
  void clear_holes(Panels rows, int64_t n_cols) const {
    if (!has_holes) return;
    for (int64_t i = 0; i < n; ++i) {
      if (holes[i] == 0) continue;
      float* to = rows.data + i * rows.row_stride;
      for (int64_t j = 0; j < n_cols; j += kPanel, to += rows.panel_stride) std::fill(to, to + kPanel, 0.0f);
    }
  }

  // body(begin, end, whether it is a later run) for the runs between holes of the first n_visible keys; once, with none, where there are none.
  template <typename Body>
  void for_each_run(int64_t n_visible, Body&& body) const {
    if (!has_holes) return body(0, n_visible, false);
    int64_t begin = 0, end = 0;
    bool is_later = false;
    while (begin < n_visible) {
      while (begin < n_visible && holes[begin] != 0) ++begin;
      for (end = begin; end < n_visible && holes[end] == 0;) ++end;
      if (begin < end || !is_later) body(begin, end, is_later);
      is_later = true, begin = end;
    }
    if (!is_later) body(0, 0, false);
  }
};

// One (batch, head) pair, and what both directions do with it.
template <typename scalar_t>
struct Pair {
  const FusedAttention& a;
  int64_t batch, head;
  const vint* barred;
  const Keys keys;

  Pair(const FusedAttention& attention, int64_t index, vint* barred_keys)
      : a(attention),
        batch(index / attention.n_heads),
        head(index % attention.n_heads),
        barred(barred_keys),
        keys(attention, batch, barred_keys) {}

  int64_t row_index(int64_t row) const { return (batch * a.n_heads + head) * a.n_rows + row; }

  // Keys that a row sees, from keys.begin on: its first n_visible. Rising with the row, so a block's last row sees the most.
  int64_t n_visible(int64_t row) const {
    return a.causal ? std::clamp<int64_t>(row + 1 + a.n_keys - a.n_rows - keys.begin, 0, keys.n) : keys.n;
  }

  // The parts of the products that matter, of a block that begins at row `first` and sees n_keys: row i of it sees its first seen + i
  // keys, so tiles beyond are zero.
  int64_t seen(int64_t first) const {
    return a.causal ? first + 1 + a.n_keys - a.n_rows - keys.begin : std::numeric_limits<int64_t>::max() / 2;
  }
  auto scores_range(int64_t first) const {  // rows x keys, over D
    return [this, seen = seen(first)](int64_t i, int64_t rows, int64_t j) {
      return Range{0, j < seen + i + rows - 1 ? a.head_dim : 0};
    };
  }
  auto rows_range(int64_t first, int64_t n_keys) const {  // rows x D, over the keys
    return [n_keys, seen = seen(first)](int64_t i, int64_t rows, int64_t) {
      return Range{0, std::clamp<int64_t>(seen + i + rows - 1, 0, n_keys)};
    };
  }
  auto keys_range(int64_t first, int64_t n_rows) const {  // keys x D, over the rows
    return [n_rows, seen = seen(first)](int64_t i, int64_t, int64_t) {
      return Range{std::clamp<int64_t>(i + 1 - seen, 0, n_rows), n_rows};
    };
  }

  // Adds the bias to a row of n scores and makes those of barred keys and of the last vector's idle lanes -inf.
  void finish_scores(float* score, int64_t n, int64_t row) const {
    if (a.bias != nullptr) {
      const auto* bias = at<const scalar_t>(a.bias, a.bias_strides, batch, head, row) + keys.begin;
      for_each_vector(n, [&](int64_t i, auto m) { store(score + i, load(score + i) + load_n(bias + i, m)); });
    }
    if (keys.has_holes) {
      for (int64_t i = 0; i < n; i += kLanes) store(score + i, barred[i / kLanes] ? broadcast(-kInfinity) : load(score + i));
    }
    for (int64_t i = n; i % kLanes != 0; ++i) score[i] = -kInfinity;
  }
  // Values that are read where they lie are not zero at padding.
  void finish_grads(float* grad_p, int64_t n) const {
    if (!keys.has_holes) return;
    for (int64_t i = 0; i < n; i += kLanes) store(grad_p + i, barred[i / kLanes] ? vfloat{} : load(grad_p + i));
  }

  // body(first row, number of rows, keys that the block sees) for blocks of nearly equal size.
  template <typename Body>
  void for_each_block(Body&& body) const {
    const int64_t most = block_rows(a.n_keys), n_blocks = (a.n_rows + most - 1) / most;
    for (int64_t block = 0; block < n_blocks; ++block) {
      const int64_t first = block * a.n_rows / n_blocks, end = (block + 1) * a.n_rows / n_blocks;
      body(first, end - first, n_visible(end - 1));
    }
  }
};

// Keys or values of a pair, B, as the right factor of products over a block of query rows: packed, or, for few rows, where they lie.
template <typename scalar_t>
struct Factor {
  const scalar_t* data;
  const Keys* keys;
  int64_t stride, head_dim;
  bool is_packed;
  Panels rows, transposed;  // where packed, those that are used

  // c (n_rows, n_keys) = a B^T, a (n_rows, D). Forward and backward must round alike: the row statistics are those of the scores.
  template <typename TileRange>
  void times_transposed(int64_t n_rows, int64_t n_keys, const float* a, int64_t lda, float* c, int64_t ldc,
                        TileRange&& range) const {
    if (is_packed)
      multiply<false>(n_rows, n_keys, a, lda, transposed, c, ldc, /*add=*/false, range);
    else
      multiply_few_by_transposed(n_rows, n_keys, head_dim, a, lda, data, stride, c, ldc);
  }
  // c (n_rows, D) = a B, a (n_rows, n_keys)
  template <typename TileRange>
  void times(int64_t n_rows, int64_t n_keys, const float* a, int64_t lda, float* c, int64_t ldc, TileRange&& range) const {
    if (is_packed)
      multiply<false>(n_rows, head_dim, a, lda, rows, c, ldc, /*add=*/false, range);
    else
      keys->for_each_run(n_keys, [&](int64_t begin, int64_t end, bool add) {
        multiply_few(n_rows, head_dim, end - begin, a + begin, lda, data + begin * stride, stride, c, ldc, add);
      });
  }
};

// Scores become exp(score - max) with dropped elements zero; gives their sum before dropping, and the maximum.
struct RowSum {
  float sum, max;
};
template <bool kDrops>
inline RowSum exp_row(float* score, int64_t n, const uint16_t* draws, uint32_t threshold) {
  vfloat maxima = broadcast(-kInfinity);
  for (int64_t i = 0; i < n; i += kLanes) {
    const vfloat v = load(score + i);
    maxima = v > maxima ? v : maxima;
  }
  float max = reduce_max(maxima);
  if (max == -kInfinity) max = 0.0f;  // nothing visible: every exponential is 0, and none NaN
  vfloat sum{};
  for (int64_t i = 0; i < n; i += kLanes) {
    vfloat p = exp_nonpositive(load(score + i) - max);
    sum += p;
    if constexpr (kDrops) p = keep_lanes(draws + i, threshold) ? p : vfloat{};
    store(score + i, p);
  }
  return {reduce_add(sum), max};
}

// Scores become P~, and grad_p, the product grad_out v^T, becomes dS. `p_row` is scratch of a row, used when something is dropped.
template <bool kDrops>
inline void backward_row(float* score, float* grad_p, int64_t n, float max, float factor, const uint16_t* draws,
                         const Dropout& dropout, float* p_row) {
  vfloat dot{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vfloat p = exp_nonpositive(load(score + i) - max) * factor;
    vfloat g = load(grad_p + i);
    if constexpr (kDrops) {
      const vint keep = keep_lanes(draws + i, dropout.threshold);
      g = keep ? g * dropout.scale : vfloat{};
      store(p_row + i, p);
      store(grad_p + i, g);
      store(score + i, keep ? p * dropout.scale : vfloat{});
    } else {
      store(score + i, p);
    }
    dot += p * g;
  }
  const float sum = reduce_add(dot);
  const float* p = kDrops ? p_row : score;
  for (int64_t i = 0; i < n; i += kLanes) store(grad_p + i, load(p + i) * (load(grad_p + i) - sum));
}

// A block's rows are longer than what a causal row sees: the rest takes no part.
inline void zero_rest(float* row, int64_t n_visible, int64_t n) {
  for (int64_t i = round_up(n_visible, kLanes); i < n; i += kLanes) store(row + i, vfloat{});
}

template <typename scalar_t, bool kDrops>
void forward(const FusedAttentionForward& a) {
  const bool packs = !are_few_rows(a);
  const int64_t most_rows = std::min(block_rows(a.n_keys), a.n_rows);
  const int64_t pitch = score_pitch(a.n_keys), width = round_up(a.head_dim, kPanel), n_barred = round_up(a.n_keys, kLanes);
  const int64_t sizes[] = {packs ? panels_size(a.head_dim, a.n_keys) : 0,
                           packs ? panels_size(a.n_keys, a.head_dim) : 0,
                           most_rows * pitch,
                           2 * most_rows * width,
                           most_rows,
                           n_barred};
  int64_t n_floats = 0;
  for (const int64_t size : sizes) n_floats += Scratch::size(size);
  parallel_for(0, a.n_batch * a.n_heads, pairs_per_thread(a), [&](int64_t pair_begin, int64_t pair_end) {
    Scratch scratch(n_floats);
    const Panels k_transposed = panels(scratch.take(sizes[0]), a.head_dim), rows = panels(scratch.take(sizes[1]), a.n_keys);
    float* scores = scratch.take(sizes[2]);
    float* q = scratch.take(sizes[3]);
    float* out = q + most_rows * width;
    float* factor = scratch.take(sizes[4]);
    auto* barred = reinterpret_cast<vint*>(scratch.take(sizes[5]));
    RowDraws draws(a.dropout, a.n_keys, pair_end * a.n_rows);
    for (int64_t index = pair_begin; index < pair_end; ++index) {
      const Pair<scalar_t> pair(a, index, barred);
      const int64_t b = pair.batch, h = pair.head, first_key = pair.keys.begin;
      const Factor<scalar_t> k{at<const scalar_t>(a.k, a.k_strides, b, h, first_key),
                               &pair.keys,
                               a.k_strides.row,
                               a.head_dim,
                               packs,
                               {},
                               k_transposed};
      const Factor<scalar_t> v{
          at<const scalar_t>(a.v, a.v_strides, b, h, first_key), &pair.keys, a.v_strides.row, a.head_dim, packs, rows, {}};
      if (packs) {
        pack_rows(k.data, k.stride, pair.keys.n, a.head_dim, 1.0f, rows);
        pair.keys.clear_holes(rows, a.head_dim);
        transpose_panels(rows, pair.keys.n, a.head_dim, k_transposed);
        pack_rows(v.data, v.stride, pair.keys.n, a.head_dim, 1.0f, rows);
        pair.keys.clear_holes(rows, a.head_dim);
      }
      pair.for_each_block([&](int64_t first, int64_t n_rows, int64_t n_keys) {
        pack_rows(at<const scalar_t>(a.q, a.q_strides, b, h, first), a.q_strides.row, n_rows, a.head_dim, a.scale,
                  row_major(q, width));
        k.times_transposed(n_rows, n_keys, q, width, scores, pitch, pair.scores_range(first));
        for (int64_t i = 0; i < n_rows; ++i) {
          float* row = scores + i * pitch;
          const int64_t n = pair.n_visible(first + i), row_index = pair.row_index(first + i);
          pair.finish_scores(row, n, first + i);
          const uint16_t* row_draws = kDrops && n > 0 ? draws.of(row_index, first_key, first_key + n) + first_key : nullptr;
          const RowSum sum = exp_row<kDrops>(row, n, row_draws, a.dropout.threshold);
          zero_rest(row, n, n_keys);
          factor[i] = sum.sum == 0.0f ? 0.0f : a.dropout.scale / sum.sum;
          a.row_max[row_index] = sum.max;
          a.row_factor[row_index] = sum.sum == 0.0f ? 0.0f : 1.0f / sum.sum;
        }
        v.times(n_rows, n_keys, scores, pitch, out, width, pair.rows_range(first, n_keys));
        write_rows(out, width, n_rows, a.head_dim, at<scalar_t>(a.out, a.out_strides, b, h, first), a.out_strides.row,
                   [&](int64_t i) { return factor[i]; });
      });
    }
  });
}

template <typename scalar_t, bool kDrops>
void backward(const FusedAttentionBackward& a) {
  const bool packs = !are_few_rows(a);
  const int64_t most_rows = std::min(block_rows(a.n_keys), a.n_rows);
  const int64_t pitch = score_pitch(a.n_keys), width = round_up(a.head_dim, kPanel), n_barred = round_up(a.n_keys, kLanes);
  const int64_t sizes[] = {packs ? 2 * panels_size(a.head_dim, a.n_keys) : 0,
                           packs ? panels_size(a.n_keys, a.head_dim) : 0,
                           2 * a.n_keys * width,
                           (2 * most_rows + 1) * pitch,
                           3 * most_rows * width,
                           n_barred};
  int64_t n_floats = 0;
  for (const int64_t size : sizes) n_floats += Scratch::size(size);
  parallel_for(0, a.n_batch * a.n_heads, pairs_per_thread(a), [&](int64_t pair_begin, int64_t pair_end) {
    Scratch scratch(n_floats);
    const Panels k_transposed = panels(scratch.take(sizes[0]), a.head_dim);
    const Panels v_transposed = panels(k_transposed.data + sizes[0] / 2, a.head_dim);
    const Panels rows = panels(scratch.take(sizes[1]), a.n_keys);
    float* grad_k = scratch.take(sizes[2]);
    float* grad_v = grad_k + a.n_keys * width;
    float* scores = scratch.take(sizes[3]);
    float* grad_p = scores + most_rows * pitch;
    float* p_row = grad_p + most_rows * pitch;
    float* q = scratch.take(sizes[4]);
    float* grad_out = q + most_rows * width;
    float* grad_q = grad_out + most_rows * width;
    auto* barred = reinterpret_cast<vint*>(scratch.take(sizes[5]));
    RowDraws draws(a.dropout, a.n_keys, pair_end * a.n_rows);
    for (int64_t index = pair_begin; index < pair_end; ++index) {
      const Pair<scalar_t> pair(a, index, barred);
      const int64_t b = pair.batch, h = pair.head, first_key = pair.keys.begin;
      const Factor<scalar_t> k{at<const scalar_t>(a.k, a.k_strides, b, h, first_key),
                               &pair.keys,
                               a.k_strides.row,
                               a.head_dim,
                               packs,
                               rows,
                               k_transposed};
      const Factor<scalar_t> v{at<const scalar_t>(a.v, a.v_strides, b, h, first_key),
                               &pair.keys,
                               a.v_strides.row,
                               a.head_dim,
                               packs,
                               {},
                               v_transposed};
      if (packs) {
        pack_rows(v.data, v.stride, pair.keys.n, a.head_dim, 1.0f, rows);
        pair.keys.clear_holes(rows, a.head_dim);
        transpose_panels(rows, pair.keys.n, a.head_dim, v_transposed);
        pack_rows(k.data, k.stride, pair.keys.n, a.head_dim, 1.0f, rows);
        pair.keys.clear_holes(rows, a.head_dim);
        transpose_panels(rows, pair.keys.n, a.head_dim, k_transposed);
      }
      int64_t n_begun = 0;  // keys whose gradients hold a sum; a later block of a causal matrix sees more
      const auto begin_keys = [&](int64_t n) {
        std::fill(grad_k + n_begun * width, grad_k + std::max(n, n_begun) * width, 0.0f);
        std::fill(grad_v + n_begun * width, grad_v + std::max(n, n_begun) * width, 0.0f);
        n_begun = std::max(n, n_begun);
      };
      pair.for_each_block([&](int64_t first, int64_t n_rows, int64_t n_keys) {
        const bool add = first > 0;
        if (add) begin_keys(n_keys);
        n_begun = std::max(n_begun, n_keys);
        const Panels q_block = row_major(q, width), grad_out_block = row_major(grad_out, width);
        pack_rows(at<const scalar_t>(a.q, a.q_strides, b, h, first), a.q_strides.row, n_rows, a.head_dim, a.scale, q_block);
        pack_rows(at<const scalar_t>(a.grad_out, a.grad_out_strides, b, h, first), a.grad_out_strides.row, n_rows, a.head_dim,
                  1.0f, grad_out_block);
        k.times_transposed(n_rows, n_keys, q, width, scores, pitch, pair.scores_range(first));
        v.times_transposed(n_rows, n_keys, grad_out, width, grad_p, pitch, pair.scores_range(first));
        for (int64_t i = 0; i < n_rows; ++i) {
          float *score_row = scores + i * pitch, *grad_p_row = grad_p + i * pitch;
          const int64_t n = pair.n_visible(first + i), row_index = pair.row_index(first + i);
          pair.finish_scores(score_row, n, first + i);
          const uint16_t* row_draws = kDrops && n > 0 ? draws.of(row_index, first_key, first_key + n) + first_key : nullptr;
          if (!packs) pair.finish_grads(grad_p_row, n);
          backward_row<kDrops>(score_row, grad_p_row, n, a.row_max[row_index], a.row_factor[row_index], row_draws, a.dropout,
                               p_row);
          zero_rest(score_row, n, n_keys);
          zero_rest(grad_p_row, n, n_keys);
        }
        multiply<true>(n_keys, a.head_dim, scores, pitch, grad_out_block, grad_v, width, add, pair.keys_range(first, n_rows));
        // q is scaled already
        multiply<true>(n_keys, a.head_dim, grad_p, pitch, q_block, grad_k, width, add, pair.keys_range(first, n_rows));
        k.times(n_rows, n_keys, grad_p, pitch, grad_q, width, pair.rows_range(first, n_keys));
        write_rows(grad_q, width, n_rows, a.head_dim, at<scalar_t>(a.grad_q, a.grad_q_strides, b, h, first),
                   a.grad_q_strides.row, [&](int64_t) { return a.scale; });
      });
      begin_keys(pair.keys.n);
      const auto write_keys = [&](const float* grad, void* tensor, const HeadStrides& strides) {
        const auto one = [](int64_t) { return 1.0f; };
        write_rows(grad, width, pair.keys.n, a.head_dim, at<scalar_t>(tensor, strides, b, h, first_key), strides.row, one);
        for (int64_t key = 0; key < a.n_keys; ++key) {
          if (key == first_key) key += pair.keys.n;
          if (key < a.n_keys) {
            auto* row = at<scalar_t>(tensor, strides, b, h, key);
            std::fill(row, row + a.head_dim, scalar_t{});
          }
        }
      };
      write_keys(grad_k, a.grad_k, a.grad_k_strides);
      write_keys(grad_v, a.grad_v, a.grad_v_strides);
    }
  });
}

}  // namespace

void fused_attention_forward(const FusedAttentionForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    a.dropout.threshold == 0 ? forward<scalar_t, false>(a) : forward<scalar_t, true>(a);
  });
}

void fused_attention_backward(const FusedAttentionBackward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    a.dropout.threshold == 0 ? backward<scalar_t, false>(a) : backward<scalar_t, true>(a);
  });
}

}  // namespace ls::cpu::LS_ISA
