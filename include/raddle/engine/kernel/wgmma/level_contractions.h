// The end of a queue of short queries in a layout of several levels. Where the worker's shares of
// contractions are of few rows and states, as those of decoding with shared prefixes are, its warps
// divide the rows of those that are complete. What that takes is looked up for the first items
// while the first keys come. Other shares are composed as gpu/queue_end.h does.
#pragma once

#include "raddle/engine/kernel/wgmma/compose.h"
#include "raddle/engine/kernel/wgmma/short_memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Items whose shares are looked up at a time: of requests' own keys, for which one contraction
/// waits, and of any.
constexpr i32 most_own_items = 16, most_items = 32 / most_dependents;

/// A warp looks up where the states of one or two of the first items are announced.
template <class Kernel>
RADDLE_DEVICE void look_up_known_waiting(const GpuLaunch& launch, i32 begin, i32 end) {
  auto& known = ShortMemory<Kernel>::get().known_waiting;
  const i32 warp = ConsumerTeam::warp(), lane = ptx::lane_index();
  const i32 lanes = known.lanes(end - begin), nth = known.nth(end - begin);
  const Waiting waiting =
      look_up_waiting(launch.plan, begin + warp + nth * ConsumerTeam::num_warps, end);
  const i32 contraction = lane & (lanes - 1);
  if (contraction == 0) known.waiting[warp][nth] = waiting;
  known.counter[warp][lane] = look_up_counter(launch.plan, waiting, contraction);
}

/// A warp looks up the worker's shares of contractions that items [begin, end) hold states of, if
/// the shares are few and small: each lane one at most. Returns whether they are.
template <class Kernel>
RADDLE_DEVICE bool look_up_shares_of(const GpuLaunch& launch, i32 begin, i32 end) {
  auto& known = ShortMemory<Kernel>::get().known;
  const PlanView& plan = launch.plan;
  const i32 items = end - begin;
  const i32 at_a_time = items == 1            ? 32
                        : items == 2          ? 16
                        : items <= 4          ? 8
                        : items <= most_items ? most_dependents
                                              : 32 / most_own_items;
  const i32 lane = ptx::lane_index(), item = begin + lane / at_a_time;
  WorkerShare found;
  if (item < end)
    found =
        look_up_worker_share<ConsumerTeam>(launch, plan.items[item], lane % at_a_time, at_a_time);
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
  // Of many shares of few items, warps that wait for some each compose sooner.
  const bool all_fit = ptx::ballot(!fits) == 0 && count <= min(known.most, max(items, most_items));
  if (lane == 0) known.count = all_fit ? count : known.none, known.items = items;
  if (!all_fit) return false;
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
  return true;
}

/// The same of as many of the items [begin, end) as can be looked up at a time.
template <class Kernel>
RADDLE_COLD void look_up_known_shares(const GpuLaunch& launch, i32 begin, i32 end) {
  RADDLE_ROLLED
  for (i32 items = min(most_own_items, end - begin);; items = most_items)
    if (look_up_shares_of<Kernel>(launch, begin, begin + items) || items <= most_items) return;
}

/// Each lane of a warp knows a share. Waits until states of some are complete, and returns which of
/// these the worker has taken; 0 when no lane has one left to wait for. A share is dropped when it
/// is settled, as in wait_for_share. The worker takes no more than `most_rows` at a time: the other
/// workers that look for the shares compose the rest meanwhile.
RADDLE_DEVICE u32 wait_for_shares(const GpuLaunch& launch, WorkerShare& mine, i32 num_rows,
                                  i32 expected, i32 most_rows, i64 deadline) {
  i32* word = launch.arrived + (mine.which >= 0 ? counter_of(launch, mine) : 0);
  while (ptx::ballot(mine.which >= 0) != 0) {
    const bool waits = mine.which >= 0, late = ptx::global_time() >= deadline;
    const Arrivals seen = look_at_share(word, waits, late, expected);
    const bool is_ready = waits && seen.count() >= expected;
    // Two workers look for a share. If the other one has taken it, this one is the last that looks,
    // and resets the word without asking, as take_share does.
    const bool others = is_ready && seen.taken() > 0;
    if (others) *word = 0;
    const u32 open = ptx::ballot(is_ready && !others);
    const i32 before = ptx::count_bits(open & ((1u << ptx::lane_index()) - 1u));
    const bool asks = is_ready && !others && (before == 0 || (before + 1) * num_rows <= most_rows);
    const bool takes = asks && take_share(word, mine.count, mine.workers) < mine.count;
    if (asks || others || (late && !is_ready)) mine.which = -1;
    if (const u32 taken = ptx::ballot(takes)) return taken;
    ptx::sleep(100);
  }
  return 0;
}

