// The counting examples of lecture 10 (kernel fusion): the same result by several kernels and by one. Called by test_lecture.py, which counts.
//
//   tri_mat_add            e = a + b + d, against two additions: 6 arrays moved, then 4
//   bias_dropout_residual  y = residual + mask * (x + bias), the mask an array as in the lecture: 9 arrays, then 5
//   softmax                rows of softmax(scale * x), one block per row, tree reductions: 8 arrays, then 2; as many barriers either way
#include "support.h"

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int element() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void mat_add_kernel(const float* a, const float* b, float* c, int n) {
  if (const int i = element(); i < n) c[i] = a[i] + b[i];
}
__global__ void tri_mat_add_kernel(const float* a, const float* b, const float* d, float* e, int n) {
  if (const int i = element(); i < n) e[i] = a[i] + b[i] + d[i];
}

__global__ void add_bias_kernel(const float* x, const float* bias, float* y, int n, int n_cols) {
  if (const int i = element(); i < n) y[i] = x[i] + bias[i % n_cols];
}
__global__ void dropout_kernel(const float* x, const float* mask, float* y, int n) {
  if (const int i = element(); i < n) y[i] = x[i] * mask[i];
}
__global__ void bias_dropout_residual_kernel(const float* x, const float* bias, const float* mask, const float* residual,
                                             float* y, int n, int n_cols) {
  if (const int i = element(); i < n) y[i] = (x[i] + bias[i % n_cols]) * mask[i] + residual[i];
}

struct Max {
  __device__ static float identity() { return -INFINITY; }
  __device__ static float apply(float a, float b) { return a > b ? a : b; }
};
struct Sum {
  __device__ static float identity() { return 0.0f; }
  __device__ static float apply(float a, float b) { return a + b; }
};

// The block's reduction as a tree in shared memory: a barrier after the writes and one after each of log2(threads) rounds.
template <typename Op>
__device__ float reduce(float* partial, float value) {
  partial[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] = Op::apply(partial[threadIdx.x], partial[threadIdx.x + half]);
    __syncthreads();
  }
  return partial[0];
}

__global__ void scale_kernel(const float* x, float* y, float scale, int n) {
  if (const int i = element(); i < n) y[i] = scale * x[i];
}
template <typename Op>
__global__ void reduce_rows_kernel(const float* x, float* out, int n_cols) {
  LS_SHARED(float, partial, kThreads);
  float value = Op::identity();
  for (int c = threadIdx.x; c < n_cols; c += blockDim.x) value = Op::apply(value, x[blockIdx.x * n_cols + c]);
  value = reduce<Op>(partial, value);
  if (threadIdx.x == 0) out[blockIdx.x] = value;
}
__global__ void exp_kernel(const float* x, const float* row_max, float* y, int n, int n_cols) {
  if (const int i = element(); i < n) y[i] = expf(x[i] - row_max[i / n_cols]);
}
__global__ void divide_kernel(const float* x, const float* row_sum, float* y, int n, int n_cols) {
  if (const int i = element(); i < n) y[i] = x[i] / row_sum[i / n_cols];
}

constexpr int kMaxPerThread = 16;  // elements of a row in a thread's registers
__global__ void softmax_kernel(const float* x, float* y, float scale, int n_cols) {
  LS_SHARED(float, partial, kThreads);
  float v[kMaxPerThread];
  float row_max = Max::identity(), row_sum = 0.0f;
  int count = 0;
  for (int c = threadIdx.x; c < n_cols; c += blockDim.x) {
    v[count] = scale * x[blockIdx.x * n_cols + c];
    row_max = Max::apply(row_max, v[count++]);
  }
  row_max = reduce<Max>(partial, row_max);
  for (int k = 0; k < count; ++k) row_sum += v[k] = expf(v[k] - row_max);
  __syncthreads();  // all have read the maximum before its place is used again
  row_sum = reduce<Sum>(partial, row_sum);
  for (int k = 0; k < count; ++k) y[blockIdx.x * n_cols + k * blockDim.x + threadIdx.x] = v[k] / row_sum;
}

