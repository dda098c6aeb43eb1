// Interface of the SIMT runtime: runs a CUDA kernel on one CPU thread, one fiber per CUDA thread.
//
// Kernels reach it through simt.h, which gives CUDA's vocabulary. Tests and bindings call what stands in
// namespace simt: the memory that a launch may touch, the order in which threads run, the traffic they made.
// A kernel that does something CUDA does not allow makes launch() throw std::runtime_error; the process lives on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>

// As in CUDA: uint3 is a plain aggregate, dim3 defaults its missing extents to 1.
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};

namespace simt {

// Bytes moved to and from global memory. `cold` counts a byte once per launch, however often it is touched: the traffic
// of a kernel with a perfect cache, to be compared with the op's floor.
struct Traffic {
  uint64_t read = 0;
  uint64_t written = 0;
  uint64_t cold_read = 0;
  uint64_t cold_written = 0;
};

// Totals over all launches since reset_stats(). `cold` figures and `regions` need registered regions.
struct Stats {
  uint64_t launches = 0;
  uint64_t blocks = 0;
  uint64_t barriers = 0;          // completed __syncthreads, counted once per block
  uint64_t warp_collectives = 0;  // completed __syncwarp, shuffles and votes, counted once per warp
  Traffic global;
  std::map<std::string, Traffic> regions;
};

// Lets kernels touch [ptr, ptr + n_bytes). As long as any region is registered, every global access outside of all of
// them is a fault, and so is a write to one that is not writable. Overlapping regions become one, writable if either is.
void register_region(const void* ptr, size_t n_bytes, bool writable, const std::string& name);
void clear_regions();

// Forgets all regions at the end of a scope, also when a launch throws.
struct ScopedRegions {
  ScopedRegions() = default;
  ScopedRegions(const ScopedRegions&) = delete;
  ScopedRegions& operator=(const ScopedRegions&) = delete;
  ~ScopedRegions() { clear_regions(); }
};

// 0 runs blocks and threads in index order. Any other seed shuffles both; a correct kernel gives the same result.
// The start value is the environment variable LS_SIMT_SEED, or 0.
void set_schedule(uint64_t seed);

const Stats& stats();
void reset_stats();

namespace detail {

struct Site {  // where in the source a thread waits
  const char* file;
  int line;
  bool operator==(const Site& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

enum class Collective : uint8_t { syncthreads, syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot, any, all };

struct LaunchConfig {
  const char* kernel_name;
  const void* kernel;  // its address, the key of cudaFuncSetAttribute
  uint3 grid, block;
  size_t smem_bytes;
};

void run(const LaunchConfig& config, void (*body)(void*), void* call, size_t call_bytes);
void allow_dynamic_shared(const void* kernel, size_t smem_bytes);

void barrier(bool predicate, Site site, unsigned* any, unsigned* count);
uint64_t warp_collective(Collective kind, unsigned mask, uint64_t value, int param, int width, Site site);
void* shared_array(const void* key, const char* name, size_t n_bytes, size_t align, Site site);
void* dynamic_shared(const char* name, size_t align, Site site);
void before_atomic(void* ptr, size_t n_bytes, void* pc);
void fence();
void memset_global(void* ptr, int value, size_t n_bytes);
[[noreturn]] void fail(const std::string& what);  // ends the launch that runs; outside of one, throws
[[noreturn]] void fail(const char* what);         // for kernels, whose own instrumented code must not make the string

template <typename... P>
struct Call {
  void (*kernel)(P...);
  std::tuple<P...> args;
  static void body(void* self) {
    auto* call = static_cast<Call*>(self);
    std::apply(call->kernel, call->args);
  }
};

}  // namespace detail

// What LS_LAUNCH calls. Arguments are converted to the kernel's parameter types once, as CUDA does, and the launch has
// finished when it returns. Throws std::runtime_error with the kernel, block, thread, source line and what went wrong.
template <typename... P, typename... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem_bytes, void* /*stream*/, A&&... args) {
  static_assert(sizeof...(P) == sizeof...(A), "the number of arguments must be the kernel's");
  detail::Call<P...> call{kernel, std::tuple<P...>(static_cast<P>(std::forward<A>(args))...)};
  detail::run({name, reinterpret_cast<const void*>(kernel), grid, block, smem_bytes}, &detail::Call<P...>::body, &call,
              sizeof(call));
}

}  // namespace simt
