// What differs between devices once a layout is planned and a run's tensors are checked.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "device/name.h"
#include "plan/kernel_choice.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/run.h"
#include "variant/batch_checks.h"

namespace raddle {

/// A plan where its device's kernels read it, ready to run.
class PlanOnDevice {
 public:
  virtual ~PlanOnDevice() = default;
  virtual DeviceId device() const = 0;
  /// Which kernels run it, and in how many launches.
  virtual std::string explain() const = 0;
  /// Whether a kernel made it, of lengths that the host does not know.
  virtual bool made_on_device() const = 0;
  /// Whether its runs write the marks of a timeline.
  virtual bool marks_timelines() const { return false; }
  /// Runs `plan`, which holds this; `view` has all but scratch.
  virtual void run(const Plan& plan, const RunView& view, const BoundVariant& variant,
                   const RunArgs& args, RunStats* stats) const = 0;
};

/// Where plans that the host makes are put: an attention's, or those of one reservation.
class PlanStore {
 public:
  virtual ~PlanStore() = default;
  /// The layout as kernels of captured runs can read it; raises ValueError where they cannot.
  virtual LayoutPtr fit(const LayoutPtr& layout) const { return layout; }
  /// Raises ValueError where values that a captured run keeps do not suit a batch.
  virtual void check_captured(const Batch&) const {}
  /// Has a plan where kernels read it, from work on `stream` on; returns before it is there.
  /// `kernel` is what the plan was made for, `origin` the variant before the plan's members.
  virtual std::shared_ptr<const PlanOnDevice> put(const Layout& layout, const PlanArrays& arrays,
                                                  const KernelChoice& kernel,
                                                  const BoundVariant& origin,
                                                  const BoundVariant& variant, void* stream) = 0;
};

/// What a plan is made with: tile shapes and costs, and the kernels that have them.
struct Planning {
  PlanConfig config;
  KernelChoice kernel;                      ///< of a GPU
  std::optional<PlanConfig> clusters = {};  ///< the same for clusters of blocks, if they may run it
};

/// What plans and runs an attention on one device.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceId device() const = 0;
  virtual const AttentionSpec& spec() const = 0;
  /// For plans of `layout`; num_workers 0: the device's default.
  virtual Planning planning_of(const Layout& layout, i32 num_workers, Schedule schedule) const = 0;
  /// For all plans of a reservation.
  virtual Planning reserved_planning(const Maxima& maxima, i32 num_workers,
                                     Schedule schedule) const = 0;
  /// Where plans go that no reservation holds.
  virtual PlanStore& plans() const = 0;
  /// Room for any plan made with `planning` within `maxima`.
  virtual std::shared_ptr<PlanStore> reserve(const Planning& planning, const Maxima& maxima,
                                             void* stream) const = 0;
};

/// A reservation on a GPU whose plans a kernel makes there, of lengths that the host does not know.
class DevicePlanner {
 public:
  virtual ~DevicePlanner() = default;
  /// As PlanStore's.
  virtual void check_captured(const Batch& batch) const = 0;
  /// Has the kernel make a plan, in stream order; `shape` is the layout's stand_in.
  virtual std::shared_ptr<const PlanOnDevice> plan(const DeviceLayoutPtr& layout,
                                                   const Layout& shape, void* stream) = 0;
  /// What was wrong with plans since the last call, in words; waits for `stream`.
  virtual std::string check(void* stream) = 0;
};

/// A GPU can plan, too.
class GpuBackend : public Backend {
 public:
  /// Room for any plan made with `planning` within `maxima`, and for making it. `variant` is that
  /// of all plans, `origin` as of PlanStore::put.
  virtual std::shared_ptr<DevicePlanner> reserve_planner(const Planning& planning,
                                                         const Maxima& maxima,
                                                         const BoundVariant& origin,
                                                         const BoundVariant& variant,
                                                         void* stream) const = 0;
};

std::shared_ptr<const Backend> make_cpu_backend(const AttentionSpec& spec);
/// Has its kernels compiled or found, and loaded; waits for the one of short queries.
std::shared_ptr<const GpuBackend> make_cuda_backend(const AttentionSpec& spec,
                                                    const BoundVariant& variant, DeviceId device);

/// Tile shapes and costs of plans within `maxima` on that GPU, by each of the kernels that may run
/// them; num_workers 0: as many blocks as it holds at a time.
std::vector<PlanConfig> cuda_plan_configs(const AttentionSpec& spec, DeviceId device,
                                          const Maxima& maxima, i32 num_workers);

/// "sm_90a". Raises DeviceError where there is no such device.
std::string cuda_arch(DeviceId device);

}  // namespace raddle
