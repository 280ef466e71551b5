// Shared memory of a block that computes short queries: what the loading warpgroup fills, and what
// the threads of the computing warpgroups tell one another.
#pragma once

#include "raddle/engine/kernel/gpu/arrive.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Items of a queue whose tickets are looked up before their states are stored.
constexpr i32 tickets_ahead = 32;

template <class Kernel>
struct ShortMemory : Memory<Kernel> {
  static constexpr i32 rows = Kernel::tile_rows;
  /// P of a tile: a row of 64 keys for each query.
  using Weights = Slot<rows, 1>;
  static_assert(128 == 2 * Kernel::tile_keys);

  alignas(1024) u8 p[consumer_groups][Weights::bytes];
  /// The state of the second warpgroup, then rows of both: O, and behind it the LSE. Four numbers
  /// more than O has keep the lanes that write a column apart.
  float state[rows][Kernel::dim_vo + 4];
  float reference[rows];  ///< of the second warpgroup
  /// Of the keys of each warp of a group: the largest logits of a tile, and an item's sums.
  float top[consumer_groups][group_warps][rows];
  float sum[consumer_groups][group_warps][rows];
  ArrivalTicket ticket[tickets_ahead];  ///< of the queue's first items

  RADDLE_DEVICE static ShortMemory& get() {
    return *static_cast<ShortMemory*>(ptx::shared_memory());
  }
};

}  // namespace wgmma

RADDLE_ENGINE_END
