// Sums over the rows of an (N, C) matrix: the gradients of biases and of layer norm's gamma and beta.
//
// Two stages, no atomics, so the same input gives the same bits. Stage 1: the rows are cut into column_sum_n_partials(N)
// chunks (common/params.h: by N alone); a block sums a chunk in registers and writes one row of `partials`. Stage 2,
// finish_column_sums: a block sums 32 columns of `partials` and rounds to scalar.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace ls::cuda {

// The block shape of kernels in which a thread owns a group of eight columns and walks over rows: threadIdx.x counts groups,
// threadIdx.y rows. 32 groups side by side make a warp read 512 consecutive bytes (16 bit) per row; the block grows sideways
// only when there are too few rows to fill it.
constexpr int kTileThreads = 256;
constexpr int kTileColumns = 8;  // of a thread: one 16-byte vector in 16 bits, one draw of dropout

struct Tile {
  dim3 block;
  int64_t n_col_blocks;

  Tile(int64_t n_rows, int64_t n_cols) {
    const int64_t n_groups = ceil_div(n_cols, kTileColumns);
    block.x = pow2_at_least(n_groups, kWarpSize);
    block.y = pow2_at_least(n_rows, kTileThreads / block.x);
    block.x = pow2_at_least(n_groups, kTileThreads / block.y);
    n_col_blocks = ceil_div(n_groups, block.x);
  }
};

// Rows per thread once the tiles are plenty: the bias and the address arithmetic are shared among them. Below kManyBlocks,
// seven for each of an H200's 132 multiprocessors, more blocks are worth more.
constexpr int64_t kRowsPerThread = 4;
constexpr int64_t kManyBlocks = 1024;

// Rows of a chunk where no sum over rows is wanted.
inline int64_t rows_per_chunk_without_sums(const Tile& tile, int64_t n_rows) {
  const bool many = ceil_div(n_rows, tile.block.y) * tile.n_col_blocks >= kRowsPerThread * kManyBlocks;
  return tile.block.y * (many ? kRowsPerThread : 1);
}

// Where a thread stands: columns [col, col + n_valid) of the rows row_begin, row_begin + blockDim.y, … below row_end.
struct TilePosition {
  int64_t chunk, col, n_valid, row_begin, row_end;

  __device__ __forceinline__ TilePosition(int64_t n_rows, int64_t n_cols, unsigned n_col_blocks, int64_t rows_per_chunk) {
    chunk = blockIdx.x / n_col_blocks;
    const int64_t group = static_cast<int64_t>(blockIdx.x % n_col_blocks) * blockDim.x + threadIdx.x;
    col = group * kTileColumns;
    n_valid = n_cols - col;
    row_begin = chunk * rows_per_chunk + threadIdx.y;
    row_end = (chunk + 1) * rows_per_chunk;
    if (row_end > n_rows) row_end = n_rows;
    if (n_valid <= 0) row_end = 0;  // beyond the last column: no rows, but the thread still meets the block's barriers
  }
};

// The index of a column in shared memory. One word is skipped after each 32, which spreads both the stores of lanes that own
// 4 or 8 consecutive columns and the loads of consecutive columns over all 32 banks.
__host__ __device__ __forceinline__ constexpr int skewed(int column) { return column + column / 32; }

constexpr int kTileSharedFloats = skewed(kTileThreads * kTileColumns);

// Second half of stage 1: out[c] = sum over teams of shared[team * pitch + skewed(c)], teams in order. All threads of the
// block call it, after a barrier.
__device__ __forceinline__ void sum_over_teams(const float* shared, int n_teams, int pitch, int64_t n_cols, float* out) {
  const int n_threads = blockDim.x * blockDim.y;
  for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < n_cols; c += n_threads) {
    float sum = 0.0f;
    for (int team = 0; team < n_teams; ++team) sum += shared[team * pitch + skewed(c)];
    out[c] = sum;
  }
}

// For a Tile's block: out[c] = the sum over threadIdx.y of column c of the tile, c < n_cols. `shared` has kTileSharedFloats.
// All threads of the block call it; a second call on the same `shared` needs a barrier before.
__device__ __forceinline__ void sum_tile_columns(const float (&sum)[kTileColumns], float* shared, int64_t n_cols, float* out) {
  const int tile_cols = blockDim.x * kTileColumns, pitch = skewed(tile_cols);
#pragma unroll
  for (int i = 0; i < kTileColumns; ++i) shared[threadIdx.y * pitch + skewed(threadIdx.x * kTileColumns + i)] = sum[i];
  __syncthreads();
  sum_over_teams(shared, blockDim.y, pitch, n_cols < tile_cols ? n_cols : tile_cols, out);
}

// Stage 2. partials: (n_outputs, n_partials, n_cols). Block (32, 32), grid (ceil(n_cols / 32), n_outputs): thread (x, y) sums
// the partials y, y + 32, … of column x, reading 128 consecutive bytes per warp; then warp y sums column y by shuffles, the
// shared tile being read across (33 words a row: no bank conflict).
template <typename scalar_t>
__global__ void __launch_bounds__(kWarpSize* kWarpSize)
    finish_column_sums_kernel(const float* partials, int64_t n_partials, int64_t n_cols, scalar_t* out0, scalar_t* out1) {
  LS_SHARED(float, tile, kWarpSize*(kWarpSize + 1));
  scalar_t* out = blockIdx.y == 0 ? out0 : out1;
  if (out == nullptr) return;
  partials += blockIdx.y * n_partials * n_cols;
  const int64_t first_col = static_cast<int64_t>(blockIdx.x) * kWarpSize;
  const int64_t col = first_col + threadIdx.x;
  float sum = 0.0f;
  if (col < n_cols)
    for (int64_t p = threadIdx.y; p < n_partials; p += kWarpSize) sum += partials[p * n_cols + col];
  tile[threadIdx.y * (kWarpSize + 1) + threadIdx.x] = sum;
  __syncthreads();
  const float total = team_sum(tile[threadIdx.x * (kWarpSize + 1) + threadIdx.y]);
  if (threadIdx.x == 0 && first_col + threadIdx.y < n_cols) out[first_col + threadIdx.y] = static_cast<scalar_t>(total);
}

// out0 (and out1 where partials holds two): (C,), each may be null. With n_partials == 0 (no rows) they become zero.
template <typename scalar_t>
void finish_column_sums(const char* op, const float* partials, int64_t n_partials, int64_t n_cols, void* out0, void* out1,
                        cudaStream_t stream) {
  dim3 grid = grid_of(op, ceil_div(n_cols, kWarpSize));
  grid.y = out1 != nullptr ? 2 : 1;
  LS_LAUNCH((finish_column_sums_kernel<scalar_t>), grid, dim3(kWarpSize, kWarpSize), 0, stream, partials, n_partials, n_cols,
            static_cast<scalar_t*>(out0), static_cast<scalar_t*>(out1));
  check_launch(op);
}

}  // namespace ls::cuda
