// How many entries the arrays of a plan have, and where they lie in its one block of memory.
#pragma once

#include "raddle/engine/core/carve.h"
#include "raddle/engine/plan/plan.h"

namespace raddle {

/// Entries of every array of a plan, and rows of the state buffer.
struct PlanSizes {
  i64 query_tiles = 0;
  i64 runs = 0;
  i64 items = 0;
  i64 queue_indptr = 0;
  i64 splits = 0;
  i64 contractions = 0;
  i64 expected = 0;  ///< also the number of counters
  i64 sources = 0;
  i64 dependents = 0;
  i64 openings = 0;
  i64 partial_rows = 0;
};

/// Byte offsets of the arrays of a plan in one block, each aligned to 16 bytes.
struct PlanOffsets {
  i64 query_tiles, runs, items, queue_indptr, splits, contractions, expected, sources, dependents,
      openings;
  i64 bytes;  ///< of the whole block
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Goes through the arrays of a plan in the order in which they lie in its block. For each of them,
/// calls `visit` with the members of its name of the given records: PlanSizes, PlanOffsets,
/// PlanView. This is the one list of a plan's arrays: all that sizes, places or copies them uses
/// it.
template <class Visit, class... Records>
RADDLE_FN constexpr void visit_plan_arrays(const Visit& visit, Records&&... of) {
  visit(of.query_tiles...);
  visit(of.runs...);
  visit(of.items...);
  visit(of.queue_indptr...);
  visit(of.splits...);
  visit(of.contractions...);
  visit(of.expected...);
  visit(of.sources...);
  visit(of.dependents...);
  visit(of.openings...);
}

RADDLE_FN PlanOffsets plan_offsets(const PlanSizes& sizes) {
  PlanOffsets offsets{};
  Carver<16> carve;
  visit_plan_arrays(
      [&carve]<class T>(i64 count, i64& offset, const T*) { offset = carve.place<T>(count); },
      sizes, offsets, PlanView{});
  offsets.bytes = carve.used();
  return offsets;
}

/// A plan of these sizes whose block of arrays lies at `base`, on the host or on a device.
RADDLE_FN PlanView view_at(const void* base, const PlanSizes& sizes, const PlanConfig& config) {
  PlanView view{};
  view.num_workers = config.num_workers;
  view.num_kv_heads = config.num_kv_heads;
  view.group_size = config.group_size;
  view.num_query_tiles = static_cast<i32>(sizes.query_tiles);
  view.num_runs = static_cast<i32>(sizes.runs);
  view.num_items = static_cast<i32>(sizes.items);
  view.num_splits = static_cast<i32>(sizes.splits);
  view.num_contractions = static_cast<i32>(sizes.contractions);
  view.num_sources = static_cast<i32>(sizes.sources);
  view.num_dependents = static_cast<i32>(sizes.dependents);
  view.num_partial_rows = static_cast<i32>(sizes.partial_rows);
  view.shapes[short_queries] = config.shapes[short_queries];
  view.shapes[long_queries] = config.shapes[long_queries];
  Carver<16> carve(const_cast<void*>(base));
  visit_plan_arrays([&carve]<class T>(i64 count, const T*& array) { array = carve.take<T>(count); },
                    sizes, view);
  return view;
}

RADDLE_ENGINE_END
