// Attention for Hopper (sm_90a): one persistent block a multiprocessor, whose third warpgroup loads
// what the other two compute. Long and short queries have kernels of their own.
#pragma once

#include "raddle/engine/kernel/wgmma/contractions.h"
#include "raddle/engine/kernel/wgmma/first_tiles.h"
#include "raddle/engine/kernel/wgmma/loader.h"
#include "raddle/engine/kernel/wgmma/long_queries.h"
#include "raddle/engine/kernel/wgmma/queries.h"
#include "raddle/engine/kernel/wgmma/short_queries.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Warps of the loading warpgroup; the first two load K (0) and V (1).
enum LoadingWarp : i32 { key_warp, value_warp, finder_warp, query_warp };
/// This warp's number in the loading warpgroup; negative in others.
RADDLE_DEVICE i32 loading_warp() { return ptx::warp_index() - consumer_groups * group_warps; }

/// Creates a ring's barriers, a lane each: `fillers` arrive at a slot when it is filled, `users`
/// when it has been used.
template <i32 count>
RADDLE_DEVICE void create_ring(Ring<count>& ring, i32 fillers, i32 users) {
  const i32 lane = ptx::lane_index();
  if (lane >= count) return;
  ptx::barrier_create(ptx::shared_address(&ring.full[lane]), fillers);
  ptx::barrier_create(ptx::shared_address(&ring.free[lane]), users);
}

/// A warp of the loading warpgroup creates the barriers of what it fills.
template <class Kernel>
RADDLE_DEVICE void create_barriers() {
  auto& block = Memory<Kernel>::get();
  // Of a tile, one thread of each warpgroup, in every block that this block copies tiles to.
  constexpr i32 users = Kernel::cluster_size * consumer_groups / Kernel::rings;
  const i32 loads = loading_warp();
  if (loads <= value_warp)
    create_ring(loads == key_warp ? block.key_slots : block.value_slots, 1, users);
  else if (loads == finder_warp)
    create_ring(block.items, 1, ConsumerTeam::num_warps);
  else
    create_ring(block.queries, 32, ConsumerTeam::num_warps / Kernel::query_parts);
  if (Kernel::tiles_end_items && loads == value_warp && ptx::lane_index() == 0) {
    for (u64& tail : block.tail) ptx::barrier_create(ptx::shared_address(&tail), 1);
    if constexpr (Kernel::cluster_size > 1)
      for (u64& told : block.told_full) ptx::barrier_create(ptx::shared_address(&told), 1);
    ptx::barrier_create(ptx::shared_address(&block.begun), 1);
  }
  ptx::fence_created_barriers();
  ptx::sync_warp();  // other lanes have copies arrive at them
}

/// What the warps of the loading warpgroup do; `first` is the first item, which `opening` describes
/// if it has one, and next(item) the item behind another.
template <class Kernel, class Variant, class Next>
RADDLE_DEVICE void load(const Launch& launch, const Variant& variant, i32 first,
                        const Opening& opening, Next next) {
  const i32 loads = loading_warp();
  i32 started = 0;
  if (!Kernel::reads_from_end &&
      (loads == key_warp || (loads == value_warp && !Kernel::queries_first)))
    started = start_first_tiles<Kernel>(launch, opening, loads);
  if (loads == key_warp)
    TileLoader<Kernel, 0, Variant>(launch, variant, started).run();
  else if (loads == value_warp)
    TileLoader<Kernel, 1, Variant>(launch, variant, started).run();
  else if (loads == finder_warp)
    ItemFinder<Kernel>(launch).run(first, opening, next);
  else
    QueryLoader<Kernel, Variant>(launch, variant).run(opening);
}

