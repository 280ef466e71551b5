// The parameter of the planner kernel, which the host passes by value; pointers are device
// pointers. Plain data: the host's compiler and NVRTC lay it out alike.
//
// The kernel reads lengths and page tables from the caller's device arrays and writes a plan and
// the layout's arrays at addresses that never change, which a CUDA graph can capture.
#pragma once

#include "raddle/engine/kernel/gpu_planner/arrays.h"
#include "raddle/engine/plan/bounds.h"

namespace raddle {

/// Lengths and tables of a batch. Each request is a group; its keys are pages or contiguous rows.
struct DeviceBatch {
  i32 num_requests;
  const i32* num_requests_at;  ///< where the device has that number; null: num_requests holds it
  const i32* qo_indptr;        ///< [num_requests + 1]
  const i32* kv_len;           ///< [num_requests]; null: ragged keys, kv_indptr
  const i32* kv_indptr;        ///< [num_requests + 1]
  const i32* pages;            ///< page_indices, or a block table; null: ragged keys
  const i32* page_indptr;      ///< [num_requests + 1] into pages; null: rows of a block table
  i64 row_stride;              ///< of a block table, in entries
  i64 num_entries;             ///< of pages, or of one row of a block table
  i32 page_size;
  i32 num_pages;   ///< of the pool: entries below it are valid. 0: entries are not looked at
  i32 min_prefix;  ///< > 0: equal leading pages become a level, from this many tokens on
};

/// Errors of a batch: bits of PlanReport::errors.
enum PlanError : i32 {
  too_many_requests = 1,  ///< the plan is empty
  too_many_rows = 2,      ///< the plan is empty
  too_many_keys = 4,      ///< the plan is empty
  bad_rows = 8,           ///< qo_indptr decreases or leaves [0, max_qo_tokens]: no rows there
  bad_keys = 16,          ///< kv_len below 0: taken for 0
  bad_table = 32,  ///< fewer pages than kv_len needs, or outside the table: kv_len taken for 0
  bad_page = 64,   ///< a page outside the pool, or -1 where keys are kept: taken for no keys
  too_long = 128   ///< a request with more rows than max_qo_len, with batch invariance: no rows
};

/// Written only where something is wrong, and bits are only added.
struct PlanReport {
  i32 errors;
  i32 request;  ///< the first bad request of the last bad plan; -1: none in particular
};

/// Byte offsets of a planned layout's arrays in one block, each aligned to 16 bytes.
struct PlannedOffsets : PlannedRecord<NumberOf> {
  i64 bytes;
};

/// Byte offsets of the planner's scratch arrays.
struct PlannerScratch : ScratchRecord<NumberOf> {
  i64 bytes;  ///< of all these: in shared memory where that suffices, else in device memory
  i64 marks;  ///< what follows is in device memory: a counter and a word for all, then one a
              ///< request;
  i64 found;  ///< with prefixes, the PrefixLink of every request;
  i64 spans;  ///< where there is a mask, max_spans runs a thread of every planner
  i64 device_bytes;
};

struct PlanLaunch {
  DeviceBatch batch;
  PlanConfig config;  ///< `schedule` is not looked at: on a device it is linear
  Maxima maxima;      ///< max_levels is 2 with prefixes, else 1; max_qo_len is 0, except with
                      ///< batch invariance
  PlanOffsets at;     ///< of the arrays of plan_bounds(config, maxima)
  PlannedOffsets layout_at;
  PlannerScratch scratch_at;
  bool scratch_in_shared;
  i32 num_planners;  ///< blocks that make the same plan and divide the writing; 1 where scratch is
                     ///< not in shared memory, or prefixes are looked for
  u8* plan;
  u8* layout;
  u8* scratch;       ///< scratch_at.device_bytes, marks zero between launches
  PlanSizes* sizes;  ///< sizes of the plan's arrays
  PlanReport* report;
};

// Both compilers check these numbers, so neither can lay the parameter out in its own way.
static_assert(sizeof(DeviceBatch) == 88 && sizeof(PlanConfig) == 148 && sizeof(Maxima) == 40);
static_assert(sizeof(PlannedOffsets) == 88 && sizeof(PlannerScratch) == 232);
static_assert(sizeof(PlanLaunch) == 736);

}  // namespace raddle
