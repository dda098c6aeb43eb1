// Launches: blocks one after another, the threads of a block as fibers, barriers and warp collectives as rendezvous.
//
// A thread runs until it waits or exits, then hands over to the next ready one. When nobody is ready and not everybody
// has exited, the block is stuck: that is how a divergent barrier shows, and the report says who waits where.
#include "runtime.h"

#include <cxxabi.h>

#include <cinttypes>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>

#include "state.h"

// The storage behind threadIdx & co, which simt.h declares const under the same assembler names.
#define SIMT_STORAGE(name) uint3 name##_storage __asm__("simt_" #name) __attribute__((visibility("hidden")))
SIMT_STORAGE(threadIdx);
SIMT_STORAGE(blockIdx);
SIMT_STORAGE(blockDim);
SIMT_STORAGE(gridDim);

namespace simt {
namespace detail {

Launch launch_state;
Stats totals;
thread_local bool in_kernel = false;

namespace {

struct Scheduler {
  StackPool stacks{kMaxThreads};
  std::vector<Thread> threads{kMaxThreads};
  Fiber main;
  void (*body)(void*) = nullptr;

  uint32_t ready[kMaxThreads];  // ring buffer of thread indices; a thread is in it at most once
  uint32_t head = 0, n_ready = 0;

  uint32_t n_exited = 0;
  uint32_t n_at_barrier = 0;  // all at the same site, or the block will be stuck
  Site barrier_site{};
  uint32_t max_clock = 1;

