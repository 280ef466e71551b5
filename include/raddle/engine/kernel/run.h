// What a run hands to every backend's kernels: the caller's tensors and a set of scratch. Plain
// data; pointers are of the kernel's own device.
#pragma once

#include "raddle/engine/core/scale.h"
#include "raddle/engine/core/tensor.h"
#include "raddle/engine/layout/layout.h"

namespace raddle {

struct RunView {
  KvView kv[max_levels];
  /// Where K and V are not quantised, those of K are 1, since `scale` has theirs, and those of V
  /// one number, the same of all levels.
  KvScales kv_scales[max_levels];
  RowsView q;
  RowsView out;
  RowsView lse;        ///< of single floats; data null: not wanted
  float* partial_o;    ///< [num_partial_rows, dim_vo]
  float* partial_lse;  ///< [num_partial_rows]
  i32* arrived;        ///< [num_contractions · num_kv_heads], zero between launches
  i32* drawn;  ///< [2] items drawn of the shared queue, workers that left it; zero between launches
  float scale;
  bool state_only;  ///< the output is a state: fp32, without sink and output parts
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Where a row begins, in elements.
RADDLE_FN i64 offset_in(const RowsView& rows, const Row& row) {
  return row.row * rows.row_stride + row.request * rows.request_stride +
         row.q_head * rows.head_stride;
}

/// Writes a row's LSE where it is wanted.
RADDLE_FN void put_lse(const RowsView& lse, const Row& row, float value) {
  if (lse.data) static_cast<float*>(lse.data)[offset_in(lse, row)] = value;
}

RADDLE_ENGINE_END
