// The end of a worker's queue: its states are announced, and those that are complete composed.
#pragma once

#include "raddle/engine/kernel/gpu/queue_end.h"
#include "raddle/engine/kernel/wgmma/short_memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Says of every item of the worker's own queue that its state, if it has one, is stored; drawn
/// items have none. Said at the queue's end: a call in the loop of long queries would have it
/// spill.
template <class Kernel, class Variant>
RADDLE_DEVICE void arrive_all(const GpuLaunch& launch, const Variant& variant, i32 begin, i32 end) {
  auto& block = Memory<Kernel>::get();
  RADDLE_ROLLED
  for (i32 i = begin; i < end; ++i) {
    const WorkItem& item = launch.plan.items[i];
    if (item.partial_row < 0) continue;
    arrive<Kernel>(launch, variant, item, look_up_ticket(launch, item, ConsumerTeam::thread()),
                   block.completed, block.vector[ConsumerTeam::warp()]);
  }
}

/// The contractions at the end of a worker's queue.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_queue(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                  i32 end) {
  auto& block = Memory<Kernel>::get();
  arrive_all<Kernel>(launch, variant, begin, end);
  contract_shares<Kernel>(launch, variant, begin, end, block.completed,
                          block.vector[ConsumerTeam::warp()]);
}

/// Looks up, while the first keys are on their way, what it takes to announce the states of a queue
/// of short queries: each lane of a warp for one item, because a ticket is the last of a chain of
/// look-ups. Layouts of several levels have many tickets an item, and do without.
template <class Kernel>
RADDLE_DEVICE void look_up_tickets(const GpuLaunch& launch, i32 begin, i32 end) {
  const i32 lane = ptx::lane_index();
  if (launch.layout.num_levels == 1 && begin + lane < end)
    ShortMemory<Kernel>::get().ticket[lane] =
        look_up_ticket(launch, launch.plan.items[begin + lane], 0);
}

/// What contract_queue does, with the tickets that were looked up ahead. Where a state has few
/// rows, the worker that stores the last one composes them, and no worker has shares to look for.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_short_queue(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                        i32 end) {
  using Team = typename Kernel::Team;
  auto& block = ShortMemory<Kernel>::get();
  if (launch.layout.num_levels > 1) return contract_queue<Kernel>(launch, variant, begin, end);
  Team::sync();  // a warp of the team has written the tickets
  RADDLE_ROLLED
  for (i32 i = begin; i < end; ++i) {
    const i32 nth = i - begin;
    ArrivalTicket ticket =
        nth < tickets_ahead ? block.ticket[nth] : look_up_ticket(launch, launch.plan.items[i], 0);
    if (ticket.at < 0) continue;
    if (Team::thread() > 0) ticket.at = -1;  // a tile has one contraction
    arrive<Kernel>(launch, variant, launch.plan.items[i], ticket, block.completed,
                   block.vector[Team::warp()]);
    mark<Kernel>(launch, TimelineStage::finished, i);
  }
  if constexpr (Kernel::tile_rows > rows_at_once<Team>)
    contract_shares<Kernel>(launch, variant, begin, end, block.completed,
                            block.vector[Team::warp()]);
}

}  // namespace wgmma

RADDLE_ENGINE_END
