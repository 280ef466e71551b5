// The shared queue: a schedule for many workers, each of which draws the next unit when it is free.
//
// It has two advantages over equal spans of the line and over longest first. Workers compute the
// tiles of one KV head at one time, so that its keys are read into the L2 cache once, however far
// the workers drift apart; and no worker waits long for a late one. Units come in waves whose keys
// fit the cache together, and in a wave the most expensive first, so that the last ones are cheap.
#pragma once

#include "raddle/engine/plan/assign.h"

namespace raddle {

struct DrawnUnit {
  i32 tile;
  i32 kv_head;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Columns that a group's query tiles read, at most.
RADDLE_FN i64 columns_of(const Units& units, i32 group) {
  i64 columns = 0;
  for (i32 t = units.group_tile[group]; t < units.group_tile[group + 1]; ++t)
    columns = max(columns, i64{units.kv_tiles[t]} * tile_keys(units, t));
  return columns;
}

/// Orders the units. `order` has the groups, by their most expensive tile, highest cost first;
/// `wave` is how many columns of one KV head fit the cache; `ranked` and `spare` have room
/// for all units. Returns how many there are.
RADDLE_FN i32 order_in_waves(const Units& units, const Ranked* order, i32 num_groups, i64 wave,
                             Ranked* ranked, Ranked* spare, DrawnUnit* queue) {
  i64 columns = 0;
  for (i32 i = 0; i < num_groups; ++i) columns += columns_of(units, order[i].number);
  const i32 heads = units.num_kv_heads;
  const i64 waves = max(i64{1}, ceil_div(columns * heads, max(i64{1}, wave)));
  const i64 even = ceil_div(columns * heads, waves);
  i32 count = 0, begin = 0;
  i64 filled = 0;  // columns in the wave so far
  const auto end_wave = [&] {
    sort_most_expensive_first(ranked, count - begin, spare);
    for (i32 i = begin; i < count; ++i)
      queue[i] = DrawnUnit{ranked[i - begin].number / heads, ranked[i - begin].number % heads};
    begin = count;
    filled = 0;
  };
  for (i32 i = 0; i < num_groups; ++i) {
    const i32 group = order[i].number;
    const i64 adds = columns_of(units, group);
    for (i32 h = 0; h < heads; ++h) {
      for (i32 t = units.group_tile[group]; t < units.group_tile[group + 1]; ++t) {
        const UnitCost cost = unit_cost(units, t);
        ranked[count++ - begin] = Ranked{cost.start + units.kv_tiles[t] * cost.tile, t * heads + h};
      }
      filled += adds;
      if (filled >= even) end_wave();
    }
  }
  end_wave();
  return count;
}

/// The heaviest of the workers' loads if each draws the next unit when it is free; `heap` has
/// num_workers entries.
RADDLE_FN i64 draw_all(const Units& units, const DrawnUnit* queue, i32 count, i32 num_workers,
                       Load* heap) {
  for (i32 w = 0; w < num_workers; ++w) heap[w] = make_load(0, w);  // equal loads are a heap
  for (i32 i = 0; i < count; ++i) {
    const UnitCost cost = unit_cost(units, queue[i].tile);
    add_to_least(heap, num_workers, cost.start + units.kv_tiles[queue[i].tile] * cost.tile);
  }
  i64 heaviest = 0;
  for (i32 w = 0; w < num_workers; ++w) heaviest = max(heaviest, cost_of(heap[w]));
  return heaviest;
}

RADDLE_ENGINE_END
