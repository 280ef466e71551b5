// Kernels of compositions on a GPU: compiled or found in the cache, and loaded, once per process
// and device, at the first request.
#pragma once

#include <sys/types.h>

#include <future>
#include <memory>
#include <string>

#include "device/cuda/module.h"
#include "jit/background.h"
#include "jit/gpu_kernel.h"
#include "jit/planner_kernel.h"
#include "raddle/engine/kernel/gpu/config.h"

namespace raddle::cuda {

/// A kernel that is compiled or found, and loaded, on a thread of its own. Copies share it, and it
/// arrives though all of them are gone.
class ComingKernel {
 public:
  /// Waits for it, and says so after a second. Raises what went wrong on the way: CompileError,
  /// DeviceError.
  const Kernel& get() const;

 private:
  friend class KernelTable;
  bool has_failed() const;
  std::shared_future<const Kernel*> kernel_;
  std::string doing_;  ///< for people
  std::shared_ptr<jit::Watch> watch_;
  pid_t process_ = 0;  ///< where its thread is
};

/// Starts it. Raises CompileError where there is no NVRTC; the rest is get's.
ComingKernel coming(const jit::GpuKernel& kernel, const Device& device, const KernelConfig& config);

/// With all the shared memory that a block can have: how much a launch takes depends on its maxima.
ComingKernel coming(const jit::PlannerKernel& kernel, const Device& device);

}  // namespace raddle::cuda
