// What the host hands to the planner kernel, by value as its parameter; pointers are the device's.
// Plain data, laid out alike by the host's compiler and NVRTC.
//
// The kernel reads lengths and page tables where the caller's own kernels left them and writes a
// plan, with the layout's arrays, at addresses that never change: what a CUDA graph captures.
#pragma once

#include "raddle/engine/plan/bounds.h"

namespace raddle {

/// Lengths and tables of a batch. A request is a group; its keys are pages or contiguous rows.
struct DeviceBatch {
  i32 num_requests;
  const i32* num_requests_at;  ///< the same number on the device; null: num_requests
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

/// What is wrong with a batch: bits of PlanReport::errors.
enum PlanError : i32 {
  too_many_requests = 1,  ///< the plan is empty
  too_many_rows = 2,      ///< the plan is empty
  too_many_keys = 4,      ///< the plan is empty
  bad_rows = 8,           ///< qo_indptr decreases or leaves [0, max_qo_tokens]: no rows there
  bad_keys = 16,          ///< kv_len below 0: taken for 0
  bad_table = 32,  ///< fewer pages than kv_len needs, or outside the table: kv_len taken for 0
  bad_page = 64    ///< a page outside the pool, or -1 where keys are kept: taken for no keys
};

/// Only written where something is wrong, and only bits are added; memory of the host will do.
struct PlanReport {
  i32 errors;
  i32 request;  ///< the first one that the last bad plan met; -1: none in particular
};

/// Byte offsets of a planned layout's arrays in one block, each aligned to 16 bytes.
struct PlannedOffsets {
  i64 qo_indptr, kv_len, block_begin;
  i64 row_request, suffix, kv_begin;                         // with prefixes: of the last level,
  i64 prefix_indptr, prefix_rows, prefix_len, prefix_begin;  // and of the first
  i64 bytes;
};

/// Byte offsets of what the planner keeps for itself.
struct PlannerScratch {
  i64 candidates, group_tile, prefix, kv_tiles, tiles, cuts, rank, row_at, queue, owners, splits;
  i64 qo_indptr, kv_len;
  i64 links, depth, group, row_before, tiles_before, prefix_tiles, first_dependent, hulls;
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
  Maxima maxima;      ///< max_levels is 2 with prefixes, else 1
  PlanOffsets at;     ///< of the arrays of plan_bounds(config, maxima)
  PlannedOffsets layout_at;
  PlannerScratch scratch_at;
  bool scratch_in_shared;
  i32 num_planners;  ///< blocks that plan alike and share out the writing; else than 1 only where
                     ///< their scratch is in shared memory, and no prefixes are looked for
  u8* plan;
  u8* layout;
  u8* scratch;       ///< scratch_at.device_bytes, marks zero between launches
  PlanSizes* sizes;  ///< what the plan takes
  PlanReport* report;
};

// Both compilers see these numbers, so neither can lay the parameter out in its own way.
static_assert(sizeof(DeviceBatch) == 88 && sizeof(PlanConfig) == 104 && sizeof(Maxima) == 32);
static_assert(sizeof(PlannedOffsets) == 88 && sizeof(PlannerScratch) == 208);
static_assert(sizeof(PlanLaunch) == 648);

}  // namespace raddle
