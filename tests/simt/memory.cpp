// Every memory access of a kernel arrives here, see hooks.cpp.
// Checked: bounds, read-only regions, shared memory read before written, accesses that nothing orders (order.cpp says what
// does). Counted: bytes.
#include <link.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "state.h"

namespace simt {
namespace detail {
namespace {

constexpr size_t kArenaBytes = 512 * 1024;
constexpr size_t kRedzoneBytes = 1024;           // between shared arrays
constexpr size_t kPooledCellBytes = 256u << 20;  // shadow memory kept for later launches

struct Range {
  uintptr_t begin, end;
  bool contains(uintptr_t a) const { return a >= begin && a < end; }
};

struct Memory {
  std::vector<std::unique_ptr<Region>> regions;  // registered, by address
  std::vector<std::unique_ptr<Region>> arrays;   // shared, of this launch, by address
  uintptr_t arena = 0;
  size_t arena_used = 0, static_shared_bytes = 0;
  Region* hints[64] = {};    // the region last seen for an address; verified at each use
  std::vector<Range> image;  // of this library, as mapped: constants and tables that kernels may read
  std::multimap<size_t, Cell*> pool;
  size_t pooled_bytes = 0;
  uint64_t n_access = 0;
  std::chrono::steady_clock::time_point deadline;
};

Memory& memory = *new Memory;  // as the scheduler, never destroyed

// ---- Shadow cells ----
// Fresh pages read as zero, which is a stamp older than all; old contents are older than the launch. Neither is cleared.

void release_cells(Region& r) {
  if (r.cells == nullptr) return;
  auto& m = memory;
  if (m.pooled_bytes + r.cells_bytes <= kPooledCellBytes) {
    m.pool.emplace(r.cells_bytes, r.cells);
    m.pooled_bytes += r.cells_bytes;
  } else {
    munmap(r.cells, r.cells_bytes);
  }
  r.cells = nullptr;
}

void acquire_cells(Region& r, int granule_log2) {
  auto& m = memory;
  size_t bytes = 64 * 1024;
  const size_t needed = ((r.size >> granule_log2) + 1) * sizeof(Cell);
  while (bytes < needed) bytes *= 2;
  r.granule_log2 = granule_log2;
  r.cells_bytes = bytes;
  if (auto found = m.pool.find(bytes); found != m.pool.end()) {
    r.cells = found->second;
    m.pool.erase(found);
    m.pooled_bytes -= bytes;
    return;
  }
  void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (fresh == MAP_FAILED) fault("no memory for the shadow of " + r.name);
  r.cells = static_cast<Cell*>(fresh);
}

// Makes the cells narrow enough for an access of n bytes at `offset`.
void refine(Region& r, size_t offset, size_t n) {
  const int width = __builtin_ctzll(offset | n | 4);
  if (r.cells == nullptr) return acquire_cells(r, width);
  if (width >= r.granule_log2) return;
  Region coarse = {};
  std::swap(coarse.cells, r.cells);
  coarse.cells_bytes = r.cells_bytes;
  const int split = r.granule_log2 - width;
  const bool sparse = coarse.cells_bytes > kPooledCellBytes;  // do not touch all of it: better forget what it knows
  const size_t n_coarse = (r.size >> r.granule_log2) + 1;
  acquire_cells(r, width);
  for (size_t i = 0; i < n_coarse && !sparse; ++i) {
    for (size_t j = i << split; j < (i + 1) << split && j <= r.size >> width; ++j) r.cells[j] = coarse.cells[i];
  }
  release_cells(coarse);
}

// ---- Reports ----

const char* name_of(Access a) { return a == Access::read ? "read" : a == Access::write ? "write" : "atomic update"; }

std::string n_bytes_text(size_t n) { return std::to_string(n) + (n == 1 ? " byte" : " bytes"); }

std::string name_of(const Region& r) { return (r.shared ? "shared array '" : "region '") + r.name + "'"; }

uint3 thread_id(uint32_t index) {
  const uint3 b = launch_state.config.block;
  return {index % b.x, index / b.x % b.y, index / b.x / b.y};
}

[[noreturn]] __attribute__((noinline, cold)) void race(const Region& r, size_t offset, Access before, Stamp s, Access now,
                                                       const void* pc) {
  const bool same_block = epoch_of(s) >= launch_state.block_epoch;
  const std::string who = same_block ? "thread " + describe(thread_id(thread_of(s)))
                                     : "thread " + describe(thread_id(thread_of(s))) + " of another block";
  const std::string remedy = same_block ? "put __syncthreads (or __syncwarp within a warp) between them"
                                        : "blocks are ordered only by another launch, or by atomics after __threadfence";
  fault(std::string("unsynchronised accesses to ") + name_of(r) + ", byte " + std::to_string(offset) + ": " + name_of(before) +
            " by " + who + ", " + name_of(now) + " by this one; " + remedy,
        pc);
}

// The array or region nearest to an address outside of all, and where the address lies from it.
std::string nearest(const std::vector<std::unique_ptr<Region>>& among, uintptr_t a) {
  const Region* best = nullptr;
  size_t best_distance = 0;
  for (const auto& r : among) {
    const size_t distance = a < r->base ? r->base - a : a - (r->base + r->size);
    if (best == nullptr || distance < best_distance) {
      best = r.get();
      best_distance = distance;
    }
  }
  if (best == nullptr || best_distance > 1u << 30) return "far from every known one";
  return n_bytes_text(best_distance) + (a < best->base ? " before " : " past the end of ") + name_of(*best) + " of " +
         n_bytes_text(best->size);
}

// An access that lies in no array and no region: returns where it is allowed, ends the launch where not.
__attribute__((noinline, cold)) void outside(uintptr_t a, size_t n, Access access, const void* pc) {
  auto& m = memory;
  const bool writes = access != Access::read;
  if (a - launch_state.call < launch_state.call_bytes && !writes) return;
  if (m.regions.empty() && a >= 4096 && !is_stack(a) && a - m.arena >= kArenaBytes) {
    auto& t = totals.global;
    if (writes) t.written += n;
    if (access != Access::write) t.read += n;
    return;
  }
  const bool in_image = std::any_of(m.image.begin(), m.image.end(), [a](const Range& r) { return r.contains(a); });
  if (in_image && !writes) return;
  const std::string what = std::string(name_of(access)) + " of " + n_bytes_text(n);
  if (a < 4096) fault(what + " through a null pointer", pc);
  if (is_stack(a)) fault(what + " in the local memory of another thread", pc);
  if (a - m.arena < kArenaBytes) fault(what + " outside of shared memory, " + nearest(m.arrays, a), pc);
  if (in_image) fault(what + " to a variable of the library; register it as a writable region if that is meant", pc);
  fault(what + " outside of global memory, " + nearest(m.regions, a), pc);
}

// ---- The check ----

inline Region* find(uintptr_t a) {
  auto& m = memory;
  Region*& hint = m.hints[(a >> 12) % 64];
  if (hint != nullptr && hint->contains(a)) return hint;
  const auto& among = a - m.arena < kArenaBytes ? m.arrays : m.regions;
  auto after = std::upper_bound(among.begin(), among.end(), a,
                                [](uintptr_t x, const std::unique_ptr<Region>& r) { return x < r->base; });
  if (after == among.begin() || !(*--after)->contains(a)) return nullptr;
  return hint = after->get();
}

inline bool unordered(Stamp s, Stamp horizon) { return s >= horizon && s != launch_state.stamp && !happened_before(s); }

// Notes a read (or an atomic) beside at most one earlier one that it is not ordered with, see Cell.
inline void remember(Stamp (&slots)[2], Stamp horizon) {
  const Stamp now = launch_state.stamp;
  if (!unordered(slots[0], horizon)) {
    slots[0] = now;
  } else if (!unordered(slots[1], horizon)) {
    slots[1] = now;
  } else {
    const auto warp = [](Stamp s) { return s >> (kClockBits + 5); };  // epoch and warp
    const bool spread = epoch_of(slots[0]) != epoch_of(slots[1]);
    if ((!spread && epoch_of(slots[0]) != epoch_of(now)) || (warp(slots[0]) == warp(slots[1]) && warp(slots[0]) != warp(now))) {
      slots[1] = now;
    }
  }
}

inline void check_cell(Region& r, size_t index, Access access, Stamp horizon, const void* pc) {
  Cell& c = r.cells[index];
  const size_t offset = index << r.granule_log2;
  const size_t n = std::min(size_t{1} << r.granule_log2, r.size - offset);
  if (access != Access::write) {
    if (c.read[0] < horizon && c.atomic[0] < horizon) r.traffic.cold_read += n;
    if (r.shared && c.write < horizon && c.atomic[0] < horizon) {
      fault(std::string(name_of(access)) + " of " + name_of(r) + ", byte " + std::to_string(offset) +
                ", which no thread of the block has written",
            pc);
    }
  }
  if (access != Access::read && c.write < horizon && c.atomic[0] < horizon) r.traffic.cold_written += n;
  if (unordered(c.write, horizon)) race(r, offset, Access::write, c.write, access, pc);
  if (access != Access::atomic) {
    for (Stamp s : c.atomic) {
      if (unordered(s, horizon)) race(r, offset, Access::atomic, s, access, pc);
    }
  }
  if (access != Access::read) {
    for (Stamp s : c.read) {
      if (unordered(s, horizon)) race(r, offset, Access::read, s, access, pc);
    }
  }
  if (access == Access::read) {
    remember(c.read, horizon);
  } else if (access == Access::write) {
    c.write = launch_state.stamp;
  } else {
    remember(c.atomic, horizon);
  }
}

// A kernel that waits for what no other thread can do would hang: blocks and fibers do not preempt each other.
__attribute__((noinline, cold)) void check_deadline() {
  if (std::chrono::steady_clock::now() > memory.deadline) {
    fault("the launch ran longer than LS_SIMT_TIMEOUT; a thread may be spinning on what another should write");
  }
}

void insert_sorted(std::vector<std::unique_ptr<Region>>& into, std::unique_ptr<Region> region) {
  auto at = std::upper_bound(into.begin(), into.end(), region->base,
                             [](uintptr_t x, const std::unique_ptr<Region>& r) { return x < r->base; });
  into.insert(at, std::move(region));
}

void forget_hints() { std::fill(std::begin(memory.hints), std::end(memory.hints), nullptr); }

std::vector<Range> find_image() {
  struct Search {
    uintptr_t inside;
    std::vector<Range> ranges;
  } search{reinterpret_cast<uintptr_t>(&find_image), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* s = static_cast<Search*>(data);
        std::vector<Range> ranges;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          ranges.push_back({begin, begin + segment.p_memsz});
        }
        const bool ours = std::any_of(ranges.begin(), ranges.end(), [s](const Range& r) { return r.contains(s->inside); });
        if (ours) s->ranges = std::move(ranges);
        return ours ? 1 : 0;
      },
      &search);
  return search.ranges;
}

}  // namespace

