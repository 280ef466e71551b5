// The lanes of a GPU's warp as the workers of a unit.
#pragma once

#include "raddle/engine/kernel/cache/lanes.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace kv {

/// All lanes of a warp.
struct Warp {
  static constexpr i32 count = 32;
  static constexpr bool aligned = true;
  RADDLE_DEVICE i32 index() const { return ptx::thread_index() % 32; }
  RADDLE_DEVICE void sync() const { ptx::sync_warp(); }
  RADDLE_DEVICE float largest(float x) const {
    for (i32 step = 1; step < count; step *= 2) x = max(x, ptx::shuffle_xor(x, step));
    return x;
  }
};

/// Lanes [first, first + width) of a warp, where width is a power of two: the warp works on several
/// units at a time. All lanes of the warp must call sum_pieces equally often.
struct Part {
  static constexpr bool aligned = true;
  static constexpr i32 held = 1;
  i32 width;
  RADDLE_DEVICE i32 index() const { return ptx::thread_index() % width; }
  RADDLE_DEVICE i32 piece(i32) const { return index(); }

  /// Adds in the order of Alone::sum_pieces; every lane gets the sum.
  template <class F>
  RADDLE_DEVICE float sum_pieces(i32 pieces, F f) const {
    float x = index() < pieces ? f(0) : 0.0f;
    for (i32 step = 1; step < width; step *= 2) x += ptx::shuffle_xor(x, step);
    return x;
  }
};

/// The narrowest Part that has a lane for each piece.
RADDLE_DEVICE Part part_for(i32 pieces) {
  i32 width = 1;
  while (width < pieces) width *= 2;
  return Part{width};
}

}  // namespace kv

RADDLE_ENGINE_END
