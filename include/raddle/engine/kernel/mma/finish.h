// From partial results to the caller's tensors: finishing a row. A warp holds it in registers, four
// elements a lane and step.
#pragma once

#include "raddle/engine/core/state.h"
#include "raddle/engine/kernel/mma/shared.h"
#include "raddle/engine/tile/warp_vector.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A row of `dim` elements in a warp: this lane's are 4 · (lane + 32 · i) + e.
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
  /// what only reads: without branches, more of it is under way.
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

/// Where a row of the output begins, in elements.
RADDLE_DEVICE i64 out_offset(const MmaLaunch& launch, const Row& row) {
  return row.row * launch.out.row_stride + row.q_head * launch.out.head_stride;
}

RADDLE_DEVICE void store_lse(const MmaLaunch& launch, const Row& row, float lse) {
  if (launch.lse)
    launch.lse[row.row * launch.lse_row_stride + row.q_head * launch.lse_head_stride] = lse;
}

/// The factor by which a sink shrinks a row's output, and the LSE with it: ⊕ with the state
/// (0, sink) of a key without value. 1 for a bare state and for variants without sinks.
template <class V>
RADDLE_DEVICE float apply_sink(const MmaLaunch& launch, const V& variant, const Row& row,
                               float& lse) {
  if constexpr (has_sink<V>) {
    if (!launch.state_only) {
      const Mix mix = compose(lse, variant.sink(row));
      lse = mix.lse;
      return mix.first;
    }
  }
  return 1.0f;
}

/// Writes a finished row, or its bare state, to the output tensors. `vector` is the warp's, in
/// shared memory: what an output part sees.
template <class K, class V>
RADDLE_DEVICE void write_row(const MmaLaunch& launch, const V& variant, const Row& row,
                             LaneRow<K::dim_vo>& o, float lse, float* vector) {
  using T = typename K::T;
  using Lanes = LaneRow<K::dim_vo>;
  const i64 at = out_offset(launch, row);
  if (launch.state_only) {
    Lanes::each([&](i32 i, i32 d) {
      *reinterpret_cast<Four*>(static_cast<float*>(launch.out.data) + at + d) = o.of[i];
    });
  } else {
    const float factor = apply_sink(launch, variant, row, lse);
    if constexpr (has_sink<V>) o.map([&](float x) { return x * factor; });
    if constexpr (has_output<V>) {
      Lanes::each([&](i32 i, i32 d) { *reinterpret_cast<Four*>(vector + d) = o.of[i]; });
      ptx::sync_warp();
      WarpVector x(vector, K::dim_vo);
      variant.output(x, row, lse);
      Lanes::every([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(vector + d); });
      ptx::sync_warp();
    }
    Lanes::each(
        [&](i32 i, i32 d) { store_four(static_cast<T*>(launch.out.data) + at + d, o.of[i]); });
  }
  if (ptx::lane_index() == 0) store_lse(launch, row, lse);
}

/// Stores a row's state where contractions find it.
template <class K>
RADDLE_DEVICE void store_partial(const MmaLaunch& launch, i64 at, const LaneRow<K::dim_vo>& o,
                                 float lse) {
  LaneRow<K::dim_vo>::each([&](i32 i, i32 d) {
    *reinterpret_cast<Four*>(launch.partial_o + at * K::dim_vo + d) = o.of[i];
  });
  if (ptx::lane_index() == 0) launch.partial_lse[at] = lse;
}

/// Sends a row that lies in shared memory, its LSE behind it, to where it belongs: to partial row
/// number `partial`, or, where that is negative, to the output.
template <class K, class V>
RADDLE_DEVICE void send_row(const MmaLaunch& launch, const V& variant, const float* from,
                            i64 partial, const Row& row, float* vector) {
  LaneRow<K::dim_vo> o;
  o.every([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(from + d); });
  const float lse = from[K::dim_vo];
  if (partial >= 0)
    store_partial<K>(launch, partial, o, lse);
  else
    write_row<K>(launch, variant, row, o, lse, vector);
}

/// Where a row goes, which a lane finds for its warp; nowhere, if it is padding.
struct Outbound {
  u8* to = nullptr;
  float factor = 1.0f;  ///< of a sink
};

/// Finds that for this lane's row, and stores its LSE.
template <class K, class V>
RADDLE_DEVICE Outbound send_off(const MmaLaunch& launch, const V& variant, i64 partial,
                                const Row& row, float lse) {
  if (partial >= 0) {
    launch.partial_lse[partial] = lse;
    return Outbound{reinterpret_cast<u8*>(launch.partial_o + partial * K::dim_vo)};
  }
  const float factor = apply_sink(launch, variant, row, lse);
  store_lse(launch, row, lse);
  const i32 bytes = launch.state_only ? 4 : static_cast<i32>(sizeof(typename K::T));
  return Outbound{static_cast<u8*>(launch.out.data) + bytes * out_offset(launch, row), factor};
}

/// Copies rows from shared memory to where lane i says for row i, in fp32 or in the matrix dtype;
/// several are under way at a time.
template <class K, class V, i32 count, bool rounds, class From>
RADDLE_DEVICE void copy_out(const Outbound& mine, From from) {
  using T = typename K::T;
  using Lanes = LaneRow<K::dim_vo>;
  constexpr i32 batch = K::dim_vo <= 128 ? 4 : 2;
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
      if constexpr (has_sink<V>) {
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

/// Sends a warp's rows, `count` of them: the tile's rows number(i), which lie at from(i). A row has
/// a chain of look-ups, so each lane goes through one row's, but where an output part sees rows.
template <class K, i32 count, class V, class Number, class From>
RADDLE_DEVICE void send_rows(const MmaLaunch& launch, const V& variant, i32 num_rows,
                             i32 partial_row, const Row* rows, float* vector, Number number,
                             From from) {
  const auto partial = [&](i32 m) { return partial_row >= 0 ? i64{partial_row} + m : -1; };
  if constexpr (has_output<V>) {
    RADDLE_ROLLED
    for (i32 i = 0; i < count; ++i) {
      const i32 m = number(i);
      if (m < num_rows) send_row<K>(launch, variant, from(i), partial(m), rows[m], vector);
    }
  } else {
    static_assert(count <= 32);
    const i32 i = min(ptx::lane_index(), count - 1), m = number(i);
    Outbound mine;
    if (ptx::lane_index() == i && m < num_rows)
      mine = send_off<K>(launch, variant, partial(m), rows[m], from(i)[K::dim_vo]);
    if (partial_row >= 0 || launch.state_only)
      copy_out<K, V, count, false>(mine, from);
    else
      copy_out<K, V, count, true>(mine, from);
  }
}

}  // namespace mma

RADDLE_ENGINE_END
