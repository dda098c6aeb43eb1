// The one place where a .cu file meets its platform: nvcc and a GPU, or g++ and the SIMT harness (tests/simt/), which runs
// the same source on the CPU. Both give LS_LAUNCH, LS_SHARED and LS_DYNAMIC_SHARED; the harness defines its own.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#if defined(LS_SIMT)
#include "simt.h"
#else
#include <cuda_runtime.h>

// kernel may be a parenthesised template-id: LS_LAUNCH((kernel<float, 4>), grid, block, 0, stream, args...)
#define LS_LAUNCH(kernel, grid, block, smem_bytes, stream, ...) \
  (kernel<<<(grid), (block), (smem_bytes), (stream)>>>(__VA_ARGS__))
#define LS_SHARED(type, name, count) __shared__ type name[count]
#define LS_DYNAMIC_SHARED(type, name)                              \
  extern __shared__ __align__(16) unsigned char ls_dynamic_smem[]; \
  type* name = reinterpret_cast<type*>(ls_dynamic_smem)
#endif
