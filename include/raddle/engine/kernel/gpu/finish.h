// Finishing a row: from partial results to the caller's tensors. A warp holds a row in registers,
// four elements a lane and step.
#pragma once

#include "raddle/engine/core/state.h"
#include "raddle/engine/kernel/gpu/facts.h"
#include "raddle/engine/kernel/gpu/timeline.h"
#include "raddle/engine/tile/warp_vector.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// Whether a kernel multiplies O by a scale of V. One for K and V of 16 bits does so only if it is
/// compiled for that: such scales are rare, and the end of an item is code that nothing hides.
#if defined(RADDLE_SCALES_OUTPUT)
constexpr bool scales_output = true;
#else
constexpr bool scales_output = false;
#endif

/// What the rows of an item are multiplied by beside 1/Σ: the scale of V of all levels. So partial
/// states have it already, and contractions, sinks and output parts need not know.
RADDLE_DEVICE float output_scale(const GpuLaunch& launch) {
  if constexpr (scales_output) return launch.kv_scales[0].v.value;
  return 1.0f;
}

/// A row of `dim` elements in the registers of a warp: a lane holds the elements 4 · (lane + 32 ·
/// i) + e.
template <i32 dim>
struct LaneRow {
  static constexpr i32 steps = ceil_div(dim, 128);
  Four of[steps];

  /// f(i, first element) for every step in which this lane has elements.
  template <class F>
  RADDLE_DEVICE static void each(F f) {
    RADDLE_UNROLL
    for (i32 i = 0; i < steps; ++i) {
      const i32 d = 4 * (ptx::lane_index() + 32 * i);
      if (d < dim) f(i, d);
    }
  }
  /// f(i, first element) for every step; a lane without elements repeats the row's last ones. For
  /// reading only: without branches, more loads are in flight.
  template <class F>
  RADDLE_DEVICE static void every(F f) {
    RADDLE_UNROLL
    for (i32 i = 0; i < steps; ++i) f(i, min(4 * (ptx::lane_index() + 32 * i), dim - 4));
  }
  template <class F>
  RADDLE_DEVICE void map(F f) {
    RADDLE_UNROLL
    for (i32 i = 0; i < steps; ++i) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e) of[i].x[e] = f(of[i].x[e]);
    }
  }
};

/// Writes four elements of an output row, rounded to the matrix dtype.
template <class T>
RADDLE_DEVICE void store_four(T* to, const Four& o) {
  *reinterpret_cast<Packed4*>(to) =
      Packed4{{ptx::pack(o.x[0], o.x[1], T{}), ptx::pack(o.x[2], o.x[3], T{})}};
}

/// Offset of an output row, in elements.
RADDLE_DEVICE i64 out_offset(const GpuLaunch& launch, const Row& row) {
  return offset_in(launch.out, row);
}

RADDLE_DEVICE void store_lse(const GpuLaunch& launch, const Row& row, float lse) {
  put_lse(launch.lse, row, launch.lse_base_2 ? lse * math::log2e : lse);
}

/// Applies a sink to the LSE and returns the factor for the row's output: ⊕ with the state (0,
/// sink) of a key without value. 1 for a bare state and for variants without sinks.
template <class Variant>
RADDLE_DEVICE float apply_sink(const GpuLaunch& launch, const Variant& variant, const Row& row,
                               float& lse) {
  if constexpr (has_sink<Variant>) {
    if (!launch.state_only) {
      const Mix mix = compose(lse, variant.sink(row));
      lse = mix.lse;
      return mix.first;
    }
  }
  return 1.0f;
}

/// Writes a finished row, or its bare state, to the output tensors. `vector`, in shared memory, is
/// the warp's: an output part sees the row there.
template <class Kernel, class Variant>
RADDLE_DEVICE void write_row(const GpuLaunch& launch, const Variant& variant, const Row& row,
                             LaneRow<Kernel::dim_vo>& o, float lse, float* vector) {
  using T = typename Kernel::T;
  using Lanes = LaneRow<Kernel::dim_vo>;
  const i64 at = out_offset(launch, row);
  if (launch.state_only) {
    Lanes::each([&](i32 i, i32 d) {
      *reinterpret_cast<Four*>(static_cast<float*>(launch.out.data) + at + d) = o.of[i];
    });
  } else {
    const float factor = apply_sink(launch, variant, row, lse);
    if constexpr (has_sink<Variant>) o.map([&](float x) { return x * factor; });
    if constexpr (has_output<Variant>) {
      Lanes::each([&](i32 i, i32 d) { *reinterpret_cast<Four*>(vector + d) = o.of[i]; });
      ptx::sync_warp();
      WarpVector x(vector, Kernel::dim_vo);
      variant.output(x, row, lse);
      Lanes::every([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(vector + d); });
      ptx::sync_warp();
    }
    Lanes::each(
        [&](i32 i, i32 d) { store_four(static_cast<T*>(launch.out.data) + at + d, o.of[i]); });
  }
  if (ptx::lane_index() == 0) store_lse(launch, row, lse);
}

