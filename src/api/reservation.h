// What a reservation holds, whatever its device.
#pragma once

#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "variant/bound_variant.h"

namespace raddle {

struct Reservation::State {
  std::shared_ptr<const AttentionBackend> backend;
  std::shared_ptr<const BoundVariant> variant;  ///< before the plan's members
  Maxima maxima;
  PlanOptions options;
  PlanConfig config;
  bool device_lengths;                     ///< GPUs: plans are made there
  std::shared_ptr<ReservedMemory> memory;  ///< null on CPUs
  std::mutex mutex;
  PlanPtr plan;
};

}  // namespace raddle
