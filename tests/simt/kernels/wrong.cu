// Kernels that are wrong on purpose, one for each kind of fault; test_simt_runtime.py says what must be reported.

#include "support.h"

// ---- Divergent barriers ----

__global__ void exit_before_barrier_kernel() {
  if (threadIdx.x >= 40) return;
  __syncthreads();
}
TEST(exit_before_barrier, LS_LAUNCH(exit_before_barrier_kernel, 1, 64, 0, nullptr))

__global__ void barrier_in_each_branch_kernel() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
TEST(barrier_in_each_branch, LS_LAUNCH(barrier_in_each_branch_kernel, 1, 64, 0, nullptr))

__global__ void shuffle_with_exited_lanes_kernel(float* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(kFullMask, 1.0f, 1);
}
TEST(shuffle_with_exited_lanes, Buffer<float> out(64, "out");
     LS_LAUNCH(shuffle_with_exited_lanes_kernel, 1, 64, 0, nullptr, out.data()))

__global__ void shuffle_against_barrier_kernel() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __shfl_sync(kFullMask, 1, 0);
  }
}
TEST(shuffle_against_barrier, LS_LAUNCH(shuffle_against_barrier_kernel, 1, 32, 0, nullptr))

__global__ void different_shuffles_kernel() {
  if (threadIdx.x < 16) {
    __shfl_xor_sync(kFullMask, 1, 1);
  } else {
    __shfl_down_sync(kFullMask, 1, 1);
  }
}
TEST(different_shuffles, LS_LAUNCH(different_shuffles_kernel, 1, 32, 0, nullptr))

// ---- Misused warp functions ----

__global__ void mask_without_caller_kernel() { __syncwarp(0x0000ffffu); }
TEST(mask_without_caller, LS_LAUNCH(mask_without_caller_kernel, 1, 32, 0, nullptr))

__global__ void shuffle_from_unnamed_lane_kernel() {
  if (threadIdx.x < 16) __shfl_down_sync(0x0000ffffu, 1, 1);  // lane 15 reads lane 16
}
TEST(shuffle_from_unnamed_lane, LS_LAUNCH(shuffle_from_unnamed_lane_kernel, 1, 32, 0, nullptr))

__global__ void shuffle_from_absent_lane_kernel() { __shfl_xor_sync(kFullMask, 1, 16); }
TEST(shuffle_from_absent_lane, LS_LAUNCH(shuffle_from_absent_lane_kernel, 1, 16, 0, nullptr))

__global__ void shuffle_width_kernel() { __shfl_xor_sync(kFullMask, 1, 1, 12); }
TEST(shuffle_width, LS_LAUNCH(shuffle_width_kernel, 1, 32, 0, nullptr))

__global__ void activemask_kernel() { __activemask(); }
TEST(activemask, LS_LAUNCH(activemask_kernel, 1, 32, 0, nullptr))

// ---- Shared memory read before it is written ----

__global__ void unwritten_static_kernel(float* out) {
  LS_SHARED(float, partial, 32);
  if (threadIdx.x < 31) partial[threadIdx.x] = 1.0f;  // the last one is forgotten
  __syncthreads();
  out[threadIdx.x] = partial[threadIdx.x];
}
TEST(unwritten_static, Buffer<float> out(32, "out"); LS_LAUNCH(unwritten_static_kernel, 1, 32, 0, nullptr, out.data()))

__global__ void unwritten_dynamic_kernel(float* out) {
  LS_DYNAMIC_SHARED(float, scratch);
  out[threadIdx.x] = scratch[threadIdx.x];
}
TEST(unwritten_dynamic, Buffer<float> out(32, "out"); LS_LAUNCH(unwritten_dynamic_kernel, 1, 32, 128, nullptr, out.data()))

template <typename T, int kValue>
__global__ void unwritten_byte_kernel(int* out) {
  LS_SHARED(int, word, 1);
  reinterpret_cast<T*>(&word[0])[0] = kValue;  // two bytes are missing
  out[0] = word[0];
}
TEST(unwritten_byte, Buffer<int> out(1, "out"); LS_LAUNCH((unwritten_byte_kernel<short, 3>), 1, 1, 0, nullptr, out.data()))

