// Contractions: one warp composes a row of a tile from the row's partial states.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// A row that is composed of partial states: O and Σ relative to a largest LSE. The same states in
/// the same order give the same bits, whichever worker composes them and however it finds them.
template <class Kernel, Scan scan>
class ComposedRow {
  using Lanes = LaneRow<Kernel::dim_vo>;

 public:
  /// States that are loaded, and added, together. More would save time for dozens of states, but
  /// cost time for two: instructions that run once have to be fetched, too.
  static constexpr i32 at_once = max(1, 8 / Lanes::steps);
  struct State {
    Lanes o;
    float lse;
  };

  RADDLE_DEVICE ComposedRow() {
    o.map([](float) { return 0.0f; });
  }

  /// ⊕= the first `count` of the states; the LSE of others is -inf.
  RADDLE_DEVICE void add(const State (&states)[at_once], i32 count) {
    float new_top = top;
    RADDLE_UNROLL
    for (i32 u = 0; u < at_once; ++u) new_top = ptx::max(new_top, states[u].lse);
    const float shift = new_top == -math::infinity ? 0.0f : new_top;
    const auto weight = [=](float lse) {
      return scan == Scan::sum ? 1.0f : ptx::exp2((lse - shift) * math::log2e);
    };
    const float rescale = weight(top);
    top = new_top, sum *= rescale;
    o.map([=](float x) { return x * rescale; });
    RADDLE_UNROLL
    for (i32 u = 0; u < at_once; ++u) {
      if (u >= count) break;
      const float w = weight(states[u].lse);
      sum += w;
      RADDLE_UNROLL
      for (i32 i = 0; i < Lanes::steps; ++i) {
        RADDLE_UNROLL
        for (i32 e = 0; e < 4; ++e)
          o.of[i].x[e] = ptx::fma(states[u].o.of[i].x[e], w, o.of[i].x[e]);
      }
    }
  }

  /// ⊕= `count` states, at most 32, in lane order: lane i gives `mine`, the row of state i in the
  /// buffer of partial states. While some states are added, the next are on their way.
  RADDLE_DEVICE void compose(const GpuLaunch& launch, i32 mine, i32 count) {
    const i32 lane = ptx::lane_index();
    mine = ptx::shuffle(mine,
                        max(0, min(lane, count - 1)));  // lanes without a state repeat the last one
    const float lse = launch.partial_lse[mine];
    State next[at_once];
    load(launch, mine, 0, next);
    RADDLE_ROLLED
    for (i32 c = 0; c < count; c += at_once) {
      State states[at_once];
      RADDLE_UNROLL
      for (i32 u = 0; u < at_once; ++u) {
        states[u] = next[u];
        const float of = ptx::shuffle(lse, c + u);
        states[u].lse = c + u < count ? of : -math::infinity;
      }
      if (c + at_once < count) load(launch, mine, c + at_once, next);
      add(states, count - c);
    }
  }

  /// Turns the sums into O and LSE of the union; a row that kept nothing is (0, -inf).
  RADDLE_DEVICE float finish() {
    if constexpr (scan == Scan::sum) return 0.0f;
    const float inverse = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
    o.map([=](float x) { return x * inverse; });
    return sum == 0.0f ? top : ptx::fma(ptx::log2(sum), math::ln2, top);
  }

  Lanes o;

 private:
  /// Loads O of states c … c + at_once - 1.
  RADDLE_DEVICE static void load(const GpuLaunch& launch, i32 mine, i32 c,
                                 State (&states)[at_once]) {
    RADDLE_UNROLL
    for (i32 u = 0; u < at_once; ++u) {
      const i64 row = ptx::shuffle(mine, c + u);
      Lanes::every([&](i32 i, i32 d) {
        states[u].o.of[i] =
            *reinterpret_cast<const Four*>(launch.partial_o + row * Kernel::dim_vo + d);
      });
    }
  }

  float top = -math::infinity;
  float sum = 0.0f;
};

/// The warps that compose rows together: all warps of a team, each every num_warps-th row; or a
/// single one, all rows.
template <class Team>
struct RowWorkers {
  bool alone;
  RADDLE_DEVICE i32 index() const { return alone ? 0 : Team::warp(); }
  RADDLE_DEVICE i32 size() const { return alone ? 1 : Team::num_warps; }
};

