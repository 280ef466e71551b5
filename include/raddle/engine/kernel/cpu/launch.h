// What the host hands to the CPU kernels of one ISA: bound variant stages, tensors, the plan. Plain
// data.
#pragma once

#include "raddle/engine/core/dtype.h"
#include "raddle/engine/core/row.h"
#include "raddle/engine/core/tensor.h"
#include "raddle/engine/layout/layout.h"
#include "raddle/engine/plan/plan.h"
#include "raddle/engine/variant/stages.h"

namespace raddle {

struct CpuLaunch {
  i32 dim_qk;
  i32 dim_vo;
  DType dtype;
  bool state_only;  ///< the output is a state: fp32, without sink and output parts
  float scale;
  const Stages* stages;
  const LayoutView* layout;
  const PlanView* plan;
  KvView kv[max_levels];
  RowsView q;
  RowsView out;
  float* lse;  ///< null: not wanted
  i64 lse_row_stride;
  i64 lse_head_stride;
  float* partial_o;    ///< [num_partial_rows, dim_vo]
  float* partial_lse;  ///< [num_partial_rows]
  i32* arrived;        ///< [num_contractions · num_kv_heads], zero between launches
};

/// The entry points of one ISA.
struct CpuKernels {
  const char* isa;
  i32 lanes;
  /// Computes one work item, and whatever contractions it completes. `scratch` is the thread's own.
  void (*attend)(const CpuLaunch& launch, i32 item, void* scratch);
  i64 (*scratch_bytes)(const CpuLaunch& launch);
  /// Applies sink and output parts to one row's normalised state.
  void (*finish_state)(const Stages& stages, const Row& row, i32 dim, float* o, float& lse);
  const VariantOps* variants;
  i32 num_variants;
};

}  // namespace raddle
