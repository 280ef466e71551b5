// The parameter of a kernel on Hopper's wgmma.
#pragma once

#include "raddle/engine/core/tensor_map.h"
#include "raddle/engine/kernel/gpu/launch.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// What every family is given, and where bulk copies find K and V.
struct Launch : GpuLaunch {
  /// Whether keys and values are the first lines to leave the L2 cache: then they displace nothing
  /// that has not been written to memory yet. Long reads are slower so.
  bool keys_leave_first;
  bool in_boxes[max_levels];     ///< whether the level has maps; its rows are copied singly else
  TensorMap map[max_levels][2];  ///< of K and V
};

static_assert(sizeof(Launch) == 2432 + 128 * 2 * max_levels);

}  // namespace wgmma

RADDLE_ENGINE_END
