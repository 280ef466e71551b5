// Attention for GPUs with mma.sync (sm_80 on): FlashAttention-2's loop over KV tiles (algorithm 1)
// in one persistent launch. A block of four warps walks one worker's queue; short and long queries
// have loops of their own.
#pragma once

#include "raddle/engine/kernel/mma/long_queries.h"
#include "raddle/engine/kernel/mma/short_queries.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Called, not inlined: together the three loops would keep each other's values in registers.
template <class K, class V, i32 blocks>
RADDLE_COLD void attend_long(const MmaLaunch& launch, const V& variant, i32 item) {
  LongQueries<K, V, blocks>(launch, variant, item).run();
}

/// One worker's queue.
template <class K, class V>
RADDLE_DEVICE void attend(const MmaLaunch& launch, const V& variant) {
  const PlanView& plan = launch.plan;
  const i32 worker = ptx::block_index();
  const i32 end = plan.queue_indptr[worker + 1];
  for (i32 i = plan.queue_indptr[worker]; i < end;) {
    const QueryTile& tile = plan.query_tiles[plan.items[i].query_tile];
    if (tile.shape == 0) {
      i = ShortQueries<K, V>(launch, variant, i, end).run();
    } else {
      if (K::long_rows > 64 && tile.num_rows > 64)
        attend_long<K, V, K::long_rows / 64>(launch, variant, i);
      else
        attend_long<K, V, 1>(launch, variant, i);
      ++i;
    }
  }
}

}  // namespace mma

RADDLE_ENGINE_END
