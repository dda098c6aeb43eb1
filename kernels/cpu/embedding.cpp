// y = dropout(scale * weight[token] + positions[position]) and the gradients of both tables; shapes and meaning in
// common/params.h.
//
// Memory: forward reads a row of each table and writes y (8 bytes per fp32 element, the table of positions being in the cache);
// backward reads grad_y, once per table, and writes every row of a table once. What it costs is mostly the zeros of the rows
// that no token names: 64 MB for 32,000 x 512. Arithmetic is fp32. Forward: a thread owns whole tokens. Backward: the tokens are
// sorted by id and a thread owns whole rows of the table, summed in the order of the tokens: no atomics, the same bits at any
// number of threads.
#include <algorithm>
#include <vector>

#include "cpu/dropout.h"
#include "cpu/parallel.h"

namespace ls::cpu::LS_ISA {
namespace {

// The positions of consecutive tokens, from row `row` of (B, T) on.
class PositionCounter {
 public:
  PositionCounter(const int64_t* tokens, int64_t n_tokens, int64_t padding_idx, int64_t row)
      : tokens_(tokens), n_tokens_(n_tokens), padding_idx_(padding_idx), row_(row) {
    for (int64_t i = row - row % n_tokens; i < row; ++i) count_ += tokens[i] != padding_idx;
  }
  int64_t next() {
    if (row_ % n_tokens_ == 0) count_ = 0;
    const bool is_token = tokens_[row_++] != padding_idx_;
    count_ += is_token;
    return padding_idx_ + (is_token ? count_ : 0);
  }

 private:
  const int64_t* tokens_;
  int64_t n_tokens_, padding_idx_, row_;
  int64_t count_ = 0;
};

// Rows of a matrix sorted by their id in a table: those of `id` are rows[begin[id]] to rows[begin[id + 1] - 1], ascending.
struct RowsById {
  std::vector<int64_t> begin, rows;

  // Rows whose id is `skipped` are left out.
  RowsById(const int64_t* ids, int64_t n_rows, int64_t n_ids, int64_t skipped) : begin(n_ids + 2), rows(n_rows) {
    // Counting sort. begin[id + 1] counts up from the first place of id to that of id + 1.
    for (int64_t row = 0; row < n_rows; ++row)
      if (ids[row] != skipped) ++begin[ids[row] + 2];
    for (int64_t id = 2; id <= n_ids; ++id) begin[id] += begin[id - 1];
    for (int64_t row = 0; row < n_rows; ++row)
      if (ids[row] != skipped) rows[begin[ids[row] + 1]++] = row;
  }
};

// Vector stores in place of memset: for long fills glibc takes `rep stosb`, which on an EPYC goes past the cache (8 MB that lie in the
// third-level cache: 0.53 ms against 0.21). Streaming stores are no better there, and worse on memory that the system has just
// cleared, which tables of 32 MB and more are: 7.5 ms for 64 MB against 5.8.
template <typename scalar_t>
void fill_zeros(scalar_t* p, int64_t n_elem) {
  volatile float source = 0.0f;  // a constant would make the compiler put memset in place of the loop
  const vfloat zero = broadcast(source);
  auto* bytes = reinterpret_cast<unsigned char*>(p);
  const int64_t n_bytes = n_elem * static_cast<int64_t>(sizeof(scalar_t));
  int64_t i = 0;
  for (; i + static_cast<int64_t>(sizeof(zero)) <= n_bytes; i += sizeof(zero)) std::memcpy(bytes + i, &zero, sizeof(zero));
  std::memset(bytes + i, 0, n_bytes - i);
}

// table[id] = scale * sum over the rows of that id of dropout(grad_y[row]), for every id in [0, n_ids).
template <typename scalar_t>
void sum_rows_by_id(const RowsById& sorted, int64_t n_ids, const scalar_t* grad_y, int64_t n_cols, const Dropout& dropout,
                    float scale, scalar_t* table) {
  // A row of grad_y takes about as long as four rows of zeros, with its draws.
  constexpr int64_t kRowCost = 4;
  const auto cost_before = [&](int64_t id) { return id + kRowCost * sorted.begin[id]; };
  const auto first_id_at = [&](int64_t cost) {
    int64_t low = 0, high = n_ids;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cost_before(middle) < cost)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  parallel_for(0, cost_before(n_ids), rows_per_thread(n_cols), [&](int64_t cost_begin, int64_t cost_end) {
    std::vector<float> sum(n_cols);
    const int64_t id_end = first_id_at(cost_end);
    for (int64_t id = first_id_at(cost_begin); id < id_end;) {
      const int64_t begin = sorted.begin[id], end = sorted.begin[id + 1];
      scalar_t* out = table + id * n_cols;
      if (begin == end) {
        int64_t next = id + 1;
        while (next < id_end && sorted.begin[next + 1] == begin) ++next;
        fill_zeros(out, (next - id) * n_cols);
        id = next;
        continue;
      }
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = sorted.rows[i];
        for_each_dropout_segment(
            dropout, row, row + 1, n_cols, [&](int64_t, int64_t col_begin, int64_t col_end, const uint16_t* draws) {
              const scalar_t* g_row = grad_y + row * n_cols + col_begin;
              const auto masked = [&](int64_t c, auto n) {
                const vfloat g = load_n(g_row + c, n);
                return draws == nullptr ? g : keep_lanes(draws + c, dropout.threshold) ? g * dropout.scale : vfloat{};
              };
              float* s = sum.data() + col_begin;
              if (begin + 1 == end)
                for_each_vector(col_end - col_begin,
                                [&](int64_t c, auto n) { store_n(out + col_begin + c, masked(c, n) * scale, n); });
              else if (i == begin)
                for_each_vector(col_end - col_begin, [&](int64_t c, auto n) { store_n(s + c, masked(c, n), n); });
              else
                for_each_vector(col_end - col_begin,
                                [&](int64_t c, auto n) { store_n(s + c, load_n(s + c, n) + masked(c, n), n); });
            });
      }
      if (begin + 1 < end)
        for_each_vector(n_cols, [&](int64_t c, auto n) { store_n(out + c, load_n(sum.data() + c, n) * scale, n); });
      ++id;
    }
  });
}

}  // namespace

