// Rows of 16-bit elements in shared memory, laid out so that eight rows of a matrix, and the
// 16-byte chunks of a row, lie in different banks.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

/// A chunk of a row: eight elements that are loaded or stored together.
struct alignas(16) Packed8 {
  u32 x[4];
};

/// Bytes from one row of `dim` elements to the next. Rows are padded to whole matrices 16 wide.
/// Where that is not whole lines of 128 bytes, a row is one chunk longer, so that its number of
/// chunks is odd.
RADDLE_FN constexpr i32 row_pitch(i32 dim) {
  const i32 chunks = 2 * ceil_div(dim, 16);
  return 16 * (chunks % 8 == 0 ? chunks : chunks + 1);
}

/// Rows of `dim` elements. A row consists of chunks of 16 bytes, eight elements. Where a row is
/// whole lines of 128 bytes, chunk c lies at c ^ (row % 8).
template <i32 dim>
struct SharedRows {
  static constexpr i32 chunks = 2 * ceil_div(dim, 16);
  static constexpr bool swizzled = chunks % 8 == 0;
  static constexpr i32 pitch = row_pitch(dim);

  /// Byte offset of a chunk.
  RADDLE_FN static constexpr u32 at(i32 row, i32 chunk) {
    return static_cast<u32>(row * pitch + 16 * (swizzled ? chunk ^ (row & 7) : chunk));
  }

  /// Offset of chunk + 2 · step, given the offset of `chunk` < 2 in a block aligned to 128 bytes:
  /// one operation where the steps are unrolled.
  RADDLE_FN static constexpr u32 step_from(u32 first, i32 step) {
    if (!swizzled) return first + static_cast<u32>(32 * step);
    return (first ^ static_cast<u32>(32 * (step & 3))) + static_cast<u32>(128 * (step >> 2));
  }

  /// Steps this far apart are swizzled alike: one address and a constant are enough for all of
  /// them.
  static constexpr i32 swizzled_steps = swizzled ? 4 : 1;

  /// Offset of the same chunk `rows` rows below, where `rows` is a multiple of a power of two above
  /// the first row.
  RADDLE_FN static constexpr u32 rows_after(u32 first, i32 rows) {
    if (!swizzled) return first + static_cast<u32>(rows * pitch);
    return (first ^ static_cast<u32>(16 * (rows & 7))) + static_cast<u32>(rows * pitch);
  }
};

RADDLE_ENGINE_END
