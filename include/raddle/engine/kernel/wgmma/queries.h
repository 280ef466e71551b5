// Finding items, and loading their queries: a warp each, ahead of all others. Both follow chains of
// look-ups, one after another, which an item of few tiles would otherwise wait for. The warp that
// loads queries also has O stored that leaves by way of their slots.
#pragma once

#include "raddle/engine/kernel/gpu/queue.h"
#include "raddle/engine/kernel/gpu/rows.h"
#include "raddle/engine/kernel/wgmma/launch.h"
#include "raddle/engine/kernel/wgmma/row_copies.h"
#include "raddle/engine/plan/opening.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// The fused rows of an item that this block computes: of a cluster of two, each block has a tile.
template <class Kernel>
RADDLE_DEVICE Span rows_of_block(const Opening& item) {
  const i32 end = item.row_begin + item.num_rows;
  if constexpr (Kernel::cluster_size == 1) return Span{item.row_begin, end, false};
  const i32 begin = min(item.row_begin + Kernel::tile_rows * rank_in_cluster<Kernel>(), end);
  return Span{begin, min(begin + Kernel::tile_rows, end), false};
}

template <class Kernel>
class ItemFinder {
  using Block = Memory<Kernel>;

 public:
  RADDLE_DEVICE explicit ItemFinder(const GpuLaunch& launch) : launch_(launch) {}

  /// Names item `first` and those that follow it, as one lane learns from next(item); then an item
  /// that is none. An item is drawn once the one `ahead` before it has been sent. Where workers
  /// have openings, `opening` is that of the first item.
  template <class Next>
  RADDLE_DEVICE void run(i32 first, const Opening& opening, Next next) const {
    Block& block = Block::get();
    [[maybe_unused]] i32 told = 0;
    RADDLE_ROLLED
    for (i32 nth = 0, item = first;; ++nth) {
      if (nth >= ahead) wait_free(block.items, block.items.place(nth - ahead));
      if (nth > 0 && rank_in_cluster<Kernel>() == 0)
        item = ptx::shuffle(ptx::lane_index() == 0 ? next(item) : 0, 0);
      if constexpr (Kernel::cluster_size > 1)
        if (nth > 0 || opening.item < 0) item = agree(item, nth, told);
      const i32 slot = block.items.place(nth).slot;
      if (ptx::lane_index() == 0) {
        block.item[slot].item = item;
        if (item >= 0)
          describe(nth == 0 && opens_with(opening) ? opening : look_up(item), block.item[slot]);
        ptx::barrier_arrive(ptx::shared_address(&block.items.full[slot]));
      }
      if (item < 0) return;
    }
  }

 private:
  /// Two in tight memory; else not fewer than three: a step waits for the next tile's keys before
  /// it sends the item before its own, and where items have one tile each, those keys are the next
  /// item's, the second behind that one (LongQueries::sends_first).
  static constexpr i32 ahead = min(Kernel::item_slots, 3);
  /// Openings tell of an item's first span.
  RADDLE_DEVICE static bool opens_with(const Opening& opening) {
    return opening.item >= 0 && !Kernel::reads_from_end;
  }
  template <class Slots, class At>
  RADDLE_DEVICE static void wait_free(const Slots& items, const At& at) {
    ptx::barrier_wait(ptx::shared_address(&items.free[at.slot]), at.parity);
  }

