// The workers of one unit of a cache kernel: a single CPU thread, or the lanes of a warp (warp.h).
// Functions for units are written once, as loops from lanes.index() in steps of lanes.count, and
// give the same bits on both.
#pragma once

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace kv {

/// Elements that a lane handles at a time: 16 bytes of a 16-bit dtype. Head dims are multiples of
/// it.
constexpr i32 piece_size = 8;
/// The most pieces of a head: one a lane of a warp.
constexpr i32 max_pieces = 32;
constexpr i32 max_head_dim = piece_size * max_pieces;

/// A single thread, which does all of a unit's work.
struct Alone {
  static constexpr i32 count = 1;
  static constexpr bool aligned = false;  ///< whether all rows begin at multiples of 16 bytes
  RADDLE_FN i32 index() const { return 0; }
  RADDLE_FN void sync() const {}
  /// The largest of all lanes' numbers.
  RADDLE_FN float largest(float x) const { return x; }

  /// How many pieces of a head a lane holds at a time, and which is the `nth`.
  static constexpr i32 held = max_pieces;
  RADDLE_FN i32 piece(i32 nth) const { return nth; }

  /// Sum of f(nth) over the held pieces below `pieces`, as a tree over neighbours: f(0) + f(1),
  /// f(2) + f(3), … first.
  template <class F>
  RADDLE_FN float sum_pieces(i32 pieces, F f) const {
    float x[max_pieces] = {};
    for (i32 i = 0; i < pieces; ++i) x[i] = f(i);
    for (i32 step = 1; step < pieces; step *= 2)
      for (i32 i = 0; i < pieces; i += 2 * step) x[i] += i + step < pieces ? x[i + step] : 0.0f;
    return x[0];
  }
};

/// One piece, as it lies in memory.
template <class T>
struct alignas(sizeof(T) == 1 ? piece_size : 16) Piece {
  T x[piece_size];
};

template <class Lanes, class T>
RADDLE_FN void load_piece(const Lanes&, const T* from, float (&x)[piece_size]) {
  if constexpr (Lanes::aligned) {
    const Piece<T> piece = *reinterpret_cast<const Piece<T>*>(from);
    RADDLE_UNROLL
    for (i32 i = 0; i < piece_size; ++i) x[i] = to_float(piece.x[i]);
  } else {
    for (i32 i = 0; i < piece_size; ++i) x[i] = to_float(from[i]);
  }
}

template <class Lanes, class T>
RADDLE_FN void store_piece(const Lanes&, const float (&x)[piece_size], T* to) {
  if constexpr (Lanes::aligned) {
    Piece<T> piece;
    RADDLE_UNROLL
    for (i32 i = 0; i < piece_size; ++i) piece.x[i] = from_float<T>(x[i]);
    *reinterpret_cast<Piece<T>*>(to) = piece;
  } else {
    for (i32 i = 0; i < piece_size; ++i) to[i] = from_float<T>(x[i]);
  }
}

}  // namespace kv

RADDLE_ENGINE_END
