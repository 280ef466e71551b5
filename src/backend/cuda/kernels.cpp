#include "backend/cuda/kernels.h"

#include <unistd.h>

#include <chrono>
#include <functional>
#include <map>
#include <mutex>

#include "backend/cuda/compile.h"
#include "jit/nvrtc.h"
#include "jit/process.h"
#include "raddle/engine/kernel/gpu_planner/memory.h"
#include "raddle/error.h"

namespace raddle::cuda {

using namespace std::chrono_literals;

/// All of this process's, never unloaded: threads that bring them may outlive everything else.
class KernelTable {
 public:
  using Make = std::function<std::unique_ptr<const Kernel>(jit::Watch&)>;

  static KernelTable& instance() {
    static KernelTable& table = *new KernelTable;
    return table;
  }

  /// The one that is there or on its way; one that failed is tried again.
  ComingKernel coming(const Device& device, const std::string& source, const std::string& label,
                      Make make) {
    // What a forked process has of its parent's kernels is of no use.
    const std::string key =
        std::to_string(getpid()) + "\n" + std::to_string(device.ordinal()) + "\n" + source;
    const std::string version = jit::Nvrtc::instance().version();
    const std::lock_guard lock(mutex_);
    ComingKernel& found = kernels_[key];
    if (found.kernel_.valid() && !found.has_failed()) return found;
    auto promise = std::make_shared<std::promise<const Kernel*>>();
    auto watch = std::make_shared<jit::Watch>();
    found.kernel_ = promise->get_future().share();
    found.doing_ =
        "compiling the kernel " + label + " for " + device.info().arch + " with NVRTC " + version;
    found.watch_ = watch;
    found.process_ = getpid();
    jit::in_background(watch, [promise, watch, make = std::move(make)] {
      try {
        promise->set_value(make(*watch).release());
      } catch (...) {
        promise->set_exception(std::current_exception());
      }
    });
    return found;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, ComingKernel> kernels_;
};

const Kernel& ComingKernel::get() const {
  if (kernel_.wait_for(0s) == std::future_status::ready) return *kernel_.get();
  if (process_ != getpid())
    fail<DeviceError>(
        "a kernel was on its way when this process was forked; expected an Attention of its own: "
        "what is on a GPU does not survive a fork");
  if (kernel_.wait_for(1s) != std::future_status::ready && watch_->compiling) jit::announce(doing_);
  return *kernel_.get();
}

bool ComingKernel::is(const Kernel& kernel) const {
  return kernel_.wait_for(0s) == std::future_status::ready && !has_failed() &&
         kernel_.get() == &kernel;
}

bool ComingKernel::has_failed() const {
  if (kernel_.wait_for(0s) != std::future_status::ready) return false;
  try {
    kernel_.get();
    return false;
  } catch (...) {
    return true;
  }
}

ComingKernel coming(const jit::GpuKernel& kernel, const Device& device,
                    const KernelConfig& config) {
  const std::string& arch = device.info().arch;
  const auto make = [kernel, &device, config](jit::Watch& watch) {
    return std::make_unique<const Kernel>(
        device, jit::cubin_of(kernel, device.info().arch, &watch), jit::gpu_entry_point,
        jit::label_of(kernel), config.team_threads, config.shared_bytes, config.most_teams,
        kernel.family == KernelFamily::wgmma ? Begin::early : Begin::after_earlier_work);
  };
  return KernelTable::instance().coming(device, jit::source_of(kernel, arch), jit::label_of(kernel),
                                        make);
}

ComingKernel coming(const jit::PlannerKernel& kernel, const Device& device) {
  const auto make = [kernel, &device](jit::Watch& watch) {
    return std::make_unique<const Kernel>(device, jit::cubin_of(kernel, device.info().arch, &watch),
                                          jit::planner_entry_point, jit::label_of(kernel),
                                          planner::num_threads, device.info().max_shared_bytes);
  };
  return KernelTable::instance().coming(device, jit::source_of(kernel), jit::label_of(kernel),
                                        make);
}

AttentionKernels::Described AttentionKernels::describe(const AttentionSpec& spec,
                                                       const BoundVariant& variant,
                                                       const Device& device, Which which) {
  const KernelFamily family = which >= wgmma ? KernelFamily::wgmma : KernelFamily::mma;
  const bool levels = which >= wgmma_levels_8;
  const Which first = levels ? wgmma_levels_8 : wgmma_short_8;
  const i32 short_rows = which > wgmma ? 8 << (which - first) : 0;
  const KernelConfig config = config_of(spec, device.info().arch, family, short_rows);
  jit::GpuKernel kernel = kernel_of(spec, variant, device.info().arch, family);
  kernel.short_only = which == short_only;
  kernel.short_rows = short_rows;
  kernel.levels = levels;
  return {std::move(kernel), config};
}

AttentionKernels::AttentionKernels(const AttentionSpec& spec, const BoundVariant& variant,
                                   const Device& device)
    : device_(&device) {
  for (i32 which = 0; which < count; ++which)
    described_.push_back(describe(spec, variant, device, static_cast<Which>(which)));
  const KernelConfig& config = described_[any_length].config;
  if (config.shared_bytes > device.info().max_shared_bytes)
    fail<ValueError>("head_dim ", spec.head_dim_qk, " needs ", config.shared_bytes,
                     " bytes of shared memory; ", device.info().name, " has ",
                     device.info().max_shared_bytes);
}

void AttentionKernels::start(Which which, bool scales) {
  const std::lock_guard lock(mutex_);
  std::optional<ComingKernel>& kernel = coming_[scales][which];
  if (kernel && !kernel->has_failed()) return;
  jit::GpuKernel described = described_[which].kernel;
  described.scales_output = scales;
  kernel = coming(described, *device_, described_[which].config);
}

const Kernel& AttentionKernels::get(const KernelChoice& choice, bool all_short) {
  if (choice.family == KernelFamily::mma) return get(all_short ? short_only : any_length);
  if (choice.short_rows == 0) return get(wgmma);
  i32 which = choice.has_levels ? wgmma_levels_8 : wgmma_short_8;
  for (i32 rows = 8; rows < choice.short_rows; rows *= 2) ++which;
  return get(static_cast<Which>(which));
}

const Kernel& AttentionKernels::get(Which which, bool scales) {
  start(which, scales);
  return coming_[scales][which]->get();
}

const Kernel& AttentionKernels::scaling(const Kernel& kernel) {
  i32 which = 0;
  for (; which < count; ++which) {
    const std::lock_guard lock(mutex_);
    const std::optional<ComingKernel>& known = coming_[false][which];
    if (known && known->is(kernel)) break;
  }
  return get(static_cast<Which>(which), true);
}

}  // namespace raddle::cuda
