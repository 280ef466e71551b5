// Contractions: one warp composes a row of a tile from the row's partial states.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// The largest of the lanes' numbers, compared as integers in the same order. NaN is above all.
RADDLE_DEVICE float largest_of_warp(float x) {
  const auto sign = [](u32 bits) { return static_cast<u32>(static_cast<i32>(bits) >> 31); };
  const u32 bits = float_to_bits(x);
  const u32 most = ptx::max_of_warp(bits ^ (sign(bits) | 1u << 31));
  return bits_to_float(most ^ (~sign(most) | 1u << 31));
}

/// A row that is composed of partial states: O and Σ relative to a largest LSE. No other warp hides
/// its latency, so each instruction waits for the one before: the number of instructions decides.
template <class Kernel, Scan scan>
class ComposedRow {
 public:
  RADDLE_DEVICE ComposedRow() {
    RADDLE_UNROLL
    for (i32 i = 0; i < LaneRow<Kernel::dim_vo>::steps; ++i) o.of[i] = Four{};
  }

  /// ⊕= `count` states, at most 32, in lane order: lane i gives `mine`, the row of state i in the
  /// buffer of partial states. O of the next states is loaded while the current ones are added up;
  /// O of the first ones is loaded before their weights are known.
  RADDLE_DEVICE void compose(const GpuLaunch& launch, i32 mine, i32 count) {
    const i32 lane = ptx::lane_index();
    mine = ptx::shuffle(mine,
                        max(0, min(lane, count - 1)));  // lanes without a state repeat the last one
    const float* from[LaneRow<Kernel::dim_vo>::steps];
    LaneRow<Kernel::dim_vo>::every([&](i32 i, i32 d) { from[i] = launch.partial_o + d; });
    States next;
    load(from, mine, 0, next);
    const float lse = launch.partial_lse[mine];
    const float weight = weigh(lane < count ? lse : -math::infinity);
    RADDLE_ROLLED
    for (i32 c = 0; c < count; c += unrolled) {
      const States states = next;
      if (c + unrolled < count) load(from, mine, c + unrolled, next);
      add(states, weight, c, count);
    }
  }

  /// Turns the sums into O and LSE of the union; a row that kept nothing is (0, -inf).
  RADDLE_DEVICE float finish() {
    if constexpr (scan == Scan::sum) return 0.0f;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    o.map([&](float x) { return x * inverse; });
    return top == -math::infinity ? top : top + math::log(sum);
  }

  LaneRow<Kernel::dim_vo> o;

 private:
  /// States that are loaded together. More would save time for dozens of states, but cost time for
  /// two: instructions that run once have to be fetched, too.
  static constexpr i32 unrolled = max(1, 8 / LaneRow<Kernel::dim_vo>::steps);

  /// Returns the weight e^(LSE - top) of the lane's state, and rescales Σ and O to the new top.
  RADDLE_DEVICE float weigh(float lse) {
    if constexpr (scan == Scan::sum) return 1.0f;
    const float new_top = max(top, largest_of_warp(lse));
    const float shift = new_top == -math::infinity ? 0.0f : new_top;
    const float rescale = ptx::exp2((top - shift) * math::log2e);
    const float weight = ptx::exp2((lse - shift) * math::log2e);
    float total = weight;
    for (i32 step = 16; step > 0; step /= 2) total += ptx::shuffle_xor(total, step);
    o.map([&](float x) { return x * rescale; });
    sum = sum * rescale + total;
    top = new_top;
    return weight;
  }

  struct States {
    LaneRow<Kernel::dim_vo> of[unrolled];
  };

  /// Loads O of states c … c + unrolled - 1.
  RADDLE_DEVICE static void load(const float* const (&from)[LaneRow<Kernel::dim_vo>::steps],
                                 i32 mine, i32 c, States& x) {
    RADDLE_UNROLL
    for (i32 u = 0; u < unrolled; ++u) {
      const i64 row = ptx::shuffle(mine, c + u);
      RADDLE_UNROLL
      for (i32 i = 0; i < LaneRow<Kernel::dim_vo>::steps; ++i)
        x.of[u].of[i] = *reinterpret_cast<const Four*>(from[i] + row * Kernel::dim_vo);
    }
  }

  /// Adds the states that exist, weighted.
  RADDLE_DEVICE void add(const States& x, float weight, i32 c, i32 count) {
    RADDLE_UNROLL
    for (i32 u = 0; u < unrolled; ++u) {
      if (c + u >= count) break;
      const float w = ptx::shuffle(weight, c + u);
      RADDLE_UNROLL
      for (i32 i = 0; i < LaneRow<Kernel::dim_vo>::steps; ++i) {
        RADDLE_UNROLL
        for (i32 e = 0; e < 4; ++e) o.of[i].x[e] = ptx::fma(x.of[u].of[i].x[e], w, o.of[i].x[e]);
      }
    }
  }

  float top = -math::infinity;
  float sum = 0.0f;
};

/// The warps that compose rows together: all warps of a team, every fourth row each; or a single
/// one, all rows.
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