dim3 blocks(int n) { return dim3((n + kThreads - 1) / kThreads); }

void reads(const float* p, size_t n, const char* name) { simt::register_region(p, n * sizeof(float), false, name); }
void writes(float* p, size_t n, const char* name) { simt::register_region(p, n * sizeof(float), true, name); }

}  // namespace

// Each gives null or what was caught, as in right.cu; `fused` chooses the one kernel.
extern "C" {

const char* tri_mat_add(const float* a, const float* b, const float* d, float* e, int n, bool fused) {
  return caught([=] {
    reads(a, n, "a"), reads(b, n, "b"), reads(d, n, "d"), writes(e, n, "e");
    if (fused) {
      LS_LAUNCH(tri_mat_add_kernel, blocks(n), kThreads, 0, nullptr, a, b, d, e, n);
      return;
    }
    Buffer<float> c(n, "c");
    LS_LAUNCH(mat_add_kernel, blocks(n), kThreads, 0, nullptr, a, b, c.data(), n);
    LS_LAUNCH(mat_add_kernel, blocks(n), kThreads, 0, nullptr, static_cast<const float*>(c.data()), d, e, n);
  });
}

const char* bias_dropout_residual(const float* x, const float* bias, const float* mask, const float* residual, float* y,
                                  int n_rows, int n_cols, bool fused) {
  return caught([=] {
    const int n = n_rows * n_cols;
    reads(x, n, "x"), reads(bias, n_cols, "bias"), reads(mask, n, "mask"), reads(residual, n, "residual"), writes(y, n, "y");
    if (fused) {
      LS_LAUNCH(bias_dropout_residual_kernel, blocks(n), kThreads, 0, nullptr, x, bias, mask, residual, y, n, n_cols);
      return;
    }
    Buffer<float> biased(n, "biased"), dropped(n, "dropped");
    LS_LAUNCH(add_bias_kernel, blocks(n), kThreads, 0, nullptr, x, bias, biased.data(), n, n_cols);
    LS_LAUNCH(dropout_kernel, blocks(n), kThreads, 0, nullptr, static_cast<const float*>(biased.data()), mask, dropped.data(),
              n);
    LS_LAUNCH(mat_add_kernel, blocks(n), kThreads, 0, nullptr, static_cast<const float*>(dropped.data()), residual, y, n);
  });
}

const char* softmax(const float* x, float* y, float scale, int n_rows, int n_cols, int n_threads, bool fused) {
  return caught([=] {
    const int n = n_rows * n_cols;
    reads(x, n, "x"), writes(y, n, "y");
    if (fused) {
      LS_LAUNCH(softmax_kernel, dim3(n_rows), n_threads, 0, nullptr, x, y, scale, n_cols);
      return;
    }
    Buffer<float> scaled(n, "scaled"), exponentials(n, "exponentials"), row_max(n_rows, "row_max"), row_sum(n_rows, "row_sum");
    const float *s = scaled.data(), *e = exponentials.data(), *max = row_max.data(), *sum = row_sum.data();
    LS_LAUNCH(scale_kernel, blocks(n), kThreads, 0, nullptr, x, scaled.data(), scale, n);
    LS_LAUNCH((reduce_rows_kernel<Max>), dim3(n_rows), n_threads, 0, nullptr, s, row_max.data(), n_cols);
    LS_LAUNCH(exp_kernel, blocks(n), kThreads, 0, nullptr, s, max, exponentials.data(), n, n_cols);
    LS_LAUNCH((reduce_rows_kernel<Sum>), dim3(n_rows), n_threads, 0, nullptr, e, row_sum.data(), n_cols);
    LS_LAUNCH(divide_kernel, blocks(n), kThreads, 0, nullptr, e, sum, y, n, n_cols);
  });
}
}
