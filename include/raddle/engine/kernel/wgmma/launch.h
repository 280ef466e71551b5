// The parameter of a kernel on Hopper's wgmma.
#pragma once

#include "raddle/engine/core/tensor_map.h"
#include "raddle/engine/kernel/gpu/launch.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Which rows of Q, and of O, are a box of a whole tile of long queries: those of one head and
/// request, or those of all heads of a group, where RowsView::request_stride is 0.
enum class RowBoxes : i32 { none, of_heads, of_groups };

/// What every family is given, and where bulk copies find Q, O, K and V.
struct Launch : GpuLaunch {
  /// Whether keys and values are the first lines to leave the L2 cache: then they displace nothing
  /// that has not been written to memory yet. Long reads are slower so.
  bool keys_leave_first;
  bool in_boxes[max_levels];  ///< whether the level has maps; its rows are copied singly else
  RowBoxes row_boxes;
  bool out_in_boxes;  ///< whether O has a map; its boxes are those of row_boxes
  TensorMap query_map, out_map;
  TensorMap map[max_levels][2];  ///< of K and V
};

static_assert(sizeof(Launch) == 2432 + 128 * (2 + 2 * max_levels));

}  // namespace wgmma

RADDLE_ENGINE_END
