// out = alpha A B + bias; definition in common/params.h.
//
// B is packed into panels of kWidth columns, for all threads; a thread takes a block of rows of A at a time, packs it into tiles of kRows
// rows, kDepth columns of them at once (96 KB, in the second-level cache), and goes over B's panels, each of which (24 KB) stays in the
// first-level cache while the block's tiles pass. Both packings widen 16-bit numbers, so these cost no pass of their own, and take either
// order of the dimensions. Threads take blocks from one counter until none is left: on a machine that others use, too, neither waits long
// for the other. Every element of out is the sum of the same parts in the same order, whatever the number of threads.
//
// The loops are those of Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication (2008).
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

#include "cpu/matrix.h"
#include "cpu/parallel.h"

extern "C" int32_t torch_get_num_threads(uint32_t* n_threads);

namespace ls::cpu::LS_ISA {
namespace {

// A tile's sums fill the registers: 12 of 16 vectors in AVX2, 24 of 32 in AVX-512. 4 x 3 takes fewer loads than 6 x 2.
constexpr int kRows = kLanes == 16 ? 8 : 4, kVectors = 3;
constexpr int64_t kWidth = kVectors * kLanes;          // of a panel
constexpr int64_t kDepth = 256;                        // a panel of B: 24 KB of the first-level cache (AVX2)
constexpr int64_t kBlockRows = 96, kBlockCols = 528;   // of out, for a thread at a time
constexpr int64_t kPackedRows = 2048;                  // of B at once
constexpr int64_t kPackedElements = int64_t{1} << 20;  // of B at once, about: 4 MB
constexpr int64_t kPackedAtOnce = 1 << 13;             // of these by a thread, about

// Memory that a thread keeps from call to call: fresh pages would cost more than what is written to them.
class Kept {
 public:
  float* get(int64_t n_floats) {
    if (n_floats > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(n_floats, 16) * sizeof(float))));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = n_floats;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t size_ = 0;
};

// A block of A, (n_rows, n_k), as tiles one after another: element (i, k) at i / kRows * kRows * n_k + k * kRows + i % kRows, times alpha. Rows
// up to a whole tile are zero. Vectors are stored whole: what lies beyond a tile's rows is overwritten by what comes after, and kLanes floats
// beyond the end are written.
template <typename scalar_t>
void pack_left(const scalar_t* a, int64_t row_stride, int64_t k_stride, int64_t n_rows, int64_t n_k, float alpha, float* to) {
  const auto element = [&](int64_t i, int64_t k) {
    return i < n_rows ? to_float(a[i * row_stride + k * k_stride]) * alpha : 0.0f;
  };
  int64_t first = 0;
  if (kLanes >= kRows && row_stride == 1 && k_stride != 1 && n_k > 0) {
    // Along the rows of memory, which may all fall on few sets of the cache; some at a time, which make a cache line of a tile.
    const int64_t n_whole = std::max<int64_t>(0, (n_rows - kLanes) / kRows * kRows);
    const auto pack = [&](int64_t k, auto n) {
      for (int64_t i = 0; i < n_whole; i += kRows)
        for (int64_t r = k; r < k + n; ++r) store(to + i * n_k + r * kRows, load(a + i + r * k_stride) * alpha);
    };
    int64_t k = 0;
    for (; k + 4 < n_k; k += 4) pack(k, std::integral_constant<int, 4>{});
    for (; k + 1 < n_k; ++k) pack(k, std::integral_constant<int, 1>{});
    for (int64_t i = 0; i < n_whole; ++i) to[i / kRows * kRows * n_k + k * kRows + i % kRows] = element(i, k);
    first = n_whole, to += n_whole * n_k;
  }
  for (; first < n_rows; first += kRows, to += kRows * n_k) {
    int64_t k = 0;
    if constexpr (kLanes >= kRows) {
      if (k_stride == 1) {
        const scalar_t* rows[kLanes];
        for (int l = 0; l < kLanes; ++l) rows[l] = a + std::min(first + std::min(l, kRows - 1), n_rows - 1) * row_stride;
        for (; k + kLanes <= n_k; k += kLanes) {
          vfloat block[kLanes];
          for (int l = 0; l < kLanes; ++l) block[l] = load(rows[l] + k) * alpha;
          transpose(block);
          for (int l = 0; l < kLanes; ++l) store(to + (k + l) * kRows, block[l]);
        }
      }
    }
    for (; k < n_k; ++k)
      for (int i = 0; i < kRows; ++i) to[k * kRows + i] = element(first + i, k);
  }
}

// A part of B, (n_k, n_cols), as panels: element (k, j) at j / kWidth * kWidth * n_k + k * kWidth + j % kWidth. Columns up to a whole vector are
// zero. Packed are the rows `ks` of the panels `of`.
template <typename scalar_t>
void pack_right(const scalar_t* b, int64_t k_stride, int64_t col_stride, int64_t n_k, int64_t n_cols, Range ks, Range of,
                float* to) {
  to += of.begin * kWidth * n_k;
  for (int64_t panel = of.begin; panel < of.end; ++panel, to += kWidth * n_k) {
    for (int64_t j = panel * kWidth, v = 0; v < kVectors && j < n_cols; ++v, j += kLanes) {
      const int64_t n = std::min<int64_t>(n_cols - j, kLanes);
      const scalar_t* from = b + j * col_stride;
      float* out = to + v * kLanes;
      int64_t k = ks.begin;
      if (n == kLanes && k_stride == 1) {
        // Two vectors of each column, a cache line in AVX2, before the next column, which may fall on the same set of the cache.
        for (; k + 2 * kLanes <= ks.end; k += 2 * kLanes) {
          vfloat near[kLanes], far[kLanes];
          for (int l = 0; l < kLanes; ++l)
            near[l] = load(from + l * col_stride + k), far[l] = load(from + l * col_stride + k + kLanes);
          transpose(near);
          for (int l = 0; l < kLanes; ++l) store(out + (k + l) * kWidth, near[l]);
          transpose(far);
          for (int l = 0; l < kLanes; ++l) store(out + (k + kLanes + l) * kWidth, far[l]);
        }
      }
      for (; k < ks.end; ++k)
        for (int64_t l = 0; l < kLanes; ++l) out[k * kWidth + l] = l < n ? to_float(from[k * k_stride + l * col_stride]) : 0.0f;
    }
  }
}

// The rows `ks` of B, whose columns are contiguous, into all panels. Along the rows, as the processor expects what it fetches ahead; two of them at a
// time, which make whole cache lines of a panel: the panels may all fall on one set of the cache.
template <typename scalar_t>
void pack_rows_right(const scalar_t* b, int64_t k_stride, int64_t n_k, int64_t n_cols, Range ks, float* to) {
  const int64_t n_whole = n_cols / kWidth;
  const auto pack = [&](int64_t first, auto n_rows) {
    const scalar_t* from = b + first * k_stride;
    float* out = to + first * kWidth;
    for (int64_t panel = 0; panel < n_whole; ++panel, from += kWidth, out += kWidth * n_k)
      for (int r = 0; r < n_rows; ++r)
        for (int v = 0; v < kVectors; ++v) store(out + r * kWidth + v * kLanes, load(from + r * k_stride + v * kLanes));
  };
  int64_t k = ks.begin;
  for (; k + 2 <= ks.end; k += 2) pack(k, std::integral_constant<int, 2>{});
  if (k < ks.end) pack(k, std::integral_constant<int, 1>{});
  pack_right(b, k_stride, 1, n_k, n_cols, ks, {n_whole, (n_cols + kWidth - 1) / kWidth}, to);
}

// c (n_rows, n_cols) = or += left right, packed, over n_k; the right panels are panel_stride apart.
void multiply_block(int64_t n_rows, int64_t n_cols, int64_t n_k, const float* left, const float* right, int64_t panel_stride,
                    float* c, int64_t ldc, bool add) {
  for (int64_t j = 0; j < n_cols; j += kWidth, right += panel_stride) {
    const int64_t width = std::min(n_cols - j, kWidth), n_vectors = (width + kLanes - 1) / kLanes;
    for (int64_t i = 0; i < n_rows; i += kRows) {
      const int64_t height = std::min<int64_t>(n_rows - i, kRows);
      const auto multiply = [&](float* to, int64_t stride, bool adds) {
        switch (n_vectors) {
          case 3:
            return multiply_tile<kRows, 3, true>(n_k, left + i * n_k, kRows, right, kWidth, to, stride, adds);
          case 2:
            return multiply_tile<kRows, 2, true>(n_k, left + i * n_k, kRows, right, kWidth, to, stride, adds);
          default:
            return multiply_tile<kRows, 1, true>(n_k, left + i * n_k, kRows, right, kWidth, to, stride, adds);
        }
      };
      float* to = c + i * ldc + j;
      if (height == kRows && width % kLanes == 0) {
        multiply(to, ldc, add);
        continue;
      }
      float tile[kRows * kWidth];
      multiply(tile, kWidth, false);
      for (int64_t r = 0; r < height; ++r)
        for (int64_t l = 0; l < width; ++l)
          to[r * ldc + l] = add ? to[r * ldc + l] + tile[r * kWidth + l] : tile[r * kWidth + l];
    }
  }
}

// n blocks of nearly equal size, whole units but for the last, that cover n_elem.
struct Blocks {
  int64_t n, size, n_elem;
  Blocks(int64_t n_elem, int64_t most, int64_t unit) : n_elem(n_elem) {
    n = std::max<int64_t>(1, (n_elem + most - 1) / most);
    size = std::max<int64_t>(unit, round_up((n_elem + n - 1) / n, unit));
    n = std::max<int64_t>(1, (n_elem + size - 1) / size);
  }
  int64_t begin(int64_t block) const { return block * size; }
  int64_t length(int64_t block) const { return std::min(size, n_elem - block * size); }
};

// The blocks of out, handed out to the threads: large ones first, small ones at the end, so that all come to it together.
class Queue {
 public:
  Queue(int64_t n_rows, const Blocks& cols, int64_t n_threads) : n_rows_(n_rows), cols_(cols), n_threads_(n_threads) {}

