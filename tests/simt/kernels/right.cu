// Kernels that must pass, under any order of threads and blocks, with the result that CUDA defines.
#include "support.h"

namespace {

void expect(bool right, const char* what) {
  if (!right) throw std::runtime_error(std::string("wrong result: ") + what);
}

// ---- Barriers and shared memory ----

template <int kWarps>
__global__ void block_sum_kernel(const float* x, float* out, int n) {
  LS_SHARED(float, partial, kWarps);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) sum += partial[w];
    out[blockIdx.x] = sum;
  }
}

template <int kSlot>
__device__ int* slot() {
  LS_SHARED(int, value, 1);
  return value;
}
__global__ void shared_per_instance_kernel(int* out) {
  if (threadIdx.x == 0) {
    slot<0>()[0] = 10;
    slot<1>()[0] = 11;
  }
  __syncthreads();
  if (threadIdx.x == 1) out[0] = slot<0>()[0] * 100 + slot<1>()[0];
}

__global__ void reverse_kernel(double* x) {
  LS_DYNAMIC_SHARED(double, tile);
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

__global__ void unused_dynamic_kernel(int* out, bool use) {
  LS_DYNAMIC_SHARED(int, scratch);
  if (use) scratch[0] = 1;
  out[0] = 1;
}

// Bytes and halves of one word that belong to different threads do not meet.
__global__ void narrow_neighbours_kernel(unsigned char* bytes, short* halves) {
  LS_SHARED(unsigned char, tile, 64);
  tile[threadIdx.x] = static_cast<unsigned char>(threadIdx.x);
  bytes[threadIdx.x] = static_cast<unsigned char>(tile[threadIdx.x] + 1);
  halves[threadIdx.x] = static_cast<short>(threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) halves[63] = static_cast<short>(halves[63] + tile[63]);
}

__global__ void barrier_predicates_kernel(int* out) {
  const int odd = threadIdx.x % 2;
  const int count = __syncthreads_count(odd), any = __syncthreads_or(threadIdx.x == 7), all = __syncthreads_and(odd);
  if (threadIdx.x == 5) out[0] = count * 100 + any * 10 + all;
}

__global__ void indices_kernel(int* out) {
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = static_cast<int>(block * 1000 + thread);
}

// ---- Warps ----

__global__ void shuffles_kernel(int* out, int param, int width) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_sync(kFullMask, lane, param, width);
  out[32 + lane] = __shfl_up_sync(kFullMask, lane, param, width);
  out[64 + lane] = __shfl_down_sync(kFullMask, lane, param, width);
  out[96 + lane] = __shfl_xor_sync(kFullMask, lane, param, width);
}

__global__ void shuffle_types_kernel(double* out) {
  const int lane = threadIdx.x;
  double sum = __shfl_sync(kFullMask, lane + 0.5, 3) + __shfl_sync(kFullMask, static_cast<float>(lane), 4);
  sum += static_cast<double>(__shfl_sync(kFullMask, static_cast<long long>(lane) << 40, 1) >> 40);
  sum += __shfl_sync(kFullMask, static_cast<unsigned>(lane), 5);
  out[lane] = sum;
}

// Each half works on its own, for a different number of rounds.
__global__ void half_warps_kernel(int* out) {
  const unsigned half = threadIdx.x / 16, mask = half == 0 ? 0x0000ffffu : 0xffff0000u;
  int v = 1;
  for (unsigned round = 0; round <= half; ++round) {
    for (int offset = 8; offset > 0; offset /= 2) v += __shfl_xor_sync(mask, v, offset);
  }
  out[threadIdx.x] = v;
}

__global__ void votes_kernel(unsigned* out) {
  const int lane = threadIdx.x;
  const unsigned ballot = __ballot_sync(kFullMask, lane % 3 == 0);
  const int any = __any_sync(kFullMask, lane == 9), all = __all_sync(kFullMask, lane < 31);
  if (lane == 0) {
    out[0] = ballot;
    out[1] = any * 2 + all;
  }
}

__global__ void warp_transpose_kernel(float* x) {  // (4, 8) per warp, exchanged through shared memory without a barrier
  LS_SHARED(float, tile, 64);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int round = 0; round < 3; ++round) {
    tile[warp * 32 + lane] = x[threadIdx.x];
    __syncwarp();
    x[threadIdx.x] = tile[warp * 32 + lane % 8 * 4 + lane / 8];
    __syncwarp();
  }
}

__global__ void partial_warp_kernel(unsigned* out) {  // 48 threads: the second warp has 16 lanes
  __syncwarp();
  const unsigned ballot = __ballot_sync(kFullMask, 1);
  if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = ballot;
}

// ---- Atomics ----

