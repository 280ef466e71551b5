// Kernels of compositions on a GPU: compiled or found in the cache, and loaded, once per process
// and device, at the first request.
#pragma once

#include <sys/types.h>

#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/cuda/compile.h"
#include "device/cuda/module.h"
#include "jit/background.h"
#include "jit/gpu_kernel.h"
#include "jit/planner_kernel.h"
#include "plan/kernel_choice.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/gpu/config.h"
#include "variant/bound_variant.h"

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
  friend class AttentionKernels;
  bool has_failed() const;
  /// Null while it is on its way, and where it has failed.
  const Kernel* if_there() const;
  std::shared_future<const Kernel*> kernel_;
  std::string doing_;  ///< for people
  std::shared_ptr<jit::Watch> watch_;
  pid_t process_ = 0;  ///< where its thread is
};

/// Starts it. Raises CompileError where there is no NVRTC; the rest is get's.
ComingKernel coming(const jit::GpuKernel& kernel, const Device& device, const KernelConfig& config);

/// With all the shared memory that a block can have: how much a launch takes depends on its maxima.
ComingKernel coming(const jit::PlannerKernel& kernel, const Device& device);

/// The kernels of an attention. One is compiled or found when it is first asked for, or earlier.
class AttentionKernels {
 public:
  AttentionKernels(const AttentionSpec& spec, const BoundVariant& variant, const Device& device);

  /// Has it compiled on a thread of its own.
  void start(const KernelForm& form);
  void start(const KernelChoice& choice) { start(form_of(choice, false)); }
  /// Waits for it. Raises what went wrong on the way.
  const Kernel& get(const KernelForm& form);
  /// The one that was chosen; of the mma family that of short queries alone, or any.
  const Kernel& get(const KernelChoice& choice, bool all_short);
  /// What runs in the place of `kernel`, one of these, where it is handed a scale of V that has no
  /// 8 bits (`scales`), or keys that boxes cannot copy (`rows`): the same that serves these, too.
  /// It is compiled when it is first asked for.
  const Kernel& in_place_of(const Kernel& kernel, bool scales, bool rows);
  /// Whether K and V have 8 bits, so that every kernel knows their scales.
  bool is_quantized() const { return described_[0].kernel.kv_dtype != described_[0].kernel.dtype; }

 private:
  struct Described {
    jit::GpuKernel kernel;
    KernelConfig config;
  };
  static KernelForm form_of(const KernelChoice& choice, bool all_short);
  /// The one that is there or on its way; one that failed is tried again. With `mutex_` held.
  ComingKernel& started(const KernelForm& form);
  static Described describe(const AttentionSpec& spec, const BoundVariant& variant,
                            const Device& device, const KernelForm& form);

  const Device* device_;
  std::vector<Described> described_;  ///< by KernelForm::Which
  std::mutex mutex_;
  std::map<KernelForm, ComingKernel> coming_;
};

}  // namespace raddle::cuda
