// Attention for GPUs with mma.sync (sm_80 on): FlashAttention-2's loop over KV tiles (algorithm 1)
// in one persistent launch. A block of four warps walks one worker's queue; short and long queries
// have loops of their own.
#pragma once

#include "raddle/engine/kernel/mma/long_queries.h"
#include "raddle/engine/kernel/mma/short_queries.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A line a thread: then the chain of queue, item, tile, page table that leads to the first key is
/// answered by the L2 cache.
RADDLE_DEVICE void prefetch_arrays(const MmaLaunch& launch) {
  const i64 at = 128 * (i64{num_threads} * ptx::block_index() + ptx::thread_index());
  if (at < launch.array_bytes) ptx::prefetch(launch.arrays + at);
}

/// What waits for other workers' states, when a queue is done.
template <class K, class V>
RADDLE_DEVICE void finish_queue(const MmaLaunch& launch, const V& variant, i32 begin, i32 end) {
  if (launch.layout.num_levels < 2) return;
  contract_all_claimed<K>(launch, variant, begin, end, ShortLayout<K>::completed_bits(),
                          ShortLayout<K>::vector(ptx::warp_index()));
}

/// One worker's queue: its long queries, then its short ones. Two loops one after the other leave
/// each of them all registers; as branches of one loop, they spill.
template <class K, class V>
RADDLE_DEVICE void attend(const MmaLaunch& launch, const V& variant) {
  const PlanView& plan = launch.plan;
  prefetch_arrays(launch);
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
  finish_queue<K>(launch, variant, begin, end);
}

/// The same where all items are of short queries, as in a batch that only decodes: a third of the
/// code, none of it waiting behind registers of the other loop.
template <class K, class V>
RADDLE_DEVICE void attend_short(const MmaLaunch& launch, const V& variant) {
  prefetch_arrays(launch);
  const i32 worker = ptx::block_index();
  const i32 begin = launch.plan.queue_indptr[worker], end = launch.plan.queue_indptr[worker + 1];
  mark(launch, TimelineStage::started, begin);
  for (i32 i = begin; i < end;) i = ShortQueries<K, V>(launch, variant, i, end).run();
  finish_queue<K>(launch, variant, begin, end);
}

}  // namespace mma

RADDLE_ENGINE_END