__global__ void histogram_kernel(const int* x, int* bins, int n) {
  LS_SHARED(int, local, 8);
  if (threadIdx.x < 8) local[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[x[i]], 1);
  __syncthreads();
  if (threadIdx.x < 8) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

__global__ void last_block_sum_kernel(float* partial, unsigned* counter, float* out) {
  LS_SHARED(unsigned, ticket, 1);
  partial[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket[0] = atomicAdd(counter, 1u);
  __syncthreads();
  if (ticket[0] == gridDim.x - 1 && threadIdx.x == 0) {
    for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) out[0] += partial[i];
  }
}

__global__ void compare_and_swap_kernel(float* out) {  // a float maximum by CAS
  auto* bits = reinterpret_cast<unsigned*>(out);
  unsigned old = atomicAdd(bits, 0u);
  const float mine = static_cast<float>(threadIdx.x);
  while (__uint_as_float(old) < mine) {
    const unsigned assumed = old;
    old = atomicCAS(bits, assumed, __float_as_uint(mine));
    if (old == assumed) break;
  }
}

// ---- Order, size, traffic ----

__global__ void last_writer_kernel(int* out) { atomicExch(out, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x)); }

__global__ void scale_kernel(float* y, const float* x, const float* weight, int n_cols) {  // a block per row
  const int64_t row = static_cast<int64_t>(blockIdx.x) * n_cols;
  for (int i = threadIdx.x; i < n_cols; i += blockDim.x) y[row + i] = x[row + i] * weight[i];
}

__global__ void warp_and_block_kernel() {
  LS_SHARED(int, sum, 1);
  if (threadIdx.x == 0) sum[0] = 0;
  __syncthreads();
  atomicAdd(&sum[0], __shfl_sync(kFullMask, 1, 5));
  __syncthreads();
  assert(sum[0] == 64);
}

__global__ void far_kernel(float* y, int64_t offset) { y[offset + threadIdx.x] = 1.0f; }

__global__ void copy_vectors_kernel(float4* y, const float4* x) { y[threadIdx.x] = x[threadIdx.x]; }

__constant__ float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__global__ void table_kernel(float* out, const float* values) { out[threadIdx.x] = values[threadIdx.x] + table[threadIdx.x]; }

struct Params {
  const float* x;
  float* y;
  float factor[3];
};
__global__ void params_kernel(const Params p, short narrow, double wide) {
  p.y[threadIdx.x] = p.x[threadIdx.x] * p.factor[threadIdx.x % 3] + narrow + static_cast<float>(wide);
}

}  // namespace

TEST(block_sum, Buffer<float> x(5 * 100, "x", false, 2.0f); Buffer<float> out(5, "out");
     LS_LAUNCH((block_sum_kernel<4>), 5, 128, 0, nullptr, x.data(), out.data(), 100);
     for (float sum : out.host) expect(sum == 200.0f, "sum"))
TEST(shared_per_instance, Buffer<int> out(1, "out"); LS_LAUNCH(shared_per_instance_kernel, 1, 2, 0, nullptr, out.data());
     expect(out.host[0] == 1011, "slots"))
TEST(reverse, Buffer<double> x(64, "x"); for (int i = 0; i < 64; ++i) x.host[i] = i;
     LS_LAUNCH(reverse_kernel, 1, 64, 64 * sizeof(double), nullptr, x.data());
     for (int i = 0; i < 64; ++i) expect(x.host[i] == 63 - i, "reversed"))
TEST(large_dynamic_shared, Buffer<double> x(64, "x");
     cudaFuncSetAttribute(reverse_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024);
     LS_LAUNCH(reverse_kernel, 1, 64, 100 * 1024, nullptr, x.data()))
TEST(unused_dynamic, Buffer<int> out(1, "out"); LS_LAUNCH(unused_dynamic_kernel, 1, 1, 0, nullptr, out.data(), false))
TEST(narrow_neighbours, Buffer<unsigned char> bytes(64, "bytes"); Buffer<short> halves(64, "halves");
     LS_LAUNCH(narrow_neighbours_kernel, 1, 64, 0, nullptr, bytes.data(), halves.data());
     expect(bytes.host[63] == 64 && halves.host[62] == 62 && halves.host[63] == 126, "neighbours"))
TEST(barrier_predicates, Buffer<int> out(1, "out"); LS_LAUNCH(barrier_predicates_kernel, 1, 64, 0, nullptr, out.data());
     expect(out.host[0] == 3210, "predicates"))
TEST(indices, Buffer<int> out(2 * 3 * 2 * 24, "out");
     LS_LAUNCH(indices_kernel, dim3(2, 3, 2), dim3(4, 3, 2), 0, nullptr, out.data());
     for (int i = 0; i < 2 * 3 * 2 * 24; ++i) expect(out.host[i] == i / 24 * 1000 + i % 24, "index"))

// Returns null when the 4 x 32 results have been written to `out` (int32, 128).
extern "C" const char* shuffles(int* out, int param, int width) {
  return caught([=] {
    simt::register_region(out, 128 * sizeof(int), true, "out");
    LS_LAUNCH(shuffles_kernel, 1, 32, 0, nullptr, out, param, width);
  });
}
TEST(shuffle_types, Buffer<double> out(32, "out"); LS_LAUNCH(shuffle_types_kernel, 1, 32, 0, nullptr, out.data());
     for (double v : out.host) expect(v == 3.5 + 4 + 1 + 5, "types"))
