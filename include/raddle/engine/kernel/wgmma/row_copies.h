// Rows that lie anywhere in device memory, copied to slots in pieces of 16 bytes.
#pragma once

#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Addresses of two consecutive rows.
template <class T>
struct alignas(16) RowPair {
  const T* row[2];
};

/// Starts copying `rows` rows of `dim` numbers to a slot's rows from `to` on, a multiple of 8 of
/// them; rows_from(m) are the addresses of rows m and m + 1. Eight lanes copy 128 bytes of a row;
/// columns beyond the head's become zero. This is on the way of short items, so it is straight
/// code.
template <class Slots, i32 dim, i32 rows, class T, class RowsFrom>
RADDLE_DEVICE void copy_rows(u32 to, RowsFrom rows_from) {
  static_assert(rows % 8 == 0 && sizeof(T) == 2);
  const i32 lane = ptx::lane_index(), first = lane / 8 * 2, column = 8 * (lane % 8);
  RowPair<T> pair[rows / 8];  // first of all: an address waits for what looks it up
  RADDLE_UNROLL
  for (i32 i = 0; i < rows / 8; ++i) {
    pair[i] = rows_from(8 * i + first);
    pair[i].row[0] += column, pair[i].row[1] += column;
  }
  // First halves of all rows, then second ones: so the compiler keeps each address in registers of
  // its own. With one pair for all, each copy waits until the one before has read its address.
  RADDLE_UNROLL
  for (i32 half = 0; half < ceil_div(dim, 64); ++half) {
    const i32 columns = dim % 64 == 0 ? 8 : min(max(dim - 64 * half - column, 0), 8);
    RADDLE_UNROLL
    for (i32 i = 0; i < rows / 4; ++i) {
      // Rows are swizzled by eights.
      const i32 at = Slots::at(first + i % 2, 8 * half + lane % 8) + 128 * 8 * (i / 2);
      ptx::copy_async(to + static_cast<u32>(at),
                      pair[i / 2].row[i % 2] + (columns > 0 ? 64 * half : -column), 2 * columns);
    }
  }
}

/// Slots of a ring, at most `most`, whose rows a warp is copying. wgmma may read them once the
/// threads that started the copies have waited for them and passed a fence. The warp does so, and
/// arrives at the slot's barrier, when `most` slots are under way or when the next one is not free.
template <i32 most>
class CopiedSlots {
 public:
  /// The copies started since the last call fill a slot, and `full` waits for that.
  RADDLE_DEVICE void add(u32 full) {
    if (count_ == most) announce_oldest();
    ptx::copy_commit();
    RADDLE_UNROLL
    for (i32 i = 0; i < most; ++i)
      if (i == count_) full_[i] = full;
    ++count_;
  }
  /// Waits until another slot is free to be filled.
  RADDLE_DEVICE void wait_free(u32 free, i32 parity) {
    RADDLE_ROLLED
    while (count_ > 0 && !ptx::any(ptx::barrier_ended(free, parity))) announce_oldest();
    ptx::barrier_wait(free, parity);
  }
  RADDLE_DEVICE void announce_all() {
    RADDLE_ROLLED
    while (count_ > 0) announce_oldest();
  }

 private:
  static_assert(most <= 3);
  RADDLE_DEVICE void announce_oldest() {
    if (most == 1 || count_ == 1)
      ptx::copy_wait<0>();
    else if (most == 2 || count_ == 2)
      ptx::copy_wait<1>();
    else
      ptx::copy_wait<2>();
    ptx::fence_proxy();
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(full_[0]);
    RADDLE_UNROLL
    for (i32 i = 1; i < most; ++i) full_[i - 1] = full_[i];
    --count_;
  }

  u32 full_[most] = {};  ///< their barriers, the oldest first
  i32 count_ = 0;
};

}  // namespace wgmma

RADDLE_ENGINE_END
