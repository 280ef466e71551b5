// A page table in a GPU's memory: shapes and addresses are all that the host knows of it.
#pragma once

#include "raddle/engine/kernel/gpu_planner/launch.h"
#include "raddle/layout.h"

namespace raddle {

struct DeviceLayout {
  DeviceId device;
  DeviceBatch batch;
  HeadOrder order;
  i32 num_rows = -1;  ///< at most; -1: as many as the reservation may have
  std::shared_ptr<const void> owner;

  i32 num_levels() const { return batch.min_prefix > 0 ? 2 : 1; }
};

/// A host layout that answers all questions but those about lengths: how K and V are stored, how
/// many requests and levels there are, which pages they may use. It has as many query rows as the
/// batch may have, max_qo_tokens where the layout does not say, and no keys.
LayoutPtr stand_in(const DeviceLayout& layout, i32 max_qo_tokens);

}  // namespace raddle
