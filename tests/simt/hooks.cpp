// What the compiler calls in instrumented code, and how the code's own addresses become source lines.
//
// -fsanitize=thread announces each memory access; -fsanitize=alignment,bounds,... calls when a check has failed. The
// sanitizers' own libraries are not linked: these definitions, hidden inside the test library, take their place.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

using simt::detail::Access;
using simt::detail::in_kernel;
using simt::detail::on_access;

#define HOOK extern "C" __attribute__((visibility("hidden")))
#define CALLER __builtin_return_address(0)

// ---- Memory accesses ----

#define ACCESS_HOOKS(n)                                    \
  HOOK void __tsan_read##n(void* p) {                      \
    if (in_kernel) on_access(p, n, Access::read, CALLER);  \
  }                                                        \
  HOOK void __tsan_write##n(void* p) {                     \
    if (in_kernel) on_access(p, n, Access::write, CALLER); \
  }
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)
HOOK void __tsan_read_range(void* p, size_t n) {
  if (in_kernel) on_access(p, n, Access::read, CALLER);
}
HOOK void __tsan_write_range(void* p, size_t n) {
  if (in_kernel) on_access(p, n, Access::write, CALLER);
}
HOOK void __tsan_vptr_read(void** p) {
  if (in_kernel) on_access(p, sizeof(*p), Access::read, CALLER);
}
HOOK void __tsan_vptr_update(void** p, void*) {
  if (in_kernel) on_access(p, sizeof(*p), Access::write, CALLER);
}
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}

// ---- std::atomic and the guards of function-local statics: host code only ----

static void refuse_host_atomic(const void* pc) {
  if (in_kernel) simt::detail::fault("std::atomic or an initialised local static is no device code; use atomicAdd & co", pc);
}

#define ATOMIC_HOOK(bits, T, name, built_in)                \
  HOOK T __tsan_atomic##bits##_##name(T* p, T value, int) { \
    refuse_host_atomic(CALLER);                             \
    return built_in(p, value, __ATOMIC_SEQ_CST);            \
  }
#define CAS_HOOK(bits, T, strength)                                                                      \
  HOOK int __tsan_atomic##bits##_compare_exchange_##strength(T* p, T* expected, T desired, int, int) {   \
    refuse_host_atomic(CALLER);                                                                          \
    return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
#define ATOMIC_HOOKS(bits, T)                                 \
  HOOK T __tsan_atomic##bits##_load(const T* p, int) {        \
    refuse_host_atomic(CALLER);                               \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);              \
  }                                                           \
  HOOK void __tsan_atomic##bits##_store(T* p, T value, int) { \
    refuse_host_atomic(CALLER);                               \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);             \
  }                                                           \
  ATOMIC_HOOK(bits, T, exchange, __atomic_exchange_n)         \
  ATOMIC_HOOK(bits, T, fetch_add, __atomic_fetch_add)         \
  ATOMIC_HOOK(bits, T, fetch_sub, __atomic_fetch_sub)         \
  ATOMIC_HOOK(bits, T, fetch_and, __atomic_fetch_and)         \
  ATOMIC_HOOK(bits, T, fetch_or, __atomic_fetch_or)           \
  ATOMIC_HOOK(bits, T, fetch_xor, __atomic_fetch_xor)         \
  CAS_HOOK(bits, T, strong)                                   \
  CAS_HOOK(bits, T, weak)
ATOMIC_HOOKS(8, uint8_t)
ATOMIC_HOOKS(16, uint16_t)
ATOMIC_HOOKS(32, uint32_t)
ATOMIC_HOOKS(64, uint64_t)
HOOK void __tsan_atomic_thread_fence(int) {}
HOOK void __tsan_atomic_signal_fence(int) {}

// ---- Undefined behaviour ----
// The layout of what the compiler passes is the sanitizer's stable interface (compiler-rt, ubsan_handlers.h).

namespace {

struct Location {
  const char* file;
  uint32_t line, column;
};

struct Type {
  uint16_t kind;  // 0: integer
  uint16_t info;  // of integers: bit 0 signed, above it log2 of the width in bits
  char name[1];   // zero-terminated, in quotes
};

struct TypeMismatch {
  Location location;
  const Type* type;
  uint8_t log_alignment;
  uint8_t access;  // load, store, reference binding, ...
};

struct Overflow {
  Location location;
  const Type* type;
};

struct OutOfBounds {
  Location location;
  const Type* array_type;
  const Type* index_type;
};

struct ShiftOutOfBounds {
  Location location;
  const Type* left_type;
  const Type* right_type;
};

// Integers of up to 64 bits come in the word itself, wider ones behind a pointer.
std::string number(const Type& type, uintptr_t value) {
  const int bits = 1 << (type.info >> 1);
  if (bits > 64) return "a 128-bit number";
  if (!(type.info & 1)) return std::to_string(bits == 64 ? value : value & ((uintptr_t{1} << bits) - 1));
  return std::to_string(static_cast<int64_t>(value << (64 - bits)) >> (64 - bits));
}

void undefined(const Location& at, const std::string& what) {
  const std::string text = what + " (" + simt::detail::base_name(at.file) + ":" + std::to_string(at.line) + ")";
  if (in_kernel) simt::detail::fault(text);
  simt::detail::report_host_fault(text);
}

void overflow(const Overflow* data, uintptr_t left, const char* sign, uintptr_t right) {
  undefined(data->location, number(*data->type, left) + " " + sign + " " + number(*data->type, right) + " overflows " +
                                data->type->name + "; offsets must be 64-bit");
}

}  // namespace

