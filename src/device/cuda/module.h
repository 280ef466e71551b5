// Loaded kernels and their launch.
#pragma once

#include <string>

#include "device/cuda/device.h"
#include "device/cuda/stream.h"

namespace raddle::cuda {

/// One kernel of a loaded cubin, with the shape of its launches. Never unloaded.
class Kernel {
 public:
  /// `label` names the kernel in errors. Raises DeviceError where it cannot be loaded.
  Kernel(const Device& device, const std::string& cubin, const char* entry_point, std::string label,
         i32 num_threads, i32 shared_bytes);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const std::string& label() const { return label_; }
  i32 num_threads() const { return num_threads_; }
  i32 shared_bytes() const { return shared_bytes_; }
  const Device& device() const { return *device_; }

  /// Launches `num_blocks` in stream order and waits for nothing. Raises DeviceError with the
  /// kernel's name, its configuration and the driver's own message.
  void launch(i32 num_blocks, StreamHandle stream, void** params) const {
    launch(num_blocks, shared_bytes_, stream, params);
  }
  /// The same with less than shared_bytes() of shared memory a block.
  void launch(i32 num_blocks, i32 shared_bytes, StreamHandle stream, void** params) const;

 private:
  std::string describe(i32 num_blocks) const;
  const Device* device_;
  std::string label_;
  void* function_ = nullptr;
  i32 num_threads_, shared_bytes_;
};

}  // namespace raddle::cuda
