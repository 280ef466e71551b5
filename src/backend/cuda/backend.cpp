// An attention on a GPU: its kernels, and the memory of its plans.
#include "backend/backend.h"

#include <cstdlib>
#include <vector>

#include "backend/cuda/compile.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/plan.h"
#include "backend/cuda/planner.h"
#include "backend/cuda/reservation.h"
#include "device/cuda/tensor_map.h"
#include "plan/device_planner.h"
#include "plan/heuristics.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace cuda {
namespace {

/// Plans for all workers that the device holds at a time.
PlanConfig plan_config(const AttentionSpec& spec, const DeviceInfo& device, KernelFamily family,
                       i32 short_rows, bool outputs) {
  const i32 all =
      device.num_multiprocessors *
      config_of(spec, device.arch, family, short_rows, outputs).blocks_per_multiprocessor;
  return gpu_plan_config(spec, jit::arch_number(device.arch), family, short_rows, all,
                         Schedule::automatic, outputs);
}

/// The same for `num_workers`, if that is not 0, and a schedule.
PlanConfig as_asked(PlanConfig config, i32 num_workers, Schedule schedule) {
  if (num_workers > 0) config.num_workers = num_workers;
  config.schedule = schedule;
  return config;
}

class CudaBackend final : public GpuBackend {
 public:
  CudaBackend(const AttentionSpec& spec, const BoundVariant& variant, const Device& device)
      : spec_(spec),
        device_(&device),
        facts_(facts_of(variant, device.info().arch, takes_tensor_maps(),
                        family_named(std::getenv("RADDLE_BACKEND")))),
        memory_(std::make_shared<AttentionMemory>(device, spec, variant)),
        plans_(device, memory_) {
    check_asked_family(spec, facts_);
    for (i32 which = 0; which < KernelForm::count; ++which) {
      const KernelForm form{static_cast<KernelForm::Which>(which)};
      configs_.push_back(
          plan_config(spec, device.info(), form.family(), form.short_rows(), variant.has_output()));
    }
    start_kernels();
  }

  DeviceId device() const override { return DeviceId::cuda(device_->ordinal()); }
  const AttentionSpec& spec() const override { return spec_; }

  Planning planning_of(const Layout& layout, i32 num_workers, Schedule schedule) const override {
    const PlanConfig mma = config(KernelFamily::mma, num_workers, schedule);
    const PlanConfig wgmma = config(KernelFamily::wgmma, num_workers, schedule);
    KernelChoice choice = choose_gpu_kernel(spec_, facts_, layout, mma, wgmma);
    if (choice.short_rows > 0)
      return {config(KernelFamily::wgmma, num_workers, schedule, choice.short_rows), choice};
    if (choice.family == KernelFamily::mma) return {mma, choice};
    choice.serves.clusters = may_be_clusters(spec_, choice, layout, wgmma.num_workers);
    if (!choice.serves.clusters) return {wgmma, choice};
    return {wgmma, choice, cluster_plan_config(spec_, wgmma)};
  }

  Planning reserved_planning(const Maxima& maxima, i32 num_workers,
                             Schedule schedule) const override {
    const KernelChoice choice = choose_reserved_kernel(spec_, facts_, maxima);
    return {config(choice.family, num_workers, schedule, choice.short_rows), choice};
  }

  PlanStore& plans() const override { return plans_; }

  std::shared_ptr<PlanStore> reserve(const Planning& planning, const Maxima& maxima,
                                     void* stream) const override {
    const ContextScope context(*device_);
    check_reserve(stream);
    return std::make_shared<HostPlannedReservation>(kernel_for(planning, maxima), memory_, planning,
                                                    maxima, spec_.head_dim_vo, stream);
  }

