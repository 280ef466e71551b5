// Attention for Hopper (sm_90a): one persistent block a multiprocessor, whose third warpgroup loads
// what the other two compute. Long and short queries have kernels of their own.
#pragma once

#include "raddle/engine/kernel/wgmma/contractions.h"
#include "raddle/engine/kernel/wgmma/loader.h"
#include "raddle/engine/kernel/wgmma/long_queries.h"
#include "raddle/engine/kernel/wgmma/queries.h"
#include "raddle/engine/kernel/wgmma/short_queries.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class Kernel>
RADDLE_DEVICE void create_barriers() {
  auto& block = Memory<Kernel>::get();
  const auto create = [](u64& barrier, i32 arrivals) {
    ptx::barrier_create(ptx::shared_address(&barrier), arrivals);
  };
  constexpr i32 users = consumer_groups / Kernel::rings;
  for (i32 i = 0; i < Kernel::slots; ++i) {
    create(block.key_slots.full[i], 1), create(block.key_slots.free[i], users);
    create(block.value_slots.full[i], 1), create(block.value_slots.free[i], users);
  }
  for (i32 i = 0; i < Kernel::query_slots; ++i)
    create(block.queries.full[i], 32), create(block.queries.free[i], ConsumerTeam::num_warps);
  for (i32 i = 0; i < Kernel::item_slots; ++i)
    create(block.items.full[i], 1), create(block.items.free[i], ConsumerTeam::num_warps);
  create(block.tail, 1);
  ptx::fence_created_barriers();
}

/// The loading warpgroup's warp that finds items.
constexpr i32 finder_warp = consumer_groups * group_warps + 2;

/// What the warps of the loading warpgroup do; `first` is the first item, `opening` its opening
/// where workers have one, and next(item) the item behind another.
template <class Kernel, class Variant, class Next>
RADDLE_DEVICE void load(const Launch& launch, const Variant& variant, i32 first,
                        const Opening& opening, Next next) {
  const i32 warp = ptx::warp_index() - consumer_groups * group_warps;
  if (warp == 0)
    TileLoader<Kernel, 0>(launch).run();
  else if (warp == 1)
    TileLoader<Kernel, 1>(launch).run();
  else if (ptx::warp_index() == finder_warp)
    ItemFinder<Kernel>(launch).run(first, opening, next);
  else
    QueryLoader<Kernel, Variant>(launch, variant).run();
}

/// Computes the long queries of the worker's own queue, and then those it draws from the open one.
template <class Kernel, class Variant>
RADDLE_DEVICE void attend_long(const Launch& launch, const Variant& variant) {
  static_assert(!has_long_kernel(Kernel::dim_qk, Kernel::dim_vo) ||
                sizeof(Memory<Kernel>) <= shared_bytes);
  const i32* queue = launch.plan.queue_indptr + ptx::block_index();
  const i32 item = first_long(launch, queue[0], queue[1]);
  if (ptx::thread_index() == 0) create_barriers<Kernel>();
  ptx::sync_block();
  if (ptx::thread_index() < consumer_groups * group_threads) {
    ptx::take_registers<consumer_registers>();
    zero_unused_rows<Kernel>(launch);
    LongQueries<Kernel, Variant>(launch, variant).run();
    contract_queue<Kernel>(launch, variant, queue[0], queue[1]);
  } else {
    ptx::give_registers<loader_registers>();
    load<Kernel>(launch, variant, item, Opening{},
                 [&](i32 last) { return next_long(launch, last); });
  }
}

/// Computes a worker's queue of short queries; the plan has no others.
template <class Kernel, class Variant>
RADDLE_DEVICE void attend_short(const Launch& launch, const Variant& variant) {
  static_assert(sizeof(ShortMemory<Kernel>) <= shared_bytes);
  const bool computes = ptx::thread_index() < consumer_groups * group_threads;
  const Opening opening = launch.plan.openings[ptx::block_index()];
  const i32 end = opening.queue_end, begin = opening.item < 0 ? end : opening.item;
  mark<Kernel>(launch, TimelineStage::started, begin);
  if (computes) prefetch_inputs<Kernel>(launch);
  if (ptx::thread_index() < 2) ptx::prefetch(&launch.map[0][ptx::thread_index()]);
  if (ptx::thread_index() == 0) create_barriers<Kernel>();
  ptx::sync_block();
  if (computes) {
    if constexpr (Kernel::takes_registers) ptx::take_registers<short_consumer_registers>();
    // These warps have nothing else to do before the first keys have come.
    zero_unused_rows<Kernel>(launch);
    if (composes_at_once<Kernel>(launch)) look_up_states<Kernel>(launch, begin, end);
    if (launch.layout.num_levels > 1 && ConsumerTeam::warp() == ConsumerTeam::num_warps - 1)
      look_up_known_shares<Kernel>(launch, begin, end);
    if (ShortQueries<Kernel, Variant>(launch, variant).run())
      contract_short_queue<Kernel>(launch, variant, begin, end);
    if (begin < end) mark<Kernel>(launch, TimelineStage::contracted, end - 1);
  } else {
    if constexpr (Kernel::takes_registers) ptx::give_registers<short_loader_registers>();
    load<Kernel>(launch, variant, opening.item, opening,
                 [&](i32 last) { return last + 1 < end ? last + 1 : -1; });
    // It has named the last items, and has nothing to do while the others finish them.
    if (ptx::warp_index() == finder_warp && composes_at_once<Kernel>(launch))
      rehearse_composition<Kernel, Variant>(launch, ShortMemory<Kernel>::get().rehearsal);
  }
}

}  // namespace wgmma

RADDLE_ENGINE_END
