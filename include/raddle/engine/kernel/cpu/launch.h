// What the host hands to the CPU kernels of one ISA: bound variant stages, tensors, the plan. Plain
// data.
#pragma once

#include "raddle/engine/core/dtype.h"
#include "raddle/engine/core/row.h"
#include "raddle/engine/kernel/run.h"
#include "raddle/engine/plan/plan.h"
#include "raddle/engine/variant/stages.h"

namespace raddle {

struct CpuLaunch : RunView {
  i32 dim_qk;
  i32 dim_vo;
  i32 k_begin;            ///< columns of a key before its row of K: 0, or dim_vo where K extends V
  DType dtype;            ///< of Q and O
  DType kv_dtype;         ///< of K and V
  bool prefetch_into_l2;  ///< prefetch keys into the L2 cache, not the L1
  const Stages* stages;
  const LayoutView* layout;
  const PlanView* plan;
};

/// The entry points of one ISA.
struct CpuKernels {
  const char* isa;
  i32 lanes;
  /// How many items from `first` on, of those before `end`, are computed together.
  i32 (*run_length)(const CpuLaunch& launch, i32 first, i32 end);
  /// Computes work items [first, end), one run, and whatever contractions they complete. `next` is
  /// the item that this thread is likely to begin with afterwards, -1: none. `scratch` is the
  /// thread's own.
  void (*attend)(const CpuLaunch& launch, i32 first, i32 end, i32 next, void* scratch);
  i64 (*scratch_bytes)(const CpuLaunch& launch);
  /// Applies sink and output parts to one row's normalised state.
  void (*finish_state)(const Stages& stages, const Row& row, i32 dim, float* o, float& lse);
  const VariantOps* variants;
  i32 num_variants;
};

}  // namespace raddle
