// Reads the lengths and the page list of one request from device memory, and finds what is wrong
// with them.
#pragma once

#include "raddle/engine/kernel/gpu_planner/launch.h"

namespace raddle {

struct DeviceRequest {
  i32 first;   ///< row of the query tensor
  i32 rows;    ///< 0 where they are bad
  i32 keys;    ///< 0 where they or their table are bad
  i32 begin;   ///< where its list begins in the pages, or where its keys begin
  i32 errors;  ///< PlanError
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace planner {

RADDLE_FN DeviceRequest read_request(const DeviceBatch& batch, i32 max_rows, i32 r) {
  DeviceRequest q{batch.qo_indptr[r], 0, 0, 0, 0};
  const i32 end = batch.qo_indptr[r + 1];
  if (q.first >= 0 && q.first <= end && end <= max_rows) {
    q.rows = end - q.first;
  } else {
    q.errors |= bad_rows;
  }
  i64 keys = 0, begin = 0, listed = 0, size = batch.num_entries;
  if (!batch.pages) {
    begin = batch.kv_indptr[r];
    keys = listed = batch.kv_indptr[r + 1] - begin;
  } else {
    keys = batch.kv_len[r];
    begin = batch.page_indptr ? batch.page_indptr[r] : r * batch.row_stride;
    listed = batch.page_indptr ? batch.page_indptr[r + 1] - begin : batch.num_entries;
    if (!batch.page_indptr) size = begin + batch.num_entries;
  }
  const i64 needed =
      batch.pages && keys > 0 ? quotient(keys + batch.page_size - 1, i64{batch.page_size}) : keys;
  if (keys < 0) {
    q.errors |= bad_keys;
  } else if (begin < 0 || listed < needed || begin + needed > size || begin + needed > int_max) {
    q.errors |= bad_table;
  } else {
    q.keys = static_cast<i32>(keys);
    q.begin = static_cast<i32>(begin);
  }
  return q;
}

/// Entries of its page list that hold keys.
RADDLE_FN i32 used_pages(const DeviceBatch& batch, const DeviceRequest& q) {
  return batch.pages ? ceil_div(q.keys, batch.page_size) : 0;
}

}  // namespace planner

RADDLE_ENGINE_END
