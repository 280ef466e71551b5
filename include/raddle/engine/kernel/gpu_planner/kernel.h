// The planner kernel. One to four blocks each plan the whole batch, so that none needs another's
// results, and divide the writing of items, which takes longest. Where pages are to be checked,
// other blocks read the tables meanwhile. If a page is bad, the block that finishes last plans once
// more: no block waits for another, and the common case pays for one counter only. Where prefixes
// are to be found, all blocks read the tables first, and the last one plans.
#pragma once

#include "raddle/engine/kernel/gpu_planner/fixed_chunks.h"
#include "raddle/engine/kernel/gpu_planner/linear.h"
#include "raddle/engine/kernel/gpu_planner/planner.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// The composition's coverage; where it has no mask, everything is kept.
template <class Variant>
struct VariantCover {
  const Variant& variant;
  RADDLE_FN KvSpan kv_span(const Tile& t) const {
    if constexpr (has_kv_span<Variant>)
      return variant.kv_span(t);
    else
      return KvSpan{everything, everything};
  }
  RADDLE_FN Coverage coverage(const Tile& t) const {
    if constexpr (has_coverage<Variant>)
      return variant.coverage(t);
    else
      return has_mask<Variant> ? Coverage::partial : Coverage::full;
  }
};

/// Marks a request whose list has pages outside the pool or missing ones. All threads of a block
/// call it.
RADDLE_DEVICE void check_pages(const DeviceBatch& batch, const DeviceRequest& q, i32 r,
                               i32* marks) {
  const i32* pages = batch.pages + q.begin;
  const i32 count = used_pages(batch, q);
  i32 bad = 0;
  for (i32 i = ptx::thread_index(); i < count; i += ptx::thread_count()) {
    const i32 page = pages[i];
    if (page < 0 || page >= batch.num_pages) bad |= page == -1 ? page_missing : page_outside;
  }
  if (bad) {
    ptx::atomic_or(&marks[2 + r], bad);
    ptx::atomic_or(&marks[1], 1);
  }
}

/// Checks the page lists of every step-th request and, with `prefixes`, looks for a shared prefix.
template <bool prefixes>
RADDLE_DEVICE void read_tables(const PlanLaunch& launch, PlannerShared& shared, i32* marks,
                               i32 first, i32 step) {
  const i32 given = given_requests(launch.batch);
  const i32 num_requests = given > launch.batch.num_requests ? 0 : given;
  for (i32 r = first; r < num_requests; r += step) {
    if (launch.batch.num_pages > 0)
      check_pages(launch.batch, read_request(launch.batch, launch.maxima.max_qo_tokens, r), r,
                  marks);
    if constexpr (prefixes) {
      auto* found = reinterpret_cast<PrefixLink*>(launch.scratch + launch.scratch_at.found);
      const PrefixLink link = find_link(launch, shared, r);
      if (ptx::thread_index() == 0) found[r] = link;
    }
  }
}

/// Counts this block up; returns whether it is the last one.
RADDLE_DEVICE bool arrives_last(i32* arrivals, PlannerShared& shared) {
  ptx::fence_device();  // makes what this thread wrote visible before the block's arrival
  ptx::sync_block();
  if (ptx::thread_index() == 0)
    shared.word = ptx::atomic_add(arrivals, 1) + 1 == ptx::block_count();
  ptx::sync_block();
  ptx::fence_device();  // makes what the other blocks wrote visible after theirs
  return shared.word != 0;
}

/// What a planner kernel is compiled for.
struct PlannerKind {
  bool prefixes = false;      ///< finds equal leading pages
  bool in_shared = false;     ///< a promise that launch.scratch_in_shared is true: the planner's
                              ///< arrays lie in shared memory, which makes addresses shorter and
                              ///< saves a test at every access. Without it both cases work.
  bool fixed_chunks = false;  ///< cuts at absolute columns: PlanConfig::batch_invariant
};

/// How a kind divides the units among the workers.
template <bool prefixes, bool fixed_chunks>
struct WorkOf {
  using type = LinearSpans<prefixes>;
};
template <bool prefixes>
struct WorkOf<prefixes, true> {
  using type = FixedChunks;
};

/// Makes one plan; this block is one of `parts` that make the same.
template <PlannerKind kind, class Variant>
RADDLE_DEVICE void plan_once(const PlanLaunch& launch, const Variant& variant, const i32* marks,
                             PlannerShared& shared, i32 part, i32 parts) {
  u8* memory = static_cast<u8*>(ptx::shared_memory()) + shared_header();
  if (!kind.in_shared && !launch.scratch_in_shared) memory = launch.scratch;
  const VariantCover<Variant> cover{variant};
  Context context(launch, marks, shared, memory, part, parts);
  using Work = typename WorkOf<kind.prefixes, kind.fixed_chunks>::type;
  BlockPlanner<VariantCover<Variant>, kind.prefixes, Work>(cover, context).run();
}

/// The kernel's body, for launch.num_planners blocks; more where pages are checked; any number with
/// prefixes.
template <PlannerKind kind, class Variant>
RADDLE_DEVICE void plan_batch(const PlanLaunch& launch, const Variant& variant) {
  constexpr bool prefixes = kind.prefixes;
  auto& shared = *static_cast<PlannerShared*>(ptx::shared_memory());
  i32* marks = reinterpret_cast<i32*>(launch.scratch + launch.scratch_at.marks);
  const i32 planners = prefixes ? 0 : launch.num_planners;  // blocks that begin to plan at once
  bool reads = ptx::block_index() >= planners;
  bool again = false;  // the tables have been read
  for (;;) {
    if (reads) {
      read_tables<prefixes>(launch, shared, marks, ptx::block_index() - planners,
                            ptx::block_count() - planners);
    } else {
      plan_once<kind>(launch, variant, again && marks[1] != 0 ? marks + 2 : nullptr, shared,
                      again ? 0 : ptx::block_index(), again ? 1 : planners);
    }
    if (again) break;
    if (ptx::block_count() == planners) return;
    if (!arrives_last(marks, shared)) return;
    if (!prefixes && marks[1] == 0) break;
    again = true;
    reads = false;
  }
  ptx::sync_block();
  // The marks are zero again for the next launch.
  for (i32 i = ptx::thread_index(); i < 2 + launch.maxima.max_requests; i += ptx::thread_count())
    marks[i] = 0;
}

}  // namespace planner

RADDLE_ENGINE_END
