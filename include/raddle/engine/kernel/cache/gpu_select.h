// Selects the k best pages of a list on a GPU: one thread block a list.
#pragma once

#include "raddle/engine/kernel/cache/launch.h"
#include "raddle/engine/kernel/cache/select.h"
#include "raddle/engine/kernel/cache/warp.h"

RADDLE_ENGINE_BEGIN

namespace kv {

/// Exchanges a number a warp between the warps of a block. Two sets take turns, so that a round
/// needs one barrier: a set is written again only after all warps have passed the barrier of the
/// next round.
class WarpCounts {
 public:
  RADDLE_DEVICE explicit WarpCounts(i32* shared) : set_(shared) {}

  /// Returns the numbers of all warps, in order.
  RADDLE_DEVICE const i32* share(i32 mine) {
    i32* set = set_ + round_ * num_select_warps;
    round_ ^= 1;
    if (ptx::thread_index() % 32 == 0) set[ptx::thread_index() / 32] = mine;
    ptx::sync_block();
    return set;
  }

  /// The sum over the block.
  RADDLE_DEVICE i32 sum(i32 mine) {
    const i32* all = share(mine);
    i32 total = 0;
    for (i32 w = 0; w < num_select_warps; ++w) total += all[w];
    return total;
  }

 private:
  i32* set_;
  i32 round_ = 0;
};

/// How many of n keys are at least `bound`.
RADDLE_DEVICE i32 count_from(const u32* keys, i32 n, u32 bound, WarpCounts& counts) {
  i32 mine = 0;
  for (i32 first = 0; first < n; first += num_select_threads) {
    const i32 i = first + ptx::thread_index();
    mine += ptx::count_bits(ptx::ballot(i < n && keys[i] >= bound));
  }
  return counts.sum(mine);
}

/// The k-th largest of n keys, bit by bit from the top; 1 <= k <= n.
RADDLE_DEVICE u32 kth_largest(const u32* keys, i32 n, i32 k, WarpCounts& counts) {
  u32 found = 0;
  for (u32 bit = 0x80000000u; bit != 0; bit >>= 1)
    if (count_from(keys, n, found | bit, counts) >= k) found |= bit;
  return found;
}

/// The votes of a block, in thread order: how many came before this thread's, and how many there
/// are.
struct Rank {
  i32 before;
  i32 all;
};
RADDLE_DEVICE Rank rank_of(bool yes, WarpCounts& counts) {
  const u32 votes = ptx::ballot(yes);
  const i32* warps = counts.share(ptx::count_bits(votes));
  const u32 lower = (1u << (ptx::thread_index() % 32)) - 1u;
  Rank rank{ptx::count_bits(votes & lower), 0};
  for (i32 w = 0; w < num_select_warps; ++w) {
    if (w < ptx::thread_index() / 32) rank.before += warps[w];
    rank.all += warps[w];
  }
  return rank;
}

/// Writes the list's best pages in their order in the request. Of equal scores earlier pages win.
RADDLE_DEVICE void select(const SelectLaunch& launch) {
  const SelectView& view = launch.view;
  const i64 list = ptx::block_index();
  const i32 request = static_cast<i32>(list / lists_of_request(view));
  const i32 pages = pages_of_group(launch.level, request);
  const i32 k = min(view.num_selected, pages);
  const u32* keys = view.scores + list * view.max_pages;
  WarpCounts counts(static_cast<i32*>(ptx::shared_memory()));
  i32 written = 0;
  if (k > 0) {
    const u32 least = kth_largest(keys, pages, k, counts);
    i32 ties_left = k - (least == kept_key ? 0 : count_from(keys, pages, least + 1, counts));
    for (i32 first = 0; first < pages; first += num_select_threads) {
      const i32 nth = first + ptx::thread_index();
      const u32 key = nth < pages ? keys[nth] : 0u;
      const Rank tie = rank_of(nth < pages && key == least, counts);
      const bool chosen = nth < pages && (key > least || (key == least && tie.before < ties_left));
      const Rank rank = rank_of(chosen, counts);
      if (chosen) write_selected(view, launch.level, request, list, written + rank.before, nth);
      written += rank.all;
      ties_left = max(ties_left - tie.all, 0);
    }
  }
  for (i32 i = written + ptx::thread_index(); i < view.num_selected; i += num_select_threads)
    write_none(view, list, i);
}

}  // namespace kv

RADDLE_ENGINE_END
