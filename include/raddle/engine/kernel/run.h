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
  float* lse;  ///< null: not wanted
  i64 lse_row_stride;
  i64 lse_head_stride;
  float* partial_o;    ///< [num_partial_rows, dim_vo]
  float* partial_lse;  ///< [num_partial_rows]
  i32* arrived;        ///< [num_contractions · num_kv_heads], zero between launches
  i32* drawn;  ///< [2] items drawn of the open queue, workers that left it; zero between launches
  float scale;
  bool state_only;  ///< the output is a state: fp32, without sink and output parts
};

}  // namespace raddle