HOOK void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  const size_t alignment = size_t{1} << data->log_alignment;
  undefined(data->location, "misaligned address: " + std::string(data->type->name) + " needs a multiple of " +
                                std::to_string(alignment) + ", this one is " + std::to_string(address % alignment) +
                                " past one");
}
HOOK void __ubsan_handle_out_of_bounds(OutOfBounds* data, uintptr_t index) {
  undefined(data->location, "index " + number(*data->index_type, index) + " is outside of " + data->array_type->name);
}
HOOK void __ubsan_handle_add_overflow(Overflow* data, uintptr_t a, uintptr_t b) { overflow(data, a, "+", b); }
HOOK void __ubsan_handle_sub_overflow(Overflow* data, uintptr_t a, uintptr_t b) { overflow(data, a, "-", b); }
HOOK void __ubsan_handle_mul_overflow(Overflow* data, uintptr_t a, uintptr_t b) { overflow(data, a, "*", b); }
HOOK void __ubsan_handle_negate_overflow(Overflow* data, uintptr_t a) {
  undefined(data->location, "negation of " + number(*data->type, a) + " overflows " + data->type->name);
}
HOOK void __ubsan_handle_divrem_overflow(Overflow* data, uintptr_t a, uintptr_t b) {
  undefined(data->location, "division of " + number(*data->type, a) + " by " + number(*data->type, b));
}
HOOK void __ubsan_handle_shift_out_of_bounds(ShiftOutOfBounds* data, uintptr_t, uintptr_t by) {
  undefined(data->location, "shift of " + std::string(data->left_type->name) + " by " + number(*data->right_type, by));
}

// ---- assert() in a kernel ends the launch; elsewhere the process, as ever ----

HOOK [[noreturn]] void __assert_fail(const char* expression, const char* file, unsigned line, const char* function) {
  if (in_kernel) {
    simt::detail::fault(std::string("assertion failed: ") + expression, {file, static_cast<int>(line)});
  }
  std::fprintf(stderr, "%s:%u: %s: Assertion `%s' failed.\n", file, line, function, expression);
  std::abort();
}

// ---- Source lines and names ----

namespace simt::detail {
namespace {

// What addr2line, which comes with the compiler, prints about an address of this library; empty when it cannot tell.
std::vector<std::string> ask_addr2line(const char* options, const void* address, ptrdiff_t shift) {
  std::vector<std::string> lines;
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr || std::strchr(info.dli_fname, '\'') != nullptr) return lines;
  char command[4200];
  const auto offset = static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase) + shift;
  std::snprintf(command, sizeof(command), "addr2line %s -e '%s' %#tx 2>/dev/null", options, info.dli_fname, offset);
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return lines;
  char line[4096];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) {
    lines.emplace_back(line);
    if (lines.back().back() == '\n') lines.back().pop_back();
  }
  pclose(pipe);
  return lines;
}

void remove_all(std::string& text, const char* part) {
  for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, std::strlen(part));
}

}  // namespace

// The innermost inlined function's line first, then up to two that called it; the harness's own headers are left out.
std::string source_line(const void* pc) {
  static std::map<const void*, std::string> known;
  if (pc == nullptr) return "";
  if (auto found = known.find(pc); found != known.end()) return found->second;
  std::string text;
  int n_frames = 0;
  for (const std::string& line : ask_addr2line("-i", pc, -1)) {  // -1: a return address lies past the call
    std::string frame = base_name(line.c_str());
    frame = frame.substr(0, frame.find(' '));
    const bool own = frame.rfind("simt.h:", 0) == 0 || frame.rfind("runtime.h:", 0) == 0 || frame.rfind("??", 0) == 0;
    if (!own && n_frames++ < 3) text += (text.empty() ? "" : " in ") + frame;
  }
  return known[pc] = text.empty() ? text : " (" + text + ")";
}

// "kernel<float, 4>" from "void ls::cuda::(anonymous namespace)::kernel<float, 4>(ls::Params)"; where the debug information
// does not tell, the launch's own words, in which the arguments of a template may be names.
std::string kernel_name(const LaunchConfig& config) {
  static std::map<const void*, std::string> known;
  if (auto found = known.find(config.kernel); found != known.end()) return found->second;
  const auto lines = ask_addr2line("-f -C", config.kernel, 0);
  if (lines.empty() || lines[0] == "??") return config.kernel_name;
  std::string name = lines[0];
  remove_all(name, "(anonymous namespace)::");
  int depth = 0;
  size_t begin = 0, end = 0;
  for (; end < name.size() && (depth > 0 || name[end] != '('); ++end) {
    if (name[end] == '<') ++depth;
    if (name[end] == '>') --depth;
    if (depth == 0 && (name[end] == ' ' || name[end] == ':')) begin = end + 1;
  }
  return known[config.kernel] = name.substr(begin, end - begin);
}

}  // namespace simt::detail
