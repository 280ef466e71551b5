// The host's side of the planner on a GPU: checks what can be known before a launch, and fills in
// the kernel's parameter, except for addresses of memory. Pure functions.
#pragma once

#include <string>

#include "raddle/engine/kernel/gpu_planner/launch.h"

namespace raddle {

/// How the planner kernel is launched.
struct PlannerGrid {
  i32 blocks;
  i32 threads;
  i32 shared_bytes;  ///< dynamic shared memory of a block
};

/// Raises ValueError, naming the argument, where plans of such a reservation cannot be made on a
/// device.
void check_device_planning(const PlanConfig& config, const Maxima& maxima);

/// Bytes of device memory that the planner kernel takes, whatever the batch.
struct PlannerMemory {
  i64 plan, layout;
  i64 scratch;  ///< zeroed once
};
PlannerMemory planner_memory(const PlanConfig& config, const Maxima& maxima, bool masked);

/// Whether the planner's arrays lie in the shared memory of a block, of which a device has
/// `max_shared_bytes`.
bool plans_in_shared(const PlanConfig& config, const Maxima& maxima, bool masked,
                     i32 max_shared_bytes);

/// The kernel's parameter for a reservation: `plan`, `layout`, `scratch`, `sizes` and `report` are
/// left null. They need planner_memory, sizeof(PlanSizes) and sizeof(PlanReport).
/// batch.num_requests says how many requests its arrays have room for, also where num_requests_at
/// points to how many there are. `masked`: the composition has a mask. `max_shared_bytes` is what a
/// block can have on the device. Raises ValueError naming the argument where no plan can be made on
/// the device.
PlanLaunch plan_launch(const DeviceBatch& batch, const PlanConfig& config, const Maxima& maxima,
                       bool masked, i32 max_shared_bytes);

PlannerGrid planner_grid(const PlanLaunch& launch);

/// What a report says, in words; empty where nothing is wrong.
std::string describe(const PlanReport& report, const Maxima& maxima);

}  // namespace raddle
