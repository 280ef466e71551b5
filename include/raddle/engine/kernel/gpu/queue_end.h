// What a worker composes when its queue is done: its shares of the contractions that its items hold
// states of, once the other workers' states are stored. The whole team composes contractions of
// many rows together. Of contractions of few rows, as decoding has them, each warp composes
// whichever is ready first, because the last piece of a prefix completes hundreds of them.
#pragma once

#include "raddle/engine/kernel/gpu/arrive.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// How long a worker waits for others, all contractions together. A missing worker may not get a
/// multiprocessor before this block ends, for instance beside kernels of other streams. Then this
/// worker gives up, and the last one to arrive composes its shares.
constexpr i64 contraction_timeout_ns = 1'000'000;

/// A worker's part in a contraction.
struct WorkerShare {
  i32 which = -1;  ///< the contraction's number; -1: it has none
  i32 kv_head = 0;
  i32 count = 0;      ///< shares of the contraction's rows
  i32 workers = 0;    ///< workers that look for a share
  bool few = false;   ///< the contraction has few rows
  bool more = false;  ///< more contractions wait for the item than have been looked up
};

RADDLE_DEVICE i32 counter_of(const GpuLaunch& launch, const WorkerShare& share) {
  return counter_of(launch.plan, share.which, share.kv_head);
}

/// The part of an item's worker in contraction number `nth` of those that wait for the item. Where
/// many wait, only those are counted that the chunks of the tile deal to this worker. `at_a_time`
/// are looked up side by side.
template <class Team>
RADDLE_DEVICE WorkerShare look_up_worker_share(const GpuLaunch& launch, const WorkItem& item,
                                               i32 nth, i32 at_a_time = most_dependents) {
  const PlanView& plan = launch.plan;
  if (item.partial_row < 0) return WorkerShare{};
  const QueryTile& tile = plan.query_tiles[item.query_tile];
  const Split split = plan.splits[tile.split + item.kv_head];
  const i32 chunk = quotient(item.partial_row - split.partial_row, tile.num_rows);
  const i32 dependents = tile.dependents_end - tile.dependents_begin;
  const bool dealt = dependents > most_dependents;
  i32 next = nth + at_a_time;  // where a further look goes on
  if (dealt) nth = chunk + nth * split.num_chunks, next = chunk + next * split.num_chunks;
  if (nth >= dependents) return WorkerShare{};
  const i32 which = plan.dependents[tile.dependents_begin + nth];
  const ContractionShares shares = look_up_shares<Team>(plan, which, item.kv_head);
  const bool own = tile.level + 1 == launch.layout.num_levels;
  const bool mine =
      shares.few ? launch.layout.num_levels > 1 && chunk == (own ? 0 : nth % split.num_chunks)
                 : !dealt && chunk + (own ? 0 : shares.own) < shares.count;
  WorkerShare found;
  if (mine && (own || shares.helper == item.query_tile))
    found = WorkerShare{which, item.kv_head, shares.count, shares.workers, shares.few};
  found.more = next < dependents;
  return found;
}

/// The lane whose contraction is ready, and the number of the share that it took.
struct TakenShare {
  i32 lane, nth;
};

/// What has arrived at a share's contraction, if the lane waits for it. A lane whose wait took too
/// long says that it gives up, unless all states have arrived meanwhile.
RADDLE_DEVICE Arrivals look_at_share(i32* word, bool waits, bool late, i32 expected) {
  Arrivals seen{waits ? ptx::load_relaxed(word) : 0};
  if (waits && late && seen.count() < expected)
    seen.word = ptx::atomic_add(word, Arrivals::one_left);
  return seen;
}

/// Each lane knows its worker's part in one contraction. Waits until all states of one of these are
/// stored, and takes a share of it; returns lane -1 when no lane has a part left to wait for. A
/// lane drops its part when it is settled: when another worker took the only share, or the wait
/// took too long. All lanes of the warp call it.
RADDLE_DEVICE TakenShare wait_for_share(const GpuLaunch& launch, WorkerShare& mine, i32 expected,
                                        i64 deadline) {
  i32* word = launch.arrived + (mine.which >= 0 ? counter_of(launch, mine) : 0);
  while (ptx::ballot(mine.which >= 0) != 0) {
    const bool waits = mine.which >= 0, late = ptx::global_time() >= deadline;
    const Arrivals seen = look_at_share(word, waits, late, expected);
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
      return TakenShare{first, taken};
    }
  }
  return TakenShare{-1, 0};
}

/// Composes the contractions that the row workers wait for, each when it is complete. Lanes have
/// `found` them, and wait for those of which they have a `share`.
template <class Kernel, class Variant>
RADDLE_DEVICE void compose_ready(const GpuLaunch& launch, const Variant& variant,
                                 const WorkerShare& found, WorkerShare share, i32 expected,
                                 RowWorkers<typename Kernel::Team> row_workers, i64 deadline,
                                 u32* bits, float* vector) {
  const bool tells = Kernel::Team::thread() == 0;
  while (true) {
    TakenShare taken{};
    if (row_workers.alone || Kernel::Team::warp() == 0)
      taken = wait_for_share(launch, share, expected, deadline);
    if (!row_workers.alone) {
      taken.lane = Kernel::Team::tell(tells, taken.lane, bits);
      taken.nth = Kernel::Team::tell(tells, taken.nth, bits);
    }
    if (taken.lane < 0) return;
    const Sources sources = look_up_sources(launch.plan, ptx::shuffle(found.which, taken.lane),
                                            ptx::shuffle(found.kv_head, taken.lane));
    ptx::sync_warp();  // one lane has taken the share, and sees its states
    contract<Kernel>(launch, variant, sources, ptx::shuffle(found.count, taken.lane), taken.nth,
                     row_workers, tells, bits, vector);
  }
}

/// Composes this worker's shares of the contractions that items [begin, end) of its queue hold
/// states of; all of these items are done. `bits` has a word a warp in shared memory.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_shares(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                   i32 end, u32* bits, float* vector) {
  constexpr i32 at_a_time = 32 / most_dependents;
  const PlanView& plan = launch.plan;
  const i64 deadline = ptx::global_time() + contraction_timeout_ns;
  const i32 lane = ptx::lane_index();
  i32 nth = lane % most_dependents;
  for (i32 first = begin; first < end;) {
    const i32 item = first + lane / most_dependents;
    WorkerShare found;
    if (item < end)
      found = look_up_worker_share<typename Kernel::Team>(launch, plan.items[item], nth);
    const i32 expected = found.which >= 0 ? plan.expected[counter_of(launch, found)] : 0;
    // Where there are several contractions of few rows, each warp waits for some of them.
    const u32 few = ptx::ballot(found.few);
    const bool apart = ptx::count_bits(few) > Kernel::Team::num_warps / 2;
    RADDLE_ROLLED
    for (i32 pass = apart ? 0 : 1; pass < 2; ++pass) {
      const RowWorkers<typename Kernel::Team> row_workers{pass == 0};
      const i32 turn = ptx::count_bits(few & ((1u << lane) - 1u)) % Kernel::Team::num_warps;
      const bool mine = !row_workers.alone || turn == Kernel::Team::warp();
      WorkerShare share = found;
      if (!mine || (apart && found.few) != row_workers.alone) share.which = -1;
      compose_ready<Kernel>(launch, variant, found, share, expected, row_workers, deadline, bits,
                            vector);
    }
    const bool more = ptx::ballot(found.more) != 0;
    nth = more ? nth + most_dependents : lane % most_dependents;
    if (!more) first += at_a_time;
  }
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