  std::string fault;
  std::exception_ptr thrown;
  std::vector<std::pair<const void*, uintptr_t>> shared_arrays;  // key and address of the launch's LS_SHARED sites
  uintptr_t dynamic_shared = 0;
};

Scheduler& scheduler = *new Scheduler;  // never destroyed: a kernel may run while the process exits

std::mutex launch_mutex;  // one launch at a time in the process
std::string host_fault;   // guarded by host_fault_mutex
std::mutex host_fault_mutex;

std::map<const void*, size_t>& dynamic_shared_opt_in() {
  static std::map<const void*, size_t> kernels;
  return kernels;
}

// ---- Order ----

uint64_t& schedule_seed() {
  static uint64_t seed = [] {
    const char* text = std::getenv("LS_SIMT_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 0ull;
  }();
  return seed;
}

uint64_t random_state = 0;

uint64_t next_random() {  // splitmix64 (Steele, Lea, Flood 2014)
  uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Appends threads to the ready queue, shuffled unless the schedule is 0.
void make_ready(uint32_t* indices, uint32_t n) {
  auto& s = scheduler;
  for (uint32_t i = 0; i < n; ++i) {
    if (schedule_seed() != 0) std::swap(indices[i], indices[i + next_random() % (n - i)]);
    s.threads[indices[i]].state = State::ready;
    s.ready[(s.head + s.n_ready++) % kMaxThreads] = indices[i];
  }
}

// ---- Switching ----

void set_current(Thread* t) {
  launch_state.current = t;
  if (t == nullptr) return;
  threadIdx_storage = t->id;
  launch_state.stamp = make_stamp(launch_state.epoch, t->index, t->clock[t->lane()]);
}

void switch_to(Fiber& from, Thread* next) {
  set_current(next);
  switch_fiber(from, next ? next->fiber : scheduler.main);
}

Thread* pop_ready() {
  auto& s = scheduler;
  if (s.n_ready == 0) return nullptr;
  Thread* t = &s.threads[s.ready[s.head]];
  s.head = (s.head + 1) % kMaxThreads;
  --s.n_ready;
  return t;
}

// Lets others run until somebody has put the current thread back into the queue.
void wait() {
  Thread* self = launch_state.current;
  Thread* next = pop_ready();
  if (next == self) {
    set_current(self);  // its stamp has moved on
  } else {
    switch_to(self->fiber, next);
  }
}

// Drops every fiber of the block and returns to run().
[[noreturn]] void abandon() {
  Thread* self = launch_state.current;
  set_current(nullptr);
  switch_fiber(self->fiber, scheduler.main);
  __builtin_unreachable();
}

void thread_entry() {
  auto& s = scheduler;
  Thread* self = launch_state.current;
  try {
    s.body(reinterpret_cast<void*>(launch_state.call));
  } catch (...) {
    s.thrown = std::current_exception();
  }
  if (s.thrown) abandon();
  self->state = State::exited;
  ++s.n_exited;
  switch_to(self->fiber, pop_ready());
  __builtin_unreachable();
}

// ---- Reports ----

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::syncthreads:
      return "__syncthreads";
    case Collective::syncwarp:
      return "__syncwarp";
    case Collective::shfl:
      return "__shfl_sync";
    case Collective::shfl_up:
      return "__shfl_up_sync";
    case Collective::shfl_down:
      return "__shfl_down_sync";
    case Collective::shfl_xor:
      return "__shfl_xor_sync";
    case Collective::ballot:
      return "__ballot_sync";
    case Collective::any:
      return "__any_sync";
    case Collective::all:
      return "__all_sync";
  }
  return "?";
}

std::string format(const char* pattern, ...) {
  char buffer[512];
  va_list args;
  va_start(args, pattern);
  std::vsnprintf(buffer, sizeof(buffer), pattern, args);
  va_end(args);
  return buffer;
}

std::string site_text(Site site) { return format("(%s:%d)", base_name(site.file).c_str(), site.line); }

std::string whereabouts(const Thread& t) {
  if (t.state != State::waiting) return "exited";
  if (t.kind == Collective::syncthreads) return std::string("at __syncthreads ") + site_text(t.site);
  return format("at %s with mask 0x%08x %s", name_of(t.kind), t.mask, site_text(t.site).c_str());
}

// "threads 0-31 at __syncthreads (a.cu:12); threads 32-63 exited"
std::string whereabouts_of_block() {
  auto& s = scheduler;
  std::vector<std::pair<std::string, std::string>> groups;  // whereabouts, thread ranges; in order of appearance
  for (uint32_t first = 0; first < launch_state.n_threads;) {
    const std::string here = whereabouts(s.threads[first]);
    uint32_t last = first;
    while (last + 1 < launch_state.n_threads && whereabouts(s.threads[last + 1]) == here) ++last;
    auto group = groups.begin();
    while (group != groups.end() && group->first != here) ++group;
    if (group == groups.end()) group = groups.insert(group, {here, ""});
    std::string& ranges = group->second;
    if (ranges.size() < 80) {
      ranges += (ranges.empty() ? "" : ",") + (first == last ? format("%u", first) : format("%u-%u", first, last));
    } else if (ranges.back() != '.') {
      ranges += ",...";
    }
    first = last + 1;
  }
  std::string text;
  for (const auto& [here, ranges] : groups) text += (text.empty() ? "threads " : "; threads ") + ranges + " " + here;
  return text;
}

std::string prefix(const Thread* t) {
  std::string text = "simt: " + kernel_name(launch_state.config) + ": block " + describe(launch_state.block_index);
  if (t != nullptr) text += ", thread " + describe(t->id);
  return text + ": ";
}

}  // namespace

std::string describe(uint3 v) { return format("(%u,%u,%u)", v.x, v.y, v.z); }

std::string base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

bool is_stack(uintptr_t address) { return scheduler.stacks.contains(address); }

void fault(const std::string& what, const void* pc) {
  scheduler.fault = prefix(launch_state.current) + what + source_line(pc);
  abandon();  // the caller's frames are dropped with the fiber
}

void fault(const std::string& what, Site site) { fault(what + " " + site_text(site)); }

void fail(const std::string& what) {
  if (in_kernel) fault(what, __builtin_return_address(0));
  throw std::runtime_error("simt: " + what);
}

void fail(const char* what) {
  if (in_kernel) fault(what, __builtin_return_address(0));
  throw std::runtime_error(std::string("simt: ") + what);
}

void report_host_fault(const std::string& what) {
  std::lock_guard<std::mutex> lock(host_fault_mutex);
  if (host_fault.empty()) host_fault = "simt: host code: " + what;
}

// ---- Barriers ----

// Waits for all threads of the block. Gives how many of them brought a true predicate, and whether any did.
void barrier(bool predicate, Site site, unsigned* any, unsigned* count) {
  auto& s = scheduler;
  if (!in_kernel) fail("__syncthreads outside of a kernel");
  Thread* self = launch_state.current;
  self->kind = Collective::syncthreads;
  self->site = site;
  if (s.n_at_barrier == 0) s.barrier_site = site;
  self->state = State::waiting;
  self->value = predicate;
  if (site == s.barrier_site && ++s.n_at_barrier == launch_state.n_threads) {
    s.n_at_barrier = 0;
    uint32_t n_true = 0;
    uint32_t indices[kMaxThreads];
    std::iota(indices, indices + launch_state.n_threads, 0u);
    for (uint32_t i = 0; i < launch_state.n_threads; ++i) n_true += s.threads[i].value != 0;
    for (uint32_t i = 0; i < launch_state.n_threads; ++i) s.threads[i].value = n_true;
    ++launch_state.epoch;
    ++totals.barriers;
    block_synchronized();
    make_ready(indices, launch_state.n_threads);
  }
  wait();
  if (any) *any = self->value != 0;
  if (count) *count = static_cast<unsigned>(self->value);
}

// ---- Warp collectives ----

namespace {

// The lane whose value a shuffle gives to `t`; its own where the source falls outside of its segment.
int source_lane(const Thread& t) {
  const int lane = static_cast<int>(t.lane());
  const int segment = lane & ~(t.width - 1);
  switch (t.kind) {
    case Collective::shfl:
      return segment | (t.param & (t.width - 1));
    case Collective::shfl_up:
      return lane - t.param >= segment ? lane - t.param : lane;
    case Collective::shfl_down:
      return lane + t.param < segment + t.width ? lane + t.param : lane;
    case Collective::shfl_xor: {
      const int source = lane ^ t.param;
      return source < segment + t.width ? source : lane;
    }
    default:
      return lane;
  }
}

// All lanes of `mask` have arrived: computes what each of them receives.
void complete(Thread* warp, unsigned mask, unsigned present) {
  const Thread& any = warp[__builtin_ctz(present)];
  const Collective kind = any.kind;
  uint64_t result[kWarpSize] = {};
  if (kind == Collective::syncwarp) {
    uint32_t joined[kWarpSize] = {};
    for (unsigned l = 0; l < kWarpSize; ++l) {
      if (!(present >> l & 1)) continue;
      for (unsigned i = 0; i < kWarpSize; ++i) joined[i] = joined[i] > warp[l].clock[i] ? joined[i] : warp[l].clock[i];
    }
    for (unsigned l = 0; l < kWarpSize; ++l) {
      if (!(present >> l & 1)) continue;
      std::memcpy(warp[l].clock, joined, sizeof(joined));
      const uint32_t now = ++warp[l].clock[l];
      auto& max_clock = scheduler.max_clock;
      if (now > max_clock) max_clock = now;
      if (now == kMaxClock) fault("more __syncwarp in one block than the race check can count");
    }
  } else if (kind == Collective::ballot || kind == Collective::any || kind == Collective::all) {
    unsigned ballot = 0;
    for (unsigned l = 0; l < kWarpSize; ++l) ballot |= (present >> l & 1) && warp[l].value ? 1u << l : 0u;
    const uint64_t vote = kind == Collective::ballot ? ballot : kind == Collective::any ? ballot != 0 : ballot == present;
    for (uint64_t& r : result) r = vote;
  } else {
    for (unsigned l = 0; l < kWarpSize; ++l) {
      if (!(present >> l & 1)) continue;
      const int source = source_lane(warp[l]);
      if (source < 0 || source >= static_cast<int>(kWarpSize) || !(present >> source & 1)) {
        launch_state.current = &warp[l];
        fault(format("%s reads lane %d, which is not among the lanes of mask 0x%08x", name_of(kind), source, mask),
              warp[l].site);
      }
      result[l] = warp[source].value;
    }
  }
  for (unsigned l = 0; l < kWarpSize; ++l) {
    if (present >> l & 1) warp[l].value = result[l];
  }
}

}  // namespace

uint64_t warp_collective(Collective kind, unsigned mask, uint64_t value, int param, int width, Site site) {
  auto& s = scheduler;
  if (!in_kernel) fail(std::string(name_of(kind)) + " outside of a kernel");
  Thread* self = launch_state.current;
  if (!(mask >> self->lane() & 1)) {
    fault(format("%s: mask 0x%08x must name the calling lane %u", name_of(kind), mask, self->lane()), site);
  }
  if (width < 1 || width > static_cast<int>(kWarpSize) || (width & (width - 1)) != 0) {
    fault(format("%s: width must be a power of two up to %u, got %d", name_of(kind), kWarpSize, width), site);
  }
  self->kind = kind;
  self->mask = mask;
  self->value = value;
  self->param = param;
  self->width = width;
  self->site = site;
  self->state = State::waiting;

  // Lanes that the block does not have are not waited for; reading from one is refused above.
  Thread* warp = &s.threads[self->warp() * kWarpSize];
  const uint32_t n_lanes = std::min(kWarpSize, launch_state.n_threads - self->warp() * kWarpSize);
  const unsigned present = n_lanes == kWarpSize ? mask : mask & ((1u << n_lanes) - 1);
  for (unsigned rest = present; rest != 0;) {  // from the lane that mostly comes last
    const unsigned lane = 31 - __builtin_clz(rest);
    rest ^= 1u << lane;
    const Thread& t = warp[lane];
    const bool arrived = t.state == State::waiting && t.kind == kind && t.mask == mask && t.site == site;
    if (!arrived) {
      wait();
      return self->value;
    }
  }
  complete(warp, mask, present);
  ++totals.warp_collectives;
  uint32_t indices[kWarpSize], n = 0;
  for (unsigned rest = present; rest != 0; rest &= rest - 1) indices[n++] = warp[__builtin_ctz(rest)].index;
  make_ready(indices, n);
  wait();
  return self->value;
}

// ---- Shared memory ----

void* shared_array(const void* key, const char* name, size_t n_bytes, size_t align, Site site) {
  auto& s = scheduler;
  if (!in_kernel) fail("LS_SHARED outside of a kernel");
  for (const auto& [known, address] : s.shared_arrays) {
    if (known == key) return reinterpret_cast<void*>(address);
  }
  Region* region = add_shared_array(name, n_bytes, align);
  if (region == nullptr) {
    fault(format("LS_SHARED %s: static shared memory must stay within %zu bytes; use LS_DYNAMIC_SHARED", name,
                 kStaticSharedLimit),
          site);
  }
  s.shared_arrays.emplace_back(key, region->base);
  return reinterpret_cast<void*>(region->base);
}

void* dynamic_shared(const char* name, size_t align, Site site) {
  if (!in_kernel) fail("LS_DYNAMIC_SHARED outside of a kernel");
  if (align > 16) fault(format("LS_DYNAMIC_SHARED %s: CUDA aligns it to 16 bytes, the type asks for %zu", name, align), site);
  return reinterpret_cast<void*>(scheduler.dynamic_shared);
}

void allow_dynamic_shared(const void* kernel, size_t smem_bytes) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  dynamic_shared_opt_in()[kernel] = smem_bytes;
}

// ---- Launches ----

namespace {

void check_config(const LaunchConfig& c) {
  const auto refuse = [&](const std::string& what) { throw std::runtime_error("simt: " + kernel_name(c) + ": " + what); };
  const uint64_t n_threads = static_cast<uint64_t>(c.block.x) * c.block.y * c.block.z;
  if (n_threads < 1 || n_threads > kMaxThreads || c.block.z > 64) {
    refuse("block must have 1 to 1024 threads, at most 64 along z, got " + describe(c.block));
  }
  if (c.grid.x < 1 || c.grid.y < 1 || c.grid.z < 1 || c.grid.x > 0x7fffffffu || c.grid.y > 65535 || c.grid.z > 65535) {
    refuse("grid must lie within (1..2147483647, 1..65535, 1..65535), got " + describe(c.grid));
  }
  const auto opted_in = dynamic_shared_opt_in().find(c.kernel);
  const size_t limit = opted_in == dynamic_shared_opt_in().end() ? kStaticSharedLimit : opted_in->second;
  if (c.smem_bytes > limit || c.smem_bytes > kDynamicSharedLimit) {
    refuse(format("smem_bytes must be at most %zu (raise it to %zu by cudaFuncSetAttribute), got %zu", limit,
                  kDynamicSharedLimit, c.smem_bytes));
  }
}

void run_block() {
  auto& s = scheduler;
  auto& l = launch_state;
  l.block_epoch = ++l.epoch;
  begin_block_order();
  s.head = s.n_ready = s.n_exited = s.n_at_barrier = 0;
  const bool reset_clocks = s.max_clock > kMaxClock / 4;
  if (reset_clocks) s.max_clock = 1;
  uint32_t indices[kMaxThreads];
  std::iota(indices, indices + l.n_threads, 0u);
  uint3 id{0, 0, 0};
  for (uint32_t i = 0; i < l.n_threads; ++i) {
    Thread& t = s.threads[i];
    t.id = id;
    if (reset_clocks) {
      std::memset(t.clock, 0, sizeof(t.clock));
      t.clock[t.lane()] = 1;
    }
    prepare_fiber(t.fiber, t.stack, i, thread_entry);
    if (++id.x == l.config.block.x) {
      id.x = 0;
      if (++id.y == l.config.block.y) {
        id.y = 0;
        ++id.z;
      }
    }
  }
  make_ready(indices, l.n_threads);
  in_kernel = true;
  switch_to(s.main, pop_ready());
  in_kernel = false;
  if (s.thrown) std::rethrow_exception(std::exchange(s.thrown, nullptr));
  if (!s.fault.empty()) throw std::runtime_error(std::exchange(s.fault, {}));
  if (s.n_exited != l.n_threads) throw std::runtime_error(prefix(nullptr) + "divergent barrier: " + whereabouts_of_block());
  ++totals.blocks;
}

// Visits 0..n-1 in order, or for a shuffled schedule as i -> (a i + b) mod n with a prime to n.
struct BlockOrder {
  uint64_t n, a = 1, b = 0;
  explicit BlockOrder(uint64_t n_blocks) : n(n_blocks) {
    if (schedule_seed() == 0) return;
    b = next_random() % n;
    do {
      a = next_random() % n;
    } while (std::gcd(a, n) != 1);
  }
  uint64_t operator()(uint64_t i) const { return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * i + b) % n); }
};

}  // namespace