/// Composes row m of a share, by a warp.
template <class Kernel, class Variant>
RADDLE_DEVICE void compose_known_row(const GpuLaunch& launch, const Variant& variant,
                                     const KnownShare& share, i32 m, float* vector) {
  i32 count = 0, at = 0;  // of the state of this lane
  RADDLE_ROLLED
  for (i32 s = 0; s < share.num_sources; ++s) {
    const SourceRows& from = share.source[s];
    if (m < from.begin || m >= from.end) continue;
    const i32 chunk = ptx::lane_index() - count;
    if (chunk >= 0) at = from.first + m + min(chunk, from.count - 1) * from.stride;
    count += from.count;
  }
  compose_row<Kernel>(launch, variant, share.row[m], StateRows{at, 0, count}, vector);
}

/// Composes the known shares, each when its states are there.
template <class Kernel, class Variant>
RADDLE_DEVICE void compose_known_shares(const GpuLaunch& launch, const Variant& variant,
                                        i64 deadline) {
  auto& block = ShortMemory<Kernel>::get();
  const i32 lane = ptx::lane_index(), warp = ConsumerTeam::warp();
  WorkerShare mine;
  i32 num_rows = 0, expected = 0;
  if (lane < block.known.count) {
    const KnownShare& known = block.known.share[lane];
    mine = known.share, num_rows = known.num_rows, expected = known.expected;
  }
  // A row a warp; more where all workers together have more rows than that.
  const PlanView& plan = launch.plan;
  const i32 of_all = plan.num_contractions * plan.num_kv_heads * num_rows;
  const i32 most_rows = max(ConsumerTeam::num_warps, ceil_div(of_all, plan.num_workers));
  while (true) {
    u32 taken =
        warp == 0 ? wait_for_shares(launch, mine, num_rows, expected, most_rows, deadline) : 0;
    taken = static_cast<u32>(ConsumerTeam::tell(ConsumerTeam::thread() == 0,
                                                static_cast<i32>(taken), block.team().completed));
    if (taken == 0) return;
    i32 nth = 0;  // of all rows of the shares that were taken
    for (; taken != 0; taken &= taken - 1) {
      const KnownShare& share = block.known.share[ptx::lowest_bit(taken)];
      for (i32 m = 0; m < share.num_rows; ++m)
        if (nth++ % ConsumerTeam::num_warps == warp)
          compose_known_row<Kernel>(launch, variant, share, m, block.team().vector[warp]);
    }
  }
}

/// Composes the shares of the items [begin, end), some items after others, as long as these have
/// known shares. Returns the first of those that have not.
template <class Kernel, class Variant>
RADDLE_COLD i32 compose_while_known(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                    i32 end) {
  auto& block = ShortMemory<Kernel>::get();
  const i64 deadline = ptx::global_time() + contraction_timeout_ns;
  while (block.known.count != block.known.none) {
    compose_known_shares<Kernel>(launch, variant, deadline);
    begin += block.known.items;
    if (begin >= end) return end;
    ConsumerTeam::sync();  // all warps are done with the shares before
    if (ConsumerTeam::warp() == 0) look_up_known_shares<Kernel>(launch, begin, end);
    ConsumerTeam::sync();
  }
  return begin;
}

/// Announces the queue's states, and composes the worker's shares.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_level_queue(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                        i32 end) {
  auto& block = ShortMemory<Kernel>::get();
  const i32 warp = ConsumerTeam::warp(), lane = ptx::lane_index();
  const KnownWaiting& known = block.known_waiting;
  announce_to_levels<Kernel>(launch, variant, known.waiting[warp][known.nth(end - begin)],
                             known.counter[warp][lane], known.lanes(end - begin));
  announce_all_to_levels<Kernel>(launch, variant, begin + known.most(end - begin), end);
  begin = compose_while_known<Kernel>(launch, variant, begin, end);
  contract_shares<Kernel>(launch, variant, begin, end, block.team().completed,
                          block.team().vector[warp]);
}

}  // namespace wgmma

RADDLE_ENGINE_END
