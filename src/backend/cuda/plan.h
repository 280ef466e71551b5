// A plan on a GPU: its arrays and its layout's in one block of device memory.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/reservation.h"
#include "backend/cuda/variant.h"
#include "device/cuda/memory.h"
#include "device/cuda/module.h"
#include "plan/planner.h"
#include "raddle/engine/kernel/gpu/launch.h"

namespace raddle::cuda {

class CudaPlan final : public PlanOnDevice {
 public:
  /// Sends everything up in one asynchronous copy on `stream`. Needs a ContextScope.
  CudaPlan(const Kernel& kernel, const Layout& layout, const PlanArrays& arrays,
           std::shared_ptr<const CudaVariant> variant, StreamHandle stream);
  /// A plan whose arrays a reservation has.
  CudaPlan(const Kernel& kernel, CudaReservation& reservation, const GpuLaunch& launch);

  /// A plan that a reservation's planner makes there of `layout`; `capture`: of the graph that
  /// does.
  CudaPlan(const Kernel& kernel, CudaReservation& reservation, const GpuLaunch& launch,
           DeviceLayoutPtr layout, u64 capture);

  DeviceId device() const override;
  bool made_on_device() const override { return layout_ != nullptr; }
  std::string explain() const override;

  /// Which runs it.
  const Kernel& kernel() const { return *kernel_; }
  /// The kernel's parameter with layout and plan; the rest is a run's.
  const GpuLaunch& launch() const { return launch_; }
  const CudaVariant& variant() const { return *variant_; }
  /// Null where the plan has memory of its own.
  CudaReservation* reservation() const { return reservation_.get(); }
  /// Whether two workers' teams may end with halves of a unit; of a reservation a later plan's may.
  bool joins() const { return joins_ || reservation_; }
  /// What it was made of there, or null, and by which captured graph, or 0.
  const DeviceLayoutPtr& layout() const { return layout_; }
  u64 capture() const { return capture_; }
  /// Before a launch on `stream`.
  void use_on(StreamHandle stream) const {
    reservation_ ? reservation_->use_on(stream) : block_.use_on(stream);
  }

 private:
  const Kernel* kernel_;
  std::shared_ptr<const CudaVariant> variant_;
  std::shared_ptr<CudaReservation> reservation_;
  Block block_;
  GpuLaunch launch_{};
  bool joins_ = false;
  DeviceLayoutPtr layout_;
  u64 capture_ = 0;
};

}  // namespace raddle::cuda
