// Plans on a GPU: sent there, and run.
#pragma once

#include <mutex>

#include "backend/backend.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/tensor_maps.h"
#include "backend/cuda/variant.h"
#include "device/cuda/memory.h"
#include "device/cuda/module.h"
#include "plan/planner.h"
#include "raddle/engine/kernel/gpu/launch.h"

namespace raddle::cuda {

class CudaReservation;

/// What all plans of an attention share; each keeps it as long as it lives.
class AttentionMemory {
 public:
  AttentionMemory(const Device& device, const AttentionSpec& spec, const BoundVariant& variant)
      : kernels(spec, variant, device),
        captured(device),
        scratch(device, spec.head_dim_vo),
        maps(spec) {}

  /// A plan's variant on the device. `origin` is the spec's own, which most plans and runs share.
  /// What is new goes up on `stream`. Needs a ContextScope.
  std::shared_ptr<const CudaVariant> variant_of(const BoundVariant& origin,
                                                const BoundVariant& variant, StreamHandle stream);

  AttentionKernels kernels;
  CapturedArrays captured;
  StreamScratch scratch;
  TensorMaps maps;

 private:
  std::mutex mutex_;
  std::shared_ptr<const CudaVariant> origin_;
};
using AttentionMemoryPtr = std::shared_ptr<AttentionMemory>;

/// Raises ValueError where a plan cannot go up on `stream`: it is being captured, or kernels count
/// something of the plan in fewer bits than plans do.
void check_upload(const Layout& layout, const PlanArrays& arrays, StreamHandle stream);

/// Raises ValueError where plans that a kernel makes under `maxima` might have counts of more bits
/// than kernels count in.
void check_reserved_counts(const PlanConfig& config, const Maxima& maxima);

class CudaPlan final : public PlanOnDevice {
 public:
  /// Sends everything up in one asynchronous copy on `stream`. Needs a ContextScope.
  CudaPlan(const Kernel& kernel, const KernelChoice& choice, AttentionMemoryPtr memory,
           const Layout& layout, const PlanArrays& arrays,
           std::shared_ptr<const CudaVariant> variant, StreamHandle stream);
  /// A plan whose arrays a reservation has.
  CudaPlan(CudaReservation& reservation, const GpuLaunch& launch);
  /// A plan that a reservation's planner makes there of `layout`, in work that `capture` records.
  CudaPlan(CudaReservation& reservation, const GpuLaunch& launch, DeviceLayoutPtr layout,
           u64 capture);

  DeviceId device() const override;
  bool made_on_device() const override { return layout_ != nullptr; }
  bool marks_timelines() const override { return !choice_.is_long_wgmma(); }
  std::string explain() const override;
  void run(const Plan& plan, const RunView& view, const BoundVariant& variant, const RunArgs& args,
           RunStats* stats) const override;

  /// The kernel's parameter with layout and plan; the rest is a run's.
  const GpuLaunch& launch() const { return launch_; }
  /// What it was made of there, or null, and by which captured graph, or 0.
  const DeviceLayoutPtr& layout() const { return layout_; }
  u64 capture() const { return capture_; }

 private:
  /// Whether two workers' teams may end with halves of a unit; of a reservation a later plan's may.
  bool joins() const { return joins_ || reservation_; }
  /// The kernel of a run: the plan's, or the one like it that scales V, or that copies keys row by
  /// row where not all levels' tensors lie in boxes.
  const Kernel& kernel_of(const RunView& view, bool in_boxes) const;

  const Kernel* kernel_;
  KernelChoice choice_;
  AttentionMemoryPtr memory_;
  std::shared_ptr<const CudaVariant> variant_;
  std::shared_ptr<CudaReservation> reservation_;  ///< null where the plan has memory of its own
  Block block_;
  GpuLaunch launch_{};
  bool joins_ = false;
  DeviceLayoutPtr layout_;
  u64 capture_ = 0;
};

/// Plans with memory of their own.
class CudaPlans final : public PlanStore {
 public:
  CudaPlans(const Device& device, AttentionMemoryPtr memory)
      : device_(&device), memory_(std::move(memory)) {}

  std::shared_ptr<const PlanOnDevice> put(const Layout& layout, const PlanArrays& arrays,
                                          const KernelChoice& kernel, const BoundVariant& origin,
                                          const BoundVariant& variant, void* stream) override;

 private:
  const Device* device_;
  AttentionMemoryPtr memory_;
};

}  // namespace raddle::cuda
