// What every binding shares: argument checks whose messages say what was expected and what came, dtype names, and the hand-over
// to the launchers of the device. A binding checks, allocates and calls one launcher; the maths is in kernels/cpu and kernels/cuda.
//
// Compiled with LS_SIMT, the same bindings send CPU tensors to the CUDA launchers under the harness of tests/simt, and tell it
// which memory a launch may touch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/params.h"
#if !defined(LS_SIMT)
#include "cpu/dispatch.h"
#endif
#if defined(LS_SIMT) || defined(LS_WITH_CUDA)
#include "cuda/launchers.h"
#endif

namespace ls {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error, which torch shows as RuntimeError, with the parts joined: "op: argument must ..., got ...".
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}
#define LS_CHECK(condition, ...)             \
  do {                                       \
    if (!(condition)) ls::fail(__VA_ARGS__); \
  } while (false)

inline std::string shape_of(const Tensor& t) {
  std::ostringstream out;
  out << '(';
  for (int64_t i = 0; i < t.dim(); ++i) out << (i == 0 ? "" : ", ") << t.size(i);
  out << (t.dim() == 1 ? ",)" : ")");
  return out.str();
}

inline DType dtype_of(const char* op, const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      fail(op, ": ", name, " must be float32, float16 or bfloat16, got ", torch::headeronly::toString(t.scalar_type()));
  }
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t) {
  LS_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous, got shape ", shape_of(t),
           " with other strides; call .contiguous()");
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType expected) {
  LS_CHECK(t.scalar_type() == expected, op, ": ", name, " must be ", torch::headeronly::toString(expected), ", got ",
           torch::headeronly::toString(t.scalar_type()));
}

inline int32_t device_type(const Tensor& t) {
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return type;
}

// A tensor on meta does not come here: with one among its arguments, torch calls the fake kernel, which refuses it (ls_plugin/ops/checks.py).
inline void check_device(const char* op, const char* name, const Tensor& t, const Tensor& reference) {
  LS_CHECK(device_type(t) == device_type(reference) && t.get_device_index() == reference.get_device_index(), op, ": ", name,
           " lies on another device than the first argument; move it with .to()");
}

// `t` is None or (C,) with C = x.size(-1), on x's device and in x's dtype. Contiguous, it comes back as it is, else as a copy: it is small.
inline std::optional<Tensor> row_vector(const char* op, const char* name, const std::optional<Tensor>& t, const Tensor& x) {
  if (!t) return t;
  const int64_t n_cols = x.size(x.dim() - 1);
  LS_CHECK(t->dim() == 1 && t->size(0) == n_cols, op, ": ", name, " must have shape (C,) = (", n_cols, ",), got ",
           shape_of(*t));
  check_dtype(op, name, *t, x.scalar_type());
  check_device(op, name, *t, x);
  return t->is_contiguous() ? *t : torch::stable::contiguous(*t);
}

inline void check_same_shape(const char* op, const char* name, const Tensor& t, const char* x_name, const Tensor& x) {
  bool same = t.dim() == x.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = t.size(i) == x.size(i);
  LS_CHECK(same, op, ": ", name, " must have the shape of ", x_name, ", ", shape_of(x), ", got ", shape_of(t));
}

// `t` has x's shape, dtype and device, contiguous.
inline void check_like(const char* op, const char* name, const Tensor& t, const char* x_name, const Tensor& x) {
  check_same_shape(op, name, t, x_name, x);
  check_dtype(op, name, t, x.scalar_type());
  check_device(op, name, t, x);
  check_contiguous(op, name, t);
}

// A value that a kernel reads on the device of `reference`: one element, or nothing.
inline void check_device_scalar(const char* op, const char* name, const std::optional<Tensor>& t, ScalarType dtype,
                                const Tensor& reference) {
  if (!t) return;
  LS_CHECK(t->numel() == 1, op, ": ", name, " must have one element, got shape ", shape_of(*t));
  check_dtype(op, name, *t, dtype);
  check_device(op, name, *t, reference);
}

// `t` holds one fp32 number for each of n_rows rows of x, on x's device, contiguous.
inline void check_row_statistic(const char* op, const char* name, const Tensor& t, int64_t n_rows, const Tensor& x) {
  LS_CHECK(t.numel() == n_rows, op, ": ", name, " must have one element per row, ", n_rows, ", got shape ", shape_of(t));
  check_dtype(op, name, t, ScalarType::Float);
  check_device(op, name, t, x);
  check_contiguous(op, name, t);
}

// Rows and columns of a (..., C) tensor seen as a matrix.
struct Matrix {
  int64_t n_rows, n_cols;
};
inline Matrix as_matrix(const char* op, const char* name, const Tensor& t) {
  LS_CHECK(t.dim() >= 1, op, ": ", name, " must have at least one dimension, (..., C), got a scalar");
  check_contiguous(op, name, t);
  const int64_t n_cols = t.size(t.dim() - 1);
  return {n_cols == 0 ? 0 : t.numel() / n_cols, n_cols};
}

