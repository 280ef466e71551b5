// What differs between devices once a layout is planned and a run's tensors are checked.
#pragma once

#include <memory>
#include <string>

#include "device/name.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/run.h"
#include "variant/batch_checks.h"

namespace raddle {

/// A plan as a device's kernels read it, where that is not the host's own memory.
class PlanOnDevice {
 public:
  virtual ~PlanOnDevice() = default;
  virtual DeviceId device() const = 0;
  /// Which kernels run it, and in how many launches.
  virtual std::string explain() const = 0;
  /// Whether a kernel made it, of lengths that the host does not know.
  virtual bool made_on_device() const { return false; }
};

/// A reservation's memory on a device.
class ReservedMemory {
 public:
  virtual ~ReservedMemory() = default;
  /// The layout as kernels of captured runs can read it; raises ValueError where they cannot.
  virtual LayoutPtr fit(const LayoutPtr& layout) const = 0;
  /// Raises ValueError where values that a captured run keeps do not suit a batch.
  virtual void check_captured(const Batch& batch) const = 0;
  /// What was wrong with plans made on the device since the last call, in words; waits for
  /// `stream`.
  virtual std::string check(void* stream) = 0;
};

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  virtual DeviceId device() const = 0;
  virtual const AttentionSpec& spec() const = 0;
  /// Tile shapes and costs; num_workers 0: the device's default.
  virtual PlanConfig plan_config(i32 num_workers, Schedule schedule) const = 0;
  /// The copy that kernels read; null where they read the host's. `origin` is the variant before
  /// the plan's members. `reserved`: where it goes, or null. Returns before it is there.
  virtual std::shared_ptr<const PlanOnDevice> upload(const Layout& layout, const PlanArrays& arrays,
                                                     const BoundVariant& origin,
                                                     const BoundVariant& variant,
                                                     ReservedMemory* reserved,
                                                     void* stream) const = 0;
  /// Memory for any plan of `config` within `maxima`; null where plans need none.
  virtual std::shared_ptr<ReservedMemory> reserve(const PlanConfig& config, const Maxima& maxima,
                                                  void* stream) const = 0;
  /// A reservation for plans that a kernel makes on the device, of a DeviceLayout; `variant` is
  /// that of all of them, `origin` as of upload.
  virtual std::shared_ptr<ReservedMemory> reserve_planner(const PlanConfig& config,
                                                          const Maxima& maxima,
                                                          const BoundVariant& origin,
                                                          const BoundVariant& variant,
                                                          void* stream) const = 0;
  /// Has the kernel make a plan, in stream order; `shape` is the layout's stand_in.
  virtual std::shared_ptr<const PlanOnDevice> plan_on_device(const DeviceLayoutPtr& layout,
                                                             const Layout& shape,
                                                             ReservedMemory& reserved,
                                                             void* stream) const = 0;
  /// Runs a plan of this device; `view` has all but scratch.
  virtual void run(const Plan& plan, const RunView& view, const BoundVariant& variant,
                   const RunArgs& args, RunStats* stats) const = 0;
};

std::unique_ptr<AttentionBackend> make_cpu_backend(const AttentionSpec& spec);
/// Has its kernels compiled or found, and loaded; waits for the one of short queries.
std::unique_ptr<AttentionBackend> make_cuda_backend(const AttentionSpec& spec,
                                                    const BoundVariant& variant, DeviceId device);

/// Tile shapes and costs of that GPU's kernel; num_workers 0: as many blocks as it holds at a time.
PlanConfig cuda_plan_config(const AttentionSpec& spec, DeviceId device, i32 num_workers,
                            Schedule schedule);

/// "sm_90a". Raises DeviceError where there is no such device.
std::string cuda_arch(DeviceId device);

}  // namespace raddle
