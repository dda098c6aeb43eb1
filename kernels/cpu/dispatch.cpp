#include "cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ls::cpu {

#define LS_LAUNCHER(name, Params) void name(const Params& params);
#if defined(__x86_64__)
namespace avx512 {
#include "common/launchers.def"
}
namespace avx2 {
#include "common/launchers.def"
}
#endif
namespace plain {
#include "common/launchers.def"
}
#undef LS_LAUNCHER

namespace {

Isa widest() {
#if defined(__x86_64__)
  // The flags that setup.py compiles each set with.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return Isa::kAvx2;
#endif
  return Isa::kPlain;
}

Isa choose() {
  const Isa best = widest();
  const char* wish = std::getenv("LS_CPU_ISA");
  if (wish == nullptr || *wish == '\0') return best;
  const std::string name(wish);
  Isa wanted;
  if (name == "plain") {
    wanted = Isa::kPlain;
  } else if (name == "avx2") {
    wanted = Isa::kAvx2;
  } else if (name == "avx512") {
    wanted = Isa::kAvx512;
  } else {
    throw std::runtime_error("LS_CPU_ISA must be plain, avx2 or avx512, got " + name);
  }
  if (wanted > best)
    throw std::runtime_error("LS_CPU_ISA=" + name + ": this processor lacks it; unset it or choose a narrower set");
  return wanted;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name() {
  switch (isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "plain";
  }
}

#if defined(__x86_64__)
#define LS_LAUNCHER(name, Params)    \
  void name(const Params& params) {  \
    switch (isa()) {                 \
      case Isa::kAvx512:             \
        return avx512::name(params); \
      case Isa::kAvx2:               \
        return avx2::name(params);   \
      default:                       \
        return plain::name(params);  \
    }                                \
  }
#else
#define LS_LAUNCHER(name, Params) \
  void name(const Params& params) { plain::name(params); }
#endif
#include "common/launchers.def"
#undef LS_LAUNCHER

}  // namespace ls::cpu
