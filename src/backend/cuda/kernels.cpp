#include "backend/cuda/kernels.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

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
  // A compilation may begin late: its thread waits for a core, or for another process's to fail.
  while (kernel_.wait_for(1s) != std::future_status::ready) {
    if (!watch_->compiling) continue;
    jit::announce(doing_);
    break;
  }
  return *kernel_.get();
}

const Kernel* ComingKernel::if_there() const {
  return kernel_.wait_for(0s) == std::future_status::ready && !has_failed() ? kernel_.get()
                                                                            : nullptr;
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
                                                       const Device& device,
                                                       const KernelForm& form) {
  const std::string& arch = device.info().arch;
  return {kernel_of(spec, variant, arch, form),
          config_of(spec, arch, form.family(), form.short_rows(), variant.has_output())};
}

AttentionKernels::AttentionKernels(const AttentionSpec& spec, const BoundVariant& variant,
                                   const Device& device)
    : device_(&device) {
  for (i32 which = 0; which < KernelForm::count; ++which)
    described_.push_back(describe(spec, variant, device, {static_cast<KernelForm::Which>(which)}));
  const KernelConfig& config = described_[KernelForm::any_length].config;
  if (config.shared_bytes > device.info().max_shared_bytes)
    fail<ValueError>("head_dim ", spec.head_dim_qk, " needs ", config.shared_bytes,
                     " bytes of shared memory; ", device.info().name, " has ",
                     device.info().max_shared_bytes);
}

ComingKernel& AttentionKernels::started(const KernelForm& form) {
  const auto found = coming_.find(form);
  if (found != coming_.end() && !found->second.has_failed()) return found->second;
  jit::GpuKernel described = described_[form.which].kernel;
  described.serves = form.serves;
  described.scales_output = form.scales;
  ComingKernel kernel = coming(described, *device_, described_[form.which].config);
  return coming_.insert_or_assign(form, std::move(kernel)).first->second;
}

void AttentionKernels::start(const KernelForm& form) {
  const std::lock_guard lock(mutex_);
  started(form);
}

KernelForm AttentionKernels::form_of(const KernelChoice& choice, bool all_short) {
  KernelForm form = cuda::form_of(choice.family, all_short, choice.short_rows);
  if (form.family() == KernelFamily::wgmma)
    form.serves = {choice.serves.levels && choice.short_rows > 0, choice.serves.rows,
                   choice.serves.clusters};
  return form;
}

const Kernel& AttentionKernels::get(const KernelChoice& choice, bool all_short) {
  return get(form_of(choice, all_short));
}

const Kernel& AttentionKernels::get(const KernelForm& form) {
  ComingKernel kernel;
  {
    const std::lock_guard lock(mutex_);
    const ComingKernel& found = started(form);
    if (const Kernel* there = found.if_there()) return *there;
    kernel = found;  // to wait without the lock
  }
  return kernel.get();
}

const Kernel& AttentionKernels::in_place_of(const Kernel& kernel, bool scales, bool rows) {
  KernelForm form{};
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(coming_.begin(), coming_.end(), [&](const auto& each) {
      return each.second.if_there() == &kernel;
    });
    form = found->first;
  }
  form.scales |= scales;
  form.serves.rows |= rows;
  return get(form);
}

}  // namespace raddle::cuda
