// What a worker composes when its queue is done: shares of what its items are states of, when other
// workers' states are there. Of many rows, a team together; of few rows, as decoding has them, each
// warp what it finds ready first, for a prefix's last piece completes hundreds of contractions.
#pragma once

#include "raddle/engine/kernel/mma/arrive.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// How long a worker waits for others, all contractions together. Whoever is missing may not have a
/// multiprocessor before this block leaves its own, as beside kernels of other streams: then the
/// last to arrive composes what was this worker's.
constexpr i64 patience_ns = 1'000'000;

/// A worker's part in a contraction.
struct Share {
  i32 which = -1;  ///< the contraction's number; -1: it has none
  i32 kv_head = 0;
  i32 count = 0;      ///< shares of its rows
  i32 workers = 0;    ///< that look for some
  bool few = false;   ///< rows
  bool more = false;  ///< contractions wait for the item than have been looked up
};

RADDLE_DEVICE i32 counter_of(const MmaLaunch& launch, const Share& share) {
  return counter_of(launch.plan, share.which, share.kv_head);
}

/// The part of an item's worker in contraction number `nth` of those that wait for the item; where
/// they are many, of those that its tile's chunks deal to this one.
RADDLE_DEVICE Share look_up_share(const MmaLaunch& launch, const WorkItem& item, i32 nth) {
  const PlanView& plan = launch.plan;
  if (item.partial_row < 0) return Share{};
  const QueryTile& tile = plan.query_tiles[item.query_tile];
  const Split split = plan.splits[tile.split + item.kv_head];
  const i32 chunk = quotient(item.partial_row - split.partial_row, tile.num_rows);
  const i32 dependents = tile.dependents_end - tile.dependents_begin;
  const bool dealt = dependents > most_dependents;
  if (dealt) nth = chunk + nth * split.num_chunks;
  if (nth >= dependents) return Share{};
  const i32 which = plan.dependents[tile.dependents_begin + nth];
  const Shares shares = look_up_shares(plan, which, item.kv_head);
  const bool own = tile.level + 1 == launch.layout.num_levels;
  const bool mine =
      shares.few ? launch.layout.num_levels > 1 && chunk == (own ? 0 : nth % split.num_chunks)
                 : !dealt && chunk + (own ? 0 : shares.own) < shares.count;
  Share found;
  if (mine && (own || shares.helper == item.query_tile))
    found = Share{which, item.kv_head, shares.count, shares.workers, shares.few};
  found.more = dealt && nth + most_dependents * split.num_chunks < dependents;
  return found;
}

/// Which of a warp's lanes took a share, and the share's number.
struct Taken {
  i32 lane, nth;
};

/// Waits until all states are there of a contraction of which a lane knows its worker's part, and
/// takes a share for it; lane -1: there is none left to wait for. A lane forgets what is seen to:
/// of a single share, that somebody else took it, and what was waited for too long. A warp's work.
RADDLE_DEVICE Taken take_ready(const MmaLaunch& launch, Share& mine, i32 expected, i64 deadline) {
  i32* word = launch.arrived + (mine.which >= 0 ? counter_of(launch, mine) : 0);
  while (ptx::ballot(mine.which >= 0) != 0) {
    const bool waits = mine.which >= 0, late = ptx::global_time() >= deadline;
    Arrivals seen{waits ? ptx::load_relaxed(word) : 0};
    if (waits && late && seen.count() < expected)
      seen.word = ptx::atomic_add(word, Arrivals::one_left);
    const bool complete = waits && seen.count() >= expected;
    const bool others = complete && mine.count == 1 && seen.taken() > 0;
    const u32 ready = ptx::ballot(complete && !others);
    const i32 first = ready != 0 ? ptx::lowest_bit(ready) : -1;
    i32 nth = mine.count;
    if (others || ptx::lane_index() == first) nth = take_share(word, mine.count, mine.workers);
    if (others || (late && !complete) || ptx::lane_index() == first) mine.which = -1;
    if (ready == 0) {
      ptx::sleep(100);
    } else if (const i32 taken = ptx::shuffle(nth, first);
               taken < ptx::shuffle(mine.count, first)) {
      return Taken{first, taken};
    }
  }
  return Taken{-1, 0};
}

/// Composes what a crew waits for, each contraction when it is complete: lanes have `found` them,
/// and wait for those of which they have a `share`.
template <class K, class V>
RADDLE_DEVICE void compose_ready(const MmaLaunch& launch, const V& variant, const Share& found,
                                 Share share, i32 expected, Crew crew, i64 deadline, u32* bits,
                                 float* vector) {
  const bool tells = ptx::thread_index() == 0;
  while (true) {
    Taken taken{};
    if (crew.alone || ptx::warp_index() == 0) taken = take_ready(launch, share, expected, deadline);
    if (!crew.alone) {
      taken.lane = tell_team<K>(tells, taken.lane, bits);
      taken.nth = tell_team<K>(tells, taken.nth, bits);
    }
    if (taken.lane < 0) return;
    const Sources sources = look_up_sources(launch.plan, ptx::shuffle(found.which, taken.lane),
                                            ptx::shuffle(found.kv_head, taken.lane));
    ptx::sync_warp();     // one lane has seen their arrival
    ptx::fence_device();  // the others' states, after that
    contract<K>(launch, variant, sources, ptx::shuffle(found.count, taken.lane), taken.nth, crew,
                tells, bits, vector);
  }
}

/// Composes this worker's shares of what the items [begin, end) of its queue, all of them done, are
/// states of. `bits` has a word a warp in shared memory.
template <class K, class V>
RADDLE_DEVICE void contract_shares(const MmaLaunch& launch, const V& variant, i32 begin, i32 end,
                                   u32* bits, float* vector) {
  constexpr i32 at_a_time = 32 / most_dependents;
  const PlanView& plan = launch.plan;
  const i64 deadline = ptx::global_time() + patience_ns;
  const i32 lane = ptx::lane_index();
  i32 nth = lane % most_dependents;
  for (i32 first = begin; first < end;) {
    const i32 item = first + lane / most_dependents;
    Share found;
    if (item < end) found = look_up_share(launch, plan.items[item], nth);
    const i32 expected = found.which >= 0 ? plan.expected[counter_of(launch, found)] : 0;
    // Of several contractions of few rows, each warp looks after some.
    const u32 few = ptx::ballot(found.few);
    const bool apart = ptx::count_bits(few) > num_warps / 2;
    RADDLE_ROLLED
    for (i32 pass = apart ? 0 : 1; pass < 2; ++pass) {
      const Crew crew{pass == 0};
      const i32 turn = ptx::count_bits(few & ((1u << lane) - 1u)) % num_warps;
      const bool mine = !crew.alone || turn == ptx::warp_index();
      Share share = found;
      if (!mine || (apart && found.few) != crew.alone) share.which = -1;
      compose_ready<K>(launch, variant, found, share, expected, crew, deadline, bits, vector);
    }
    const bool more = ptx::ballot(found.more) != 0;
    nth = more ? nth + most_dependents : lane % most_dependents;
    if (!more) first += at_a_time;
  }
}

}  // namespace mma

RADDLE_ENGINE_END