/// Composes the partial states of rows [begin, end) of a query tile, one warp a row. add(composed,
/// m) adds the states of row m.
template <class Kernel, class Variant, class Add>
RADDLE_DEVICE void contract_rows(const GpuLaunch& launch, const Variant& variant,
                                 const QueryTile& tile, i32 begin, i32 end, i32 kv_head,
                                 RowWorkers<typename Kernel::Team> row_workers, float* vector,
                                 Add add) {
  const LevelView& level = launch.levels[tile.level];
  for (i32 m = begin + row_workers.index(); m < end; m += row_workers.size()) {
    const Row row = make_row(launch.layout, level, tile.group, tile.row_begin + m, kv_head,
                             launch.plan.group_size);
    ComposedRow<Kernel, scan_of<Variant>()> composed;
    add(composed, m);
    const float lse = composed.finish();
    write_row<Kernel>(launch, variant, row, composed.o, lse, vector);
  }
}

/// A source of a contraction: rows [begin, end) of the tile have `count` states each, `stride` rows
/// apart; the first state of row m is at first + m.
struct SourceRows {
  i32 first, begin, end, stride, count;
};

RADDLE_DEVICE SourceRows rows_of(const PlanView& plan, const Source& source, i32 kv_head) {
  const QueryTile& from = plan.query_tiles[source.query_tile];
  const Split split = plan.splits[from.split + kv_head];
  return SourceRows{split.partial_row + source.row - source.dst_row, source.dst_row,
                    source.dst_row + source.num_rows, from.num_rows, split.num_chunks};
}

/// The sources of a contraction: states of a tile of the last level, in level and chunk order. Lane
/// i of a warp knows source i.
struct Sources {
  i32 which = -1;  ///< number of the contraction; -1: a tile of a single level
  i32 kv_head, count;
  SourceRows mine;
};

/// This lane's source, counted from `first` on.
RADDLE_DEVICE SourceRows look_up_source(const PlanView& plan, const Sources& sources, i32 first) {
  const i32 nth = first + ptx::lane_index();
  if (nth >= sources.count) return SourceRows{};
  const i32 begin = plan.contractions[sources.which].source_begin;
  return rows_of(plan, plan.sources[begin + nth], sources.kv_head);
}

/// Writes the row of state number `nth` of row m to `row`, if there is such a state; returns the
/// number of states over all sources. Each lane asks for its own `nth`.
RADDLE_DEVICE i32 find_state(const PlanView& plan, Sources& sources, i32 m, i32 nth, i32& row) {
  i32 count = 0;
  RADDLE_ROLLED
  for (i32 s = 0; s < sources.count; ++s) {
    // There are more sources than lanes: the row shares little with each of many groups.
    if (sources.count > 32 && s % 32 == 0) sources.mine = look_up_source(plan, sources, s);
    const SourceRows& mine = sources.mine;
    const i32 from = s % 32, chunk = nth - count;
    if (m < ptx::shuffle(mine.begin, from) || m >= ptx::shuffle(mine.end, from)) continue;
    const i32 chunks = ptx::shuffle(mine.count, from);
    const i32 at = ptx::shuffle(mine.first, from) + m + chunk * ptx::shuffle(mine.stride, from);
    if (chunk >= 0 && chunk < chunks) row = at;
    count += chunks;
  }
  return count;
}

/// Adds all states of row m.
template <class Composed>
RADDLE_DEVICE void compose_row(const GpuLaunch& launch, Sources& sources, Composed& composed,
                               i32 m) {
  i32 done = 0, count;
  RADDLE_ROLLED
  do {
    i32 mine = 0;
    count = find_state(launch.plan, sources, m, done + ptx::lane_index(), mine);
    composed.compose(launch, mine, min(32, count - done));
    done += 32;
  } while (done < count);
}

RADDLE_DEVICE Sources look_up_sources(const PlanView& plan, i32 which, i32 kv_head) {
  const Contraction& contraction = plan.contractions[which];
  Sources found{which, kv_head, contraction.source_end - contraction.source_begin, {}};
  found.mine = look_up_source(plan, found, 0);
  return found;
}

/// The sources of a tile of a single level are its own chunks: nothing has to be looked up.
RADDLE_DEVICE Sources own_sources(const QueryTile& tile, const Split& split, i32 kv_head) {
  return Sources{-1, kv_head, 1,
                 SourceRows{split.partial_row, 0, tile.num_rows, tile.num_rows, split.num_chunks}};
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
