#include "device/cuda/module.h"

#include "device/cuda/driver.h"

namespace raddle::cuda {

Kernel::Kernel(const Device& device, const std::string& cubin, const char* entry_point,
               std::string label, i32 num_threads, i32 shared_bytes)
    : device_(&device),
      label_(std::move(label)),
      num_threads_(num_threads),
      shared_bytes_(shared_bytes) {
  const ContextScope context(device);
  const OutsideCapture outside;
  void* module = nullptr;
  if (const int result = driver().load_module(&module, cubin.data()))
    raise(result, "loading the kernel " + label_ + " on " + device.info().name);
  if (const int result = driver().get_function(&function_, module, entry_point))
    raise(result, std::string("finding ") + entry_point + " in the kernel " + label_);
  if (const int result =
          driver().set_function_attribute(function_, function_max_dynamic_shared, shared_bytes))
    raise(result, "asking for the shared memory of " + describe(0));
}

void Kernel::launch(i32 num_blocks, i32 shared_bytes, StreamHandle stream, void** params) const {
  const int result = driver().launch(function_, static_cast<unsigned>(num_blocks), 1, 1,
                                     static_cast<unsigned>(num_threads_), 1, 1,
                                     static_cast<unsigned>(shared_bytes), stream, params, nullptr);
  if (result != 0) [[unlikely]]
    raise(result, "launching " + describe(num_blocks));
}

std::string Kernel::describe(i32 num_blocks) const {
  return "the kernel " + label_ + " (" + std::to_string(num_blocks) + " blocks of " +
         std::to_string(num_threads_) + " threads with " + std::to_string(shared_bytes_) +
         " bytes of shared memory, on 'cuda:" + std::to_string(device_->ordinal()) + "', " +
         device_->info().name + ")";
}

}  // namespace raddle::cuda