  struct Block {
    int64_t row, n_rows, col, n_cols;
  };
  bool take(Block* block) {
    int64_t begin = next_.load();
    while (true) {
      const int64_t left = n_rows_ * cols_.n - begin;
      if (left <= 0) return false;
      const int64_t share = std::clamp(round_up(left / (2 * n_threads_), kRows), kLeastRows, kBlockRows);
      const int64_t row = begin % n_rows_, n = std::min(share, n_rows_ - row);
      if (!next_.compare_exchange_weak(begin, begin + n)) continue;
      const int64_t col = begin / n_rows_;
      *block = {row, n, cols_.begin(col), cols_.length(col)};
      return true;
    }
  }

 private:
  static constexpr int64_t kLeastRows = 24;
  const int64_t n_rows_;
  const Blocks& cols_;
  const int64_t n_threads_;
  std::atomic<int64_t> next_{0};  // row of the columns' rows one after another
};

// pack(task) for all n_packs tasks, then work(block) for all blocks, each on the thread that is free for it.
template <typename Pack, typename Work>
void share_work(int64_t n_packs, Queue& queue, int64_t n_threads, const Pack& pack, const Work& work) {
  std::atomic<int64_t> next_pack{0}, n_packed{0};
  parallel_for(0, n_threads, 1, [&](int64_t, int64_t) {
    for (int64_t task = next_pack++; task < n_packs; task = next_pack++) {
      pack(task);
      n_packed.fetch_add(1, std::memory_order_release);
    }
    // The rest are in work: a thread takes a task only while it runs.
    while (n_packed.load(std::memory_order_acquire) < n_packs) std::this_thread::yield();
    for (Queue::Block block; queue.take(&block);) work(block);
  });
}

template <typename scalar_t, typename out_t>
void multiply(const Product& p) {
  // fp32 is added up over parts of B; of 16 bits B is one part, so that each sum is rounded once.
  constexpr bool kInPlace = std::is_same_v<out_t, float>;
  const auto *a = static_cast<const scalar_t*>(p.a), *b = static_cast<const scalar_t*>(p.b);
  const auto* bias = static_cast<const scalar_t*>(p.bias);
  auto* out = static_cast<out_t*>(p.out);
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  // Less than a thread's waking is worth.
  const int64_t n_threads = p.n_rows * p.n_cols * p.n_k < 250'000 ? 1 : std::max<int64_t>(threads, 1);

  const Blocks parts(p.n_k, kInPlace ? kPackedRows : std::max<int64_t>(p.n_k, 1), kDepth);
  const int64_t packed_cols = (kInPlace ? 1 : 4) * kPackedElements / std::clamp<int64_t>(p.n_k, 1, parts.size);
  const Blocks strips(p.n_cols, round_up(std::max<int64_t>(packed_cols, 1), kWidth), kWidth);
  thread_local Kept kept_right;
  float* const right = kept_right.get(std::min(parts.size, p.n_k) * round_up(std::min(strips.size, p.n_cols), kWidth));
  for (int64_t strip = 0; strip < strips.n; ++strip) {
    const int64_t first_col = strips.begin(strip), n_cols = strips.length(strip);
    for (int64_t part = 0; part < parts.n; ++part) {
      const int64_t first_k = parts.begin(part), n_k = parts.length(part);
      const int64_t n_panels = (n_cols + kWidth - 1) / kWidth;
      const bool by_rows = p.b_col_stride == 1;
      // What a task packs: rows of B, or panels.
      const int64_t n_units = by_rows ? n_k : n_panels;
      const int64_t unit = std::clamp<int64_t>(n_units / (4 * n_threads), 1, by_rows ? kPackedAtOnce / n_cols + 1 : 2);
      const Blocks cols(n_cols, kBlockCols, kWidth);
      const Blocks depths(n_k, kDepth, kLanes);
      // Sums of many depths grow in a thread's own memory: rows of out may be a power of two apart, and would put one another out of the cache.
      const bool adds = p.add || part > 0, is_direct = kInPlace && bias == nullptr && n_k > 0 && depths.n <= 2;
      const auto pack = [&](int64_t task) {
        const scalar_t* from = b + first_k * p.b_k_stride + first_col * p.b_col_stride;
        const Range units{task * unit, std::min(n_units, (task + 1) * unit)};
        if (by_rows)
          pack_rows_right(from, p.b_k_stride, n_k, n_cols, units, right);
        else
          pack_right(from, p.b_k_stride, p.b_col_stride, n_k, n_cols, {0, n_k}, units, right);
      };
      const auto work = [&](const Queue::Block& block) {
        const auto [i, height, j, width] = block;
        thread_local Kept kept_left, kept_sums;
        float* const left = kept_left.get(round_up(height, kRows) * depths.size + kLanes);
        int64_t ldc = kBlockCols + 16;
        float* c = kept_sums.get(height * ldc);
        if constexpr (kInPlace) {
          if (is_direct) c = out + i * p.out_row_stride + first_col + j, ldc = p.out_row_stride;
        }
        if (n_k == 0) std::fill(c, c + height * ldc, 0.0f);
        for (int64_t d = 0; d < depths.n && n_k > 0; ++d) {
          const int64_t k = depths.begin(d), depth = depths.length(d);
          pack_left(a + i * p.a_row_stride + (first_k + k) * p.a_k_stride, p.a_row_stride, p.a_k_stride, height, depth, p.alpha,
                    left);
          // The next part's beginnings: from there on the processor sees for itself what comes.
          if (d + 1 < depths.n && p.a_k_stride == 1)
            for (int64_t r = 0; r < height; ++r) {
              const scalar_t* next = a + (i + r) * p.a_row_stride + first_k + k + depth;
              __builtin_prefetch(next), __builtin_prefetch(next + 64 / sizeof(scalar_t));
            }
          multiply_block(height, width, depth, left, right + j * n_k + k * kWidth, kWidth * n_k, c, ldc,
                         d > 0 || (is_direct && adds));
        }
        if (is_direct) return;
        for (int64_t r = 0; r < height; ++r) {
          out_t* row = out + (i + r) * p.out_row_stride + first_col + j;
          for_each_vector(width, [&](int64_t l, auto n) {
            vfloat sum = load_n(c + r * ldc + l, n);
            if (adds) sum += load_n(row + l, n);
            if (bias != nullptr && part == 0) sum += load_n(bias + first_col + j + l, n);
            store_n(row + l, sum, n);
          });
        }
      };
      Queue queue(p.n_rows, cols, n_threads);
      share_work((n_units + unit - 1) / unit, queue, n_threads, pack, work);
    }
  }
}

}  // namespace

void product(const Product& p) {
  if (p.n_rows == 0 || p.n_cols == 0) return;
  dispatch_dtype(p.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    p.out_dtype == DType::kFloat32 ? multiply<scalar_t, float>(p) : multiply<scalar_t, scalar_t>(p);
  });
}

}  // namespace ls::cpu::LS_ISA
