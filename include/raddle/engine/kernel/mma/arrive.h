// Who composes partial states, and when: items arrive at the contractions that wait for them, and
// one worker composes each.
#pragma once

#include "raddle/engine/kernel/mma/contract.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// What a contraction's word in `arrived` says: how many items have, and which worker has said that
/// it will contract, plus one.
struct Arrivals {
  i32 word;
  RADDLE_DEVICE static i32 claim(i32 worker) { return (worker + 1) << 16; }
  RADDLE_DEVICE i32 count() const { return word & 0xffff; }
  RADDLE_DEVICE bool is_claimed() const { return word >> 16 != 0; }
  RADDLE_DEVICE bool is_claimed_by(i32 worker) const { return word >> 16 == worker + 1; }
};

/// In a cascade, who computes rows of their own contracts them at the end of its queue: the last
/// item to arrive may be a piece of a prefix that hundreds of contractions wait for. Of several
/// pieces the first one's worker does.
RADDLE_DEVICE bool claims(const MmaLaunch& launch, const WorkItem& item, const QueryTile& tile) {
  const bool last_level = tile.level + 1 == launch.layout.num_levels;
  if (launch.layout.num_levels < 2 || !last_level || item.partial_row < 0) return false;
  return launch.plan.splits[tile.split + item.kv_head].partial_row == item.partial_row;
}

/// What an item's arrival needs of the plan, for one of the contractions that wait for it, a thread
/// each. Asked for early, in two steps, it is waited for by nobody.
struct Awaiting {
  i32 at = -1;        ///< its word in `arrived`; -1: none
  i32 expected = 0;   ///< items
  Split split{0, 0};  ///< of the item's tile

  /// Contraction number `nth` of those that wait for an item.
  RADDLE_DEVICE void find(const MmaLaunch& launch, const WorkItem& item, const QueryTile& tile,
                          i32 nth) {
    at = -1;
    if (item.partial_row < 0) return;
    split = launch.plan.splits[tile.split + item.kv_head];
    if (tile.dependents_begin + nth < tile.dependents_end)
      at = launch.plan.dependents[tile.dependents_begin + nth] * launch.plan.num_kv_heads +
           item.kv_head;
  }
  RADDLE_DEVICE void expect(const MmaLaunch& launch) {
    if (at >= 0) expected = launch.plan.expected[at];
  }
};

/// Both steps at once.
RADDLE_DEVICE Awaiting look_up_awaiting(const MmaLaunch& launch, const WorkItem& item, i32 nth) {
  Awaiting found;
  found.find(launch, item, launch.plan.query_tiles[item.query_tile], nth);
  found.expect(launch);
  return found;
}

/// Counts an item up at every contraction that waits for it, and composes those it completes and
/// nobody has claimed. All threads of the team come here with the item's state stored; `awaiting`
/// is the thread's first. `completed`, in shared memory, has a word a warp.
template <class K, class V>
RADDLE_COLD void arrive(const MmaLaunch& launch, const V& variant, const WorkItem& item,
                        Awaiting awaiting, u32* completed, float* vector) {
  const QueryTile& tile = launch.plan.query_tiles[item.query_tile];
  const i32 count = tile.dependents_end - tile.dependents_begin, worker = worker_index<K>();
  const i32 mark = claims(launch, item, tile) ? Arrivals::claim(worker) : 0;
  sync_team<K>();  // the state is stored
  for (i32 first = 0; first < count; first += num_threads) {
    if (first > 0) awaiting = look_up_awaiting(launch, item, first + ptx::thread_index());
    bool last = false;
    if (awaiting.at >= 0) {
      ptx::fence_device();  // the block's state before its arrival
      const Arrivals before{ptx::atomic_add(&launch.arrived[awaiting.at], 1 + mark)};
      last = before.count() + 1 == awaiting.expected && !before.is_claimed();
      if (last) launch.arrived[awaiting.at] = 0;
    }
    const u32 of_warp = ptx::ballot(last);
    if (ptx::lane_index() == 0) completed[ptx::warp_index()] = of_warp;
    sync_team<K>();
    for (i32 i = 0; i < min(num_threads, count - first); ++i) {
      if (!(completed[i / 32] >> (i % 32) & 1)) continue;
      ptx::fence_device();  // the others' states, after their arrival
      if (launch.layout.num_levels == 1) {
        contract<K>(launch, variant, tile, own_sources(tile, awaiting.split, item.kv_head), vector);
      } else {
        const i32 which = launch.plan.dependents[tile.dependents_begin + first + i];
        contract<K>(launch, variant, look_up_sources(launch.plan, which, item.kv_head), vector);
      }
    }
    sync_team<K>();
  }
}