// ---- Interface to the hooks and the runtime ----

void on_access(const void* ptr, size_t n, Access access, const void* pc) {
  const auto a = reinterpret_cast<uintptr_t>(ptr);
  if (a - launch_state.current->stack < StackPool::kStackBytes || n == 0) return;
  auto& m = memory;
  if ((++m.n_access & 0xfffff) == 0) check_deadline();
  Region* r = find(a);
  if (r == nullptr) return outside(a, n, access, pc);
  const size_t offset = a - r->base;
  if (n > r->size - offset) {
    fault(std::string(name_of(access)) + " of " + n_bytes_text(n) + " at byte " + std::to_string(offset) + " of " +
              name_of(*r) + ", which has " + n_bytes_text(r->size),
          pc);
  }
  if (access != Access::read) {
    if (!r->writable)
      fault(std::string(name_of(access)) + " to read-only " + name_of(*r) + ", byte " + std::to_string(offset), pc);
    r->traffic.written += n;
  }
  if (access != Access::write) r->traffic.read += n;
  if (r->cells == nullptr || ((offset | n) & ((size_t{1} << r->granule_log2) - 1)) != 0) refine(*r, offset, n);
  const Stamp horizon = static_cast<Stamp>(r->shared ? launch_state.block_epoch : launch_state.first_epoch) << 32;
  const size_t last = (offset + n - 1) >> r->granule_log2;
  for (size_t i = offset >> r->granule_log2; i <= last; ++i) check_cell(*r, i, access, horizon, pc);
}

