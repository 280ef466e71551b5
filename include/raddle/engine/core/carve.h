// Lays arrays out one after another in one block of memory.
//
// A record of arrays names each of them once, in the order in which they lie. Going through that
// list with a Carver gives the block's size (no base), the arrays' offsets (`place`) or pointers to
// them (`take`), so that what allocates a block and what uses it cannot disagree.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

/// Hands out consecutive arrays of a block, each at a multiple of `alignment` bytes from its base.
/// Without a base it only counts.
template <i32 alignment>
class Carver {
 public:
  Carver() = default;
  RADDLE_FN explicit Carver(void* base) : base_(static_cast<u8*>(base)) {}

  /// Byte offset of the next array, which has n entries.
  template <class T>
  RADDLE_FN constexpr i64 place(i64 n) {
    const i64 begin = used_;
    used_ = round_up(begin + n * static_cast<i64>(sizeof(T)), i64{alignment});
    return begin;
  }

  /// The next array, which has n entries; null without a base.
  template <class T>
  RADDLE_FN T* take(i64 n) {
    const i64 begin = place<T>(n);
    return base_ ? reinterpret_cast<T*>(base_ + begin) : nullptr;
  }

  /// Bytes of all arrays so far, each rounded up to the alignment.
  RADDLE_FN constexpr i64 used() const { return used_; }

 private:
  u8* base_ = nullptr;
  i64 used_ = 0;
};

RADDLE_ENGINE_END
