#include "backend/cuda/planner.h"

#include "backend/cuda/layout.h"
#include "raddle/engine/kernel/gpu_planner/memory.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle::cuda {

CudaPlanner::CudaPlanner(const Kernel& kernel, const PlanConfig& config, const Maxima& maxima,
                         bool masked, StreamHandle stream)
    : kernel_(&kernel), config_(config), maxima_(maxima), masked_(masked) {
  const PlannerMemory memory = planner_memory(config, maxima, masked);
  Carver<16> carve;
  carve.place<u8>(memory.plan);
  at_.layout = carve.place<u8>(memory.layout);
  at_.scratch = carve.place<u8>(memory.scratch);
  at_.sizes = carve.place<PlanSizes>(1);
  at_.report = carve.place<PlanReport>(1);
  const auto end = static_cast<std::size_t>(carve.used());
  block_ = DevicePool::of(kernel.device()).take(end, stream, "the plan of this reservation");
  // Marks and report begin at zero; so do the queues, empty before the first plan.
  clear(block_, 0, end, stream);
}

GpuLaunch CudaPlanner::plan(const DeviceLayout& layout, const CudaVariant& variant,
                            StreamHandle stream) const {
  PlanLaunch launch = plan_launch(layout.batch, config_, maxima_, masked_,
                                  kernel_->device().info().max_shared_bytes);
  // After the sizes, which are the reservation's: only what the kernel compares rows with.
  if (layout.num_rows >= 0) launch.maxima.max_qo_tokens = layout.num_rows;
  auto* base = static_cast<u8*>(block_.data());
  launch.plan = base;
  launch.layout = base + at_.layout;
  launch.scratch = base + at_.scratch;
  launch.sizes = reinterpret_cast<PlanSizes*>(base + at_.sizes);
  launch.report = reinterpret_cast<PlanReport*>(base + at_.report);
  const bool captured = is_capturing(stream);
  block_.use_on(stream);
  variant.use_on(stream);
  const PlannerGrid grid = planner_grid(launch);
  void* params[] = {&launch, variant.bytes()};
  kernel_->launch(grid.blocks, grid.threads, grid.shared_bytes, stream, params);
  if (!captured) block_.written_on(stream);
  GpuLaunch attention{};
  attention.layout = planner::planned_layout(launch, attention.levels);
  attention.layout.levels = nullptr;  // the kernel has them by value
  attention.plan = view_at(base, plan_bounds(config_, maxima_), config_);
  return attention;
}

PlanReport CudaPlanner::take_report(StreamHandle stream) const {
  PlanReport report{};
  download(&report, block_, static_cast<std::size_t>(at_.report), sizeof(report), stream);
  clear(block_, static_cast<std::size_t>(at_.report), sizeof(report), stream);
  return report;
}

DevicePlannedReservation::DevicePlannedReservation(const Kernel& kernel, AttentionMemoryPtr memory,
                                                   const Planning& planning, const Maxima& maxima,
                                                   i32 dim_vo, StreamHandle stream,
                                                   const Kernel& planner,
                                                   const BoundVariant& origin,
                                                   const BoundVariant& variant)
    : CudaReservation(kernel, std::move(memory), planning, maxima, dim_vo, stream),
      planner_(planner, planning.config, maxima, variant.has_masks(), stream) {
  set_variant(this->memory()->variant_of(origin, variant, stream));
}

std::string DevicePlannedReservation::explain() const {
  return planner_.kernel().label() + " (1 launch an update), ";
}

/// A run that was captured without its update reads one page table for good.
void DevicePlannedReservation::check_table(const DeviceBatch& batch) const {
  for (const DeviceLayoutPtr& layout : captured_tables_)
    if (batch.pages != layout->batch.pages || batch.page_size != layout->batch.page_size)
      fail<ValueError>(
          "page_indices is another array, or page_size another number, than those of a captured "
          "run; expected the same, which its graph keeps: or capture update and run together");
}

/// The host does not know which graph is replayed next: its tensors must suit the layout that was
/// captured with it, and later ones of its graph have no more rows.
i64 DevicePlannedReservation::captured_rows(const Layout& shape) const { return shape.num_rows(); }

void DevicePlannedReservation::keep_arrays(const CudaPlan& plan, StreamHandle stream) {
  if (plan.capture() == capture_of(stream)) return;
  check_table(plan.layout()->batch);
  captured_tables_.push_back(plan.layout());
}

std::shared_ptr<const PlanOnDevice> DevicePlannedReservation::plan(const DeviceLayoutPtr& layout,
                                                                   const Layout& shape,
                                                                   void* stream) {
  const ContextScope context(*device_);
  const std::lock_guard lock(mutex_);
  check_table(layout->batch);
  check_pools(shape);
  const GpuLaunch launch = planner_.plan(*layout, *variant(), stream);
  if (is_capturing(stream)) captured_updates_.push_back(layout);
  return std::make_shared<const CudaPlan>(*this, launch, layout, capture_of(stream));
}

std::string DevicePlannedReservation::check(void* stream) {
  const ContextScope context(*device_);
  if (is_capturing(stream))
    fail<ValueError>("the stream is capturing a graph; expected check after its replays");
  return describe(planner_.take_report(stream), maxima_);
}

}  // namespace raddle::cuda
