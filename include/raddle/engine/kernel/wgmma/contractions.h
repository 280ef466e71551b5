// The end of a worker's queue: its states are announced, and those that are complete composed.
#pragma once

#include "raddle/engine/kernel/gpu/queue_end.h"
#include "raddle/engine/kernel/wgmma/level_contractions.h"
#include "raddle/engine/kernel/wgmma/short_memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Whether the plan has several levels.
template <class Kernel>
RADDLE_DEVICE bool has_levels(const GpuLaunch& launch) {
  return Kernel::may_have_levels && launch.layout.num_levels > 1;
}

/// The contractions at the end of a worker's queue.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_queue(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                  i32 end) {
  auto& block = Memory<Kernel>::get();
  if constexpr (Kernel::is_tight) ConsumerTeam::sync();  // no warp reads facts about keys any more
  if (has_levels<Kernel>(launch))
    announce_all_to_levels<Kernel>(launch, variant, begin, end);
  else
    announce_all<Kernel>(launch, variant, begin, end);
  contract_shares<Kernel>(launch, variant, begin, end, block.team().completed,
                          block.team().vector[ConsumerTeam::warp()]);
}

/// Whether the worker that stores the last state of a tile composes the tile.
template <class Kernel>
RADDLE_DEVICE bool composes_at_once(const GpuLaunch& launch) {
  return ShortMemory<Kernel>::state_rows > 0 && !has_levels<Kernel>(launch);
}

/// Looks up what it takes to announce and compose the states of some items from `first` on. Each
/// lane does this for one item, because tickets and rows are the last of chains of look-ups; each
/// warp looks up rows of its own.
template <class Kernel>
RADDLE_DEVICE void look_up_states(const GpuLaunch& launch, i32 first, i32 end) {
  auto& block = ShortMemory<Kernel>::get();
  const i32 lane = ptx::lane_index();
  if (lane >= states_at_once || first + lane >= end) return;
  const WorkItem& item = launch.plan.items[first + lane];
  const QueryTile& tile = launch.plan.query_tiles[item.query_tile];
  if (ConsumerTeam::warp() == 0)
    block.item_state[lane] = {look_up_ticket(launch, item, 0), tile.num_rows};
  if (item.partial_row < 0) return;
  RADDLE_ROLLED
  for (i32 m = ConsumerTeam::warp(); m < Kernel::tile_rows; m += ConsumerTeam::num_warps)
    block.state_row[m][lane] =
        make_row(launch.layout, launch.levels[tile.level], tile.group,
                 tile.row_begin + min(m, tile.num_rows - 1), item.kv_head, launch.plan.group_size);
}

/// Announces the states of at most states_at_once items, each lane of a warp one; returns which of
/// them were the last of their tiles.
template <class Kernel>
RADDLE_DEVICE u32 announce_states(const GpuLaunch& launch, i32 count) {
  auto& block = ShortMemory<Kernel>::get();
  ConsumerTeam::sync();  // every thread has stored its part of the states
  if (ConsumerTeam::warp() == 0) {
    ArrivalTicket ticket;
    if (ptx::lane_index() < count) ticket = block.item_state[ptx::lane_index()].ticket;
    bool completes = false;
    if (ticket.at >= 0) {
      ptx::fence_device();  // makes the block's states visible before their arrival
      i32* word = launch.arrived + ticket.at;
      completes = Arrivals{ptx::atomic_add_acquire(word, 1)}.count() + 1 == ticket.expected;
      if (completes) *word = 0;
    }
    block.team().completed[0] = ptx::ballot(completes);
  }
  ConsumerTeam::sync();
  return block.team().completed[0];
}

/// What contract_queue does of a single level, by what look_up_states has found: a tile has one
/// contraction, and few rows, which the warps compose side by side.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_at_once(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                    i32 end) {
  auto& block = ShortMemory<Kernel>::get();
  const i32 warp = ConsumerTeam::warp();
  RADDLE_ROLLED
  for (i32 first = begin; first < end; first += states_at_once) {
    if (first > begin) {
      ConsumerTeam::sync();  // all warps are done with those before
      look_up_states<Kernel>(launch, first, end);
    }
    u32 completed = announce_states<Kernel>(launch, min(end - first, states_at_once));
    for (; completed != 0; completed &= completed - 1) {
      const i32 nth = ptx::lowest_bit(completed);
      const ItemState& state = block.item_state[nth];
      const Split& split = state.ticket.split;
      for (i32 m = warp; m < state.num_rows; m += ConsumerTeam::num_warps)
        compose_row<Kernel>(launch, variant, block.state_row[m][nth],
                            StateRows{split.partial_row + m, state.num_rows, split.num_chunks},
                            block.team().vector[warp]);
    }
  }
  RADDLE_ROLLED
  for (i32 i = begin; launch.timeline.marks && i < end; ++i)
    if (launch.plan.items[i].partial_row >= 0) mark<Kernel>(launch, TimelineStage::finished, i);
}

/// The contractions at the end of a queue of short queries.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_short_queue(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                        i32 end) {
  if (has_levels<Kernel>(launch))
    contract_level_queue<Kernel>(launch, variant, begin, end);
  else if constexpr (ShortMemory<Kernel>::state_rows > 0)
    contract_at_once<Kernel>(launch, variant, begin, end);
  else
    contract_queue<Kernel>(launch, variant, begin, end);
}

}  // namespace wgmma

RADDLE_ENGINE_END