/// How long a claim is waited for. Whoever is missing may not have a multiprocessor before this
/// block leaves its own: then the last to arrive contracts.
constexpr i64 patience_ns = 10'000'000;

/// Whether this worker has claimed a contraction, and all it waits for has arrived. One thread's
/// work; the word is zero afterwards, or no longer this worker's.
template <class K>
RADDLE_DEVICE bool await_claimed(const MmaLaunch& launch, i32 at) {
  i32* word = launch.arrived + at;
  const i32 worker = worker_index<K>(), expected = launch.plan.expected[at];
  Arrivals seen{ptx::load_acquire(word)};
  if (!seen.is_claimed_by(worker)) return false;
  const i64 deadline = ptx::global_time() + patience_ns;
  while (seen.count() < expected && ptx::global_time() < deadline) {
    ptx::sleep(100);
    seen.word = ptx::load_acquire(word);
  }
  if (seen.count() < expected) seen.word = ptx::atomic_add(word, -Arrivals::claim(worker));
  if (seen.count() < expected) return false;
  *word = 0;
  return true;
}

/// What the contraction that an item's worker has claimed composes.
RADDLE_DEVICE Sources look_up_claimed(const PlanView& plan, const WorkItem& item) {
  const i32 first = plan.query_tiles[item.query_tile].dependents_begin;
  return look_up_sources(plan, plan.dependents[first], item.kv_head);
}

/// Contracts what this worker has claimed of the items [begin, end) of its queue, all of them done:
/// a few at a time are looked up, waited for, and composed. `ready` is a word in shared memory.
template <class K, class V>
RADDLE_DEVICE void contract_all_claimed(const MmaLaunch& launch, const V& variant, i32 begin,
                                        i32 end, u32* ready, float* vector) {
  constexpr i32 at_a_time = 4;
  for (i32 next = begin; next < end;) {
    Sources claimed[at_a_time];
    RADDLE_UNROLL
    for (i32 i = 0; i < at_a_time; ++i) {
      for (; next < end && claimed[i].which < 0; ++next) {
        const WorkItem& item = launch.plan.items[next];
        if (claims(launch, item, launch.plan.query_tiles[item.query_tile]))
          claimed[i] = look_up_claimed(launch.plan, item);
      }
    }
    sync_team<K>();  // `ready` has been read
    if (ptx::warp_index() == 0) {
      i32 at = -1;
      RADDLE_UNROLL
      for (i32 i = 0; i < at_a_time; ++i)
        if (ptx::lane_index() == i && claimed[i].which >= 0)
          at = claimed[i].which * launch.plan.num_kv_heads + claimed[i].kv_head;
      const u32 of_warp = ptx::ballot(at >= 0 && await_claimed<K>(launch, at));
      if (ptx::lane_index() == 0) *ready = of_warp;
    }
    sync_team<K>();
    ptx::fence_device();  // the others' states, after their arrival
    RADDLE_UNROLL
    for (i32 i = 0; i < at_a_time; ++i)
      if (*ready >> i & 1) contract<K>(launch, variant, claimed[i], vector);
  }
}

}  // namespace mma

RADDLE_ENGINE_END