void begin_launch_memory() {
  auto& m = memory;
  if (m.arena == 0) {
    void* arena = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) throw std::bad_alloc();
    m.arena = reinterpret_cast<uintptr_t>(arena);
    m.image = find_image();
  }
  m.arena_used = kRedzoneBytes;
  m.static_shared_bytes = 0;
  const char* timeout = std::getenv("LS_SIMT_TIMEOUT");
  m.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout ? std::atoi(timeout) : 60);
  begin_launch_order();
}

void end_launch_memory() {
  auto& m = memory;
  for (auto& array : m.arrays) release_cells(*array);
  m.arrays.clear();
  forget_hints();
  for (auto& r : m.regions) {
    for (Traffic* t : {&totals.global, &totals.regions[r->name]}) {
      t->read += r->traffic.read;
      t->written += r->traffic.written;
      t->cold_read += r->traffic.cold_read;
      t->cold_written += r->traffic.cold_written;
    }
    r->traffic = {};
  }
}

void reset_stamps() {
  auto& m = memory;
  for (auto& r : m.regions) {
    if (r->cells != nullptr) munmap(r->cells, r->cells_bytes);
    r->cells = nullptr;
  }
  for (auto& [bytes, cells] : m.pool) munmap(cells, bytes);
  m.pool.clear();
  m.pooled_bytes = 0;
}

