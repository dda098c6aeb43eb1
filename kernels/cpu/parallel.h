// Threads of the CPU kernels: torch's own pool, through libtorch's C interface, so that no second OpenMP runtime is loaded and
// torch.set_num_threads holds.
#pragma once

#include <cstdint>
#include <stdexcept>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                      void (*function)(int64_t begin, int64_t end, void* context), void* context);

namespace ls::cpu {

// function(begin, end) over disjoint ranges that cover [begin, end); ranges of at least grain_size but for the last.
template <typename Function>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Function& function) {
  if (begin >= end) return;
  const int32_t status = torch_parallel_for(
      begin, end, grain_size < 1 ? 1 : grain_size,
      [](int64_t b, int64_t e, void* context) { (*static_cast<const Function*>(context))(b, e); },
      const_cast<void*>(static_cast<const void*>(&function)));
  // An exception inside does not cross the C interface; what it left undone must not be taken for a result.
  if (status != 0) throw std::runtime_error("ls_plugin: a CPU kernel failed, most likely out of memory");
}

// Rows worth a thread: 16 K elements take about as long as waking one (5 to 10 us).
inline int64_t rows_per_thread(int64_t n_cols) { return n_cols > 0 ? (16384 + n_cols - 1) / n_cols : 1; }

}  // namespace ls::cpu
