// Attention for GPUs with mma.sync (sm_80 on): FlashAttention-2's loop over KV tiles (algorithm 1)
// in one persistent launch. A block of four warps walks one worker's queue; short and long queries
// have loops of their own.
#pragma once

#include "raddle/engine/kernel/mma/long_queries.h"
#include "raddle/engine/kernel/mma/short_queries.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// One worker's queue.
template <class K, class V>
RADDLE_DEVICE void attend(const MmaLaunch& launch, const V& variant) {
  const PlanView& plan = launch.plan;
  const i32 worker = ptx::block_index();
  const i32 end = plan.queue_indptr[worker + 1];
  for (i32 i = plan.queue_indptr[worker]; i < end;) {
    if (plan.query_tiles[plan.items[i].query_tile].shape == 0)
      i = ShortQueries<K, V>(launch, variant, i, end).run();
    else
      LongQueries<K, V, K::long_rows / 64>(launch, variant, i++).run();
  }
}

/// The same where all items are of short queries, as in a batch that only decodes: a third of the
/// code, none of it waiting behind registers of the other loop.
template <class K, class V>
RADDLE_DEVICE void attend_short(const MmaLaunch& launch, const V& variant) {
  const i32 worker = ptx::block_index();
  const i32 end = launch.plan.queue_indptr[worker + 1];
  for (i32 i = launch.plan.queue_indptr[worker]; i < end;)
    i = ShortQueries<K, V>(launch, variant, i, end).run();
}

}  // namespace mma

RADDLE_ENGINE_END
