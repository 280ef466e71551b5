// Rows that lie anywhere in device memory: where queries are, and copies to slots in pieces of 16
// bytes.
#pragma once

#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class T>
RADDLE_DEVICE const T* query_address(const GpuLaunch& launch, const Row& row) {
  return static_cast<const T*>(launch.q.data) + offset_in(launch.q, row);
}
/// Softmax takes positive scales alone: with another one, the queries change their sign, or become
/// zero.
template <class Variant>
RADDLE_DEVICE bool turns_queries(const GpuLaunch& launch) {
  return !has_logits<Variant> && launch.scale <= 0.0f;
}
/// Two numbers of a query, turned.
RADDLE_DEVICE u32 turned(const GpuLaunch& launch, u32 pair) {
  return launch.scale == 0.0f ? 0u : pair ^ 0x80008000u;
}

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

}  // namespace wgmma

RADDLE_ENGINE_END