void embedding_forward(const EmbeddingForward& a) {
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* weight = static_cast<const scalar_t*>(a.weight);
    const auto* positions = static_cast<const scalar_t*>(a.positions);
    auto* y = static_cast<scalar_t*>(a.y);
    parallel_for(0, a.n_sentences * a.n_tokens, rows_per_thread(a.n_cols), [&](int64_t row_begin, int64_t row_end) {
      PositionCounter counter(a.tokens, a.n_tokens, a.padding_idx, row_begin);
      int64_t position = 0;
      for_each_dropout_segment(
          a.dropout, row_begin, row_end, a.n_cols, [&](int64_t row, int64_t col_begin, int64_t col_end, const uint16_t* draws) {
            if (col_begin == 0) position = counter.next();  // long rows come in several segments
            const scalar_t* w = weight + a.tokens[row] * a.n_cols + col_begin;
            const scalar_t* p = positions == nullptr ? nullptr : positions + position * a.n_cols + col_begin;
            scalar_t* out = y + row * a.n_cols + col_begin;
            for_each_vector(col_end - col_begin, [&](int64_t c, auto n) {
              vfloat v = load_n(w + c, n) * a.scale;
              if (p != nullptr) v += load_n(p + c, n);
              if (draws != nullptr) v = keep_lanes(draws + c, a.dropout.threshold) ? v * a.dropout.scale : vfloat{};
              store_n(out + c, v, n);
            });
          });
    });
  });
}

void embedding_backward(const EmbeddingBackward& a) {
  const int64_t n_rows = a.n_sentences * a.n_tokens;
  dispatch_dtype(a.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto* grad_y = static_cast<const scalar_t*>(a.grad_y);
    if (a.grad_weight != nullptr) {
      const RowsById sorted(a.tokens, n_rows, a.n_embeddings, a.padding_idx);
      sum_rows_by_id(sorted, a.n_embeddings, grad_y, a.n_cols, a.dropout, a.scale, static_cast<scalar_t*>(a.grad_weight));
    }
    if (a.grad_positions != nullptr) {
      std::vector<int64_t> positions(n_rows);
      PositionCounter counter(a.tokens, std::max<int64_t>(a.n_tokens, 1), a.padding_idx, 0);
      for (int64_t& position : positions) position = counter.next();
      const RowsById sorted(positions.data(), n_rows, a.n_positions, a.padding_idx);
      sum_rows_by_id(sorted, a.n_positions, grad_y, a.n_cols, a.dropout, 1.0f, static_cast<scalar_t*>(a.grad_positions));
    }
  });
}

}  // namespace ls::cpu::LS_ISA
