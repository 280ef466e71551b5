// Which worker gets which piece. Placements are written in queue order.
#pragma once

#include "raddle/engine/plan/pieces.h"

namespace raddle {

struct Placement {
  i32 piece;
  i32 kv_head;
  i32 worker;
};

/// A worker and its load in one number, the cost in the upper bits, so that one comparison orders
/// loads, and equal ones by worker. There is room for 2^17 workers, and for costs of hours.
struct Load {
  i64 key;
};
constexpr i32 worker_bits = 17;

/// What is sorted by cost: a piece, or another thing by its number (drawn.h sorts groups and
/// units).
struct Ranked {
  i64 cost;
  i32 number;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Sorts by cost, most expensive first, equal costs in their order. A radix sort, by how far each
/// cost is below the highest: a CPU cannot predict the branches of comparisons. Few pieces are
/// sorted by smaller digits, because going through all values of a large digit would take longer
/// than going through the pieces. `spare` is scratch; the result is in `ranked`.
RADDLE_FN void sort_most_expensive_first(Ranked* ranked, i32 count, Ranked* spare) {
  constexpr i32 most_values = 1 << 8;
  const i32 bits = count < most_values / 2 ? 5 : 8, values = 1 << bits;
  i64 most = 0, least = count > 0 ? ranked[0].cost : 0;
  for (i32 i = 0; i < count; ++i) {
    most = max(most, ranked[i].cost);
    least = min(least, ranked[i].cost);
  }
  Ranked* from = ranked;
  Ranked* to = spare;
  for (i32 shift = 0; (most - least) >> shift > 0; shift += bits) {
    const auto digit = [&](const Ranked& piece) {
      return static_cast<i32>((most - piece.cost) >> shift & (values - 1));
    };
    i32 place[most_values];
    for (i32 value = 0; value < values; ++value) place[value] = 0;
    for (i32 i = 0; i < count; ++i) ++place[digit(from[i])];
    for (i32 value = 0, before = 0; value < values; ++value) {
      const i32 here = place[value];
      place[value] = before;
      before += here;
    }
    for (i32 i = 0; i < count; ++i) to[place[digit(from[i])]++] = from[i];
    Ranked* swap = from;
    from = to;
    to = swap;
  }
  if (from != ranked) {
    for (i32 i = 0; i < count; ++i) ranked[i] = from[i];
  }
}

RADDLE_FN constexpr Load make_load(i64 cost, i32 worker) {
  return Load{cost << worker_bits | worker};
}
RADDLE_FN constexpr i64 cost_of(Load load) { return load.key >> worker_bits; }
RADDLE_FN constexpr i32 worker_of(Load load) {
  return static_cast<i32>(load.key & ((1 << worker_bits) - 1));
}

/// Adds to the least load of a heap and restores it. The lighter child is found without branches,
/// which a CPU could not predict here.
RADDLE_FN void add_to_least(Load* heap, i32 count, i64 cost) {
  const i64 moved = heap[0].key + (cost << worker_bits);
  i32 at = 0;
  i32 child = 1;
  for (; child + 1 < count; child = 2 * at + 1) {
    const i64 left = heap[child].key, right = heap[child + 1].key;
    const i64 lighter = min(left, right);
    if (moved < lighter) break;
    child += right < left;
    heap[at].key = lighter;
    at = child;
  }
  if (child + 1 == count && heap[child].key < moved) {  // an only child
    heap[at] = heap[child];
    at = child;
  }
  heap[at].key = moved;
}

/// Gives the first num_workers placements to a worker each, as a heap of idle workers would, and
/// makes the heap of what they then have.
RADDLE_FN void assign_first(const Ranked* ranked, i32 num_kv_heads, i32 num_workers, Load* heap,
                            Placement* placements) {
  i32 last = 0;
  for (i32 p = 0, w = 0; w < num_workers; ++p) {
    last = p;
    for (i32 h = 0; h < num_kv_heads && w < num_workers; ++h, ++w)
      placements[w] = Placement{ranked[p].number, h, w};
  }
  // Ascending loads are a heap. They lie in falling order, and equal ones from the lowest worker
  // on.
  i32 count = 0;
  for (i32 end = num_workers; end > 0; --last) {
    const i64 cost = ranked[last].cost;
    while (last > 0 && ranked[last - 1].cost == cost) --last;
    const i32 begin = last * num_kv_heads;
    for (i32 w = begin; w < end; ++w) heap[count++] = make_load(cost, w);
    end = begin;
  }
}

/// No assignment of sorted pieces has a lighter heaviest queue: it has the most expensive piece,
/// and of the W + 1 most expensive ones at least two on one worker.
RADDLE_FN i64 least_of_ranked(const Ranked* ranked, i32 num_pieces, i32 num_kv_heads,
                              i32 num_workers) {
  if (num_pieces * num_kv_heads <= num_workers) return num_pieces > 0 ? ranked[0].cost : 0;
  const i64 two =
      ranked[(num_workers - 1) / num_kv_heads].cost + ranked[num_workers / num_kv_heads].cost;
  return max(ranked[0].cost, two);
}

/// The assignment of Algorithm 1 (arXiv:2501.01005): the most expensive piece next, to the least
/// loaded worker. `heap` has num_workers entries. Returns the heaviest load.
RADDLE_FN i64 assign_longest_first(const Ranked* ranked, i32 num_pieces, i32 num_kv_heads,
                                   i32 num_workers, Load* heap, Placement* placements) {
  if (num_pieces == 0) return 0;
  const i32 count = num_pieces * num_kv_heads;
  assign_first(ranked, num_kv_heads, min(count, num_workers), heap, placements);
  i64 heaviest = ranked[0].cost;
  i32 p = num_workers / num_kv_heads;
  i32 head = num_workers - p * num_kv_heads;
  for (i32 i = num_workers; i < count; ++i) {
    placements[i] = Placement{ranked[p].number, head, worker_of(heap[0])};
    heaviest = max(heaviest, cost_of(heap[0]) + ranked[p].cost);
    add_to_least(heap, num_workers, ranked[p].cost);
    if (++head < num_kv_heads) continue;
    head = 0;
    ++p;
  }
  return heaviest;
}

/// Pieces in linear order, each to the worker in whose equal span its middle lies.
/// `piece_begin[t]` is the first piece of tile t. `loads` has num_workers entries. Returns the
/// heaviest load.
RADDLE_FN i64 assign_spans(const Units& units, const Piece* pieces, const i32* piece_begin,
                           i64 total, i32 num_workers, i64* loads, Placement* placements) {
  for (i32 w = 0; w < num_workers; ++w) loads[w] = 0;
  i64 x = 0;
  i64 heaviest = 0;
  i32 count = 0;
  const i64 span = max(i64{1}, ceil_div(total, i64{num_workers}));
  const auto place = [&](i32 p, i32 head, i32 chunks) {
    const i64 cost = piece_cost(units, pieces[p], chunks);
    const i32 worker = static_cast<i32>((x + cost / 2) / span);
    loads[worker] += cost;
    heaviest = max(heaviest, loads[worker]);
    placements[count++] = Placement{p, head, worker};
    x += cost;
  };
  for (i32 g = 0; g < units.num_groups; ++g) {
    const i32 begin = units.group_tile[g];
    const i32 end = units.group_tile[g + 1];
    if (end - begin == 1) {  // decode: all heads of a chunk in turn, for they lie side by side
      const i32 chunks = piece_begin[end] - piece_begin[begin];
      for (i32 p = piece_begin[begin]; p < piece_begin[end]; ++p)
        for (i32 head = 0; head < units.num_kv_heads; ++head) place(p, head, chunks);
      continue;
    }
    for (i32 head = 0; head < units.num_kv_heads; ++head) {
      for (i32 t = begin; t < end; ++t) {
        const i32 chunks = piece_begin[t + 1] - piece_begin[t];
        for (i32 p = piece_begin[t]; p < piece_begin[t + 1]; ++p) place(p, head, chunks);
      }
    }
  }
  return heaviest;
}

/// One-per-request, a baseline: all pieces of a group to one worker, and groups to workers in turn.
RADDLE_FN i64 assign_by_group(const Units& units, const Piece* pieces, const i32* piece_begin,
                              i32 num_workers, i64* loads, Placement* placements) {
  for (i32 w = 0; w < num_workers; ++w) loads[w] = 0;
  i64 heaviest = 0;
  i32 count = 0;
  i32 worker = 0;
  for (i32 g = 0; g < units.num_groups; ++g) {
    if (units.group_tile[g] == units.group_tile[g + 1]) continue;
    for (i32 h = 0; h < units.num_kv_heads; ++h) {
      for (i32 t = units.group_tile[g]; t < units.group_tile[g + 1]; ++t) {
        for (i32 p = piece_begin[t]; p < piece_begin[t + 1]; ++p) {
          loads[worker] += piece_cost(units, pieces[p], piece_begin[t + 1] - piece_begin[t]);
          placements[count++] = Placement{p, h, worker};
        }
      }
    }
    heaviest = max(heaviest, loads[worker]);
    worker = worker + 1 < num_workers ? worker + 1 : 0;
  }
  return heaviest;
}

RADDLE_ENGINE_END
