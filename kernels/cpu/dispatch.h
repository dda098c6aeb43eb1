// The CPU launchers as the bindings call them: ls::cpu::<name>(params), in the instruction set chosen at run time.
#pragma once

#include "common/params.h"

namespace ls::cpu {

enum class Isa { kPlain, kAvx2, kAvx512 };

// The instruction set in use: the widest that was built and that the processor has, or what LS_CPU_ISA names.
// Throws std::runtime_error when LS_CPU_ISA names one that is unknown or that the processor lacks.
Isa isa();
const char* isa_name();

#define LS_LAUNCHER(name, Params) void name(const Params& params);
#include "common/launchers.def"
#undef LS_LAUNCHER

}  // namespace ls::cpu
