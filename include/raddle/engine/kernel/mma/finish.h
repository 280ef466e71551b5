// From partial results to the caller's tensors: finishing a row, contracting a tile. A warp holds a
// row in its fp32 vector in shared memory.
#pragma once

#include "raddle/engine/core/state.h"
#include "raddle/engine/kernel/mma/launch.h"
#include "raddle/engine/tile/warp_vector.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Applies sink and output parts to a row's normalised state.
template <class V>
RADDLE_DEVICE void finish_state(const V& variant, const Row& row, WarpVector& o, float& lse) {
  if constexpr (has_sink<V>) {
    // ⊕ with the state (0, sink) of a key without value.
    const Mix mix = compose(lse, variant.sink(row));
    o.map([&](float x, i32) { return x * mix.first; });
    lse = mix.lse;
  }
  if constexpr (has_output<V>) variant.output(o, row, lse);
}

/// Writes a finished row, or its bare state, to the output tensors. `vector` is the warp's.
template <class T, i32 dim_vo, class V>
RADDLE_DEVICE void write_row(const MmaLaunch& launch, const V& variant, const Row& row,
                             float* vector, float lse) {
  const i32 lane = ptx::thread_index() % 32;
  if (!launch.state_only) {
    WarpVector o(vector, dim_vo);
    finish_state(variant, row, o, lse);
  }
  const i64 at = row.row * launch.out.row_stride + row.q_head * launch.out.head_stride;
  for (i32 d = lane; d < dim_vo; d += 32)
    if (launch.state_only)
      static_cast<float*>(launch.out.data)[at + d] = vector[d];
    else
      static_cast<T*>(launch.out.data)[at + d] = from_float<T>(vector[d]);
  if (launch.lse && lane == 0)
    launch.lse[row.row * launch.lse_row_stride + row.q_head * launch.lse_head_stride] = lse;
}

/// (vector, lse) ⊕= a stored partial state.
template <Scan scan, i32 dim_vo>
RADDLE_DEVICE void compose_partial(const MmaLaunch& launch, i64 partial_row, float* vector,
                                   float& lse) {
  Mix mix{1.0f, 1.0f, 0.0f};
  if (scan == Scan::softmax) mix = compose(lse, launch.partial_lse[partial_row]);
  const float* from = launch.partial_o + partial_row * dim_vo;
  for (i32 d = ptx::thread_index() % 32; d < dim_vo; d += 32)
    vector[d] = vector[d] * mix.first + from[d] * mix.second;
  lse = mix.lse;
}

/// Composes all partial states of one query tile of the last level, a warp a row, in level and
/// chunk order.
template <class T, i32 dim_vo, class V>
RADDLE_DEVICE void contract(const MmaLaunch& launch, const V& variant,
                            const Contraction& contraction, i32 kv_head, float* vector) {
  constexpr Scan scan = scan_of<V>();
  const PlanView& plan = launch.plan;
  const QueryTile& tile = plan.query_tiles[contraction.query_tile];
  const LevelView& level = launch.levels[tile.level];
  for (i32 m = ptx::thread_index() / 32; m < tile.num_rows; m += num_warps) {
    float lse = scan == Scan::softmax ? -math::infinity : 0.0f;
    for (i32 d = ptx::thread_index() % 32; d < dim_vo; d += 32) vector[d] = 0.0f;
    for (i32 i = contraction.source_begin; i < contraction.source_end; ++i) {
      const Source& source = plan.sources[i];
      const i32 nth = m - source.dst_row;
      if (nth < 0 || nth >= source.num_rows) continue;
      const QueryTile& from = plan.query_tiles[source.query_tile];
      const Split& split = plan.splits[from.split + kv_head];
      for (i32 chunk = 0; chunk < split.num_chunks; ++chunk)
        compose_partial<scan, dim_vo>(
            launch, split.partial_row + i64{chunk} * from.num_rows + source.row + nth, vector, lse);
    }
    ptx::sync_warp();
    write_row<T, dim_vo>(
        launch, variant,
        make_row(launch.layout, level, tile.group, tile.row_begin + m, kv_head, plan.group_size),
        vector, lse);
    ptx::sync_warp();
  }
}

}  // namespace mma

RADDLE_ENGINE_END
