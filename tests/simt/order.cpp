// What orders two accesses of one launch: barriers, __syncwarp, and atomics after a __threadfence. Nothing else does; shuffles
// and votes "do not imply a memory barrier" (CUDA C++ Programming Guide).
//
// Within a barrier interval of a block, each thread keeps a vector clock over the lanes of its warp (Thread::clock), joined
// by __syncwarp. Across intervals the epochs decide. Between blocks, knowledge travels through atomics: an atomic publishes at
// its address what the thread's last fence made visible, and takes what others have published there.
#include <algorithm>
#include <unordered_map>

#include "state.h"

namespace simt::detail {
namespace {

struct ThreadOrder {
  Stamp fence = 0;                // its last __threadfence in this block
  std::vector<Release> acquired;  // through atomics, since the last barrier
};

struct Order {
  bool fences = false;                                            // any __threadfence in this launch
  std::unordered_map<uintptr_t, std::vector<Release>> published;  // by the address of the atomic
  std::vector<Release> visible;                                   // to all threads of the block
  uint32_t all_fenced_epoch = 0;                                  // the block fenced everything before it
  std::vector<ThreadOrder> threads{kMaxThreads};
};

Order& order = *new Order;

void merge(std::vector<Release>& into, const std::vector<Release>& from) {
  for (const Release& r : from) {
    auto same = std::find_if(into.begin(), into.end(), [&](const Release& i) { return i.first_epoch == r.first_epoch; });
    if (same == into.end()) {
      into.push_back(r);
    } else {
      same->epoch = std::max(same->epoch, r.epoch);
      same->last = std::max(same->last, r.last);
    }
  }
}

bool covers(const std::vector<Release>& releases, Stamp s) {
  const uint32_t epoch = epoch_of(s);
  for (const Release& r : releases) {
    if (epoch >= r.first_epoch && epoch < r.epoch) return true;
    if (epoch == epoch_of(r.last) && thread_of(s) == thread_of(r.last) && s <= r.last) return true;
  }
  return false;
}

}  // namespace

// Whether an access stamped `s` happened before the current thread's next one. s lies in this launch.
bool happened_before(Stamp s) {
  const auto& l = launch_state;
  const uint32_t epoch = epoch_of(s);
  if (epoch == l.epoch) {
    const uint32_t thread = thread_of(s);
    const Thread& self = *l.current;
    if (thread == self.index) return true;
    return thread / kWarpSize == self.warp() && clock_of(s) <= self.clock[thread % kWarpSize];
  }
  if (epoch >= l.block_epoch) return true;
  const auto& o = order;
  return o.fences && (covers(o.visible, s) || covers(o.threads[l.current->index].acquired, s));
}

// An atomic by which the current thread may learn what others published at that address, and publish in turn.
// As in CUDA, only what a __threadfence has made visible is published.
void exchange_releases(uintptr_t address) {
  auto& o = order;
  if (!o.fences) return;
  auto& thread = o.threads[launch_state.current->index];
  auto& published = o.published[address];
  if (!published.empty()) merge(thread.acquired, published);
  const uint32_t epoch = std::max(o.all_fenced_epoch, thread.fence ? epoch_of(thread.fence) : 0);
  if (epoch != 0) {
    merge(published, {Release{launch_state.block_epoch, epoch, thread.fence}});
    merge(published, o.visible);
    merge(published, thread.acquired);
  }
}

void begin_launch_order() {
  order.fences = false;
  order.published.clear();
}

void begin_block_order() {
  auto& o = order;
  if (!o.fences) return;
  o.visible.clear();
  o.all_fenced_epoch = 0;
  for (auto& t : o.threads) t = {};
}

// The threads of the block now know what any of them has acquired.
void block_synchronized() {
  auto& o = order;
  if (!o.fences) return;
  const uint32_t n = launch_state.n_threads, ended = launch_state.epoch - 1;
  bool all_fenced = true;
  for (uint32_t i = 0; i < n; ++i) {
    all_fenced = all_fenced && epoch_of(o.threads[i].fence) == ended;
    merge(o.visible, o.threads[i].acquired);
    o.threads[i].acquired.clear();
  }
  if (all_fenced) o.all_fenced_epoch = launch_state.epoch;
}

void fence() {
  if (!in_kernel) return;
  auto& o = order;
  if (!o.fences) {
    o.fences = true;
    begin_block_order();
  }
  o.threads[launch_state.current->index].fence = launch_state.stamp;
}

}  // namespace simt::detail
