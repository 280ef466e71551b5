// Writing new rows of K or V into the pages of a KV pool.
#pragma once

#include "raddle/engine/core/dtype.h"
#include "raddle/engine/layout/layout.h"

namespace raddle {

/// New rows of one tensor and the pool that they go to. Steps are in bytes: the kernel moves bits
/// and knows no dtype.
struct AppendView {
  const u8* rows;  ///< element (row, head, 0) lies at row * row_step + head * head_step
  i64 row_step;
  i64 head_step;
  u8* pool;  ///< element (page, offset, head, 0) at page * page_step + offset * slot_step + head *
             ///< pool_head_step
  i64 page_step;
  i64 slot_step;
  i64 pool_head_step;
  i64 head_bytes;  ///< of one head of one row
  i32 num_heads;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// The column of its group's list that the first new row of request `group` becomes: new rows are
/// the last keys.
RADDLE_FN i32 first_new_column(const LevelView& level, i32 group) {
  return level.columns[group] - group_rows(level, group);
}

/// The request of row `row`: the last one that begins at or before it and isn't empty.
RADDLE_FN i32 find_request(const LayoutView& layout, i32 row) {
  i32 low = 0;
  i32 high = layout.num_requests;
  while (high - low > 1) {
    const i32 middle = low + (high - low) / 2;
    if (layout.qo_indptr[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

RADDLE_FN void append_row(const AppendView& view, i64 row, i64 page, i64 offset) {
  const u8* from = view.rows + row * view.row_step;
  u8* to = view.pool + page * view.page_step + offset * view.slot_step;
  if (view.head_step == view.head_bytes && view.pool_head_step == view.head_bytes) {
    __builtin_memcpy(to, from, static_cast<u64>(view.head_bytes * view.num_heads));
    return;
  }
  for (i64 head = 0; head < view.num_heads; ++head) {
    __builtin_memcpy(to + head * view.pool_head_step, from + head * view.head_step,
                     static_cast<u64>(view.head_bytes));
  }
}

/// Appends rows [begin, end) of the ragged tensors to the pages of a layout's only level.
RADDLE_FN void append_rows(const LayoutView& layout, const AppendView& k, const AppendView& v,
                           i32 begin, i32 end) {
  const LevelView& level = layout.levels[0];
  i32 request = begin < end ? find_request(layout, begin) : 0;
  for (i32 row = begin; row < end; ++row) {
    while (row >= layout.qo_indptr[request + 1]) ++request;
    const i32 column = first_new_column(level, request) + (row - layout.qo_indptr[request]);
    const Column at = column_at(level, request, column);
    append_row(k, row, at.block, at.offset);
    append_row(v, row, at.block, at.offset);
  }
}

RADDLE_ENGINE_END