  std::shared_ptr<DevicePlanner> reserve_planner(const Planning& planning, const Maxima& maxima,
                                                 const BoundVariant& origin,
                                                 const BoundVariant& variant,
                                                 void* stream) const override {
    check_reserved_counts(planning.config, maxima);
    const bool in_shared = plans_in_shared(planning.config, maxima, variant.has_masks(),
                                           device_->info().max_shared_bytes);
    const ComingKernel planner =
        coming(planner_of(spec_, variant, maxima.max_levels > 1, in_shared), *device_);
    const ContextScope context(*device_);
    check_reserve(stream);
    return std::make_shared<DevicePlannedReservation>(kernel_for(planning, maxima), memory_,
                                                      planning, maxima, spec_.head_dim_vo, stream,
                                                      planner.get(), origin, variant);
  }

 private:
  void check_reserve(StreamHandle stream) const {
    if (is_capturing(stream))
      fail<ValueError>("the stream is capturing a graph; expected reserve before the capture");
  }
  PlanConfig config(KernelFamily family, i32 num_workers, Schedule schedule,
                    i32 short_rows = 0) const {
    const KernelForm form = form_of(family, false, short_rows);
    return as_asked(configs_[static_cast<std::size_t>(form.which)], num_workers, schedule);
  }
  /// The kernel of decodes is waited for, so that its errors are raised here. That of long queries
  /// takes longer; plans wait for it, and for the few others.
  void start_kernels() {
    const std::vector<KernelForm> first = first_kernels(spec_, facts_);
    for (const KernelForm& form : first) memory_->kernels.start(form);
    memory_->kernels.get(first.front());
  }
  /// The kernel that runs all plans within `maxima`; waits for it.
  const Kernel& kernel_for(const Planning& planning, const Maxima& maxima) const {
    const i64 most_rows = i64{max_group_rows(maxima)} * spec_.group_size();
    const PlanConfig& config = planning.config;
    return memory_->kernels.get(
        planning.kernel, config.short_only || most_rows <= config.shapes[short_queries].rows);
  }

  AttentionSpec spec_;
  const Device* device_;
  FamilyFacts facts_;
  AttentionMemoryPtr memory_;
  mutable CudaPlans plans_;
  std::vector<PlanConfig> configs_;  ///< by KernelForm::Which, for all workers of the device
};

}  // namespace
}  // namespace cuda

std::vector<PlanConfig> cuda_plan_configs(const AttentionSpec& spec, DeviceId device,
                                          const Maxima& maxima, i32 num_workers) {
  const cuda::DeviceInfo& info = cuda::Device::get(device.ordinal).info();
  const std::optional<KernelFamily> asked = family_named(std::getenv("RADDLE_BACKEND"));
  std::vector<PlanConfig> configs;
  const auto add = [&](KernelFamily family, i32 short_rows) {
    // An output part changes the keys of a tile alone, on which no size depends.
    configs.push_back(cuda::as_asked(cuda::plan_config(spec, info, family, short_rows, false),
                                     num_workers, Schedule::automatic));
  };
  if (asked != KernelFamily::wgmma) add(KernelFamily::mma, 0);
  // A variant may have wgmma refused: then this is more than its plans need.
  const FamilyFacts facts{jit::arch_number(info.arch), cuda::takes_tensor_maps(), false, true,
                          asked};
  const bool may_choose = !asked && !spec.batch_invariant && !unserved_by_wgmma(spec, facts);
  if (may_choose || asked == KernelFamily::wgmma) {
    const i32 short_rows = reserved_short_rows(spec, maxima);
    if (short_rows > 0) add(KernelFamily::wgmma, short_rows);
    // Of several levels, a prefix's rows may be too many for tiles of short queries.
    const bool may_be_long = short_rows == 0 || maxima.max_levels > 1;
    if (may_be_long && !long_queries_unserved_by_wgmma(spec)) add(KernelFamily::wgmma, 0);
  }
  return configs;
}

std::shared_ptr<const GpuBackend> make_cuda_backend(const AttentionSpec& spec,
                                                    const BoundVariant& variant, DeviceId device) {
  return std::make_shared<const cuda::CudaBackend>(spec, variant,
                                                   cuda::Device::get(device.ordinal));
}

std::string cuda_arch(DeviceId device) { return cuda::Device::get(device.ordinal).info().arch; }

}  // namespace raddle
