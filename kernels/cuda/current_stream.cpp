// torch's current CUDA stream. libtorch exports the function only in its CUDA builds, and our library must load into CPU
// builds too, so it is found when a CUDA tensor first arrives, which is when libtorch_cuda.so is certainly loaded.
#include <dlfcn.h>

#include "ops/binding.h"

#if defined(LS_WITH_CUDA)

namespace ls {

cudaStream_t current_cuda_stream(int32_t device_index) {
  using GetStream = int32_t (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    LS_CHECK(symbol != nullptr,
             "ls_plugin: this torch has no aoti_torch_get_current_cuda_stream; install a CUDA build of torch 2.10 or newer");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  LS_CHECK(get_stream(device_index, &stream) == 0, "ls_plugin: torch gave no stream for cuda:", device_index);
  return static_cast<cudaStream_t>(stream);
}

}  // namespace ls

#endif