// Pointers for the launchers. Under the harness they also declare what the launch may read and write.
inline const void* in(const Tensor& t, const char* name) {
  const void* p = t.const_data_ptr();
#if defined(LS_SIMT)
  simt::register_region(p, t.numel() * t.element_size(), /*writable=*/false, name);
#else
  (void)name;
#endif
  return p;
}
// The same for a view with strides, 0 among them: its first element. The extent is from there to its last one.
inline const void* in_strided(const Tensor& t, const char* name) {
  const void* p = t.const_data_ptr();
#if defined(LS_SIMT)
  int64_t n_elem = t.numel() > 0 ? 1 : 0;
  for (int64_t i = 0; n_elem > 0 && i < t.dim(); ++i) n_elem += (t.size(i) - 1) * t.stride(i);
  simt::register_region(p, n_elem * t.element_size(), /*writable=*/false, name);
#else
  (void)name;
#endif
  return p;
}
inline void* out(const Tensor& t, const char* name) {
  void* p = t.mutable_data_ptr();
#if defined(LS_SIMT)
  simt::register_region(p, t.numel() * t.element_size(), /*writable=*/true, name);
#else
  (void)name;
#endif
  return p;
}
inline const void* in(const std::optional<Tensor>& t, const char* name) { return t ? in(*t, name) : nullptr; }
inline void* out(const std::optional<Tensor>& t, const char* name) { return t ? out(*t, name) : nullptr; }
template <typename T>
const T* in(const Tensor& t, const char* name) {
  return static_cast<const T*>(in(t, name));
}
template <typename T>
T* out(const Tensor& t, const char* name) {
  return static_cast<T*>(out(t, name));
}

// New memory on the device of `like`. Through the C function, and not through torch::stable::new_empty: that one looks the
// operator up by name and calls it boxed, some 3 us each where an op of a small batch takes 10 in all.
inline Tensor empty_strided(const Tensor& like, const int64_t* shape, const int64_t* strides, int64_t n_dims,
                            ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(n_dims, shape, strides, dtype_code, device_type(like), like.get_device_index(), &handle));
  return Tensor(handle);
}
constexpr int64_t kMaxDims = 64;  // torch's own limit
// The same, contiguous.
inline Tensor empty(const Tensor& like, const int64_t* shape, int64_t n_dims, ScalarType dtype) {
  int64_t strides[kMaxDims];
  LS_CHECK(n_dims <= kMaxDims, "ls_plugin: tensors must have at most ", kMaxDims, " dimensions, got ", n_dims);
  for (int64_t i = n_dims - 1, stride = 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  return empty_strided(like, shape, strides, n_dims, dtype);
}
inline Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return empty(like, shape.begin(), static_cast<int64_t>(shape.size()), dtype);
}
inline Tensor new_like(const Tensor& t) { return empty(t, t.sizes().data(), t.dim(), t.scalar_type()); }

// Asks Linux for huge pages in new CPU memory of several MB, before its first touch. torch's allocator gives tables of 32 MB and more
// back to the system and gets them anew at each step; filling 64 MB by faults of 4 KB takes 23 ms, by faults of 2 MB 4 ms (EPYC,
// two threads). Where the system grants none, nothing changes.
inline void advise_huge_pages(const Tensor& t) {
#if defined(__linux__)
  constexpr int64_t kMinBytes = int64_t{4} << 20;
  const int64_t n_bytes = t.numel() * t.element_size();
  if (!t.is_cpu() || n_bytes < kMinBytes) return;
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  const uintptr_t begin = address / page_bytes * page_bytes;  // the allocator's header before the tensor shares its page
  madvise(reinterpret_cast<void*>(begin), address + n_bytes - begin, MADV_HUGEPAGE);
#else
  (void)t;
#endif
}

// Dropout's constants for the kernels. A seed on the CPU is read here; one on the GPU is read by the kernel, so that nobody
// waits for it.
inline Dropout make_dropout(const char* op, double p, const std::optional<Tensor>& seed, int64_t offset, const Tensor& x) {
  LS_CHECK(p >= 0.0 && p <= 1.0, op, ": p must lie in [0, 1], got ", p);
  Dropout dropout;
  if (p == 0.0) return dropout;
  constexpr double kLevels = 65536.0;  // 16-bit draws
  if (p == 1.0) {
    dropout.threshold = 65536;
    dropout.scale = 0.0f;
  } else {
    dropout.threshold = static_cast<uint32_t>(std::fmin(std::fmax(std::nearbyint(p * kLevels), 1.0), kLevels - 1.0));
    dropout.scale = static_cast<float>(kLevels / (kLevels - dropout.threshold));
  }
  LS_CHECK(seed.has_value(), op, ": p = ", p, " needs a seed, an int64 tensor of shape (1,), got None");
  check_dtype(op, "seed", *seed, ScalarType::Long);
  LS_CHECK(seed->numel() == 1, op, ": seed must have one element, got shape ", shape_of(*seed));
  dropout.offset = static_cast<uint64_t>(offset);
  if (seed->is_cpu()) {
    dropout.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
  } else {
    check_device(op, "seed", *seed, x);
    dropout.seed_ptr = static_cast<const int64_t*>(seed->const_data_ptr());
  }
  return dropout;
}

#if defined(LS_WITH_CUDA)
// torch's current stream on a device. The symbol exists only in CUDA builds of torch, so it is looked up when first needed.
cudaStream_t current_cuda_stream(int32_t device_index);
#endif

// Calls a launcher on the device where `tensor` lies, on that device's current stream.
#if defined(LS_SIMT)
#define LS_RUN(launcher, params, tensor)      \
  do {                                        \
    const simt::ScopedRegions scoped_regions; \
    ls::cuda::launcher(params, nullptr);      \
  } while (false)
#elif defined(LS_WITH_CUDA)
#define LS_RUN(launcher, params, tensor)                                                \
  do {                                                                                  \
    if ((tensor).is_cuda()) {                                                           \
      const torch::stable::accelerator::DeviceGuard guard((tensor).get_device_index()); \
      ls::cuda::launcher(params, ls::current_cuda_stream((tensor).get_device_index())); \
    } else {                                                                            \
      ls::cpu::launcher(params);                                                        \
    }                                                                                   \
  } while (false)
#else
#define LS_RUN(launcher, params, tensor) ls::cpu::launcher(params)
#endif

}  // namespace ls
