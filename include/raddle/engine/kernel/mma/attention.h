// Attention for GPUs with mma.sync (sm_75 on): FlashAttention-2's loop over KV tiles (algorithm 1)
// in one persistent launch. A block of four warps walks one worker's queue; short and long queries
// have loops of their own.
#pragma once

#include "raddle/engine/kernel/mma/long_queries.h"
#include "raddle/engine/kernel/mma/queue_end.h"
#include "raddle/engine/kernel/mma/short_queries.h"
#include "raddle/engine/kernel/mma/wide_queries.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Has the L2 cache fetch a line a thread: all of layout and plan, so that the chain of queue,
/// item, tile, page table that leads to the first key is short, and queries, which would otherwise
/// wait behind the keys of all workers.
template <class K>
RADDLE_DEVICE void prefetch_inputs(const MmaLaunch& launch) {
  const i32 thread = num_threads * worker_index<K>() + ptx::thread_index();
  if (128 * i64{thread} < launch.array_bytes) ptx::prefetch(launch.arrays + 128 * i64{thread});
  constexpr i32 row_bytes = K::dim_qk * static_cast<i32>(sizeof(typename K::T));
  constexpr i32 lines = ceil_div(row_bytes, 128);
  const i32 num_heads = launch.plan.num_kv_heads * launch.plan.group_size;
  const i32 nth = thread / lines;
  if (nth >= launch.query_rows * num_heads) return;  // most threads, before they divide
  const i32 row = nth / num_heads, head = nth % num_heads;
  const auto* query = static_cast<const typename K::T*>(launch.q.data) + row * launch.q.row_stride +
                      head * launch.q.head_stride;
  ptx::prefetch(reinterpret_cast<const u8*>(query) + 128 * (thread % lines));
}

/// One worker's queue: compute(begin, end) computes its items and says whether rows of theirs are
/// composed in shares; these come last, when other workers' states are there.
template <class K, class V, class Compute>
RADDLE_DEVICE void attend_queue(const MmaLaunch& launch, const V& variant, Compute compute) {
  if (K::teams > 1 && worker_index<K>() >= launch.plan.num_workers) return;  // one of an odd number
  // Asked for first, which takes longest, and waited for last.
  const i32* queue = launch.plan.queue_indptr + worker_index<K>();
  const i32 begin = ptx::load_now(queue), end = ptx::load_now(queue + 1);
  prefetch_inputs<K>(launch);
  // Its address lies in constant memory of its own, which answers while the queue does.
  ptx::prefetch(zeros<K>());
  mark<K>(launch, TimelineStage::started, begin);
  if (!compute(begin, end) || begin == end) return;
  using Layout = typename Either<K::wide, ShortWideLayout<K>, ShortLayout<K>>::Type;
  // The queue is asked anew: what is kept so long takes registers from the loops.
  contract_shares<K>(launch, variant, ptx::load_now(queue), ptx::load_now(queue + 1),
                     Layout::completed_bits(), Layout::vector(ptx::warp_index()));
  mark<K>(launch, TimelineStage::contracted, end - 1);
}

/// Who computes items of either shape.
template <class K, class V>
using Long = typename Either<K::wide, WideQueries<K, V, K::long_rows / 16>,
                             LongQueries<K, V, K::long_rows / 64>>::Type;
template <class K, class V>
using Short = typename Either<K::wide, WideQueries<K, V, 1>, ShortQueries<K, V>>::Type;

/// The long item after `item`: of the block's own queue, then of the open one, in which the block's
/// own numbers have no place; negative, if there is none. One thread asks, once for each item; who
/// finds the open queue empty last has the next launch begin anew.
RADDLE_DEVICE i32 next_long(const MmaLaunch& launch, i32 item) {
  const PlanView& plan = launch.plan;
  const i32* own = plan.queue_indptr + ptx::block_index();
  for (i32 i = item + 1; i < own[1]; ++i)
    if (plan.query_tiles[plan.items[i].query_tile].shape == 1) return i;
  const i32* open = plan.queue_indptr + plan.num_workers;
  if (open[0] == open[1]) return -1;
  const i32 drawn = open[0] + ptx::atomic_add(launch.drawn, 1);
  if (drawn < open[1]) return drawn;
  if (ptx::atomic_add(launch.drawn + 1, 1) == plan.num_workers - 1)
    launch.drawn[0] = launch.drawn[1] = 0;
  return -1;
}

/// The block's first long item, for all of its threads: a lane for each of its own.
RADDLE_DEVICE i32 first_long(const MmaLaunch& launch, i32 begin, i32 end) {
  const PlanView& plan = launch.plan;
  i32& first = *static_cast<i32*>(ptx::shared_memory());
  if (ptx::warp_index() == 0) {
    u32 found = 0;
    i32 i = begin;
    for (; i < end && found == 0; i += 32) {
      const i32 mine = i + ptx::lane_index();
      found = ptx::ballot(mine < end && plan.query_tiles[plan.items[mine].query_tile].shape == 1);
    }
    if (ptx::lane_index() == 0)
      first = found != 0 ? i - 32 + ptx::lowest_bit(found) : next_long(launch, end);
  }
  ptx::sync_block();
  const i32 item = first;
  ptx::sync_block();  // before anything else takes its place
  return item;
}

/// Long queries, a worker's own and then those that it draws, then short ones. Two loops one after
/// the other leave each of them all registers; as branches of one loop, they spill.
template <class K, class V>
RADDLE_DEVICE void attend(const MmaLaunch& launch, const V& variant) {
  const PlanView& plan = launch.plan;
  const auto is_short = [&](i32 i) {
    return plan.query_tiles[plan.items[i].query_tile].shape == 0;
  };
  attend_queue<K>(launch, variant, [&](i32 begin, i32 end) {
    RADDLE_ROLLED
    for (i32 i = first_long(launch, begin, end); i >= 0;)
      i = Long<K, V>(launch, variant, i).run([&](i32 item) { return next_long(launch, item); });
    for (i32 i = begin; i < end;)
      i = is_short(i) ? Short<K, V>(launch, variant, i, end).run() : i + 1;
    return true;
  });
}

/// The same where all items are of short queries, as in a batch that only decodes: a third of the
/// code, none of it waiting behind registers of the other loop.
template <class K, class V>
RADDLE_DEVICE void attend_short(const MmaLaunch& launch, const V& variant) {
  attend_queue<K>(launch, variant, [&](i32 begin, i32 end) {
    bool shares = launch.layout.num_levels > 1;
    for (i32 i = begin; i < end;) {
      Short<K, V> items(launch, variant, i, end);
      i = items.run();
      shares = shares || items.leaves_shares();
    }
    return shares;
  });
}

}  // namespace mma

RADDLE_ENGINE_END
