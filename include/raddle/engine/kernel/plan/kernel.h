// The planner kernel. One block plans; where pages are to be checked, the others look at the
// tables meanwhile. Whichever block finishes last plans once more if a page is bad: nobody waits
// for another, and the common case pays for one counter.
#pragma once

#include "raddle/engine/kernel/plan/planner.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// A composition's answers; everything is kept where it has no mask.
template <class V>
struct VariantCover {
  const V& variant;
  RADDLE_FN KvSpan kv_span(const Tile& t) const {
    if constexpr (has_kv_span<V>)
      return variant.kv_span(t);
    else
      return KvSpan{everything, everything};
  }
  RADDLE_FN Coverage coverage(const Tile& t) const {
    if constexpr (has_coverage<V>)
      return variant.coverage(t);
    else
      return has_mask<V> ? Coverage::partial : Coverage::full;
  }
};

/// Marks requests whose lists name pages outside the pool, or none; a block a request.
RADDLE_DEVICE void check_pages(const PlanLaunch& launch, i32* marks, i32 first, i32 step) {
  const DeviceBatch& batch = launch.batch;
  const i32 given = batch.num_requests_at ? *batch.num_requests_at : batch.num_requests;
  const i32 num_requests = given > launch.maxima.max_requests ? 0 : given;
  for (i32 r = first; r < num_requests; r += step) {
    const DeviceRequest q = read_request(batch, launch.maxima.max_qo_tokens, r);
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
}

/// Whether this block is the last to come here.
RADDLE_DEVICE bool arrives_last(i32* arrivals, PlannerShared& shared) {
  ptx::fence_device();  // what this thread wrote, before the block's arrival
  ptx::sync_block();
  if (ptx::thread_index() == 0)
    shared.word = ptx::atomic_add(arrivals, 1) + 1 == ptx::block_count();
  ptx::sync_block();
  ptx::fence_device();  // what the others wrote, after theirs
  return shared.word != 0;
}

/// The kernel's body. One block, or with pages to check at least two.
template <class V>
RADDLE_DEVICE void plan_batch(const PlanLaunch& launch, const V& variant) {
  auto& shared = *static_cast<PlannerShared*>(ptx::shared_memory());
  u8* memory = launch.scratch_in_shared ? static_cast<u8*>(ptx::shared_memory()) + shared_header()
                                        : launch.scratch;
  i32* marks = reinterpret_cast<i32*>(launch.scratch + launch.scratch_at.marks);
  const VariantCover<V> cover{variant};
  const bool checks = ptx::block_count() > 1;
  bool again = false;
  do {
    if (ptx::block_index() > 0 && !again) {
      check_pages(launch, marks, ptx::block_index() - 1, ptx::block_count() - 1);
    } else {
      BlockPlanner<VariantCover<V>>(launch, cover, again ? marks + 2 : nullptr, shared, memory)
          .run();
    }
    if (!checks) return;
    if (again) break;
    if (!arrives_last(marks, shared)) return;
    again = marks[1] != 0;
  } while (again);
  ptx::sync_block();
  // Zero again for the next launch.
  for (i32 i = ptx::thread_index(); i < 2 + launch.maxima.max_requests; i += ptx::thread_count())
    marks[i] = 0;
}

}  // namespace planner

RADDLE_ENGINE_END
