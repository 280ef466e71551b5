// The GPUs of this machine, and the context that makes one current on a thread.
#pragma once

#include <string>
#include <vector>

#include "raddle/engine/core/config.h"

namespace raddle::cuda {

/// What the driver tells of a GPU without opening it.
struct DeviceInfo {
  std::string name;
  /// "sm_90a": what kernels are compiled for. The "a" features exist from Hopper on. Of an open
  /// device it is target_of.
  std::string arch;
  i32 compute = 0;  ///< 90
  i32 num_multiprocessors = 0;
  i32 max_shared_bytes = 0;  ///< of a block
};

/// The oldest architecture that kernels are written for: 75, Turing.
constexpr i32 oldest_compute = 75;

/// All GPUs that this process may use. Raises DeviceError where there is no driver, or it does not
/// start; no GPU is an empty list.
std::vector<DeviceInfo> devices();

/// What kernels for that GPU are compiled for: its own architecture, or PTX of an older one,
/// "compute_75", which RADDLE_CUDA_ARCH=75 asks for and the driver translates. So kernels of an
/// architecture run where there is only a later one. Raises ValueError for a bad RADDLE_CUDA_ARCH.
std::string target_of(const DeviceInfo& info);

/// "13.0": the newest CUDA that the driver runs.
std::string driver_version();
/// The same as a number, 1000 · major + 10 · minor.
int driver_version_number();

/// The GPU whose context is current on this thread (torch.cuda.set_device makes it so); 0 where
/// there is none.
i32 current_ordinal();

/// A GPU in use. Its primary context, the one that other libraries use too, is kept for the life of
/// the process.
class Device {
 public:
  /// Opens GPU `ordinal` at the first call. Raises DeviceError where there is none of that number,
  /// or its architecture is too old, and says what was found; ValueError as target_of does.
  static const Device& get(i32 ordinal);

  i32 ordinal() const { return ordinal_; }
  const DeviceInfo& info() const { return info_; }
  void* context() const { return context_; }

 private:
  explicit Device(i32 ordinal);
  i32 ordinal_;
  DeviceInfo info_;
  void* context_ = nullptr;
};

/// Makes a device current on this thread, and what was current before it again at the end. All that
/// touches a device needs one. Scopes nest; the outermost asks the driver, and until it ends no
/// other code may change what is current.
class ContextScope {
 public:
  explicit ContextScope(const Device& device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Device* outer_;  // whose scope was open already, or null
  bool pushed_ = false;
};

}  // namespace raddle::cuda
