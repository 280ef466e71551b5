// Deal and fill: a schedule for many workers. The back of the line of units is dealt whole, each
// unit to the least loaded worker; the front is cut into spans that fill every worker up to the
// same load.
//
// Against equal spans of the whole line: units next to each other on the line, the tiles of one KV
// head, are computed at the same time by different workers, so that their keys are read into the L2
// cache once.
#pragma once

#include "raddle/engine/plan/assign.h"
#include "raddle/engine/plan/linear_split.h"

namespace raddle {

struct DealtUnit {
  i32 tile;
  i32 kv_head;
  i32 worker;
};

/// Where the dealt part of the line begins: with the first tile of a group's KV head.
struct Front {
  UnitAt end;
  i32 num_units;
  i64 cost;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// The shortest front that costs at least `cost`; at most the whole line.
RADDLE_FN Front front_of(const Units& units, i64 cost) {
  Front front{first_cut(units).at, 0, 0};
  while (front.cost < cost && front.end.group < units.num_groups) {
    const i32 begin = units.group_tile[front.end.group];
    const i32 end = units.group_tile[front.end.group + 1];
    front.cost += units.prefix[end] - units.prefix[begin];
    front.num_units += end - begin;
    front.end.tile = end - 1;
    front.end = next_unit(units, front.end);
  }
  return front;
}

/// Deals the units behind a front, a KV head's last tile first: under a causal mask that is the
/// dearest. Workers' loads are left in `loads`; `heap` has num_workers entries, too. Returns how
/// many are dealt.
RADDLE_FN i32 deal_units(const Units& units, const Front& front, i32 num_workers, Load* heap,
                         i64* loads, DealtUnit* dealt) {
  for (i32 w = 0; w < num_workers; ++w)
    heap[w] = make_load(0, w);  // equal loads in order are a heap
  i32 count = 0;
  UnitAt at = front.end;
  while (at.group < units.num_groups) {
    const i32 begin = units.group_tile[at.group];
    const i32 end = units.group_tile[at.group + 1];
    for (i32 t = end - 1; t >= begin; --t) {
      dealt[count++] = DealtUnit{t, at.head, worker_of(heap[0])};
      const UnitCost cost = unit_cost(units, t);
      add_to_least(heap, num_workers, cost.start + units.kv_tiles[t] * cost.tile);
    }
    at.tile = end - 1;
    at = next_unit(units, at);
  }
  for (i32 w = 0; w < num_workers; ++w) loads[worker_of(heap[w])] = cost_of(heap[w]);
  return count;
}

/// The load up to which `cost` fills workers of these loads.
RADDLE_FN i64 fill_level(const i64* loads, i32 num_workers, i64 cost) {
  i64 level = int_max * i64{int_max};
  for (;;) {
    i64 total = cost;
    i32 below = 0;
    for (i32 w = 0; w < num_workers; ++w) {
      if (loads[w] >= level) continue;
      total += loads[w];
      ++below;
    }
    const i64 next = below > 0 ? ceil_div(total, i64{below}) : 0;
    if (next >= level || below == 0) return level;
    level = next;
  }
}

/// Cuts a front into spans that fill the workers; what was dealt counts in the result, too. `cuts`
/// has num_workers + 1 entries.
RADDLE_FN LinearSplit cut_front(const Units& units, const Front& front, const i64* loads,
                                i32 num_workers, Cut* cuts) {
  const i64 level = fill_level(loads, num_workers, front.cost);
  const i64 mean = front.cost / num_workers;  // one for all, or cuts of a unit might change places
  const Cut end{front.cost, front.end, front.num_units, 0, 0};
  LinearSplit split{0, 0, 0};
  cuts[0] = first_cut(units);
  CutWalk walk(cuts[0]);
  i64 x = 0;
  i32 group = 0;
  for (i32 w = 1; w <= num_workers; ++w) {
    x += max(i64{0}, level - loads[w - 1]);
    Cut cut = x == 0 ? cuts[0] : end;
    UnitCost cost{};
    if (x > 0 && x < front.cost && w < num_workers) {
      while (units.num_kv_heads * units.prefix[units.group_tile[group + 1]] <= x) ++group;
      const LinePoint point = point_at(units, x, group);
      const Grid grid = grid_of(units, point.at.tile, mean);
      cut = cut_near(units, point, grid);
      cost = grid.cost;
    }
    const i64 load = loads[w - 1] + walk.step(cut, cost);
    split.heaviest = max(split.heaviest, load);
    split.total += load;
    cuts[w] = cut;
  }
  split.num_chunks = walk.split().num_chunks;
  return split;
}

RADDLE_ENGINE_END
