// Shared prefixes in step. Of a layout of several levels the last has requests' own keys, and those
// before it have shared prefixes, of which every tile of query rows reads all keys. There the units
// of a group are cut alike, and each chunk goes to a worker of its own, so that these read the same
// keys at the same time: on an H200, a KV tile then takes 0.78 µs, and 0.89 µs where chunks begin
// anywhere.
//
// The last level is one line, cut into as many spans as there are workers, so long that each worker
// has as much to do together with its chunk of a prefix, if it has one. An example: five workers,
// two heads behind a prefix of 12 KV tiles, and 11 KV tiles of requests' own keys, where nothing
// costs but KV tiles. The mean is 7; chunks of at most 7 are two of 6 a head.
//
//   worker 0   prefix, head 0, tiles [0, 6)    own keys: 1
//          1   prefix, head 0, tiles [6, 12)   own keys: 1
//          2   prefix, head 1, tiles [0, 6)    own keys: 1
//          3   prefix, head 1, tiles [6, 12)   own keys: 1
//          4                                   own keys: 7
//
// Where that takes more workers than there are, or more than an eighth and an item's start longer
// than equal spans, or where a mask has tiles of a prefix keep different keys, all levels are one
// line as a single level is.
#pragma once

#include "raddle/engine/core/search.h"
#include "raddle/engine/plan/units.h"

