// A reservation's memory on a GPU: arrays of plan and layout at addresses that never change, and
// scratch. A captured graph keeps the kernel's parameter as it was, so whatever is in it must hold
// for every later plan.
#pragma once

#include <mutex>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/planner.h"
#include "backend/cuda/variant.h"
#include "device/cuda/memory.h"
#include "device/cuda/module.h"
#include "layout/kind.h"
#include "plan/planner.h"
#include "raddle/engine/kernel/gpu/launch.h"

namespace raddle::cuda {

class CudaReservation final : public ReservedMemory,
                              public std::enable_shared_from_this<CudaReservation> {
 public:
  /// Allocates what the maxima ask for; `kernel` runs all its plans. Needs a ContextScope, as all
  /// that follows.
  CudaReservation(const Kernel& kernel, const PlanConfig& config, const Maxima& maxima, i32 dim_vo,
                  StreamHandle stream);
  const Kernel& kernel() const { return *kernel_; }

  /// Plans are made on the device from here on. Once, before the first.
  void plan_with(std::unique_ptr<const CudaPlanner> planner) { planner_ = std::move(planner); }
  /// Null where the host plans.
  const CudaPlanner* planner() const { return planner_.get(); }
  /// Has the planner make a plan of lengths that only the device knows, in stream order; returns
  /// the launch with its views. Raises ValueError, and launches nothing, where graphs read another
  /// page table. `shape` is its stand_in.
  GpuLaunch plan(const DeviceLayoutPtr& layout, const Layout& shape, StreamHandle stream);
  std::string check(void* stream) override;

  LayoutPtr fit(const LayoutPtr& layout) const override;
  void check_captured(const Batch& batch) const override;

  /// Sends a plan of a layout that fits up in stream order; returns the launch with its views.
  GpuLaunch place(const Layout& layout, const PlanArrays& arrays, StreamHandle stream);

  /// The variant of all its plans: their plan members are given once.
  const std::shared_ptr<const CudaVariant>& variant() const { return variant_; }
  void set_variant(std::shared_ptr<const CudaVariant> variant) { variant_ = std::move(variant); }

  /// Points `view` to the reservation's scratch.
  void provide(RunView& view) const;
  void use_on(StreamHandle stream) const;
  /// Checks that a captured run of a layout will do for later plans too, and keeps what its graph
  /// reads: `launch`'s arrays, and `variant`, on the device and with its members' values.
  void capture(const RunArgs& args, const Layout& layout, const GpuLaunch& launch,
               const BoundVariant& variant, std::shared_ptr<const CudaVariant> on_device);
  /// The same for the page table of a plan that was made on the device, outside of the run's graph:
  /// later plans must be of that table.
  void capture(const DeviceLayoutPtr& layout);

 private:
  struct Place {
    std::size_t at, bytes;
  };
  /// Where layouts of a kind and their plans lie.
  struct Form {
    LayoutKind kind{};
    GpuLaunch first{};          ///< with device addresses
    std::vector<Place> places;  ///< of the layout's arrays, in visiting order
    std::size_t bytes = 0;      ///< 0: there is none yet
    Block block;
  };
  /// What all layouts so far can be written as, and this one.
  LayoutKind kind_with(const Layout& layout) const;
  void check_sizes(const Form& form, const GpuLaunch& launch, const Layout& layout) const;
  void check_pools(const Layout& layout) const;
  void check_table(const DeviceBatch& batch) const;
  Form form_of(const LayoutKind& kind, const GpuLaunch& launch, const Layout& layout,
               StreamHandle stream) const;
  std::size_t capacity(const Level& level, Of of) const;

  const Kernel* kernel_;
  const Device* device_;
  PlanConfig config_;
  Maxima maxima_;
  PlanSizes bounds_;
  i32 dim_vo_;
  Block scratch_;
  std::unique_ptr<const CudaPlanner> planner_;
  std::shared_ptr<const CudaVariant> variant_;
  Form form_;  ///< the first layout's, and those of later ones with more, until a run is captured
  std::vector<Block> outgrown_;  ///< which launches of earlier plans still name
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const CudaVariant>> captured_;  ///< what graphs point into,
  std::vector<BoundVariant> captured_values_;                 ///< and the values in it
  std::vector<DeviceLayoutPtr> captured_updates_;             ///< whose graphs plan anew,
  std::vector<DeviceLayoutPtr> captured_tables_;              ///< and of runs whose graphs do not
  std::vector<i64> captured_pools_;  ///< pages, or slots, of captured runs' smallest, by level
};

}  // namespace raddle::cuda
