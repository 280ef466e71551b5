// Sending the rows of an item: to the slot of their queries, from where they leave as boxes, or
// from registers to memory. Then the four lanes of a row exchange pieces first, so that each writes
// 16 bytes at a time.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"
#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Writes a warpgroup's 64 rows of O to partial rows from number `partial_row` on, or, where that
/// is negative, to the caller's tensor (`send`), or to their slot (`stage`).
template <class Kernel, class Variant>
class LongOutput {
  using T = typename Kernel::T;
  using O = Output<Kernel, 1>;
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr i32 fragments = Kernel::dim_vo / 8;

 public:
  RADDLE_DEVICE LongOutput(const GpuLaunch& launch, const Variant& variant,
                           const ItemFacts<Kernel>& facts, i32 warp_row, i32 lane)
      : launch_(launch), variant_(variant), facts_(facts), first_row_(warp_row), lane_(lane) {}

  RADDLE_DEVICE void send(const O& o, const RowStats<1>& stats, float to_log2) {
    RowEnd end[2];
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) end[half] = end_of(stats, half, to_log2);
    if constexpr (has_output<Variant>) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) send_whole(o, half, end[half]);
    } else {
      send_pieces(o, end);
    }
  }

  /// Rounds whole rows to the slot of their queries, from where a loading warp has them stored.
  RADDLE_DEVICE void stage(const O& o, const RowStats<1>& stats, float to_log2, u32 slot) const {
    float factor[2];
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      RowEnd end = end_of(stats, half, to_log2);
      const Row& row = facts_.row[number(half)];
      factor[half] = end.factor * apply_sink(launch_, variant_, row, end.lse);
      if (lane_ % 4 == 0) store_lse(launch_, row, end.lse);
    }
    RADDLE_UNROLL
    for (i32 j = 0; j < fragments / 2; ++j) {
      u32 x[4];
      RADDLE_UNROLL
      for (i32 i = 0; i < 4; ++i) {
        const float* of = o[0][2 * j + i / 2] + 2 * (i % 2);
        x[i] = ptx::pack(of[0] * factor[i % 2], of[1] * factor[i % 2], T{});
      }
      ptx::store_matrices(slot + static_cast<u32>(Memory<Kernel>::Queries::at(
                                     first_row_ + lane_ % 16, 2 * j + lane_ / 16)),
                          x);
    }
    ptx::fence_proxy();
  }

 private:
  RADDLE_DEVICE i32 number(i32 half) const { return first_row_ + lane_ / 4 + 8 * half; }
  RADDLE_DEVICE i64 partial(i32 m) const {
    return facts_.partial_row >= 0 ? i64{facts_.partial_row} + m : -1;
  }

  /// end_row, in instructions of the special function unit: nothing hides what an item's end takes.
  RADDLE_DEVICE RowEnd end_of(const RowStats<1>& stats, i32 half, float to_log2) const {
    const float scale = output_scale(launch_);
    if constexpr (scan == Scan::sum) return RowEnd{scale, 0.0f};
    float sum = stats.sum[0][half];
    sum += ptx::shuffle_xor(sum, 1);
    sum += ptx::shuffle_xor(sum, 2);
    const float top = stats.top[0][half];
    const float lse = ptx::fma(top, to_log2, ptx::log2(sum)) * math::ln2;
    return RowEnd{(sum == 0.0f ? 0.0f : ptx::reciprocal(sum)) * scale,
                  top == -math::infinity ? top : lse};
  }

  /// Every lane writes a quarter of its rows.
  RADDLE_DEVICE void send_pieces(const O& o, const RowEnd (&end)[2]) const {
    const i32 t = lane_ % 4;
    float factor[2];
    u8* to[2];
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      RowDestination mine;
      // All four lanes find the destination; only one stores the LSE.
      if (number(half) < facts_.num_rows) mine = destination(number(half), end[half].lse, t == 0);
      factor[half] = end[half].factor * mine.factor, to[half] = mine.to;
    }
    // Decided by vote, so that the compiler knows that a warp stays together.
    const bool states = ptx::any(facts_.partial_row >= 0 || launch_.state_only);
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (states)
        write_states(o, half, factor[half], to[half], t);
      else
        write_rounded(o, half, factor[half], to[half], t);
    }
  }

  RADDLE_DEVICE RowDestination destination(i32 m, float lse, bool stores) const {
    const Row& row = facts_.row[m];
    if (facts_.partial_row >= 0) {
      if (stores) launch_.partial_lse[partial(m)] = lse;
      return {reinterpret_cast<u8*>(launch_.partial_o + partial(m) * Kernel::dim_vo)};
    }
    const float factor = apply_sink(launch_, variant_, row, lse);
    if (stores) store_lse(launch_, row, lse);
    const i32 bytes = launch_.state_only ? 4 : static_cast<i32>(sizeof(T));
    return {static_cast<u8*>(launch_.out.data) + bytes * out_offset(launch_, row), factor};
  }

  /// Four fragments of a row are 32 columns. Lane t holds two of each 8, and writes fragment t: two
  /// exchanges with a neighbour turn the one into the other.
  RADDLE_DEVICE void write_rounded(const O& o, i32 half, float factor, u8* to, i32 t) const {
    constexpr i32 groups = fragments / 4;
    static_assert(fragments % 4 == 0);
    RADDLE_UNROLL
    for (i32 j = 0; j < groups; ++j) {
      u32 x[4];
      RADDLE_UNROLL
      for (i32 i = 0; i < 4; ++i)
        x[i] = ptx::pack(o[0][4 * j + i][2 * half] * factor, o[0][4 * j + i][2 * half + 1] * factor,
                         T{});
      exchange(x[0], x[1], 1, t & 1);
      exchange(x[2], x[3], 1, t & 1);
      exchange(x[0], x[2], 2, t & 2);
      exchange(x[1], x[3], 2, t & 2);
      if (to)
        *reinterpret_cast<Packed8*>(to + 2 * (32 * j + 8 * t)) = Packed8{{x[0], x[1], x[2], x[3]}};
    }
  }
  /// The lane with a set bit gives `a` for its neighbour's `b`.
  RADDLE_DEVICE static void exchange(u32& a, u32& b, i32 mask, i32 upper) {
    const u32 gives = upper ? a : b;
    const u32 takes = ptx::shuffle_xor(gives, mask);
    a = upper ? takes : a;
    b = upper ? b : takes;
  }

  RADDLE_DEVICE void write_states(const O& o, i32 half, float factor, u8* to, i32 t) const {
    RADDLE_UNROLL
    for (i32 n = 0; n < fragments; ++n)
      if (to)
        *reinterpret_cast<Two*>(to + 4 * (8 * n + 2 * t)) =
            Two{{o[0][n][2 * half] * factor, o[0][n][2 * half + 1] * factor}};
  }

  /// A row that an output part sees whole: the warp gathers one row after another in shared memory.
  RADDLE_DEVICE void send_whole(const O& o, i32 half, RowEnd end) const {
    float* vector = Memory<Kernel>::get().team().vector[ConsumerTeam::warp()];
    RADDLE_ROLLED
    for (i32 g = 0; g < 8; ++g) {
      const i32 m = first_row_ + g + 8 * half;
      if (m >= facts_.num_rows) return;
      if (lane_ / 4 == g) {
        RADDLE_UNROLL
        for (i32 n = 0; n < fragments; ++n) {
          RADDLE_UNROLL
          for (i32 e = 0; e < 2; ++e)
            vector[8 * n + 2 * (lane_ % 4) + e] = o[0][n][2 * half + e] * end.factor;
        }
      }
      ptx::sync_warp();
      LaneRow<Kernel::dim_vo> row;
      row.every([&](i32 i, i32 d) { row.of[i] = *reinterpret_cast<const Four*>(vector + d); });
      ptx::sync_warp();
      const float lse = ptx::shuffle(end.lse, 4 * g);
      if (facts_.partial_row >= 0)
        store_partial<Kernel>(launch_, partial(m), row, lse);
      else
        write_row<Kernel>(launch_, variant_, facts_.row[m], row, lse, vector);
    }
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const ItemFacts<Kernel>& facts_;
  const i32 first_row_, lane_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
