// The end of a queue of short queries in a layout of several levels, where the worker's shares of
// contractions are few, of few rows and states, as those of decoding with shared prefixes. What
// they take is looked up while the first keys come. Then the worker waits for the states of all of
// them at once, and its warps divide the rows of those that are complete. Workers take what
// gpu/queue_end.h gives them, which serves queues that are not like this.
#pragma once

#include "raddle/engine/kernel/wgmma/announce.h"
#include "raddle/engine/kernel/wgmma/compose.h"
#include "raddle/engine/kernel/wgmma/short_memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Looks up the worker's shares, if they are few and small: each lane of a warp one at most.
template <class Kernel>
RADDLE_COLD void look_up_known_shares(const GpuLaunch& launch, i32 begin, i32 end) {
  auto& known = ShortMemory<Kernel>::get().known;
  const PlanView& plan = launch.plan;
  const i32 lane = ptx::lane_index(), item = begin + lane / most_dependents;
  WorkerShare found;
  if (item < end)
    found = look_up_worker_share<ConsumerTeam>(launch, plan.items[item], lane % most_dependents);
  Contraction contraction{};
  i32 num_rows = 0, expected = 0;
  if (found.which >= 0) {
    contraction = plan.contractions[found.which];
    num_rows = plan.query_tiles[contraction.query_tile].num_rows;
    expected = plan.expected[counter_of(launch, found)];
  }
  const i32 num_sources = contraction.source_end - contraction.source_begin;
  const bool fits = !found.more && (found.which < 0 || found.few) &&
                    num_rows <= KnownShare::most_rows && expected <= 32 &&
                    num_sources <= KnownShare::most_sources;
  const u32 all = ptx::ballot(found.which >= 0);
  const i32 count = ptx::count_bits(all);
  const bool are_few = end - begin <= 32 / most_dependents && count <= KnownShares::most;
  const bool all_fit = ptx::ballot(!fits) == 0 && are_few;
  if (lane == 0) known.count = all_fit ? count : KnownShares::none;
  if (!all_fit) return;
  if (found.which >= 0) {
    KnownShare& mine = known.share[ptx::count_bits(all & ((1u << lane) - 1u))];
    mine.share = found;
    mine.expected = expected;
    mine.query_tile = contraction.query_tile;
    mine.num_rows = num_rows;
    mine.num_sources = num_sources;
    RADDLE_ROLLED
    for (i32 s = 0; s < num_sources; ++s)
      mine.source[s] = rows_of(plan, plan.sources[contraction.source_begin + s], found.kv_head);
  }
  ptx::sync_warp();
  for (i32 i = lane; i < count * KnownShare::most_rows; i += 32) {
    KnownShare& of = known.share[i / KnownShare::most_rows];
    const i32 m = i % KnownShare::most_rows;
    const QueryTile& tile = plan.query_tiles[of.query_tile];
    of.row[m] =
        make_row(launch.layout, launch.levels[tile.level], tile.group,
                 tile.row_begin + min(m, of.num_rows - 1), of.share.kv_head, plan.group_size);
  }
}

/// Each lane of a warp knows a share. Waits until states of some are complete, and returns which of
/// these the worker has taken; 0 when no lane has one left to wait for. A share is dropped when it
/// is settled, as in wait_for_share.
RADDLE_DEVICE u32 wait_for_shares(const GpuLaunch& launch, WorkerShare& mine, i32 expected,
                                  i64 deadline) {
  i32* word = launch.arrived + (mine.which >= 0 ? counter_of(launch, mine) : 0);
  while (ptx::ballot(mine.which >= 0) != 0) {
    const bool waits = mine.which >= 0, late = ptx::global_time() >= deadline;
    const Arrivals seen = look_at_share(word, waits, late, expected);
    const bool complete = waits && seen.count() >= expected;
    const bool takes = complete && take_share(word, mine.count, mine.workers) < mine.count;
    if (complete || late) mine.which = -1;
    if (const u32 taken = ptx::ballot(takes)) return taken;
    ptx::sleep(100);
  }
  return 0;
}

/// Composes row m of a share, by a warp.
template <class Kernel, class Variant>
RADDLE_DEVICE void compose_known_row(const GpuLaunch& launch, const Variant& variant,
                                     const KnownShare& share, i32 m, float* vector) {
  i32 count = 0, at = 0;
  RADDLE_ROLLED
  for (i32 s = 0; s < share.num_sources; ++s) {
    const SourceRows& from = share.source[s];
    if (m < from.begin || m >= from.end) continue;
    const i32 chunk = ptx::lane_index() - count;
    if (chunk >= 0) at = from.first + m + min(chunk, from.count - 1) * from.stride;
    count += from.count;
  }
  ptx::sync_warp();  // all lanes have read the row before
  reinterpret_cast<i32*>(vector)[ptx::lane_index()] = at;
  ptx::sync_warp();
  compose_row<Kernel>(launch, variant, share.row[m], StateRows{0, 0, count}, vector);
}

/// Announces the queue's states, and composes the worker's shares, each when its states are there.
template <class Kernel, class Variant>
RADDLE_COLD void contract_known_shares(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                       i32 end) {
  auto& block = ShortMemory<Kernel>::get();
  announce_all_to_levels<Kernel>(launch, variant, begin, end);
  const i32 lane = ptx::lane_index(), warp = ConsumerTeam::warp();
  const i64 deadline = ptx::global_time() + contraction_timeout_ns;
  WorkerShare mine;
  i32 expected = 0;
  if (lane < block.known.count)
    mine = block.known.share[lane].share, expected = block.known.share[lane].expected;
  if (block.known.count > 0) rehearse_composition<Kernel, Variant>(launch, block.vector[warp]);
  while (true) {
    u32 taken = warp == 0 ? wait_for_shares(launch, mine, expected, deadline) : 0;
    taken = static_cast<u32>(
        ConsumerTeam::tell(ConsumerTeam::thread() == 0, static_cast<i32>(taken), block.completed));
    if (taken == 0) return;
    ptx::fence_device();  // makes the other blocks' states visible after their arrivals
    i32 nth = 0;          // of all rows of the shares that were taken
    for (; taken != 0; taken &= taken - 1) {
      const KnownShare& share = block.known.share[ptx::lowest_bit(taken)];
      for (i32 m = 0; m < share.num_rows; ++m)
        if (nth++ % ConsumerTeam::num_warps == warp)
          compose_known_row<Kernel>(launch, variant, share, m, block.vector[warp]);
    }
  }
}

}  // namespace wgmma

RADDLE_ENGINE_END