  /// The first block of a cluster tells the second its nth item. The slot is free: the first has
  /// sent the item `ahead` before, in a step of a tile whose slot both blocks had freed two tiles
  /// before, so that the second has read what was told four items ago.
  RADDLE_DEVICE static i32 agree(i32 item, i32 nth, i32& told) {
    Block& block = Block::get();
    const i32 slot = nth & (Block::tells - 1);
    const u32 word = ptx::shared_address(&block.told[slot]);
    const u32 full = ptx::shared_address(&block.told_full[slot]);
    if (ptx::cluster_rank() > 0) {
      item = ptx::told_in_cluster(word, full, told >> slot & 1);
      told ^= 1 << slot;
      ptx::sync_warp();  // no lane is so late that it misses a phase
    } else if (ptx::lane_index() == 0) {
      ptx::tell_block_of_cluster(ptx::in_block_of_cluster(word, 1), item,
                                 ptx::in_block_of_cluster(full, 1));
    }
    return item;
  }
  RADDLE_DEVICE Opening look_up(i32 number) const {
    const WorkItem& item = launch_.plan.items[number];
    const QueryTile& tile = launch_.plan.query_tiles[item.query_tile];
    return make_opening(item, tile, launch_.levels[tile.level], launch_.plan.runs,
                        Kernel::tile_keys, number, 0, Kernel::reads_from_end);
  }
  RADDLE_DEVICE void describe(const Opening& o, ItemFacts<Kernel>& facts) const {
    facts.query_tile = o.query_tile;
    facts.kv_head = o.kv_head;
    const Span rows = rows_of_block<Kernel>(o);
    facts.row_begin = rows.begin;
    facts.num_rows = rows.end - rows.begin;
    facts.partial_row = o.partial_row;
    if (Kernel::cluster_size > 1 && o.partial_row >= 0)
      facts.partial_row += rows.begin - o.row_begin;
    if constexpr (!Kernel::tiles_end_items) facts.num_tiles = o.num_kv_tiles;
    KeySource& source = facts.source[0];
    source.runs =
        RunWalk(launch_.plan.runs, o.next_run, o.run_end, o.item_col_begin, o.item_col_end);
    source.rest = Span{o.span_begin, o.span_end, o.span_partial != 0};
    open_source(launch_, o, o.kv_head, o.first_entry, o.first_index,
                static_cast<i32>(sizeof(typename Kernel::Stored)),
                reinterpret_cast<const i32*>(zeros<Kernel>()), source);
    facts.request = request_of_keys(launch_, o.level, o.group);
    facts.source[1] = source;
  }

  const GpuLaunch& launch_;
};

template <class Kernel, class Variant>
class QueryLoader {
  using T = typename Kernel::T;
  using Block = Memory<Kernel>;
  using Slots = typename Block::Queries;

 public:
  RADDLE_DEVICE QueryLoader(const Launch& launch, const Variant& variant)
      : launch_(launch), variant_(variant) {}

  /// Loads the queries of all items that are named. With `queries_first`, the first item's rows are
  /// found by its opening, if it has one, while another warp describes the item.
  RADDLE_DEVICE void run(const Opening& opening) {
    Block& block = Block::get();
    RADDLE_ROLLED
    for (i32 nth = 0;; ++nth) {
      const auto place = block.items.place(nth);
      const u32 named = ptx::shared_address(&block.items.full[place.slot]);
      auto& facts = block.item[place.slot];
      const bool opened = Kernel::queries_first && nth == 0 && opening.item >= 0;
      if (!opened) {
        ptx::barrier_wait(named, place.parity);
        if (facts.item < 0) {
          if constexpr (Kernel::stages_output) {
            store_at_end(before_, nth - 2);
            store_at_end(last_, nth - 1);
          }
          return;
        }
      }
      const FusedRows rows = opened ? first_rows(opening)
                                    : FusedRows{facts.source[0].level, facts.source[0].group,
                                                facts.kv_head, facts.row_begin, facts.num_rows};
      RowsOfRequest of{};
      if (launch_.levels[rows.level].groups_are_requests) of = rows_of(launch_.layout, rows.group);
      // Where a box holds them, the queries are asked for first of all, if there is room.
      const Corner corner = corner_of(rows, of);
      const bool boxed = lie_in_boxes(rows);
      const bool waits = !boxed || !all_free(nth);
      if (!waits) {
        RADDLE_UNROLL
        for (i32 part = 0; part < parts; ++part) start_boxes(corner, nth, part);
        tell_begun(nth);
      }
      find_rows(rows, of, facts.row);
      // Of several parts the first must not wait for what is found behind the second.
      if (parts > 1) describe(rows, corner, facts, opened, named);
      RADDLE_UNROLL
      for (i32 part = 0; part < parts; ++part) {
        if (waits) {
          wait_free(nth, part);
          if (boxed)
            start_boxes(corner, nth, part);
          else
            copy_singly(facts.row, nth, part);
          if (part == parts - 1) tell_begun(nth);
        }
        if (parts == 1) describe(rows, corner, facts, opened, named);
        finish(nth, part, boxed);
      }
    }
  }

