// Sending the rows of a long item to memory: through shared memory, where ring and key facts are
// free by then, so that whole lines are written.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"
#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/kernel/mma/quantized.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Rows of a tile that the team's warps hold together in their row fragments number r: 16 a warp.
constexpr i32 team_fragment_rows = 16 * num_warps;

/// The first row of a warp's row fragment.
RADDLE_FN constexpr i32 long_row(i32 warp, i32 fragment) {
  return team_fragment_rows * fragment + 16 * warp;
}

/// Writes O of one item to partial rows from number `partial_row` on, or, where that is negative,
/// to the caller's tensor. A warp writes its own rows and waits for no other warp.
template <class Kernel, class Variant, i32 row_fragments>
class LongOutput {
  using T = typename Kernel::T;
  using Memory = LongMemory<Kernel>;
  using Values = ValueOperand<Kernel, row_fragments>;
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr i32 columns = Kernel::narrow_values ? Kernel::out_fragments : Kernel::dim_vo / 8;

 public:
  RADDLE_DEVICE LongOutput(const GpuLaunch& launch, const Variant& variant, i32 num_rows,
                           i32 partial_row)
      : launch_(launch),
        variant_(variant),
        warp_(ptx::warp_index()),
        num_rows_(num_rows),
        partial_row_(partial_row) {}

  RADDLE_DEVICE void send(const Output<Kernel, row_fragments>& o, RowStats<row_fragments>& stats,
                          const Values& values, float to_log2) {
    if (!has_output<Variant> && partial_row_ < 0 && !launch_.state_only) {
      put_rounded(o, stats, values, to_log2);
      ptx::sync_warp();
      return write_rounded();
    }
    RADDLE_UNROLL
    for (i32 turn = 0; turn < turns; ++turn) {
      put_rows(turn, o, stats, values, to_log2);
      ptx::sync_warp();
      write_rows(turn);
      ptx::sync_warp();
    }
  }

 private:
  /// f(first column, the element there, the element behind it) for all columns of a row that this
  /// lane has.
  template <class F>
  RADDLE_DEVICE static void each_pair(const Output<Kernel, row_fragments>& o, i32 r, i32 half,
                                      float factor, F f) {
    RADDLE_UNROLL
    for (i32 n = 0; n < columns; ++n) {
      const i32 d = Values::column(ptx::lane_index() % 4, n);
      if (Kernel::narrow_values && Kernel::dim_vo % 16 != 0 && d >= Kernel::dim_vo) continue;
      f(d, scaled(Values::element(o[r], n, half, 0), factor),
        scaled(Values::element(o[r], n, half, 1), factor));
    }
  }

  // Outputs are rounded in registers: that takes half the memory and half the instructions.

  static constexpr i32 rounded_pitch = 2 * Kernel::dim_vo + 16;
  static_assert(Kernel::long_rows * rounded_pitch <= Memory::sources);
  RADDLE_DEVICE static u8* rounded_row(i32 m) { return Memory::base() + m * rounded_pitch; }

  /// Writes O / Σ to shared memory and stores the LSE; a row that kept nothing becomes (0, -inf).
  RADDLE_DEVICE void put_rounded(const Output<Kernel, row_fragments>& o,
                                 RowStats<row_fragments>& stats, const Values& values,
                                 float to_log2) const {
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const i32 m = long_row(warp_, r) + ptx::lane_index() / 4 + 8 * half;
        auto [factor, lse] = end_row<scan>(stats, r, half, to_log2);
        factor *= values.unit() * output_scale(launch_);
        const Row& row = Memory::facts().row[m];
        factor *= apply_sink(launch_, variant_, row, lse);
        if (ptx::lane_index() % 4 == 0 && m < num_rows_) store_lse(launch_, row, lse);
        each_pair(o, r, half, factor, [&](i32 d, float x, float y) {
          *reinterpret_cast<u32*>(rounded_row(m) + 2 * d) = ptx::pack(x, y, T{});
        });
      }
    }
  }

  /// Copies the rows to the output. Each lane looks up the destination of one row for the warp; a
  /// few copies of 16 bytes are in flight at a time.
  RADDLE_DEVICE void write_rounded() const {
    constexpr i32 count = 16 * row_fragments, chunks = Kernel::dim_vo / 8, batch = 4;
    const i32 lane = ptx::lane_index();
    const auto number = [&](i32 i) { return long_row(warp_, i / 16) + i % 16; };
    T* mine = nullptr;
    if (lane < count && number(lane) < num_rows_)
      mine = static_cast<T*>(launch_.out.data) +
             out_offset(launch_, Memory::facts().row[number(lane)]);
    RADDLE_ROLLED
    for (i32 first = 0; first < count * chunks; first += 32 * batch) {
      Packed8 x[batch];
      T* to[batch];
      RADDLE_UNROLL
      for (i32 i = 0; i < batch; ++i) {
        const i32 at = min(first + 32 * i + lane, count * chunks - 1);
        const i32 row = at / chunks, chunk = at % chunks;
        to[i] = ptx::shuffle(mine, row);
        if (to[i]) to[i] += 8 * chunk;
        x[i] = *reinterpret_cast<const Packed8*>(rounded_row(number(row)) + 16 * chunk);
      }
      RADDLE_UNROLL
      for (i32 i = 0; i < batch; ++i)
        if (to[i]) *reinterpret_cast<Packed8*>(to[i]) = x[i];
    }
  }

  // States, and rows that a part of the variant changes, are written in fp32, with the LSE behind
  // each row.

  static constexpr i32 row_floats = round_up(Kernel::dim_vo, 8) + 4;
  /// Where shared memory has no room for all rows, the rows of one half are written at a time.
  static constexpr i32 turns = Kernel::long_rows * row_floats * 4 <= Memory::sources ? 1 : 2;
  static_assert(Kernel::long_rows / turns * row_floats * 4 <= Memory::sources);
  RADDLE_DEVICE static float* out_row(i32 m) {
    const i32 at = turns == 1 ? m : m / 16 * 8 + m % 8;
    return reinterpret_cast<float*>(Memory::base()) + at * row_floats;
  }

  RADDLE_DEVICE void put_rows(i32 turn, const Output<Kernel, row_fragments>& o,
                              RowStats<row_fragments>& stats, const Values& values,
                              float to_log2) const {
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        if (turns == 2 && half != turn) continue;
        float* row = out_row(long_row(warp_, r) + ptx::lane_index() / 4 + 8 * half);
        auto [factor, lse] = end_row<scan>(stats, r, half, to_log2);
        factor *= values.unit() * output_scale(launch_);
        each_pair(o, r, half, factor,
                  [&](i32 d, float x, float y) { ptx::store_two(row + d, x, y); });
        if (ptx::lane_index() % 4 == 0) row[Kernel::dim_vo] = lse;
      }
    }
  }

  RADDLE_DEVICE void write_rows(i32 turn) const {
    constexpr i32 of_block = 16 / turns;
    const auto number = [&](i32 i) {
      return long_row(warp_, i / of_block) + 8 * turn + i % of_block;
    };
    send_rows<Kernel, of_block * row_fragments>(launch_, variant_, num_rows_, partial_row_,
                                                Memory::facts().row, Memory::vector(warp_), number,
                                                [&](i32 i) { return out_row(number(i)); });
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const i32 warp_, num_rows_, partial_row_;
};

}  // namespace mma

RADDLE_ENGINE_END
