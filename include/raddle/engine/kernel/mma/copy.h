// Asynchronous copies of rows of K and V into shared memory.
#pragma once

#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// copy_rows for rows that are whole lines of 128 bytes: eight lanes copy a row, and each keeps its
/// chunk. Nothing reads what lies behind the last element.
template <class Rows, i32 row_bytes, i32 warp_keys>
RADDLE_DEVICE void copy_lines(u32 to, i32 first_row, const u8* const* source) {
  static_assert(Rows::swizzled && warp_keys % 4 == 0);
  const i32 lane = ptx::lane_index(), chunk = lane % 8;
  RADDLE_UNROLL
  for (i32 i = 0; i < warp_keys; i += 4) {
    const i32 row = i + lane / 8;
    const u8* from = source[row] + 16 * chunk;
    const u32 at = to + Rows::at(first_row + row, chunk);
    RADDLE_UNROLL
    for (i32 first = 0; first < row_bytes; first += 128) {
      const i32 bytes =
          first + 128 <= row_bytes ? 16 : max(0, min(16, row_bytes - first - 16 * chunk));
      ptx::copy_async(at + static_cast<u32>(first), from + first, bytes);
    }
  }
}

/// Copies a warp's rows of K or V, whose addresses are in `source`, to shared memory, as rows from
/// `first_row` on. Rows that will be widened in place are copied to the first half of their room.
template <class Kernel, class Rows, i32 dim, bool narrow, i32 warp_keys, i32 batch>
RADDLE_DEVICE void copy_rows(u32 to, i32 first_row, const u8* const* source) {
  constexpr i32 row_bytes = dim * static_cast<i32>(sizeof(typename Kernel::Stored));
  constexpr i32 chunks = Kernel::quantized && !narrow ? Rows::chunks / 2 : Rows::chunks;
  const i32 lane = ptx::lane_index();
  if constexpr (Kernel::wide) return copy_lines<Rows, row_bytes, warp_keys>(to, first_row, source);
  const u32 to_first = to + Rows::at(first_row + lane / chunks, lane % chunks);
  // All addresses of a batch are read before its first copy starts, so that the warp waits once.
  constexpr i32 copies = ceil_div(warp_keys * chunks, 32);
  // Where the chunks of a row divide 32, a lane copies the same chunk of every row.
  constexpr bool even = 32 % chunks == 0;
  RADDLE_UNROLL
  for (i32 first = 0; first < copies; first += batch) {
    const u8* from[batch];
    RADDLE_UNROLL
    for (i32 i = first; i < min(first + batch, copies); ++i) {
      const i32 row = even ? lane / chunks + 32 / chunks * i : (32 * i + lane) / chunks;
      const i32 chunk = even ? lane % chunks : (32 * i + lane) % chunks;
      from[i - first] = source[min(row, warp_keys - 1)] + 16 * chunk;
    }
    RADDLE_UNROLL
    for (i32 i = first; i < min(first + batch, copies); ++i) {
      const i32 row = even ? lane / chunks + 32 / chunks * i : (32 * i + lane) / chunks;
      const i32 chunk = even ? lane % chunks : (32 * i + lane) % chunks;
      if (warp_keys * chunks % 32 != 0 && row >= warp_keys) continue;
      const u32 at = even ? Rows::rows_after(to_first, 32 / chunks * i)
                          : to + Rows::at(first_row + row, chunk);
      const i32 bytes =
          row_bytes % (16 * chunks) == 0 ? 16 : max(0, min(16, row_bytes - 16 * chunk));
      ptx::copy_async(at, from[i - first], bytes);
    }
  }
}

}  // namespace mma

RADDLE_ENGINE_END
