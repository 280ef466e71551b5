// K and V as bytes: what only moves keys and values knows no dtype.
#pragma once

#include "raddle/engine/core/scale.h"
#include "raddle/engine/kernel/cache/lanes.h"
#include "raddle/engine/layout/layout.h"

namespace raddle {

/// One of K and V of a page pool. Steps are in bytes.
struct PoolBytes {
  u8* data;  ///< element (page, slot, head, 0) at page * page_step + slot * slot_step + head *
             ///< head_step
  i64 page_step;
  i64 slot_step;
  i64 head_step;
  i64 head_bytes;  ///< of one head of one slot
  i32 num_heads;
  i32 num_pages;
};

/// New rows of one tensor: element (row, head, 0) at row * row_step + head * head_step bytes.
struct RowBytes {
  const u8* data;
  i64 row_step;
  i64 head_step;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

/// 16 bytes, which a lane moves at once.
struct alignas(16) Unit {
  u64 x[2];
};

template <class Lanes>
RADDLE_FN void copy_bytes(const Lanes& lanes, const u8* from, u8* to, i64 bytes) {
  if constexpr (Lanes::aligned) {
    for (i64 i = lanes.index(); i < bytes / 16; i += Lanes::count)
      reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  } else {
#if defined(__CUDACC_RTC__)
    ::memcpy(to, from, static_cast<u64>(bytes));
#else
    __builtin_memcpy(to, from, static_cast<u64>(bytes));
#endif
  }
}

RADDLE_FN u8* head_at(const PoolBytes& pool, i64 page, i64 slot, i64 head) {
  return pool.data + page * pool.page_step + slot * pool.slot_step + head * pool.head_step;
}

/// A slot of a page.
struct SlotAt {
  i64 page, slot;
};

/// The scale of one head of one slot goes where its row goes; nothing where there are none.
template <class Lanes>
RADDLE_FN void copy_scale(const Lanes& lanes, const ScaleView& from, const ScaleView& to,
                          SlotAt from_at, SlotAt to_at, i64 head) {
  if (from.data && lanes.index() == 0)
    scale_in(to, to_at.page, to_at.slot, head) = scale_in(from, from_at.page, from_at.slot, head);
}

/// Tables on a device are read as they are found: a page that the pool lacks counts as none.
RADDLE_FN bool has_page(const PoolBytes& pool, i32 page) {
  return page >= 0 && page < pool.num_pages;
}

/// Pages of a group's list that hold keys, and how many keys the `nth` of them holds.
RADDLE_FN i32 pages_of_group(const LevelView& level, i32 group) {
  return ceil_div(level.columns[group], level.block_size);
}
RADDLE_FN i32 keys_in_page(const LevelView& level, i32 group, i32 nth) {
  return min(level.block_size, level.columns[group] - nth * level.block_size);
}

/// The column of its group's list that the first new row of request `group` is: new rows are the
/// last keys.
RADDLE_FN i32 first_new_column(const LevelView& level, i32 group) {
  return level.columns[group] - group_rows(level, group);
}

}  // namespace kv

RADDLE_ENGINE_END
