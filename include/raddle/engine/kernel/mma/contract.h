// Contractions: the rows of a tile composed of partial states, a warp a row.
#pragma once

#include "raddle/engine/kernel/mma/finish.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A row that is composed of partial states: O and Σ relative to a largest LSE.
template <class K, Scan scan>
class ComposedRow {
 public:
  RADDLE_DEVICE ComposedRow() {
    RADDLE_UNROLL
    for (i32 i = 0; i < LaneRow<K::dim_vo>::steps; ++i) o.of[i] = Four{};
  }

  /// ⊕= `count` states that lie `stride` rows apart, in their order. Some states' O is on its way
  /// while those before are added up, the first ones' before their weights are known.
  RADDLE_DEVICE void compose(const MmaLaunch& launch, i64 first, i32 stride, i32 count) {
    for (i32 done = 0; done < count; done += 32) {
      const i32 n = min(32, count - done);
      const i64 row = first + i64{done} * stride;
      float weight = 1.0f;
      States next;
      load(launch, row, stride, n, next);
      if constexpr (scan == Scan::softmax) weight = weigh(launch, row, stride, n);
      RADDLE_ROLLED
      for (i32 c = 0; c < n; c += unrolled) {
        const States states = next;
        const i32 rest = n - c - unrolled;
        if (rest > 0) load(launch, row + i64{c + unrolled} * stride, stride, rest, next);
        add(states, weight, c, n);
      }
    }
  }

  /// O and LSE of the union; nothing kept is (0, -inf).
  RADDLE_DEVICE float finish() {
    if constexpr (scan == Scan::sum) return 0.0f;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    o.map([&](float x) { return x * inverse; });
    return top == -math::infinity ? top : top + math::log(sum);
  }

  LaneRow<K::dim_vo> o;

 private:
  /// States whose loads are under way together. More would save time where there are dozens, and
  /// cost more where there are two: code that runs once is waited for.
  static constexpr i32 unrolled = max(1, 8 / LaneRow<K::dim_vo>::steps);

  /// The weight of the lane's state, e^(LSE - top); the sum and O so far shrink to the new top.
  RADDLE_DEVICE float weigh(const MmaLaunch& launch, i64 row, i32 stride, i32 n) {
    const i32 lane = ptx::lane_index();
    const float lse = lane < n ? launch.partial_lse[row + i64{lane} * stride] : -math::infinity;
    float new_top = max(top, lse);
    for (i32 step = 16; step > 0; step /= 2)
      new_top = max(new_top, ptx::shuffle_xor(new_top, step));
    const float shift = new_top == -math::infinity ? 0.0f : new_top;
    const float rescale = math::exp(top - shift);
    const float weight = math::exp(lse - shift);
    float total = weight;
    for (i32 step = 16; step > 0; step /= 2) total += ptx::shuffle_xor(total, step);
    o.map([&](float x) { return x * rescale; });
    sum = sum * rescale + total;
    top = new_top;
    return weight;
  }

  struct States {
    LaneRow<K::dim_vo> of[unrolled];
  };

  /// O of `count` states; the others are zero.
  RADDLE_DEVICE static void load(const MmaLaunch& launch, i64 row, i32 stride, i32 count,
                                 States& x) {
    RADDLE_UNROLL
    for (i32 u = 0; u < unrolled; ++u)
      LaneRow<K::dim_vo>::every([&](i32 i, i32 d) {
        const float* from = launch.partial_o + (row + i64{u} * stride) * K::dim_vo + d;
        x.of[u].of[i] = u < count ? *reinterpret_cast<const Four*>(from) : Four{};
      });
  }

  /// Adds states c … c + unrolled - 1 of a batch of n, weighted.
  RADDLE_DEVICE void add(const States& x, float weight, i32 c, i32 n) {
    RADDLE_UNROLL
    for (i32 u = 0; u < unrolled; ++u) {
      const float w = scan == Scan::softmax ? ptx::shuffle(weight, (c + u) % 32) : 1.0f;
      if (c + u >= n) continue;
      LaneRow<K::dim_vo>::every([&](i32 i, i32) {
        RADDLE_UNROLL
        for (i32 e = 0; e < 4; ++e) o.of[i].x[e] = ptx::fma(x.of[u].of[i].x[e], w, o.of[i].x[e]);
      });
    }
  }

