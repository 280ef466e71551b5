// What a reservation holds, whatever its device.
#pragma once

#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "variant/bound_variant.h"

namespace raddle {

struct Reservation::State {
  std::shared_ptr<const Backend> backend;
  std::shared_ptr<const BoundVariant> variant;  ///< before the plan's members
  Maxima maxima;
  PlanOptions options;
  Planning planning;
  std::shared_ptr<PlanStore> store;        ///< where plans of the host go, or
  std::shared_ptr<DevicePlanner> planner;  ///< what makes plans on a GPU: one of the two
  std::mutex mutex;
  PlanPtr plan;
};

}  // namespace raddle
