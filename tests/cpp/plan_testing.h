// Layouts to plan, and a check of everything a plan promises.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "plan/planner.h"
#include "raddle/engine/plan/linear_split.h"
#include "raddle/engine/variant/parts.h"

namespace raddle::plan_testing {

/// One level and the arrays it points into. Empty vectors are null pointers.
struct OwnedLevel {
  std::vector<i32> row_indptr{0}, rows, columns, kv_begin, block_begin, blocks;
  std::vector<i32> block_index, block_pos, block_count;
  std::vector<u8> mask_bits;
  i32 block_size = 16;
  i32 block_rows = 0;
  bool groups_are_requests = true;
  LevelView view() const;
};

struct OwnedLayout {
  std::vector<i32> qo_indptr{0}, kv_len, qo_pos, row_request;
  std::vector<OwnedLevel> levels;
  std::vector<LevelView> views;  ///< made by view()
  LayoutView view();
};

/// A page table (or ragged keys with page 0): one level whose groups are the requests.
OwnedLayout paged(const std::vector<i32>& qo_len, const std::vector<i32>& kv_len,
                  i32 page_size = 16);

/// A cascade of two or three levels: random sets of requests, not adjacent, share random prefixes.
OwnedLayout random_cascade(std::mt19937& random, i32 num_levels);

/// A prefix of so many columns, which so many requests share.
struct SharedBy {
  i32 requests, columns;
};
/// Requests of one row behind prefixes, with `own` keys of their own each.
OwnedLayout behind_prefixes(const std::vector<SharedBy>& prefixes, i32 own);

/// Explicit blocks: gaps between them, their own positions, holes, and mask bits when asked for.
OwnedLayout random_blocks(std::mt19937& random, bool masked);

/// A variant's answers; a variant without coverage is partial everywhere.
template <class V>
CoverFns cover_of(const V& v) {
  CoverFns fns;
  fns.self = &v;
  fns.kv_span = [](const void* self, const Tile& t) {
    return static_cast<const V*>(self)->kv_span(t);
  };
  fns.coverage = [](const void* self, const Tile& t) {
    return static_cast<const V*>(self)->coverage(t);
  };
  return fns;
}

/// The same, of a variant that may have no mask.
template <class V>
CoverFns cover(const V& v) {
  if constexpr (has_mask<V>) return cover_of(v);
  return {};
}

/// Whether a row keeps a key.
using MaskFn = bool (*)(const void* self, const Row& row, const Key& key);

/// GPU-like rates: a KV tile weighs more than an item's start, a row's merge little.
PlanConfig config_for(i32 num_workers, i32 num_kv_heads = 2, i32 group_size = 4);

/// Runs: every kept pair lies in exactly one run, full runs are full, bounds and order hold.
void check_runs(const LayoutView& layout, const PlanConfig& config, const PlanView& plan,
                const void* mask, MaskFn keeps);

/// Items, splits and contractions: every KV tile of every (tile, head) once, every partial row
/// composed exactly once into its own output row, every output row written once.
void check_work(const LayoutView& layout, const PlanConfig& config, const PlanView& plan);

/// No array and no state exceeds what plan_bounds promised for maxima that just hold this layout.
void check_bounds(const LayoutView& layout, const PlanConfig& config, const PlanArrays& plan);

/// Planned costs of queues.
struct Balance {
  i64 heaviest;
  i64 total;
};

/// The planned cost of the plan's queues, computed from its items alone.
Balance cost_of_plan(const PlanConfig& config, const PlanView& plan);

inline i32 between(std::mt19937& random, i32 first, i32 last) {
  return std::uniform_int_distribution<i32>(first, last)(random);
}

}  // namespace raddle::plan_testing
