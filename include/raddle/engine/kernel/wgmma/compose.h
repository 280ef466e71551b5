// Composing the states of a row, at the end of a queue of short queries. The whole launch waits for
// this, and what it runs has not run before: instructions come from memory, line after line, which
// took most of the time. So it is little code, a function of its own, that warps rehearse while
// they wait for something else.
#pragma once

#include "raddle/engine/kernel/gpu/contract.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

using namespace gpu_kernel;

/// Where the states of a row lie in the buffers of partial states: `stride` rows apart from `first`
/// on; or, where that is 0, at most 32 rows, of which each lane has one in `first`.
struct StateRows {
  i32 first, stride, count;
};

/// How many states of a row a warp copies at a time: as many as fit its part of the tiles' slots,
/// which nothing else uses at the end of a queue.
template <class Kernel>
constexpr i32 most_copied_states() {
  using Block = Memory<Kernel>;
  constexpr i32 bytes = Kernel::slots * (Block::Keys::bytes + Block::Values::bytes);
  constexpr i32 fit = bytes / ConsumerTeam::num_warps / (4 * Kernel::dim_vo);
  static_assert(fit >= 8);
  return fit >= 32 ? 32 : fit >= 16 ? 16 : 8;
}
/// That part: rows of O in fp32.
template <class Kernel>
RADDLE_DEVICE float* copied_states(i32 warp) {
  auto* first = reinterpret_cast<float*>(Memory<Kernel>::get().k[0]);
  return first + warp * most_copied_states<Kernel>() * Kernel::dim_vo;
}

/// Composes states. They are copied to `rows` in shared memory, all at once, so that the warp waits
/// for the L2 cache once. O is left in `vector`, in shared memory. Returns the LSE.
template <class Kernel, Scan scan>
RADDLE_COLD float compose_states(const float* partial_o, const float* partial_lse, StateRows at,
                                 float* rows, float* vector) {
  using Lanes = LaneRow<Kernel::dim_vo>;
  using Composed = ComposedRow<Kernel, scan>;
  constexpr i32 dim = Kernel::dim_vo, most = most_copied_states<Kernel>(), started_at_once = 4;
  constexpr i32 at_once = Composed::at_once;
  static_assert(most % started_at_once == 0 && most % at_once == 0);
  Composed all;
  RADDLE_ROLLED
  for (i32 done = 0; done < at.count; done += most) {
    const i32 count = min(at.count - done, most);
    if (done > 0) ptx::sync_warp();  // all lanes have read the states before
    const i32 nth = min(done + ptx::lane_index(), at.count - 1);  // further lanes repeat the last
    const i32 row = at.stride > 0 ? at.first + nth * at.stride : ptx::shuffle(at.first, nth);
    const float lse = partial_lse[row];
    RADDLE_ROLLED
    for (i32 c = 0; c < count; c += started_at_once) {
      RADDLE_UNROLL
      for (i32 u = 0; u < started_at_once; ++u) {
        const i32 state = min(c + u, count - 1);
        const i64 from = ptx::shuffle(row, state);
        Lanes::every([&](i32, i32 d) {
          ptx::copy_async(ptx::shared_address(rows + state * dim + d), partial_o + from * dim + d,
                          16);
        });
      }
    }
    ptx::copy_commit();
    ptx::copy_wait<0>();  // each lane reads what it has copied
    RADDLE_ROLLED
    for (i32 c = 0; c < count; c += at_once) {
      typename Composed::State states[at_once];
      RADDLE_UNROLL
      for (i32 u = 0; u < at_once; ++u) {
        const i32 state = min(c + u, count - 1);
        const float of = ptx::shuffle(lse, state);
        states[u].lse = c + u < count ? of : -math::infinity;
        Lanes::every([&](i32 i, i32 d) {
          states[u].o.of[i] = *reinterpret_cast<const Four*>(rows + state * dim + d);
        });
      }
      all.add(states, count - c);
    }
  }
  const float lse = all.finish();
  ptx::sync_warp();  // all lanes have read the row before
  Lanes::each([&](i32 i, i32 d) { *reinterpret_cast<Four*>(vector + d) = all.o.of[i]; });
  ptx::sync_warp();
  return lse;
}

/// Fetches the instructions of a composition: a warp composes a state in `vector`, which is
/// dropped.
template <class Kernel, class Variant>
RADDLE_DEVICE void rehearse_composition(const GpuLaunch& launch, float* vector) {
  if (launch.plan.num_partial_rows > 0)
    compose_states<Kernel, scan_of<Variant>()>(launch.partial_o, launch.partial_lse,
                                               StateRows{0, 1, 1}, vector, vector);
}

/// Composes a row by a warp, and writes it to the output.
template <class Kernel, class Variant>
RADDLE_DEVICE void compose_row(const GpuLaunch& launch, const Variant& variant, const Row& row,
                               const StateRows& at, float* vector) {
  const float lse = compose_states<Kernel, scan_of<Variant>()>(
      launch.partial_o, launch.partial_lse, at, copied_states<Kernel>(ConsumerTeam::warp()),
      vector);
  LaneRow<Kernel::dim_vo> o;
  o.every([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(vector + d); });
  write_row<Kernel>(launch, variant, row, o, lse, vector);
}

}  // namespace wgmma

RADDLE_ENGINE_END