  float top = -math::infinity;
  float sum = 0.0f;
};

/// Who composes rows together: a team's warps, every fourth row each, or one of them, all rows.
struct Crew {
  bool alone;
  RADDLE_DEVICE i32 member() const { return alone ? 0 : ptx::warp_index(); }
  RADDLE_DEVICE i32 size() const { return alone ? 1 : num_warps; }
  /// Whether this thread is the one that asks and waits for all.
  RADDLE_DEVICE bool asks() const { return (alone ? ptx::lane_index() : ptx::thread_index()) == 0; }
};

/// Composes the partial states of rows [begin, end) of a query tile, a warp a row. add(composed, m)
/// adds row m's.
template <class K, class V, class Add>
RADDLE_DEVICE void contract_rows(const MmaLaunch& launch, const V& variant, const QueryTile& tile,
                                 i32 begin, i32 end, i32 kv_head, Crew crew, float* vector,
                                 Add add) {
  const LevelView& level = launch.levels[tile.level];
  for (i32 m = begin + crew.member(); m < end; m += crew.size()) {
    const Row row = make_row(launch.layout, level, tile.group, tile.row_begin + m, kv_head,
                             launch.plan.group_size);
    ComposedRow<K, scan_of<V>()> composed;
    add(composed, m);
    const float lse = composed.finish();
    write_row<K>(launch, variant, row, composed.o, lse, vector);
  }
}

/// A source of a contraction: rows [begin, end) of the tile have `count` states, `stride` rows
/// apart, the first of row m at first + m.
struct SourceRows {
  i32 first, begin, end, stride, count;
};

RADDLE_DEVICE SourceRows rows_of(const PlanView& plan, const Source& source, i32 kv_head) {
  const QueryTile& from = plan.query_tiles[source.query_tile];
  const Split split = plan.splits[from.split + kv_head];
  return SourceRows{split.partial_row + source.row - source.dst_row, source.dst_row,
                    source.dst_row + source.num_rows, from.num_rows, split.num_chunks};
}

/// ⊕= row m's states of a source, if it has any.
template <class Composed>
RADDLE_DEVICE void compose_row(const MmaLaunch& launch, Composed& composed, const SourceRows& from,
                               i32 m) {
  if (m >= from.begin && m < from.end)
    composed.compose(launch, i64{from.first} + m, from.stride, from.count);
}

/// What a contraction composes: states of a tile of the last level, in level and chunk order. Each
/// lane of a warp knows one of the sources.
struct Sources {
  i32 which = -1;  ///< the contraction's number
  i32 kv_head, count;
  SourceRows mine;
};

/// This lane's of the sources from `first` on.
RADDLE_DEVICE SourceRows look_up_source(const PlanView& plan, const Sources& sources, i32 first) {
  const i32 nth = first + ptx::lane_index();
  if (nth >= sources.count) return SourceRows{};
  const i32 begin = plan.contractions[sources.which].source_begin;
  return rows_of(plan, plan.sources[begin + nth], sources.kv_head);
}

RADDLE_DEVICE Sources look_up_sources(const PlanView& plan, i32 which, i32 kv_head) {
  const Contraction& contraction = plan.contractions[which];
  Sources found{which, kv_head, contraction.source_end - contraction.source_begin, {}};
  found.mine = look_up_source(plan, found, 0);
  return found;
}

/// Those of a tile of a single level, whose states are its own: nothing is looked up.
RADDLE_DEVICE Sources own_sources(const QueryTile& tile, const Split& split, i32 kv_head) {
  return Sources{-1, kv_head, 1,
                 SourceRows{split.partial_row, 0, tile.num_rows, tile.num_rows, split.num_chunks}};
}

}  // namespace mma

RADDLE_ENGINE_END
