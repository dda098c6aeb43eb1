// Fibers: a stack and a saved stack pointer each, switched by hand on x86-64, by ucontext elsewhere.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__) && !defined(LS_SIMT_UCONTEXT)
#define LS_SIMT_UCONTEXT
#endif
#ifdef LS_SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace simt::detail {

// One mapping holds the stacks of a block; they are mapped once and reused by every block and launch. Below each stack
// lies a page that may not be touched, so that a kernel that recurses without end does not run into its neighbour.
class StackPool {
 public:
  static constexpr size_t kStackBytes = 128 * 1024;

  explicit StackPool(size_t n_stacks) : guard_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), n_stacks_(n_stacks) {
    void* memory =
        mmap(nullptr, n_stacks * pitch(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = reinterpret_cast<uintptr_t>(memory);
  }

  // The lowest address of stack i. Stacks are guarded in order, when first used: most blocks need few of them.
  uintptr_t stack(size_t i) {
    for (; n_guarded_ <= i; ++n_guarded_) {
      mprotect(reinterpret_cast<void*>(base_ + n_guarded_ * pitch()), guard_bytes_, PROT_NONE);
    }
    return base_ + i * pitch() + guard_bytes_;
  }

  bool contains(uintptr_t address) const { return address - base_ < n_stacks_ * pitch(); }

 private:
  size_t pitch() const { return kStackBytes + guard_bytes_; }

  size_t guard_bytes_;
  size_t n_stacks_;
  size_t n_guarded_ = 0;
  uintptr_t base_ = 0;
};

#ifdef LS_SIMT_UCONTEXT

struct Fiber {
  ucontext_t context;
};

inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

inline void prepare_fiber(Fiber& fiber, uintptr_t stack, size_t /*colour*/, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = reinterpret_cast<void*>(stack);
  fiber.context.uc_stack.ss_size = StackPool::kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#else

struct Fiber {
  void* stack_pointer;
};

// Saves the registers that the ABI makes the callee keep, exchanges the stacks, restores the other side's.
extern "C" __attribute__((visibility("hidden"))) void simt_switch_stack(void** from, void* to);
asm(R"(
  .text
  .p2align 4
  .local simt_switch_stack
  .type simt_switch_stack, @function
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simt_switch_stack, .-simt_switch_stack
)");

inline void switch_fiber(Fiber& from, Fiber& to) { simt_switch_stack(&from.stack_pointer, to.stack_pointer); }

// `colour` shifts the top of the stack by cache lines, so that the hot ends of many stacks do not share cache sets.
inline void prepare_fiber(Fiber& fiber, uintptr_t stack, size_t colour, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>(stack + StackPool::kStackBytes - (colour % 32) * 128);
  *--top = 0;                                   // the return address of entry(), which does not return; ends backtraces
  *--top = reinterpret_cast<uintptr_t>(entry);  // where the first switch returns to
  for (int i = 0; i < 6; ++i) *--top = 0;       // the registers it restores
  fiber.stack_pointer = top;
}

#endif

}  // namespace simt::detail