/// Stores a row's state in the buffer of partial states.
template <class Kernel>
RADDLE_DEVICE void store_partial(const GpuLaunch& launch, i64 at, const LaneRow<Kernel::dim_vo>& o,
                                 float lse) {
  LaneRow<Kernel::dim_vo>::each([&](i32 i, i32 d) {
    *reinterpret_cast<Four*>(launch.partial_o + at * Kernel::dim_vo + d) = o.of[i];
  });
  if (ptx::lane_index() == 0) launch.partial_lse[at] = lse;
}

/// Sends a row in shared memory, with its LSE behind it, to partial row number `partial`, or, where
/// that is negative, to the output.
template <class Kernel, class Variant>
RADDLE_DEVICE void send_row(const GpuLaunch& launch, const Variant& variant, const float* from,
                            i64 partial, const Row& row, float* vector) {
  LaneRow<Kernel::dim_vo> o;
  o.every([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(from + d); });
  const float lse = from[Kernel::dim_vo];
  if (partial >= 0)
    store_partial<Kernel>(launch, partial, o, lse);
  else
    write_row<Kernel>(launch, variant, row, o, lse, vector);
}

/// Destination of a row, which one lane looks up for its warp; null for padding.
struct RowDestination {
  u8* to = nullptr;
  float factor = 1.0f;  ///< factor of a sink
};

/// Finds the destination of this lane's row, and stores the row's LSE.
template <class Kernel, class Variant>
RADDLE_DEVICE RowDestination find_row_destination(const GpuLaunch& launch, const Variant& variant,
                                                  i64 partial, const Row& row, float lse) {
  if (partial >= 0) {
    launch.partial_lse[partial] = lse;
    return RowDestination{reinterpret_cast<u8*>(launch.partial_o + partial * Kernel::dim_vo)};
  }
  const float factor = apply_sink(launch, variant, row, lse);
  store_lse(launch, row, lse);
  const i32 bytes = launch.state_only ? 4 : static_cast<i32>(sizeof(typename Kernel::T));
  return RowDestination{static_cast<u8*>(launch.out.data) + bytes * out_offset(launch, row),
                        factor};
}

/// Copies rows from shared memory to the destinations, row i to that of lane i, in fp32 or in the
/// matrix dtype; several rows are in flight at a time.
template <class Kernel, class Variant, i32 count, bool rounds, class From>
RADDLE_DEVICE void copy_out(const RowDestination& mine, From from) {
  using T = typename Kernel::T;
  using Lanes = LaneRow<Kernel::dim_vo>;
  constexpr i32 batch = Kernel::dim_vo <= 128 ? 4 : 2;
  static_assert(count % batch == 0);
  RADDLE_ROLLED
  for (i32 first = 0; first < count; first += batch) {
    Lanes o[batch];
    u8* to[batch];
    RADDLE_UNROLL
    for (i32 r = 0; r < batch; ++r) {
      const float* row = from(first + r);
      to[r] = ptx::shuffle(mine.to, first + r);
      o[r].every([&](i32 i, i32 d) { o[r].of[i] = *reinterpret_cast<const Four*>(row + d); });
      if constexpr (has_sink<Variant>) {
        const float factor = ptx::shuffle(mine.factor, first + r);
        o[r].map([&](float x) { return x * factor; });
      }
    }
    RADDLE_UNROLL
    for (i32 r = 0; r < batch; ++r) {
      if (!to[r]) continue;
      Lanes::each([&](i32 i, i32 d) {
        if constexpr (rounds)
          store_four(reinterpret_cast<T*>(to[r]) + d, o[r].of[i]);
        else
          *reinterpret_cast<Four*>(to[r] + 4 * d) = o[r].of[i];
      });
    }
  }
}

/// Sends `count` rows of a warp: row number(i) of the tile lies at from(i). Finding a destination
/// is a chain of look-ups, so each lane follows it for one row; rows that an output part sees are
/// sent one at a time.
template <class Kernel, i32 count, class Variant, class Number, class From>
RADDLE_DEVICE void send_rows(const GpuLaunch& launch, const Variant& variant, i32 num_rows,
                             i32 partial_row, const Row* rows, float* vector, Number number,
                             From from) {
  const auto partial = [&](i32 m) { return partial_row >= 0 ? i64{partial_row} + m : -1; };
  if constexpr (has_output<Variant>) {
    RADDLE_ROLLED
    for (i32 i = 0; i < count; ++i) {
      const i32 m = number(i);
      if (m < num_rows) send_row<Kernel>(launch, variant, from(i), partial(m), rows[m], vector);
    }
  } else {
    static_assert(count <= 32);
    const i32 i = min(ptx::lane_index(), count - 1), m = number(i);
    RowDestination mine;
    if (ptx::lane_index() == i && m < num_rows)
      mine = find_row_destination<Kernel>(launch, variant, partial(m), rows[m],
                                          from(i)[Kernel::dim_vo]);
    if (partial_row >= 0 || launch.state_only)
      copy_out<Kernel, Variant, count, false>(mine, from);
    else
      copy_out<Kernel, Variant, count, true>(mine, from);
  }
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