namespace raddle {

/// The levels before the last, where they are cut in step.
struct InStep {
  i32 spans;    ///< chunks, each the span of a worker; 0: all levels are one line
  i32 groups;   ///< of these levels
  i64 x;        ///< where the last level begins on the line
  i64 reserve;  ///< what a worker's span of that level leaves free: for what a cut adds, and for
                ///< the end of its queue, so that it is done when the last chunks are and composes
                ///< them
  i64 longest;  ///< what a chunk costs at most
  i64 level;    ///< what a worker's chunk and its span of the last level cost together, if it has
                ///< room for one
};

/// How a group is cut in step.
struct GroupInStep {
  i32 group;
  i32 chunks;  ///< of each unit
  i32 spans;   ///< chunks of all units
  i64 keys;    ///< what a unit's KV tiles cost
  i64 cost;    ///< of a chunk
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// How a group is cut if chunks cost at most `longest`, or have one KV tile each.
RADDLE_FN GroupInStep group_in_step(const Units& units, i32 group, i64 longest) {
  const i32 tile = units.group_tile[group];
  const i64 tiles = units.group_tile[group + 1] - tile;
  const UnitCost cost = unit_cost(units, tile);
  const i64 keys = units.kv_tiles[tile] * cost.tile;
  const i64 room = max(cost.tile, longest - cost.start);
  const i64 chunks = keys <= room ? 1 : quotient(keys + room - 1, room);
  const i64 spans = units.num_kv_heads * tiles * chunks;
  return GroupInStep{group, static_cast<i32>(chunks), static_cast<i32>(min(spans, i64{int_max})),
                     keys, cost.start + quotient(keys, chunks)};
}

/// Whether chunks of a group are as short as they should be, and no shorter: composing the states
/// of a unit's takes no longer than computing one of them.
RADDLE_FN bool suits(const Units& units, const GroupInStep& g, i64 longest) {
  const i64 merge = rows_merge(units, units.group_tile[g.group]);
  return g.chunks == 1 || (g.cost <= longest && i64{g.chunks} * g.chunks * merge <= g.keys);
}

/// Calls f(group) for all groups in step, as long as it returns true.
template <class F>
RADDLE_FN void for_groups_in_step(const Units& units, const InStep& part, const F& f) {
  RADDLE_ROLLED
  for (i32 g = 0; g < part.groups; ++g) {
    if (units.group_tile[g] == units.group_tile[g + 1]) continue;
    if (!f(group_in_step(units, g, part.longest))) return;
  }
}

/// Whether a worker that has a chunk of this cost takes a part of the last level, too: one that is
/// worth a further item.
RADDLE_FN bool has_room(const InStep& part, i64 chunk) {
  return part.longest - chunk >= 2 * part.reserve;
}

/// How much of the last level the workers before w take.
RADDLE_FN i64 taken_before(const Units& units, const InStep& part, i32 w) {
  i64 taken = 0;
  for_groups_in_step(units, part, [&](const GroupInStep& g) {
    const i32 workers = min(g.spans, w);
    if (has_room(part, g.cost)) taken += workers * max(i64{0}, part.level - g.cost - part.reserve);
    w -= workers;
    return w > 0;
  });
  return taken + w * (part.level - part.reserve);
}

/// Tries chunks that cost at most part.longest. Returns whether they suffice: whether there are a
/// worker for each and room for the last level, of cost `own`, beside and behind them. Sets spans
/// and level.
RADDLE_FN bool try_in_step(const Units& units, i64 own, i32 num_workers, InStep& part) {
  i64 held = 0;  // by chunks that have room beside them, with what is left free there
  i32 workers_with_room = 0;
  part.spans = 0;
  for_groups_in_step(units, part, [&](const GroupInStep& g) {
    if (g.spans > num_workers - part.spans || !suits(units, g, part.longest)) {
      part.spans = num_workers + 1;
      return false;
    }
    part.spans += g.spans;
    if (has_room(part, g.cost)) {
      held += g.spans * (g.cost + part.reserve);
      workers_with_room += g.spans;
    }
    return true;
  });
  const i32 free = num_workers - part.spans;
  if (free < 0 || free + workers_with_room == 0) return false;
  part.level = quotient(own + held + free * part.reserve, i64{free + workers_with_room}) + 1;
  return part.level <= part.longest;
}

/// The first tile of the last level, 0 where there is one level.
RADDLE_FN i32 first_own_tile(const Units& units) {
  if (!units.all_partial || units.num_tiles == 0) return 0;
  const i32 last = units.tiles[units.num_tiles - 1].level;
  return first_where(0, units.num_tiles, [&](i32 t) { return units.tiles[t].level == last; });
}

/// How the levels before the last are cut in step: with the shortest spans that suffice.
/// `first(begin, end, holds)` is the first number for which `holds`, or end.
template <class First>
RADDLE_FN InStep part_in_step(const Units& units, i32 num_workers, const First& first) {
  InStep part{};
  const i32 own = first_own_tile(units);
  if (own == 0 || i64{units.num_kv_heads} * own > num_workers) return part;
  // Of a group whose tiles keep different keys, which some masks do, not all read the same.
  const auto differs = [&](i32 t) {
    const QueryTile &a = units.tiles[t - 1], &b = units.tiles[t];
    return a.level == b.level && a.group == b.group && units.kv_tiles[t - 1] != units.kv_tiles[t];
  };
  if (first(1, own, differs) < own) return part;
  part.groups =
      first_where(0, units.num_groups, [&](i32 g) { return units.group_tile[g + 1] > own; });
  part.x = units.num_kv_heads * units.cost_before[own];
  const i32 shape = units.tiles[0].shape;
  part.reserve = unit_cost(units, own).resume +
                 cost_of(units.costs[shape], units.shapes[shape].rows, true).start;
  // Spans from the mean on, up to an eighth and an item's start longer.
  constexpr i32 steps = 32;
  const i64 total = total_cost(units);
  const i64 even = quotient(total, i64{num_workers});
  const i64 step = (even / 8 + unit_cost(units, 0).start) / steps + 1;
  const i64 rest = total - part.x;
  const i32 i = first(0, steps, [&](i32 n) {
    InStep tried = part;
    tried.longest = even + n * step;
    return try_in_step(units, rest, num_workers, tried);
  });
  part.longest = even + i * step;
  if (!try_in_step(units, rest, num_workers, part)) part.spans = 0;
  return part;
}

RADDLE_ENGINE_END
