// Attention for GPUs with mma.sync (sm_75 on): FlashAttention-2's loop over KV tiles (algorithm 1)
// in one persistent launch. A block of four warps walks one worker's queue; short and long queries
// have loops of their own.
#pragma once

#include "raddle/engine/kernel/mma/long_queries.h"
#include "raddle/engine/kernel/mma/short_queries.h"
#include "raddle/engine/kernel/mma/wide_queries.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A line a thread: then the chain of queue, item, tile, page table that leads to the first key is
/// answered by the L2 cache.
RADDLE_DEVICE void prefetch_arrays(const MmaLaunch& launch) {
  const i64 at = 128 * (i64{num_threads} * ptx::block_index() + ptx::thread_index());
  if (at < launch.array_bytes) ptx::prefetch(launch.arrays + at);
}

/// One worker's queue: compute(begin, end) computes its items; then comes what waits for other
/// workers' states.
template <class K, class V, class Compute>
RADDLE_DEVICE void attend_queue(const MmaLaunch& launch, const V& variant, Compute compute) {
  prefetch_arrays(launch);
  const i32* queue = launch.plan.queue_indptr + ptx::block_index();
  const i32 begin = queue[0], end = queue[1];
  mark(launch, TimelineStage::started, begin);
  compute(begin, end);
  using Layout = typename Either<K::wide, ShortWideLayout<K>, ShortLayout<K>>::Type;
  if (launch.layout.num_levels > 1)
    contract_all_claimed<K>(launch, variant, begin, end, Layout::completed_bits(),
                            Layout::vector(ptx::warp_index()));
}

/// Who computes items of either shape.
template <class K, class V>
using Long = typename Either<K::wide, WideQueries<K, V, K::long_rows / 16>,
                             LongQueries<K, V, K::long_rows / 64>>::Type;
template <class K, class V>
using Short = typename Either<K::wide, WideQueries<K, V, 1>, ShortQueries<K, V>>::Type;

/// Long queries, then short ones. Two loops one after the other leave each of them all registers;
/// as branches of one loop, they spill.
template <class K, class V>
RADDLE_DEVICE void attend(const MmaLaunch& launch, const V& variant) {
  const PlanView& plan = launch.plan;
  const auto is_short = [&](i32 i) {
    return plan.query_tiles[plan.items[i].query_tile].shape == 0;
  };
  attend_queue<K>(launch, variant, [&](i32 begin, i32 end) {
    for (i32 i = begin; i < end; ++i)
      if (!is_short(i)) Long<K, V>(launch, variant, i).run();
    for (i32 i = begin; i < end;)
      i = is_short(i) ? Short<K, V>(launch, variant, i, end).run() : i + 1;
  });
}

/// The same where all items are of short queries, as in a batch that only decodes: a third of the
/// code, none of it waiting behind registers of the other loop.
template <class K, class V>
RADDLE_DEVICE void attend_short(const MmaLaunch& launch, const V& variant) {
  attend_queue<K>(launch, variant, [&](i32 begin, i32 end) {
    for (i32 i = begin; i < end;) i = Short<K, V>(launch, variant, i, end).run();
  });
}

}  // namespace mma

RADDLE_ENGINE_END
