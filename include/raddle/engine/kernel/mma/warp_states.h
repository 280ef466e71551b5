// What the warps of a team leave of a short item in shared memory: statistics of rows, and slabs of
// outputs relative to the team's largest logit. A team adds up its own; two teams with paired
// halves compose theirs.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"
#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A block may have two teams, where two would share a multiprocessor and all items are of short
/// queries. The teams run independently until both reach their last item. If these items are the
/// two halves of a unit, the first team composes them in shared memory. Otherwise a half is stored
/// as a partial state, and the worker that stores the last state composes it (gpu/arrive.h): to the
/// same bits, but 4 µs later or more.
///
/// Whether the items of both teams are the halves of one unit, and the last items of their queues.
template <class Kernel>
RADDLE_DEVICE bool ends_with_paired_half(const WorkItem& item) {
  return Kernel::pairs_teams && item.paired_half != 0 && ptx::team_count() == 2;
}

/// A row over all warps of a team: what its outputs are relative to, 1/Σ, and the LSE.
struct MergedRow {
  float shift, inverse, lse;
};

template <Scan scan>
RADDLE_DEVICE MergedRow merged_row(const MergeStatistics& buffer, i32 m, float to_log2) {
  if constexpr (scan == Scan::sum) return MergedRow{0.0f, 1.0f, 0.0f};
  float top = -math::infinity;
  for (i32 w = 0; w < num_warps; ++w) top = max(top, buffer.top[w][m]);
  const float shift = top == -math::infinity ? 0.0f : top;
  float sum = 0.0f;
  for (i32 w = 0; w < num_warps; ++w)
    sum += buffer.sum[w][m] * ptx::exp2((buffer.top[w][m] - shift) * to_log2);
  return MergedRow{shift, sum == 0.0f ? 0.0f : 1.0f / sum,
                   top == -math::infinity ? top : (shift * to_log2 + math::log2(sum)) * math::ln2};
}

/// The sum over a team's warps of four elements that lie `stride` floats apart.
RADDLE_DEVICE Four sum_of_warps(const float* from, i32 stride) {
  Four o{};
  for (i32 w = 0; w < num_warps; ++w)
    for (i32 e = 0; e < 4; ++e) o.x[e] += from[w * stride + e];
  return o;
}

/// Slabs of all columns of eight rows, in the memory of the ring.
template <class Memory, i32 out_fragments>
struct WholeSlabs {
  static constexpr i32 columns = round_up(8 * out_fragments, slab_columns);
  static constexpr i32 pitch = columns + 4;
  static constexpr bool fit =
      num_warps * slab_rows * pitch * 4 <= Memory::slots * Memory::slot_bytes;
  RADDLE_DEVICE static float* of_team(i32 team) {
    return reinterpret_cast<float*>(Memory::base_of(team) + Memory::ring);
  }
};

/// Composes two states of a unit, with the same bits as ComposedRow, where a thread has elements of
/// both.
struct PairedHalves {
  float weight[2] = {1.0f, 1.0f};
  float inverse = 1.0f;

  /// Returns the LSE of the union.
  template <Scan scan>
  RADDLE_DEVICE float weigh(float first, float second) {
    if constexpr (scan == Scan::sum) return 0.0f;
    const float top = ptx::max(first, second);
    const float shift = top == -math::infinity ? 0.0f : top;
    weight[0] = ptx::exp2((first - shift) * math::log2e);
    weight[1] = ptx::exp2((second - shift) * math::log2e);
    const float sum = weight[0] + weight[1];
    inverse = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
    return sum == 0.0f ? top : ptx::fma(ptx::log2(sum), math::ln2, top);
  }

  template <Scan scan>
  RADDLE_DEVICE Four compose(const Four& first, const Four& second) const {
    Four o;
    RADDLE_UNROLL
    for (i32 e = 0; e < 4; ++e) {
      o.x[e] = ptx::fma(second.x[e], weight[1], ptx::fma(first.x[e], weight[0], 0.0f));
      if constexpr (scan == Scan::softmax) o.x[e] *= inverse;
    }
    return o;
  }
};

/// Composes the halves of a unit that both teams left, of eight rows at most, and stores the
/// result: the first team does this, four elements a thread. All threads of the block call it after
/// they stored their slabs. A function of its own, because most items end without it.
template <class Kernel, class Variant, class Memory>
RADDLE_COLD void compose_paired_halves(const GpuLaunch& launch, const Variant& variant, i32 number,
                                       float to_log2) {
  constexpr Scan scan = scan_of<Variant>();
  using T = typename Kernel::T;
  using Slabs = WholeSlabs<Memory, Kernel::out_fragments>;
  constexpr i32 quads = Slabs::columns / 4;
  ptx::sync_block();
  if (ptx::team_index() != 0) return;
  const PlanView& plan = launch.plan;
  const WorkItem item = plan.items[number];
  const QueryTile& tile = plan.query_tiles[item.query_tile];
  const i32 d = 4 * (ptx::thread_index() % quads);
  for (i32 m = ptx::thread_index() / quads; m < tile.num_rows; m += num_threads / quads) {
    const Row row = make_row(launch.layout, launch.levels[tile.level], tile.group,
                             tile.row_begin + m, item.kv_head, plan.group_size);
    PairedHalves halves;
    float lse =
        halves.template weigh<scan>(merged_row<scan>(Memory::statistics_of(0), m, to_log2).lse,
                                    merged_row<scan>(Memory::statistics_of(1), m, to_log2).lse);
    const float factor = apply_sink(launch, variant, row, lse);
    if (d == 0) store_lse(launch, row, lse);
    if (d >= Kernel::dim_vo) continue;
    constexpr i32 stride = slab_rows * Slabs::pitch;
    const i32 at = m * Slabs::pitch + d;
    Four o = halves.template compose<scan>(sum_of_warps(Slabs::of_team(0) + at, stride),
                                           sum_of_warps(Slabs::of_team(1) + at, stride));
    const i64 to = out_offset(launch, row) + d;
    if (launch.state_only) {
      *reinterpret_cast<Four*>(static_cast<float*>(launch.out.data) + to) = o;
      continue;
    }
    if constexpr (has_sink<Variant>)
      for (i32 e = 0; e < 4; ++e) o.x[e] *= factor;
    store_four(static_cast<T*>(launch.out.data) + to, o);
  }
}

}  // namespace mma

RADDLE_ENGINE_END
