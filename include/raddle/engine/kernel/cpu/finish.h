// From partial results to the caller's tensors: finishing a row, storing a state, contracting a
// tile.
#pragma once

#include "raddle/engine/core/state.h"
#include "raddle/engine/kernel/cpu/row_conversion.h"
#include "raddle/engine/kernel/cpu/scratch.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Applies sink and output parts to a row's state. O is normalised; both are changed in place.
RADDLE_FN void finish_state(const Stages& stages, const Row& row, i32 dim, float* o, float& lse) {
  if (stages.sink.ops) {
    // ⊕ with the state (0, sink) of a key without value.
    const Mix mix = compose(lse, stages.sink.ops->sink(stages.sink.self, row));
    for (i32 d = 0; d < dim; ++d) o[d] *= mix.first;
    lse = mix.lse;
  }
  for (i32 i = 0; i < stages.num_output; ++i)
    stages.output[i].ops->output(stages.output[i].self, o, dim, row, lse);
}

/// Writes a finished row, or its bare state, to the output tensors.
inline void write_row(const CpuLaunch& launch, const Row& row, float* o, float lse) {
  if (!launch.state_only) finish_state(*launch.stages, row, launch.dim_vo, o, lse);
  const i64 at = offset_in(launch.out, row);
  dispatch_dtype(launch.state_only ? DType::float32 : launch.dtype, [&](auto t) {
    narrow_row(o, static_cast<decltype(t)*>(launch.out.data) + at, launch.dim_vo);
  });
  put_lse(launch.lse, row, lse);
}

/// Normalises the tile's rows: O / Σ and LSE = max + ln Σ; a row with nothing kept becomes (0,
/// -inf). O is multiplied by the scale of V that has no 8 bits, too, before it becomes a state.
template <class T>
inline void normalize(const CpuLaunch& launch, Scratch<T>& scratch, i32 num_rows) {
  const float of_values = is_quantized<T> ? 1.0f : launch.kv_scales[0].v.value;
  if (launch.stages->scan == Scan::sum) {
    for (i32 m = 0; m < num_rows && of_values != 1.0f; ++m)
      scale_row(scratch.o + m * scratch.stride_o, scratch.ldo, of_values);
    return;
  }
  for (i32 m = 0; m < num_rows; ++m) {
    const RowState& row = scratch.state[m];
    float* o = scratch.o + m * scratch.stride_o;
    scratch.lse[m] = row.max + math::log(row.sum);
    if (row.sum == 0.0f)  // exactly 0, whatever the values of dropped keys have left there
      for (i32 d = 0; d < scratch.ldo; ++d) o[d] = 0.0f;
    else
      scale_row(o, scratch.ldo, of_values / row.sum);
  }
}

template <class T>
inline void store_partial(const CpuLaunch& launch, const Scratch<T>& scratch, i32 num_rows,
                          i64 partial_row) {
  for (i32 m = 0; m < num_rows; ++m) {
    narrow_row(scratch.o + m * scratch.stride_o,
               launch.partial_o + (partial_row + m) * launch.dim_vo, launch.dim_vo);
    launch.partial_lse[partial_row + m] = scratch.lse[m];
  }
}

/// (o, lse) ⊕= a stored partial state.
RADDLE_FN void compose_partial(const CpuLaunch& launch, i64 partial_row, float* o, float& lse) {
  const float* from = launch.partial_o + partial_row * launch.dim_vo;
  Mix mix{1.0f, 1.0f, 0.0f};
  if (launch.stages->scan == Scan::softmax) mix = compose(lse, launch.partial_lse[partial_row]);
#pragma GCC ivdep
  for (i32 d = 0; d < launch.dim_vo; ++d) o[d] = o[d] * mix.first + from[d] * mix.second;
  lse = mix.lse;
}

/// Composes all partial states of one query tile of the last level, in level and chunk order.
template <class T>
inline void contract(const CpuLaunch& launch, const Contraction& contraction, i32 kv_head,
                     Scratch<T>& scratch) {
  const PlanView& plan = *launch.plan;
  const QueryTile& tile = plan.query_tiles[contraction.query_tile];
  const float empty = launch.stages->scan == Scan::softmax ? -math::infinity : 0.0f;
  for (i32 m = 0; m < tile.num_rows; ++m) {
    scratch.lse[m] = empty;
    for (i32 d = 0; d < scratch.ldo; ++d) scratch.o[m * scratch.stride_o + d] = 0.0f;
  }
  for (i32 i = contraction.source_begin; i < contraction.source_end; ++i) {
    const Source& source = plan.sources[i];
    const QueryTile& from = plan.query_tiles[source.query_tile];
    const Split& split = plan.splits[from.split + kv_head];
    for (i32 chunk = 0; chunk < split.num_chunks; ++chunk) {
      const i64 first = split.partial_row + static_cast<i64>(chunk) * from.num_rows + source.row;
      for (i32 m = 0; m < source.num_rows; ++m)
        compose_partial(launch, first + m, scratch.o + (source.dst_row + m) * scratch.stride_o,
                        scratch.lse[source.dst_row + m]);
    }
  }
  const LevelView& level = launch.layout->levels[tile.level];
  for (i32 m = 0; m < tile.num_rows; ++m)
    write_row(
        launch,
        make_row(*launch.layout, level, tile.group, tile.row_begin + m, kv_head, plan.group_size),
        scratch.o + m * scratch.stride_o, scratch.lse[m]);
}

/// Counts a finished item at every contraction that waits for it, and composes those that it
/// completes.
template <class T>
inline void arrive(const CpuLaunch& launch, const WorkItem& item, Scratch<T>& scratch) {
  const PlanView& plan = *launch.plan;
  const QueryTile& tile = plan.query_tiles[item.query_tile];
  for (i32 i = tile.dependents_begin; i < tile.dependents_end; ++i) {
    const i32 which = plan.dependents[i];
    const i32 at = which * plan.num_kv_heads + item.kv_head;
    if (__atomic_add_fetch(&launch.arrived[at], 1, __ATOMIC_ACQ_REL) != plan.expected[at]) continue;
    __atomic_store_n(&launch.arrived[at], 0, __ATOMIC_RELAXED);
    contract(launch, plan.contractions[which], item.kv_head, scratch);
  }
}

}  // namespace cpu

RADDLE_ENGINE_END
