// The planner kernel with memory for a reservation's plans: lengths and tables that only the device
// knows become a plan there, in stream order.
#pragma once

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
    std::size_t layout, scratch, sizes, report;
  } at_;  ///< in the block, which begins with the plan
  Block block_;
};

}  // namespace raddle::cuda
