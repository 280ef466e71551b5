// How the rows of a long item leave: through shared memory, of which ring and keys are free by
// then, so that whole lines of them are written.
#pragma once

#include "raddle/engine/kernel/mma/finish.h"
#include "raddle/engine/kernel/mma/quantized.h"
#include "raddle/engine/kernel/mma/softmax.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Rows of a tile that its warps' blocks number r hold together: 16 each.
constexpr i32 long_block_rows = 16 * num_warps;

/// The first row of a warp's block.
RADDLE_FN constexpr i32 long_row(i32 warp, i32 block) {
  return long_block_rows * block + 16 * warp;
}

/// O of one item, to partial rows from number `partial_row` on, or, where that is negative, to the
/// caller's tensor. A warp's own rows: no warp waits for another.
template <class K, class V, i32 blocks>
class LongOutput {
  using T = typename K::T;
  using Layout = LongLayout<K>;
  static constexpr Scan scan = scan_of<V>();
  static constexpr i32 columns = K::narrow_values ? K::out_tiles : K::dim_vo / 8;

 public:
  RADDLE_DEVICE LongOutput(const MmaLaunch& launch, const V& variant, i32 num_rows, i32 partial_row)
      : launch_(launch),
        variant_(variant),
        warp_(ptx::warp_index()),
        num_rows_(num_rows),
        partial_row_(partial_row) {}

  RADDLE_DEVICE void send(const Output<K, blocks>& o, RowStats<blocks>& stats,
                          const ValueScales<K, blocks>& scales, float to_log2) {
    if (!has_output<V> && partial_row_ < 0 && !launch_.state_only) {
      put_rounded(o, stats, scales, to_log2);
      ptx::sync_warp();
      return write_rounded();
    }
    RADDLE_UNROLL
    for (i32 turn = 0; turn < turns; ++turn) {
      put_rows(turn, o, stats, scales, to_log2);
      ptx::sync_warp();
      write_rows(turn);
      ptx::sync_warp();
    }
  }

 private:
  /// f(first column, the two elements of it and the next) for a row of this lane.
  template <class F>
  RADDLE_DEVICE static void each_pair(const Output<K, blocks>& o, i32 r, i32 half, float factor,
                                      F f) {
    RADDLE_UNROLL
    for (i32 n = 0; n < columns; ++n) {
      const i32 d = out_column<K>(ptx::lane_index() % 4, n);
      if (K::narrow_values && K::dim_vo % 16 != 0 && d >= K::dim_vo) continue;
      f(d, out_element<K>(o[r], n, half, 0) * factor, out_element<K>(o[r], n, half, 1) * factor);
    }
  }

  // Outputs, rounded where a lane has them: half the memory and half the instructions.

  static constexpr i32 rounded_pitch = 2 * K::dim_vo + 16;
  static_assert(K::long_rows * rounded_pitch <= Layout::sources);
  RADDLE_DEVICE static u8* rounded_row(i32 m) { return Layout::base() + m * rounded_pitch; }

  /// O / Σ, and LSE to where it belongs; a row with nothing kept becomes (0, -inf).
  RADDLE_DEVICE void put_rounded(const Output<K, blocks>& o, RowStats<blocks>& stats,
                                 const ValueScales<K, blocks>& scales, float to_log2) const {
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const i32 m = long_row(warp_, r) + ptx::lane_index() / 4 + 8 * half;
        auto [factor, lse] = end_row<scan>(stats, r, half, to_log2);
        if constexpr (K::narrow_values) factor *= scales.unit();
        const Row& row = Layout::scratch().row[m];
        factor *= apply_sink(launch_, variant_, row, lse);
        if (ptx::lane_index() % 4 == 0 && m < num_rows_) store_lse(launch_, row, lse);
        each_pair(o, r, half, factor, [&](i32 d, float x, float y) {
          *reinterpret_cast<u32*>(rounded_row(m) + 2 * d) = ptx::pack(x, y, T{});
        });
      }
    }
  }

  /// A lane finds where a row goes, for its warp; a few 16 bytes are under way at a time.
  RADDLE_DEVICE void write_rounded() const {
    constexpr i32 count = 16 * blocks, chunks = K::dim_vo / 8, batch = 4;
    const i32 lane = ptx::lane_index();
    const auto number = [&](i32 i) { return long_row(warp_, i / 16) + i % 16; };
    T* mine = nullptr;
    if (lane < count && number(lane) < num_rows_)
      mine = static_cast<T*>(launch_.out.data) +
             out_offset(launch_, Layout::scratch().row[number(lane)]);
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

  // States, and rows that a part of the variant changes: in fp32, the LSE behind a row.

  static constexpr i32 row_floats = round_up(K::dim_vo, 8) + 4;
  /// Where there is no room for all rows, those of one `half` are on their way at a time.
  static constexpr i32 turns = K::long_rows * row_floats * 4 <= Layout::sources ? 1 : 2;
  static_assert(K::long_rows / turns * row_floats * 4 <= Layout::sources);
  RADDLE_DEVICE static float* out_row(i32 m) {
    const i32 at = turns == 1 ? m : m / 16 * 8 + m % 8;
    return reinterpret_cast<float*>(Layout::base()) + at * row_floats;
  }

  RADDLE_DEVICE void put_rows(i32 turn, const Output<K, blocks>& o, RowStats<blocks>& stats,
                              const ValueScales<K, blocks>& scales, float to_log2) const {
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        if (turns == 2 && half != turn) continue;
        float* row = out_row(long_row(warp_, r) + ptx::lane_index() / 4 + 8 * half);
        auto [factor, lse] = end_row<scan>(stats, r, half, to_log2);
        if constexpr (K::narrow_values) factor *= scales.unit();
        each_pair(o, r, half, factor,
                  [&](i32 d, float x, float y) { ptx::store_two(row + d, x, y); });
        if (ptx::lane_index() % 4 == 0) row[K::dim_vo] = lse;
      }
    }
  }

  RADDLE_DEVICE void write_rows(i32 turn) const {
    constexpr i32 of_block = 16 / turns;
    const auto number = [&](i32 i) {
      return long_row(warp_, i / of_block) + 8 * turn + i % of_block;
    };
    send_rows<K, of_block * blocks>(launch_, variant_, num_rows_, partial_row_,
                                    Layout::scratch().row, Layout::vector(warp_), number,
                                    [&](i32 i) { return out_row(number(i)); });
  }

  const MmaLaunch& launch_;
  const V& variant_;
  const i32 warp_, num_rows_, partial_row_;
};

}  // namespace mma

RADDLE_ENGINE_END