TEST(half_warps, Buffer<int> out(32, "out"); LS_LAUNCH(half_warps_kernel, 1, 32, 0, nullptr, out.data());
     expect(out.host[0] == 16 && out.host[31] == 256, "sums of the halves"))
TEST(votes, Buffer<unsigned> out(2, "out"); LS_LAUNCH(votes_kernel, 1, 32, 0, nullptr, out.data());
     expect(out.host[0] == 0x49249249u && out.host[1] == 2, "votes"))
TEST(warp_transpose, Buffer<float> x(64, "x"); for (int i = 0; i < 64; ++i) x.host[i] = static_cast<float>(i);
     LS_LAUNCH(warp_transpose_kernel, 1, 64, 0, nullptr, x.data()); expect(x.host[0] == 0.0f && x.host[31] == 31.0f, "ends"))
TEST(partial_warp, Buffer<unsigned> out(2, "out"); LS_LAUNCH(partial_warp_kernel, 1, 48, 0, nullptr, out.data());
     expect(out.host[0] == 0xffffffffu && out.host[1] == 0x0000ffffu, "ballots"))

TEST(histogram, Buffer<int> x(1000, "x", false); Buffer<int> bins(8, "bins"); for (int i = 0; i < 1000; ++i) x.host[i] = i % 8;
     LS_LAUNCH(histogram_kernel, 3, 64, 0, nullptr, x.data(), bins.data(), 1000);
     for (int bin : bins.host) expect(bin == 125, "bin"))
TEST(last_block_sum, Buffer<float> partial(128, "partial"); Buffer<unsigned> counter(1, "counter"); Buffer<float> out(1, "out");
     LS_LAUNCH(last_block_sum_kernel, 4, 32, 0, nullptr, partial.data(), counter.data(), out.data());
     expect(out.host[0] == 128.0f, "sum"))
TEST(compare_and_swap, Buffer<float> out(1, "out"); LS_LAUNCH(compare_and_swap_kernel, 1, 64, 0, nullptr, out.data());
     expect(out.host[0] == 63.0f, "maximum"))

TEST(vectors, Buffer<float4> x(32, "x", false, make_float4(1, 2, 3, 4)); Buffer<float4> y(32, "y");
     LS_LAUNCH(copy_vectors_kernel, 1, 32, 0, nullptr, y.data(), x.data()); expect(y.host[31].w == 4.0f, "vector"))
TEST(constants, Buffer<float> out(4, "out"); static const float values[4] = {10.0f, 20.0f, 30.0f, 40.0f};
     LS_LAUNCH(table_kernel, 1, 4, 0, nullptr, out.data(), values); expect(out.host[3] == 44.0f, "constant"))
TEST(params, Buffer<float> x(32, "x", false, 2.0f); Buffer<float> y(32, "y");
     const Params p = {x.data(), y.data(), {1.0f, 2.0f, 3.0f}}; LS_LAUNCH(params_kernel, 1, 32, 0, nullptr, p, 100, 0.5f);
     expect(y.host[2] == 106.5f, "parameters"))
TEST(full_block, Buffer<float> x(3000, "x", false, 1.0f); Buffer<float> out(1, "out");
     LS_LAUNCH((block_sum_kernel<32>), 1, 1024, 0, nullptr, x.data(), out.data(), 3000); expect(out.host[0] == 3000.0f, "sum"))
TEST(many_blocks, Buffer<float> x(70000 * 2, "x", false, 1.0f); Buffer<float> out(70000, "out");
     LS_LAUNCH((block_sum_kernel<1>), 70000, 32, 0, nullptr, x.data(), out.data(), 2); expect(out.host[69999] == 2.0f, "sum"))

// Overlapping names for one buffer: read through one, written through the other.
TEST(in_place, Buffer<float> x(64, "x", false, 3.0f); Buffer<float> w(64, "w", false, 2.0f);
     simt::register_region(x.data(), 64 * sizeof(float), true, "y");
     LS_LAUNCH(scale_kernel, 1, 32, 0, nullptr, x.data(), x.data(), w.data(), 64); expect(x.host[63] == 6.0f, "product"))

// Needs no region, which several threads would share.
extern "C" const char* nothing() {
  LS_LAUNCH(warp_and_block_kernel, 4, 64, 0, nullptr);
  return nullptr;
}
extern "C" const char* last_writer(int* out) {
  return caught([=] { LS_LAUNCH(last_writer_kernel, 3, 64, 0, nullptr, out); });
}
extern "C" const char* far_offset(float* y, int64_t offset) {
  return caught([=] {
    simt::register_region(y, (offset + 32) * sizeof(float), true, "y");
    LS_LAUNCH(far_kernel, 1, 32, 0, nullptr, y, offset);
  });
}
extern "C" const char* scale(int n_rows, int n_cols) {
  return caught([=] {
    Buffer<float> y(n_rows * n_cols, "y"), x(n_rows * n_cols, "x", false), weight(n_cols, "weight", false);
    LS_LAUNCH(scale_kernel, n_rows, 64, 0, nullptr, y.data(), x.data(), weight.data(), n_cols);
  });
}
