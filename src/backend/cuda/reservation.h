// A reservation's memory on a GPU: arrays of plan and layout at addresses that never change, and
// scratch. A captured graph keeps the kernel's parameter as it was, so whatever is in it must hold
// for every later plan.
#pragma once

#include <mutex>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/layout.h"
#include "backend/cuda/plan.h"
#include "backend/cuda/variant.h"
#include "device/cuda/memory.h"
#include "device/cuda/module.h"
#include "layout/kind.h"
#include "plan/planner.h"

namespace raddle::cuda {

/// What a reservation has whether the host or a kernel makes its plans: scratch, one variant, and
/// what the graphs of captured runs read.
class CudaReservation : public std::enable_shared_from_this<CudaReservation> {
 public:
  /// Allocates what the maxima ask for; `kernel` runs all its plans. Needs a ContextScope, as all
  /// that follows.
  CudaReservation(const Kernel& kernel, AttentionMemoryPtr memory, const Planning& planning,
                  const Maxima& maxima, i32 dim_vo, StreamHandle stream);
  virtual ~CudaReservation() = default;
  CudaReservation(const CudaReservation&) = delete;
  CudaReservation& operator=(const CudaReservation&) = delete;

  const Kernel& kernel() const { return *kernel_; }
  const KernelChoice& choice() const { return choice_; }
  const AttentionMemoryPtr& memory() const { return memory_; }
  /// The variant of all its plans: their plan members are given once.
  const std::shared_ptr<const CudaVariant>& variant() const { return variant_; }
  /// What makes a plan, where that is a kernel: a beginning of PlanOnDevice::explain.
  virtual std::string explain() const { return {}; }

  /// Points `view` to the reservation's scratch.
  void provide(RunView& view) const;
  /// Where a later plan has its number of rows, too: the last entry of its row offsets.
  const i32* num_rows_at(const LayoutView& layout) const {
    return layout.qo_indptr + maxima_.max_requests;
  }
  void use_on(StreamHandle stream) const;
  /// Checks that a captured run of `plan` will do for later plans too, and keeps what its graph
  /// reads: the plan's arrays, and `variant`, on the device and with its members' values.
  void capture(const CudaPlan& plan, const RunArgs& args, const Layout& layout,
               const BoundVariant& variant, std::shared_ptr<const CudaVariant> on_device);

 protected:
  void set_variant(std::shared_ptr<const CudaVariant> variant) { variant_ = std::move(variant); }
  /// Raises ValueError where values that a captured run keeps do not suit a batch.
  void check_values(const Batch& batch) const;
  /// Pages of later layouts must lie in the pools that graphs captured.
  void check_pools(const Layout& layout) const;
  bool has_captures() const { return !captured_.empty(); }

  const Kernel* kernel_;
  KernelChoice choice_;
  const Device* device_;
  PlanConfig config_;
  Maxima maxima_;
  PlanSizes bounds_;
  mutable std::mutex mutex_;

 private:
  /// Before a launch on `stream` that reads the plan's arrays. The mutex is held.
  virtual void use_arrays_on(StreamHandle stream) const = 0;
  /// Query rows that the tensors of a captured run of `layout` have at least.
  virtual i64 captured_rows(const Layout&) const { return maxima_.max_qo_tokens; }
  /// Checks that later plans will lie where `plan` does. The mutex is held.
  virtual void keep_arrays(const CudaPlan& plan, StreamHandle stream) = 0;

  AttentionMemoryPtr memory_;
  i32 dim_vo_;
  Block scratch_;
  std::shared_ptr<const CudaVariant> variant_;
  std::vector<std::shared_ptr<const CudaVariant>> captured_;  ///< what graphs point into,
  std::vector<BoundVariant> captured_values_;                 ///< and the values in it
  std::vector<i64> captured_pools_;  ///< pages, or slots, of captured runs' smallest, by level
};

/// The host makes the plans; they go up into one block.
class HostPlannedReservation final : public CudaReservation, public PlanStore {
 public:
  using CudaReservation::CudaReservation;

  LayoutPtr fit(const LayoutPtr& layout) const override;
  void check_captured(const Batch& batch) const override { check_values(batch); }
  std::shared_ptr<const PlanOnDevice> put(const Layout& layout, const PlanArrays& arrays,
                                          const KernelChoice& kernel, const BoundVariant& origin,
                                          const BoundVariant& variant, void* stream) override;

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
  void use_arrays_on(StreamHandle stream) const override;
  void keep_arrays(const CudaPlan& plan, StreamHandle stream) override;
  /// Sends a plan of a layout that fits up in stream order; returns the launch with its views.
  GpuLaunch send(const Layout& layout, const PlanArrays& arrays, StreamHandle stream);
  /// What all layouts so far can be written as, and this one.
  LayoutKind kind_with(const Layout& layout) const;
  void check_sizes(const Form& form, const GpuLaunch& launch, const Layout& layout) const;
  Form form_of(const LayoutKind& kind, const GpuLaunch& launch, const Layout& layout,
               StreamHandle stream) const;
  std::size_t capacity(const Level& level, Of of) const;

  BatchArrays batch_arrays_;
  Form form_;  ///< the first layout's, and those of later ones with more, until a run is captured
  std::vector<Block> outgrown_;  ///< which launches of earlier plans still name
};

}  // namespace raddle::cuda