Region* add_shared_array(const std::string& name, size_t n_bytes, size_t align) {
  auto& m = memory;
  const bool dynamic = m.arrays.empty() && launch_state.current == nullptr;
  if (!dynamic) m.static_shared_bytes += n_bytes;
  if (m.static_shared_bytes > kStaticSharedLimit) return nullptr;
  auto r = std::make_unique<Region>();
  const size_t at = (m.arena_used + align - 1) / align * align;
  r->base = m.arena + at;
  r->size = n_bytes;
  r->writable = r->shared = true;
  r->name = name;
  m.arena_used = at + n_bytes + kRedzoneBytes;
  if (m.arena_used > kArenaBytes) return nullptr;
  Region* added = r.get();
  m.arrays.push_back(std::move(r));
  return added;
}

void before_atomic(void* ptr, size_t n_bytes, void* pc) {
  if (!in_kernel) fail("atomic update outside of a kernel");
  const auto a = reinterpret_cast<uintptr_t>(ptr);
  if (a % n_bytes != 0) fault("atomic update of " + n_bytes_text(n_bytes) + " at a misaligned address", pc);
  on_access(ptr, n_bytes, Access::atomic, pc);
  exchange_releases(a);
}

void memset_global(void* ptr, int value, size_t n_bytes) {
  const auto a = reinterpret_cast<uintptr_t>(ptr);
  if (n_bytes != 0 && !memory.regions.empty()) {
    const Region* r = find(a);
    if (r == nullptr || !r->writable || n_bytes > r->size - (a - r->base)) {
      fail("cudaMemsetAsync of " + n_bytes_text(n_bytes) + " outside of the writable regions, " +
           (r ? "in " + name_of(*r) : nearest(memory.regions, a)));
    }
  }
  std::memset(ptr, value, n_bytes);
  for (Traffic* t : {&totals.global, &totals.regions["cudaMemsetAsync"]}) {
    t->written += n_bytes;
    t->cold_written += n_bytes;
  }
}

}  // namespace detail

void register_region(const void* ptr, size_t n_bytes, bool writable, const std::string& name) {
  using namespace detail;
  if (in_kernel) fail("register_region inside of a kernel");
  if (n_bytes == 0) return;
  auto& m = memory;
  auto added = std::make_unique<Region>();
  added->base = reinterpret_cast<uintptr_t>(ptr);
  added->size = n_bytes;
  added->writable = writable;
  added->name = name;
  // Memory known under two names (in place, views) is one region: its accesses must meet in the same cells.
  for (auto it = m.regions.begin(); it != m.regions.end();) {
    Region& r = **it;
    if (r.base < added->base + added->size && added->base < r.base + r.size) {
      const uintptr_t end = std::max(r.base + r.size, added->base + added->size);
      added->base = std::min(r.base, added->base);
      added->size = end - added->base;
      added->writable = added->writable || r.writable;
      if (r.name != added->name) added->name = r.name + "+" + added->name;
      release_cells(r);
      it = m.regions.erase(it);
    } else {
      ++it;
    }
  }
  insert_sorted(m.regions, std::move(added));
  forget_hints();
}

void clear_regions() {
  using namespace detail;
  auto& m = memory;
  for (auto& r : m.regions) release_cells(*r);
  m.regions.clear();
  forget_hints();
}

}  // namespace simt
