// GFLOP/s of nothing but fused multiply-adds in registers, on as many threads as OMP_NUM_THREADS says: what no product can pass.
// Twelve independent accumulators hide the latency of an FMA on every x86 since Haswell.
#include <chrono>
#include <cstdio>

#ifdef __AVX512F__
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
typedef float vec_t __attribute__((vector_size(kBytes)));

int main() {
  constexpr int kAccumulators = 12, kTries = 5;
  constexpr long kIterations = 20'000'000;
  double best = 0;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    float total = 0;
    int n_threads = 0;
    const auto begin = std::chrono::steady_clock::now();
#pragma omp parallel reduction(+ : total, n_threads)
    {
      vec_t acc[kAccumulators], x = vec_t{} + 0.999f, y = vec_t{} + 1e-3f;
      asm volatile("" : "+x"(x), "+x"(y));  // values that the compiler cannot know
      for (int a = 0; a < kAccumulators; ++a) acc[a] = x + float(a);
      for (long i = 0; i < kIterations; ++i)
#pragma GCC unroll 12
        for (int a = 0; a < kAccumulators; ++a) acc[a] = acc[a] * x + y;
      for (const vec_t& a : acc) total += a[0];
      n_threads += 1;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const double flops = 2.0 * kAccumulators * (kBytes / sizeof(float)) * kIterations * n_threads;
    if (total > 0 && flops / seconds.count() > best) best = flops / seconds.count();
  }
  std::printf("%.1f\n", best / 1e9);
}