/// Computes the long queries of the worker's own queue, and then those it draws from the shared
/// one.
template <class Kernel, class Variant>
RADDLE_DEVICE void attend_long(const Launch& launch, const Variant& variant) {
  static_assert(sizeof(Memory<Kernel>) <= shared_bytes);
  const i32 loads = loading_warp(), worker = Kernel::Team::worker();
  constexpr bool in_cluster = Kernel::cluster_size > 1;
  ptx::prefetch(&launch.plan.openings[worker]);
  if (loads >= 0) {
    if (loads <= value_warp) ptx::prefetch(&launch.map[0][loads]);
    if (loads == query_warp) ptx::prefetch(&launch.query_map);
    create_barriers<Kernel>();
  }
  ptx::wait_for_earlier_work();
  const Opening& opening = launch.plan.openings[worker];
  prefetch_plan<Kernel>(launch);
  if constexpr (in_cluster)
    ptx::sync_cluster();  // neither block copies to the other before that has its barriers
  else
    ptx::sync_block();
  if (loads < 0) {
    ptx::take_registers<Kernel::asks_parts ? served_consumer_registers : consumer_registers>();
    zero_unused_rows<Kernel>(launch);
    LongQueries<Kernel, Variant>(launch, variant).run();
    if constexpr (in_cluster) {
      // Both blocks' states are stored then, and neither arrives at the other's barriers any more.
      ptx::sync_cluster();
      if (ptx::cluster_rank() > 0) return;
    }
    const i32* queue = launch.plan.queue_indptr + worker;
    contract_queue<Kernel>(launch, variant, queue[0], queue[1]);
  } else {
    ptx::give_registers<Kernel::asks_parts ? asking_loader_registers : loader_registers>();
    i32 first = opening.item;
    if (loads == finder_warp && first < 0 && rank_in_cluster<Kernel>() == 0)
      first = ptx::shuffle(
          ptx::lane_index() == 0 ? next_long(launch, worker, opening.queue_end) : 0, 0);
    load<Kernel>(launch, variant, first, opening,
                 [&](i32 last) { return next_long(launch, worker, last); });
    if constexpr (in_cluster) ptx::arrive_cluster();
  }
}

/// Computes a worker's queue of short queries; the plan has no others.
template <class Kernel, class Variant>
RADDLE_DEVICE void attend_short(const Launch& launch, const Variant& variant) {
  static_assert(sizeof(ShortMemory<Kernel>) <= shared_bytes);
  const i32 loads = loading_warp();
  const bool computes = loads < 0;
  ptx::prefetch(&launch.plan.openings[ptx::block_index()]);
  if (!computes) {  // first of all: every instruction before the first copy delays it
    if (loads <= value_warp) ptx::prefetch(&launch.map[0][loads]);
    create_barriers<Kernel>();
  }
  ptx::wait_for_earlier_work();
  const Opening opening = launch.plan.openings[ptx::block_index()];
  const i32 end = opening.queue_end, begin = opening.item < 0 ? end : opening.item;
  mark<Kernel>(launch, TimelineStage::started, begin);
  if (computes) prefetch_inputs<Kernel>(launch);
  ptx::sync_block();
  if (computes) {
    if constexpr (Kernel::takes_registers) ptx::take_registers<short_consumer_registers>();
    // These warps have nothing else to do before the first keys have come.
    zero_unused_rows<Kernel>(launch);
    if (composes_at_once<Kernel>(launch)) look_up_states<Kernel>(launch, begin, end);
    if (has_levels<Kernel>(launch)) {
      look_up_known_waiting<Kernel>(launch, begin, end);
      if (ConsumerTeam::warp() == ConsumerTeam::num_warps - 1)
        look_up_known_shares<Kernel>(launch, begin, end);
      else if (ShortMemory<Kernel>::state_rows == 0 && ConsumerTeam::warp() == 0)
        rehearse_composition<Kernel, Variant>(launch, Memory<Kernel>::get().team().vector[0]);
    }
    if (ShortQueries<Kernel, Variant>(launch, variant).run())
      contract_short_queue<Kernel>(launch, variant, begin, end);
    if (begin < end) mark<Kernel>(launch, TimelineStage::contracted, end - 1);
  } else {
    if constexpr (Kernel::takes_registers) ptx::give_registers<short_loader_registers>();
    load<Kernel>(launch, variant, opening.item, opening,
                 [&](i32 last) { return last + 1 < end ? last + 1 : -1; });
    // It has named the last items, and has nothing to do while the others finish them.
    if constexpr (ShortMemory<Kernel>::state_rows > 0)
      if (loads == finder_warp)
        rehearse_composition<Kernel, Variant>(launch, ShortMemory<Kernel>::get().rehearsal);
  }
}

}  // namespace wgmma

RADDLE_ENGINE_END