 private:
  /// An item's rows, in the order of their group's tokens and heads.
  struct FusedRows {
    i32 level, group, kv_head, begin, count;
  };
  RADDLE_DEVICE static FusedRows first_rows(const Opening& opening) {
    const Span rows = rows_of_block<Kernel>(opening);
    return {opening.level, opening.group, opening.kv_head, rows.begin, rows.end - rows.begin};
  }
  /// Where a box of Q and of O begins.
  struct Corner {
    i32 row, head, page;
  };
  /// An item, and whether O leaves by way of the slot of its queries.
  struct Staged {
    Corner corner;
    bool is;
  };
  RADDLE_DEVICE Corner corner_of(const FusedRows& rows, const RowsOfRequest& of) const {
    const i32 first = of.first + rows.begin / launch_.plan.group_size;
    return launch_.row_boxes == RowBoxes::of_groups ? Corner{0, first, rows.kv_head}
                                                    : Corner{first, rows.kv_head, of.request};
  }
  /// Whether a box holds an item's rows: of a whole tile, and of one request, so that it holds no
  /// others.
  RADDLE_DEVICE bool are_a_box(const FusedRows& rows) const {
    return launch_.row_boxes != RowBoxes::none && rows.count == Kernel::tile_rows &&
           launch_.levels[rows.level].groups_are_requests;
  }
  RADDLE_DEVICE bool lie_in_boxes(const FusedRows& rows) const {
    if constexpr (!Kernel::queries_first) return false;
    return are_a_box(rows) && !turns_queries<Variant>(launch_);
  }
  RADDLE_DEVICE bool lies_in_box_of_output(const FusedRows& rows) const {
    return Kernel::stages_output && launch_.out_in_boxes && are_a_box(rows);
  }
  /// A slot's parts become free, and full, one by one (kernel.h).
  static constexpr i32 parts = Kernel::query_parts;
  static constexpr i32 part_rows = Kernel::tile_rows / parts;
  RADDLE_DEVICE static RingPlace<Kernel::query_slots> place_of(i32 nth) {
    return RingPlace<Kernel::query_slots>(nth);
  }
  RADDLE_DEVICE static u32 full(i32 nth, i32 part) {
    const i32 barrier = Block::barrier_of_queries(place_of(nth).slot, part);
    return ptx::shared_address(&Block::get().queries.full[barrier]);
  }
  RADDLE_DEVICE static u32 free(i32 nth, i32 part) {
    const i32 barrier = Block::barrier_of_queries(place_of(nth).slot, part);
    return ptx::shared_address(&Block::get().queries.free[barrier]);
  }
  RADDLE_DEVICE static void wait_free(i32 nth, i32 part) {
    ptx::barrier_wait(free(nth, part), place_of(nth).parity ^ 1);
  }
  RADDLE_DEVICE static bool all_free(i32 nth) {
    bool all = true;
    RADDLE_UNROLL
    for (i32 part = 0; part < parts; ++part)
      all = all && ptx::any(ptx::barrier_ended(free(nth, part), place_of(nth).parity ^ 1));
    return all;
  }
  /// Called when the copies of the nth queries have been started.
  RADDLE_DEVICE static void tell_begun(i32 nth) {
    if (Kernel::queries_first && nth == 0 && ptx::lane_index() == 0)
      ptx::barrier_arrive(ptx::shared_address(&Block::get().begun));
  }
  RADDLE_DEVICE static u8* slot_of(i32 nth) { return Block::get().q[nth % Kernel::query_slots]; }
  RADDLE_DEVICE static u32 half_of(u8* slot, i32 half) {
    return ptx::shared_address(slot) + static_cast<u32>(128 * half * Kernel::tile_rows);
  }
  /// Starts copying a part: one lane does, whose arrival at the part's barrier this is. A box has
  /// the rows of a warpgroup. O that is in the slot is stored before.
  RADDLE_DEVICE void start_boxes(const Corner& from, i32 nth, i32 part) const {
    if (!ptx::elected()) return;
    constexpr i32 boxes = part_rows / group_rows;
    u8* const to = slot_of(nth);
    const bool of_groups = launch_.row_boxes == RowBoxes::of_groups;
    const i32 tokens = of_groups ? group_rows / launch_.plan.group_size : group_rows;
    store(before_, to);
    ptx::barrier_arrive_expecting(full(nth, part), static_cast<u32>(Slots::bytes / parts));
    RADDLE_UNROLL
    for (i32 box = part * boxes; box < (part + 1) * boxes; ++box) {
      const i32 row = from.row + (of_groups ? 0 : box * tokens);
      const i32 head = from.head + (of_groups ? box * tokens : 0);
      RADDLE_UNROLL
      for (i32 half = 0; half < Kernel::qk_halves; ++half)
        ptx::copy_box(half_of(to, half) + static_cast<u32>(128 * box * group_rows),
                      &launch_.query_map, full(nth, part), 64 * half, row, head, from.page,
                      ptx::Keep::usual);
    }
  }
  /// Writes what the computing warps read of an item beside its rows: whether O leaves as a box,
  /// and the columns that each row keeps.
  RADDLE_DEVICE void describe(const FusedRows& rows, const Corner& corner, ItemFacts<Kernel>& facts,
                              bool opened, u32 named) {
    if (opened) ptx::barrier_wait(named, 0);
    if constexpr (Kernel::stages_output) {
      before_ = last_;
      last_ = Staged{corner, lies_in_box_of_output(rows) && facts.partial_row < 0};
      if (ptx::lane_index() == 0) facts.stages = last_.is;
    }
    if constexpr (Kernel::finds_intervals) {
      RADDLE_ROLLED
      for (i32 m = ptx::lane_index(); m < Kernel::tile_rows; m += 32)
        facts.kept[m] = columns_kept(variant_, facts.row[m], facts.source[0], guess_);
    }
  }
  /// Called by one lane: has O of an item stored from the slot, if it is there, and waits until the
  /// slot may be written again.
  RADDLE_DEVICE void store(const Staged& item, u8* slot) const {
    if constexpr (Kernel::stages_output) {
      if (!item.is) return;
      RADDLE_UNROLL
      for (i32 half = 0; half < Kernel::vo_halves; ++half)
        ptx::store_box(half_of(slot, half), &launch_.out_map, 64 * half, item.corner.row,
                       item.corner.head, item.corner.page);
      ptx::wait_stored();
    }
  }
  /// Stores O of item `nth` of the block, behind which no queries are loaded to the slot.
  RADDLE_DEVICE void store_at_end(const Staged& item, i32 nth) const {
    if (!item.is) return;
    ptx::barrier_wait(free(nth, 0), place_of(nth).parity);
    if (ptx::elected()) store(item, slot_of(nth));
  }
  RADDLE_DEVICE void copy_singly(const Row* rows, i32 nth, i32 part) const {
    u8* const to = slot_of(nth);
    if constexpr (Kernel::stages_output) {
      if (ptx::elected()) store(before_, to);
      ptx::sync_warp();
    }
    RADDLE_ROLLED
    for (i32 first = part * part_rows; first < (part + 1) * part_rows; first += rows_at_once) {
      const T* mine = query_address<T>(launch_, rows[first + ptx::lane_index() % rows_at_once]);
      copy_rows<Slots, Kernel::dim_qk, rows_at_once, T>(
          ptx::shared_address(to) + static_cast<u32>(128 * first), [mine](i32 m) {
            return RowPair<T>{{ptx::shuffle(mine, m), ptx::shuffle(mine, m + 1)}};
          });
    }
    ptx::copy_commit();
  }
  /// Arrives at a part's barrier; waits for rows that were copied singly.
  RADDLE_DEVICE void finish(i32 nth, i32 part, bool boxed) const {
    if (!boxed) {
      ptx::copy_wait<0>();
      ptx::sync_warp();
      if (turns_queries<Variant>(launch_)) turn(slot_of(nth), part);
      ptx::fence_proxy();
    }
    ptx::sync_warp();  // what other lanes have written about rows
    if (!boxed || !ptx::elected()) ptx::barrier_arrive(full(nth, part));
  }
  /// Finds what the variant and the output see of an item's rows. Most are those of one request,
  /// about which nothing is looked up row by row.
  RADDLE_DEVICE void find_rows(const FusedRows& rows, const RowsOfRequest& of, Row* found) const {
    const LevelView& level = launch_.levels[rows.level];
    const i32 group_size = launch_.plan.group_size;
    RADDLE_ROLLED
    for (i32 m = ptx::lane_index(); m < Kernel::tile_rows; m += 32) {
      const i32 fused = rows.begin + min(m, rows.count - 1);
      if (level.groups_are_requests)
        found[m] = make_row(launch_.layout, of, of.first + fused / group_size, fused % group_size,
                            rows.kv_head, group_size);
      else
        found[m] = make_row(launch_.layout, level, rows.group, fused, rows.kv_head, group_size);
    }
  }

  static constexpr i32 rows_at_once = min(Kernel::tile_rows, 32);
  RADDLE_DEVICE void turn(u8* slot, i32 part) const {
    constexpr i32 chunks = 8 * Kernel::qk_halves, count = part_rows * chunks;
    RADDLE_ROLLED
    for (i32 at = part * count + ptx::lane_index(); at < (part + 1) * count; at += 32) {
      auto& x = *reinterpret_cast<Packed8*>(slot + Slots::at(at / chunks, at % chunks));
      RADDLE_UNROLL
      for (i32 i = 0; i < 4; ++i) x.x[i] = turned(launch_, x.x[i]);
    }
  }

  const Launch& launch_;
  const Variant& variant_;
  Staged before_{}, last_{};  ///< items: before_ had the slot of the next one
  i32 guess_ = 0;             ///< where the last search for a row's columns ended
};

}  // namespace wgmma

RADDLE_ENGINE_END
