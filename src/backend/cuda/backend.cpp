// An attention on a GPU: its kernels, and the memory of its plans.
#include "backend/backend.h"

#include "backend/cuda/compile.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/plan.h"
#include "backend/cuda/planner.h"
#include "backend/cuda/reservation.h"
#include "plan/heuristics.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace cuda {
namespace {

/// Compiles both at once. Any use needs the short kernel soon, and it has all parts of the variant,
/// so that their errors are raised here. The full kernel takes twice as long; plans with long
/// queries wait for it.
AttentionKernels kernels_of(const AttentionSpec& spec, const BoundVariant& variant,
                            const Device& device) {
  const KernelConfig config = config_of(spec, device.info().arch);
  if (config.shared_bytes > device.info().max_shared_bytes)
    fail<ValueError>("head_dim ", spec.head_dim_qk, " needs ", config.shared_bytes,
                     " bytes of shared memory; ", device.info().name, " has ",
                     device.info().max_shared_bytes);
  jit::GpuKernel kernel = kernel_of(spec, variant, device.info().arch);
  AttentionKernels kernels;
  kernel.short_only = true;
  kernels.short_only = coming(kernel, device, config);
  kernel.short_only = false;
  kernels.any_length = coming(kernel, device, config);
  kernels.short_only.get();
  return kernels;
}

class CudaBackend final : public GpuBackend {
 public:
  CudaBackend(const AttentionSpec& spec, const BoundVariant& variant, const Device& device)
      : spec_(spec),
        device_(&device),
        kernels_(kernels_of(spec, variant, device)),
        memory_(std::make_shared<AttentionMemory>(device, spec)),
        plans_(device, kernels_, memory_) {}

  DeviceId device() const override { return DeviceId::cuda(device_->ordinal()); }
  const AttentionSpec& spec() const override { return spec_; }

  PlanConfig plan_config(i32 num_workers, Schedule schedule) const override {
    return cuda_plan_config(spec_, device(), num_workers, schedule);
  }

  PlanStore& plans() const override { return plans_; }

  std::shared_ptr<PlanStore> reserve(const PlanConfig& config, const Maxima& maxima,
                                     void* stream) const override {
    const ContextScope context(*device_);
    check_reserve(stream);
    return std::make_shared<HostPlannedReservation>(kernel_for(config, maxima), memory_, config,
                                                    maxima, spec_.head_dim_vo, stream);
  }

  std::shared_ptr<DevicePlanner> reserve_planner(const PlanConfig& config, const Maxima& maxima,
                                                 const BoundVariant& origin,
                                                 const BoundVariant& variant,
                                                 void* stream) const override {
    const ComingKernel planner = coming(planner_of(variant, maxima.max_levels > 1), *device_);
    const ContextScope context(*device_);
    check_reserve(stream);
    return std::make_shared<DevicePlannedReservation>(kernel_for(config, maxima), memory_, config,
                                                      maxima, spec_.head_dim_vo, stream,
                                                      planner.get(), origin, variant);
  }

 private:
  void check_reserve(StreamHandle stream) const {
    if (is_capturing(stream))
      fail<ValueError>("the stream is capturing a graph; expected reserve before the capture");
  }
  /// The kernel that runs all plans within `maxima`; waits for it.
  const Kernel& kernel_for(const PlanConfig& config, const Maxima& maxima) const {
    const i64 most_rows = i64{max_group_rows(maxima)} * spec_.group_size();
    return kernels_.get(config.short_only || most_rows <= config.shapes[short_queries].rows);
  }

  AttentionSpec spec_;
  const Device* device_;
  AttentionKernels kernels_;
  AttentionMemoryPtr memory_;
  mutable CudaPlans plans_;
};

}  // namespace
}  // namespace cuda

PlanConfig cuda_plan_config(const AttentionSpec& spec, DeviceId device, i32 num_workers,
                            Schedule schedule) {
  const cuda::DeviceInfo& info = cuda::Device::get(device.ordinal).info();
  const i32 all =
      info.num_multiprocessors * cuda::config_of(spec, info.arch).blocks_per_multiprocessor;
  return gpu_plan_config(spec, jit::arch_number(info.arch), num_workers > 0 ? num_workers : all,
                         schedule);
}

std::shared_ptr<const GpuBackend> make_cuda_backend(const AttentionSpec& spec,
                                                    const BoundVariant& variant, DeviceId device) {
  return std::make_shared<const cuda::CudaBackend>(spec, variant,
                                                   cuda::Device::get(device.ordinal));
}

std::string cuda_arch(DeviceId device) { return cuda::Device::get(device.ordinal).info().arch; }

}  // namespace raddle
