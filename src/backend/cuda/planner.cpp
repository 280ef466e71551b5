#include "backend/cuda/planner.h"

#include "backend/cuda/layout.h"
#include "raddle/engine/kernel/gpu_planner/memory.h"

namespace raddle::cuda {

CudaPlanner::CudaPlanner(const Kernel& kernel, const PlanConfig& config, const Maxima& maxima,
                         bool masked, StreamHandle stream)
    : kernel_(&kernel), config_(config), maxima_(maxima), masked_(masked) {
  const PlannerMemory memory = planner_memory(config, maxima, masked);
  Carver<16> carve;
  const auto place = [&carve](i64 bytes) {
    return static_cast<std::size_t>(carve.place<std::byte>(bytes));
  };
  place(memory.plan);
  at_.layout = place(memory.layout);
  at_.scratch = place(memory.scratch);
  at_.sizes = place(sizeof(PlanSizes));
  at_.report = place(sizeof(PlanReport));
  const auto end = static_cast<std::size_t>(carve.used());
  block_ = DevicePool::of(kernel.device()).take(end, stream, "the plan of this reservation");
  // Marks and report begin at zero; so do the queues, empty before the first plan.
  clear(block_, 0, end, stream);
}

GpuLaunch CudaPlanner::plan(const DeviceLayout& layout, const CudaVariant& variant,
                            StreamHandle stream) const {
  PlanLaunch launch = plan_launch(layout.batch, config_, maxima_, masked_,
                                  kernel_->device().info().max_shared_bytes);
  auto* base = static_cast<u8*>(block_.data());
  launch.plan = base;
  launch.layout = base + at_.layout;
  launch.scratch = base + at_.scratch;
  launch.sizes = reinterpret_cast<PlanSizes*>(base + at_.sizes);
  launch.report = reinterpret_cast<PlanReport*>(base + at_.report);
  block_.use_on(stream);
  variant.use_on(stream);
  const PlannerGrid grid = planner_grid(launch);
  void* params[] = {&launch, variant.bytes()};
  kernel_->launch(grid.blocks, grid.threads, grid.shared_bytes, stream, params);
  if (!is_capturing(stream)) block_.written_on(stream);
  GpuLaunch attention{};
  attention.layout = planner::planned_layout(launch, attention.levels);
  attention.layout.levels = nullptr;  // the kernel has them by value
  attention.plan = view_at(base, plan_bounds(config_, maxima_), config_);
  return attention;
}

PlanReport CudaPlanner::take_report(StreamHandle stream) const {
  PlanReport report{};
  download(&report, block_, at_.report, sizeof(report), stream);
  clear(block_, at_.report, sizeof(report), stream);
  return report;
}

}  // namespace raddle::cuda
