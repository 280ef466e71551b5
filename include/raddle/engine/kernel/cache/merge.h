// Composing states that the caller holds: (O, LSE) ⊕ (O, LSE) ⊕ …
#pragma once

#include "raddle/engine/core/state.h"
#include "raddle/engine/kernel/cache/lanes.h"

namespace raddle {

/// States one after another: [states, rows, heads], O with a last dimension. Strides are in
/// elements.
struct StatesView {
  const float* o;
  const float* lse;
  i64 o_state, o_row, o_head;
  i64 lse_state, lse_row, lse_head;
};

/// `num_states` states: one, and those of a list behind it. The outputs may be one of the inputs.
/// Or with `indptr`: row r's states are the rows indptr[r] to indptr[r + 1] of `first`, which has
/// num_states of them; bounds outside of it count as the nearest ones.
struct MergeView {
  StatesView first;
  StatesView rest;
  float* out;
  float* lse_out;
  i64 out_row, out_head;
  i64 lse_out_row, lse_out_head;
  i32 num_states;
  i32 num_rows;
  i32 num_heads;
  i32 dim;
  const i32* indptr;  ///< [num_rows + 1]; null: every row has num_states
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

/// The widest rows of states: those of MLA.
constexpr i32 max_state_dim = 512;

/// sum, lse = the composition of one row's states, in order; element i of a lane's `sum` is
/// i * Lanes::count + lanes.index() of the row. Everything is read before the caller stores
/// anything.
template <class Lanes>
RADDLE_FN float compose_row(const Lanes& lanes, const MergeView& view, i64 row, i64 head,
                            float (&sum)[max_state_dim / Lanes::count]) {
  float total = -math::infinity;
  RADDLE_UNROLL
  for (i32 i = 0; i < max_state_dim / Lanes::count; ++i) sum[i] = 0.0f;
  const bool listed = view.indptr != nullptr;
  const i32 begin = listed ? max(view.indptr[row], 0) : 0;
  const i32 end = listed ? min(view.indptr[row + 1], view.num_states) : view.num_states;
  for (i32 s = begin; s < end; ++s) {
    const StatesView& from = listed || s == 0 ? view.first : view.rest;
    const i64 nth = listed ? 0 : max(s - 1, 0), at = listed ? s : row;
    const float lse = from.lse[nth * from.lse_state + at * from.lse_row + head * from.lse_head];
    if (lse == -math::infinity) continue;  // whatever its O holds
    const Mix mix = compose(total, lse);
    const float* o = from.o + nth * from.o_state + at * from.o_row + head * from.o_head;
    // A warp keeps its sums in registers, so its loop has a constant length.
    const i32 mine = Lanes::count == 1 ? view.dim : max_state_dim / Lanes::count;
    RADDLE_UNROLL
    for (i32 i = 0; i < mine; ++i) {
      const i32 d = i * Lanes::count + lanes.index();
      if (d < view.dim) sum[i] = sum[i] * mix.first + o[d] * mix.second;
    }
    total = mix.lse;
  }
  return total;
}

}  // namespace kv

RADDLE_ENGINE_END
