// Composing the states of a row, at the end of a queue of short queries. The whole launch waits for
// this, and what it runs has not run before: instructions come from memory, line after line, which
// took most of the time. So it is little code, a function of its own, that warps rehearse while
// they wait for something else; a state's place is read from shared memory, since lanes that tell
// it to one another take more.
#pragma once

#include "raddle/engine/kernel/gpu/contract.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

using namespace gpu_kernel;

/// Where the states of a row lie in the buffers of partial states: `stride` rows apart; or, where
/// that is 0, in the rows that are listed in the warp's `vector`, at most 32.
struct StateRows {
  i32 first, stride, count;
};

/// Composes states. While some are added up, the next are on their way. O is left in `vector`, in
/// shared memory. Returns the LSE.
template <class Kernel, Scan scan>
RADDLE_COLD float compose_states(const float* partial_o, const float* partial_lse, StateRows at,
                                 float* vector) {
  using Lanes = LaneRow<Kernel::dim_vo>;
  using Composed = ComposedRow<Kernel, scan>;
  constexpr i32 at_once = Composed::at_once;
  typename Composed::State next[at_once];
  Composed all;
  const i32* listed = reinterpret_cast<const i32*>(vector);
  const i32 count = at.count;
  RADDLE_ROLLED
  for (i32 c = 0; c < count + at_once; c += at_once) {
    typename Composed::State now[at_once];
    RADDLE_UNROLL
    for (i32 u = 0; u < at_once; ++u) {
      now[u] = next[u];
      if (c >= count) continue;
      const i32 nth = min(c + u, count - 1);
      const i64 row = at.stride > 0 ? at.first + nth * at.stride : listed[nth];
      Lanes::every([&](i32 i, i32 d) {
        next[u].o.of[i] = *reinterpret_cast<const Four*>(partial_o + row * Kernel::dim_vo + d);
      });
      next[u].lse = c + u < count ? partial_lse[row] : -math::infinity;
    }
    if (c > 0) all.add(now, count - (c - at_once));
  }
  const float lse = all.finish();
  ptx::sync_warp();  // all lanes have read the list
  Lanes::each([&](i32 i, i32 d) { *reinterpret_cast<Four*>(vector + d) = all.o.of[i]; });
  ptx::sync_warp();
  return lse;
}

/// Fetches the instructions of a composition: a warp composes states that are dropped.
template <class Kernel, class Variant>
RADDLE_DEVICE void rehearse_composition(const GpuLaunch& launch, float* vector) {
  if (launch.plan.num_partial_rows > 0)
    compose_states<Kernel, scan_of<Variant>()>(launch.partial_o, launch.partial_lse,
                                               StateRows{0, 1, 1}, vector);
}

/// Composes a row by a warp, and writes it to the output.
template <class Kernel, class Variant>
RADDLE_DEVICE void compose_row(const GpuLaunch& launch, const Variant& variant, const Row& row,
                               const StateRows& at, float* vector) {
  const float lse =
      compose_states<Kernel, scan_of<Variant>()>(launch.partial_o, launch.partial_lse, at, vector);
  LaneRow<Kernel::dim_vo> o;
  o.every([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(vector + d); });
  write_row<Kernel>(launch, variant, row, o, lse, vector);
}

}  // namespace wgmma

RADDLE_ENGINE_END
