// Attention for GPUs with mma.sync (sm_80 on): FlashAttention-2's loop over KV tiles (algorithm 1)
// in one persistent launch. A block of four warps walks one worker's queue; short and long queries
// have loops of their own.
#pragma once

#include "raddle/engine/kernel/mma/long_queries.h"
#include "raddle/engine/kernel/mma/short_queries.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// One worker's queue: its long queries, then its short ones. Two loops one after the other leave
/// each of them all registers; as branches of one loop, they spill.
template <class K, class V>
RADDLE_DEVICE void attend(const MmaLaunch& launch, const V& variant) {
  const PlanView& plan = launch.plan;
  const i32 worker = ptx::block_index();
  const i32 begin = plan.queue_indptr[worker], end = plan.queue_indptr[worker + 1];
  const auto is_short = [&](i32 i) {
    return plan.query_tiles[plan.items[i].query_tile].shape == 0;
  };
  mark(launch, TimelineStage::started, begin);
  for (i32 i = begin; i < end; ++i)
    if (!is_short(i)) LongQueries<K, V, K::long_rows / 64>(launch, variant, i).run();
  for (i32 i = begin; i < end;)
    i = is_short(i) ? ShortQueries<K, V>(launch, variant, i, end).run() : i + 1;
}

/// The same where all items are of short queries, as in a batch that only decodes: a third of the
/// code, none of it waiting behind registers of the other loop.
template <class K, class V>
RADDLE_DEVICE void attend_short(const MmaLaunch& launch, const V& variant) {
  const i32 worker = ptx::block_index();
  const i32 end = launch.plan.queue_indptr[worker + 1];
  i32 i = launch.plan.queue_indptr[worker];
  mark(launch, TimelineStage::started, i);
  while (i < end)
    i = ShortQueries<K, V>(launch, variant, i, end).run();
}

}  // namespace mma

RADDLE_ENGINE_END