__global__ void left_by_another_block_kernel(int* out) {
  LS_SHARED(int, total, 1);
  if (blockIdx.x == 0) total[0] = 7;
  out[blockIdx.x] = total[0];
}
TEST(left_by_another_block, Buffer<int> out(2, "out"); LS_LAUNCH(left_by_another_block_kernel, 2, 1, 0, nullptr, out.data()))

__global__ void atomic_on_unwritten_kernel() {
  LS_SHARED(int, counter, 1);
  atomicAdd(&counter[0], 1);
}
TEST(atomic_on_unwritten, LS_LAUNCH(atomic_on_unwritten_kernel, 1, 32, 0, nullptr))

// ---- Out of bounds ----

__global__ void past_shared_array_kernel(int i) {
  LS_SHARED(float, tile, 64);
  LS_SHARED(float, other, 64);
  other[threadIdx.x] = 0.0f;
  tile[i] = 1.0f;
}
TEST(past_shared_array, LS_LAUNCH(past_shared_array_kernel, 1, 1, 0, nullptr, 64))

__global__ void past_shared_pointer_kernel(int i) {
  LS_SHARED(float, tile, 64);
  float* p = tile;
  p[i] = 1.0f;
}
TEST(past_shared_pointer, LS_LAUNCH(past_shared_pointer_kernel, 1, 1, 0, nullptr, 66))

__global__ void past_dynamic_shared_kernel() {
  LS_DYNAMIC_SHARED(float, scratch);
  scratch[threadIdx.x] = 1.0f;
}
TEST(past_dynamic_shared, LS_LAUNCH(past_dynamic_shared_kernel, 1, 33, 32 * sizeof(float), nullptr))

__global__ void add_one_kernel(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x] + 1.0f; }
TEST(past_global_read, Buffer<float> x(32, "x", false); Buffer<float> y(40, "y");
     LS_LAUNCH(add_one_kernel, 1, 33, 0, nullptr, y.data(), x.data()))
TEST(past_global_write, Buffer<float> x(40, "x", false); Buffer<float> y(32, "y");
     LS_LAUNCH(add_one_kernel, 1, 33, 0, nullptr, y.data(), x.data()))
TEST(before_global, Buffer<float> x(40, "x", false); Buffer<float> y(32, "y");
     LS_LAUNCH(add_one_kernel, 1, 32, 0, nullptr, y.data(), x.data() - 1))
TEST(write_to_read_only, Buffer<float> x(32, "x", false); Buffer<float> y(32, "y");
     LS_LAUNCH(add_one_kernel, 1, 32, 0, nullptr, x.data(), y.data()))
TEST(null_pointer, LS_LAUNCH(add_one_kernel, 1, 32, 0, nullptr, nullptr, nullptr))

__global__ void straddling_kernel(float4* y) { y[threadIdx.x] = make_float4(1.0f, 2.0f, 3.0f, 4.0f); }
TEST(vector_past_end, alignas(16) static float y[16]; simt::register_region(y, 15 * sizeof(float), true, "y");
     LS_LAUNCH(straddling_kernel, 1, 4, 0, nullptr, reinterpret_cast<float4*>(y)))

__global__ void local_of_another_thread_kernel(int* out) {
  LS_SHARED(int*, where, 1);
  int mine = static_cast<int>(threadIdx.x);
  if (threadIdx.x == 0) where[0] = &mine;
  __syncthreads();
  out[threadIdx.x] = *where[0];
}
TEST(local_of_another_thread, Buffer<int> out(2, "out");
     LS_LAUNCH(local_of_another_thread_kernel, 1, 2, 0, nullptr, out.data()))