void run(const LaunchConfig& config, void (*body)(void*), void* call, size_t call_bytes) {
  if (in_kernel) fault("launch of " + std::string(config.kernel_name) + " from inside a kernel");
  std::lock_guard<std::mutex> lock(launch_mutex);
  {
    std::lock_guard<std::mutex> host_lock(host_fault_mutex);
    if (!host_fault.empty()) throw std::runtime_error(std::exchange(host_fault, {}));
  }
  check_config(config);
  auto& s = scheduler;
  auto& l = launch_state;
  if (l.epoch > (1u << 31)) {
    reset_stamps();
    l.epoch = 1;
  }
  random_state = schedule_seed();
  l.config = config;
  l.call = reinterpret_cast<uintptr_t>(call);
  l.call_bytes = call_bytes;
  l.n_threads = config.block.x * config.block.y * config.block.z;
  l.first_epoch = l.epoch + 1;
  s.body = body;
  s.max_clock = kMaxClock;  // the first block resets the clocks
  s.shared_arrays.clear();
  for (uint32_t i = 0; i < l.n_threads; ++i) {
    s.threads[i].index = i;
    s.threads[i].stack = s.stacks.stack(i);
  }
  begin_launch_memory();
  struct End {
    ~End() { end_launch_memory(); }
  } end;
  s.dynamic_shared = add_shared_array("dynamic shared memory", config.smem_bytes, 16)->base;  // may be empty
  blockDim_storage = config.block;
  gridDim_storage = config.grid;
  const BlockOrder order(static_cast<uint64_t>(config.grid.x) * config.grid.y * config.grid.z);
  for (uint64_t i = 0; i < order.n; ++i) {
    const uint64_t block = order(i);
    l.block_index = {static_cast<unsigned>(block % config.grid.x), static_cast<unsigned>(block / config.grid.x % config.grid.y),
                     static_cast<unsigned>(block / config.grid.x / config.grid.y)};
    blockIdx_storage = l.block_index;
    run_block();
  }
  ++totals.launches;
}

}  // namespace detail

void set_schedule(uint64_t seed) { detail::schedule_seed() = seed; }
const Stats& stats() { return detail::totals; }
void reset_stats() { detail::totals = {}; }

}  // namespace simt
