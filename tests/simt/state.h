// What the runtime's own files share: the threads of the running block and the memory they may touch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "runtime.h"

namespace simt::detail {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;              // per block
constexpr size_t kStaticSharedLimit = 48 * 1024;    // LS_SHARED arrays, and dynamic shared memory unless asked for more
constexpr size_t kDynamicSharedLimit = 227 * 1024;  // sm_90's opt-in limit

// ---- Time ----
// An access is stamped with who made it and when: the barrier interval ("epoch") it lies in, the thread of the block,
// and that thread's count of __syncwarp. Epochs are never reused, so stamps of earlier launches and blocks are told by
// comparison and no shadow memory is ever cleared.

using Stamp = uint64_t;
constexpr int kThreadBits = 10, kClockBits = 22;
constexpr uint32_t kMaxClock = (1u << kClockBits) - 1;

constexpr Stamp make_stamp(uint32_t epoch, uint32_t thread, uint32_t clock) {
  return static_cast<Stamp>(epoch) << 32 | static_cast<Stamp>(thread) << kClockBits | clock;
}
constexpr uint32_t epoch_of(Stamp s) { return static_cast<uint32_t>(s >> 32); }
constexpr uint32_t thread_of(Stamp s) { return static_cast<uint32_t>(s >> kClockBits) & ((1u << kThreadBits) - 1); }
constexpr uint32_t clock_of(Stamp s) { return static_cast<uint32_t>(s) & kMaxClock; }

// What is known to be visible of another block: all of it before `epoch`, and up to `last` what one thread did in it.
struct Release {
  uint32_t first_epoch;
  uint32_t epoch;
  Stamp last;
};

// ---- Threads ----

enum class State : uint8_t { ready, waiting, exited };

struct Thread {
  Fiber fiber;
  uintptr_t stack;
  uint32_t index;  // in the block, x fastest
  uint3 id;
  State state;

  // While waiting: in what, with what; then what it gives back.
  Collective kind;
  Site site;
  unsigned mask;
  int param, width;
  uint64_t value;

  // clock[l]: how many __syncwarp of lane l this thread knows to have happened; its own entry counts its own.
  uint32_t clock[kWarpSize];

  uint32_t lane() const { return index % kWarpSize; }
  uint32_t warp() const { return index / kWarpSize; }
};

// ---- Memory ----

// The last accesses to a few bytes. Two readers suffice to catch any unordered writer, as long as they are kept as far
// apart as possible (other block, else other warp, else other lane).
struct Cell {
  Stamp write;
  Stamp read[2];
  Stamp atomic[2];
};

struct Region {
  uintptr_t base;
  size_t size;
  bool writable;
  bool shared;
  std::string name;
  Traffic traffic;

  // One cell per 2^granule_log2 bytes; starts at the width of the first access, refined when a narrower one comes.
  Cell* cells = nullptr;
  size_t cells_bytes = 0;
  int granule_log2 = 0;
  bool contains(uintptr_t address) const { return address - base < size; }
};

// ---- The launch that runs ----

struct Launch {
  LaunchConfig config;
  uintptr_t call, call_bytes;  // the kernel's arguments
  uint3 block_index;
  uint32_t n_threads;
  Thread* current = nullptr;  // null outside of fibers
  Stamp stamp = 0;            // the current thread's
  uint32_t epoch = 1;         // the current barrier interval
  uint32_t first_epoch = 1;   // of the launch
  uint32_t block_epoch = 1;   // the first of the block
};

extern Launch launch_state;
extern Stats totals;

// True on the OS thread that runs a kernel, while it does: elsewhere the hooks do nothing. Host code of the same .cu and
// other threads of the process pass through the hooks as well.
extern __attribute__((tls_model("initial-exec"))) thread_local bool in_kernel;

// Ends the launch because of what the current thread did. pc: an address in the code that did it, or null.
[[noreturn]] void fault(const std::string& what, const void* pc = nullptr);
[[noreturn]] void fault(const std::string& what, Site site);
void report_host_fault(const std::string& what);      // kept until the next launch, which then fails with it
std::string source_line(const void* pc);              // " (file.cu:12)", or nothing
std::string kernel_name(const LaunchConfig& config);  // with its template arguments
std::string base_name(const char* path);
std::string describe(uint3 v);

bool is_stack(uintptr_t address);  // of any fiber

// memory.cpp
enum class Access : uint8_t { read, write, atomic };
void on_access(const void* ptr, size_t n_bytes, Access access, const void* pc);  // of the current thread
void begin_launch_memory();
void end_launch_memory();
void reset_stamps();
Region* add_shared_array(const std::string& name, size_t n_bytes, size_t align);

// order.cpp
bool happened_before(Stamp s);              // an access of this launch, before the current thread's next one
void exchange_releases(uintptr_t address);  // at an atomic
void begin_launch_order();
void begin_block_order();
void block_synchronized();

}  // namespace simt::detail