__global__ void register_array_kernel(float* out, int i) {
  float acc[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  out[0] = acc[i];
}
TEST(register_array, Buffer<float> out(1, "out"); LS_LAUNCH(register_array_kernel, 1, 1, 0, nullptr, out.data(), 4))

TEST(memset_past_end, Buffer<float> y(32, "y"); cudaMemsetAsync(y.data(), 0, 33 * sizeof(float), nullptr))

// ---- Accesses that nothing orders ----

__global__ void missing_barrier_kernel(float* out) {
  LS_SHARED(float, tile, 64);
  tile[threadIdx.x] = 1.0f;
  out[threadIdx.x] = tile[63 - threadIdx.x];
}
// Threads run in index order: the writes that thread 63 reads have happened, so that only the race check can tell.
__global__ void missing_barrier_written_kernel(float* out) {
  LS_SHARED(float, tile, 64);
  tile[threadIdx.x] = 1.0f;
  if (threadIdx.x == 63) out[0] = tile[0];
}
TEST(missing_barrier, Buffer<float> out(64, "out"); LS_LAUNCH(missing_barrier_kernel, 1, 64, 0, nullptr, out.data()))
TEST(missing_barrier_written, Buffer<float> out(64, "out");
     LS_LAUNCH(missing_barrier_written_kernel, 1, 64, 0, nullptr, out.data()))

__global__ void reused_too_early_kernel(float* out) {
  LS_SHARED(float, tile, 64);
  for (int i = 0; i < 2; ++i) {
    tile[threadIdx.x] = static_cast<float>(i);
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];  // the next round overwrites what others may still read
  }
}
TEST(reused_too_early, Buffer<float> out(64, "out"); LS_LAUNCH(reused_too_early_kernel, 1, 64, 0, nullptr, out.data()))

__global__ void same_word_kernel() {
  LS_SHARED(int, flag, 1);
  flag[0] = 1;
}
TEST(same_word, LS_LAUNCH(same_word_kernel, 1, 32, 0, nullptr))

__global__ void warp_exchange_kernel(float* out, bool sync, bool shuffle) {
  LS_SHARED(float, tile, 32);
  tile[threadIdx.x] = 1.0f;
  if (sync) __syncwarp();
  if (shuffle) __shfl_xor_sync(kFullMask, 1, 1);
  if (threadIdx.x == 31) out[0] = tile[0];
}
TEST(warp_exchange_unsynchronised, Buffer<float> out(1, "out");
     LS_LAUNCH(warp_exchange_kernel, 1, 32, 0, nullptr, out.data(), false, false))
TEST(warp_exchange_by_shuffle, Buffer<float> out(1, "out");
     LS_LAUNCH(warp_exchange_kernel, 1, 32, 0, nullptr, out.data(), false, true))

__global__ void across_warps_by_syncwarp_kernel(float* out) {
  LS_SHARED(float, tile, 64);
  tile[threadIdx.x] = 1.0f;
  __syncwarp();
  if (threadIdx.x == 63) out[0] = tile[0];
}
TEST(across_warps_by_syncwarp, Buffer<float> out(1, "out");
     LS_LAUNCH(across_warps_by_syncwarp_kernel, 1, 64, 0, nullptr, out.data()))

__global__ void half_warp_sync_kernel(float* out) {
  LS_SHARED(float, tile, 32);
  tile[threadIdx.x] = 1.0f;
  __syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
  if (threadIdx.x == 31) out[0] = tile[0];  // of the other half
}
TEST(half_warp_sync, Buffer<float> out(1, "out"); LS_LAUNCH(half_warp_sync_kernel, 1, 32, 0, nullptr, out.data()))

__global__ void overlapping_blocks_kernel(float* y) { y[blockIdx.x * 31 + threadIdx.x] = 1.0f; }
TEST(overlapping_blocks, Buffer<float> y(64, "y"); LS_LAUNCH(overlapping_blocks_kernel, 2, 32, 0, nullptr, y.data()))

__global__ void read_of_other_block_kernel(float* y) { y[blockIdx.x] = blockIdx.x == 0 ? 1.0f : y[0]; }
TEST(read_of_other_block, Buffer<float> y(2, "y"); LS_LAUNCH(read_of_other_block_kernel, 2, 1, 0, nullptr, y.data()))

__global__ void atomic_and_plain_kernel(float* y) {
  atomicAdd(&y[0], 1.0f);
  if (threadIdx.x == 31) y[1] = y[0];
}
TEST(atomic_and_plain, Buffer<float> y(2, "y"); LS_LAUNCH(atomic_and_plain_kernel, 1, 32, 0, nullptr, y.data()))

