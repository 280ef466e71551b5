// The planner kernel with memory for a reservation's plans: lengths and tables that only the device
// knows become a plan there, in stream order.
#pragma once

#include "backend/cuda/reservation.h"
#include "backend/cuda/variant.h"
#include "device/cuda/memory.h"
#include "device/cuda/module.h"
#include "layout/on_device.h"
#include "plan/device_planner.h"
#include "raddle/engine/kernel/gpu/launch.h"

namespace raddle::cuda {

class CudaPlanner {
 public:
  /// Allocates for all plans within the maxima. Needs a ContextScope, as all that follows.
  CudaPlanner(const Kernel& kernel, const PlanConfig& config, const Maxima& maxima, bool masked,
              StreamHandle stream);

  const Kernel& kernel() const { return *kernel_; }
  /// Launches the kernel; returns the attention's launch with views of the plan and of the layout.
  GpuLaunch plan(const DeviceLayout& layout, const CudaVariant& variant, StreamHandle stream) const;
  void use_on(StreamHandle stream) const { block_.use_on(stream); }
  /// What was wrong with plans since it was asked last; waits for the stream.
  PlanReport take_report(StreamHandle stream) const;

 private:
  const Kernel* kernel_;
  PlanConfig config_;
  Maxima maxima_;
  bool masked_;
  struct {
    i64 layout, scratch, sizes, report;
  } at_;  ///< in the block, which begins with the plan
  Block block_;
};

/// A kernel makes the plans, of lengths that only the device knows.
class DevicePlannedReservation final : public CudaReservation, public DevicePlanner {
 public:
  /// As CudaReservation; `planner` is the kernel that plans for `variant`, whose spec has `origin`.
  DevicePlannedReservation(const Kernel& kernel, AttentionMemoryPtr memory,
                           const Planning& planning, const Maxima& maxima, i32 dim_vo,
                           StreamHandle stream, const Kernel& planner, const BoundVariant& origin,
                           const BoundVariant& variant);

  std::string explain() const override;
  void check_captured(const Batch& batch) const override { check_values(batch); }
  /// Raises ValueError, and launches nothing, where graphs read another page table.
  std::shared_ptr<const PlanOnDevice> plan(const DeviceLayoutPtr& layout, const Layout& shape,
                                           void* stream) override;
  std::string check(void* stream) override;

 private:
  void use_arrays_on(StreamHandle stream) const override { planner_.use_on(stream); }
  i64 captured_rows(const Layout& shape) const override;
  void keep_arrays(const CudaPlan& plan, StreamHandle stream) override;
  void check_table(const DeviceBatch& batch) const;

  CudaPlanner planner_;
  std::vector<DeviceLayoutPtr> captured_updates_;  ///< whose graphs plan anew,
  std::vector<DeviceLayoutPtr> captured_tables_;   ///< and of runs whose graphs do not
};

}  // namespace raddle::cuda
