#include "api/cuda_kernels.h"

#include <map>
#include <memory>
#include <mutex>

#include "raddle/engine/kernel/mma/launch.h"
#include "raddle/engine/kernel/plan/memory.h"

namespace raddle::cuda {
namespace {

template <class Make>
const Kernel& only_once(const Device& device, const std::string& source, const Make& make) {
  struct Slot {
    std::mutex mutex;
    std::unique_ptr<const Kernel> kernel;
  };
  static std::mutex mutex;
  static std::map<std::string, Slot>& slots = *new std::map<std::string, Slot>;
  const auto slot_of = [&]() -> Slot& {
    const std::lock_guard lock(mutex);
    return slots[std::to_string(device.ordinal()) + "\n" + source];
  };
  Slot& slot = slot_of();
  const std::lock_guard lock(slot.mutex);
  if (!slot.kernel) slot.kernel = make();
  return *slot.kernel;
}

}  // namespace

const Kernel& loaded(const jit::GpuKernel& kernel, const Device& device, i32 shared_bytes) {
  const std::string& arch = device.info().arch;
  return only_once(device, jit::source_of(kernel, arch), [&] {
    return std::make_unique<const Kernel>(device, jit::cubin_of(kernel, arch), jit::gpu_entry_point,
                                          jit::label_of(kernel), mma::num_threads, shared_bytes,
                                          mma::most_teams);
  });
}

const Kernel& loaded(const jit::PlannerKernel& kernel, const Device& device) {
  return only_once(device, jit::source_of(kernel), [&] {
    return std::make_unique<const Kernel>(device, jit::cubin_of(kernel, device.info().arch),
                                          jit::planner_entry_point, jit::label_of(kernel),
                                          planner::num_threads, device.info().max_shared_bytes);
  });
}

}  // namespace raddle::cuda