// The last block to finish adds up what all have left; without a fence nothing says that it can see it.
__global__ void last_block_sum_kernel(float* partial, unsigned* counter, float* out) {
  LS_SHARED(unsigned, ticket, 1);
  partial[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) ticket[0] = atomicAdd(counter, 1u);
  __syncthreads();
  if (ticket[0] == gridDim.x - 1 && threadIdx.x == 0) {
    for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) out[0] += partial[i];
  }
}
TEST(last_block_without_fence, Buffer<float> partial(128, "partial"); Buffer<unsigned> counter(1, "counter");
     Buffer<float> out(1, "out");
     LS_LAUNCH(last_block_sum_kernel, 4, 32, 0, nullptr, partial.data(), counter.data(), out.data()))

// ---- Misaligned ----

__global__ void misaligned_vector_kernel(float4* y, const float* x) {
  y[threadIdx.x] = reinterpret_cast<const float4*>(x + 1)[threadIdx.x];
}
TEST(misaligned_vector, alignas(16) static float x[9]; Buffer<float4> y(2, "y");
     simt::register_region(x, sizeof(x), false, "x"); LS_LAUNCH(misaligned_vector_kernel, 1, 2, 0, nullptr, y.data(), x))

__global__ void misaligned_half_row_kernel(unsigned short* y, int row_length) {
  *reinterpret_cast<uint2*>(y + threadIdx.x * row_length) = make_uint2(0, 0);  // 8 bytes, rows of 2 * row_length
}
TEST(misaligned_row, alignas(16) static unsigned short y[64]; simt::register_region(y, sizeof(y), true, "y");
     LS_LAUNCH(misaligned_half_row_kernel, 1, 4, 0, nullptr, y, 7))

__global__ void misaligned_atomic_kernel(char* y) { atomicAdd(reinterpret_cast<unsigned*>(y + 2), 1u); }
TEST(misaligned_atomic, alignas(16) static char y[16]; simt::register_region(y, sizeof(y), true, "y");
     LS_LAUNCH(misaligned_atomic_kernel, 1, 1, 0, nullptr, y))

// ---- Arithmetic, aborts, configuration ----

__global__ void int_offset_kernel(float* y, int row, int n_cols) { y[row * n_cols] = 1.0f; }
TEST(int_offset, Buffer<float> y(1, "y"); LS_LAUNCH(int_offset_kernel, 1, 1, 0, nullptr, y.data(), 70000, 70000))

TEST(host_overflow, static volatile int n_rows = 70000; static volatile int n_elem = n_rows * n_rows; (void)n_elem;
     LS_LAUNCH(activemask_kernel, 1, 32, 0, nullptr))

__global__ void trap_kernel() { __trap(); }
TEST(trap, LS_LAUNCH(trap_kernel, 1, 32, 0, nullptr))

__global__ void assert_kernel(int n) { assert(n < 3); }
TEST(failed_assert, LS_LAUNCH(assert_kernel, 1, 32, 0, nullptr, 3))

__global__ void throw_kernel() { throw std::runtime_error("thrown by a thread"); }
TEST(thrown, LS_LAUNCH(throw_kernel, 1, 32, 0, nullptr))

__global__ void spin_kernel(volatile int* flag) {
  while (*flag == 0) {
  }
}
TEST(spin, Buffer<int> flag(1, "flag"); LS_LAUNCH(spin_kernel, 1, 32, 0, nullptr, flag.data()))

__global__ void nothing_kernel() {}
TEST(too_many_threads, LS_LAUNCH(nothing_kernel, 1, dim3(32, 33), 0, nullptr))
TEST(empty_grid, LS_LAUNCH(nothing_kernel, 0, 32, 0, nullptr))
TEST(grid_too_high, LS_LAUNCH(nothing_kernel, dim3(1, 65536), 32, 0, nullptr))
TEST(too_much_dynamic_shared, LS_LAUNCH(nothing_kernel, 1, 32, 49 * 1024, nullptr))

__global__ void too_much_static_shared_kernel() {
  LS_SHARED(float, tile, 49 * 256);
  tile[threadIdx.x] = 0.0f;
}
TEST(too_much_static_shared, LS_LAUNCH(too_much_static_shared_kernel, 1, 32, 0, nullptr))

__global__ void forgotten_dynamic_size_kernel() {
  LS_DYNAMIC_SHARED(float, scratch);
  scratch[0] = 0.0f;
}
TEST(forgotten_dynamic_size, LS_LAUNCH(forgotten_dynamic_size_kernel, 1, 1, 0, nullptr))
