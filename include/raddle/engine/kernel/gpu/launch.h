// The parameter of an attention kernel, which the host passes by value; pointers are device
// pointers. Plain data: the host's compiler and NVRTC lay it out alike.
#pragma once

#include "raddle/engine/kernel/run.h"
#include "raddle/engine/plan/plan.h"

namespace raddle {

/// What a worker has reached: first its start, then the next four stages of every item, and at last
/// the end of its contractions.
enum class TimelineStage : i32 { started, opened, computed, stored, finished, contracted };

/// When each worker reached which stage, for profiling.
struct TimelineView {
  /// `time`: the low 32 bits of the GPU's clock in ns. `what`: a TimelineStage, and above it the
  /// item's number.
  struct Mark {
    i32 time, what;
  };
  Mark* marks;  ///< [num_workers, capacity]; null: no marks are written
  i32 capacity;
};

/// What a run of any kernel family needs.
struct GpuLaunch : RunView {
  LayoutView layout;  ///< its `levels` is null; the kernel reads the array below
  LevelView levels[max_levels];
  PlanView plan;
  const u8* arrays;  ///< the memory that holds all arrays of layout and plan
  i64 array_bytes;
  i32 query_rows;   ///< rows of q
  bool lse_base_2;  ///< what is written to `lse` is a logarithm to base 2
  /// Where the number of the batch's rows is, if rows from there on are to be zero; else null.
  const i32* unused_rows_begin;
  TimelineView timeline;
};

// Both compilers check these numbers, so neither can lay the parameter out in its own way.
static_assert(sizeof(LevelView) == 104 && sizeof(LayoutView) == 56 && sizeof(PlanView) == 144);
static_assert(sizeof(Opening) == 96 && sizeof(KvView) == 64 && sizeof(KvScales) == 80);
static_assert(sizeof(RunView) == 1288 && sizeof(GpuLaunch) == 2368);

}  // namespace raddle
