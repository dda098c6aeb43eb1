// The CUDA launchers as the bindings call them: ls::cuda::<name>(params, stream). They take raw pointers, launch on `stream`
// of the current device without waiting, and throw std::runtime_error when a launch is refused.
#pragma once

#include "common/cuda_or_simt.h"
#include "common/params.h"

namespace ls::cuda {

#define LS_LAUNCHER(name, Params) void name(const Params& params, cudaStream_t stream);
#include "common/launchers.def"
#undef LS_LAUNCHER

}  // namespace ls::cuda
