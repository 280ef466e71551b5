// When a worker did what: marks for people who look for lost time.
#pragma once

#include "raddle/engine/kernel/mma/team.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Marks that the block has reached a stage of an item; what a row has no room for is dropped.
template <class K>
RADDLE_DEVICE void mark(const MmaLaunch& launch, TimelineStage stage, i32 item) {
  const TimelineView& timeline = launch.timeline;
  if (!timeline.marks || ptx::thread_index() != 0) return;
  constexpr i32 stages = static_cast<i32>(TimelineStage::finished);
  TimelineView::Mark* mine = timeline.marks + i64{worker_index<K>()} * timeline.capacity;
  const i32* queue = launch.plan.queue_indptr + worker_index<K>();
  i32 before = item - queue[0];  // items that the block had before
  if (item >= launch.plan.queue_indptr[launch.plan.num_workers] &&
      stage != TimelineStage::started) {
    // Drawn: the item's number in the first mark, which no other item has, counts them.
    if (stage == TimelineStage::opened) mine->what += 1 << 3;
    before = queue[1] - queue[0] + (mine->what >> 3) - queue[0] - 1;
  }
  const i32 nth = stage == TimelineStage::contracted ? timeline.capacity - 1
                                                     : stages * before + static_cast<i32>(stage);
  if (nth >= timeline.capacity) return;
  mine[nth] = {static_cast<i32>(ptx::global_time()), static_cast<i32>(stage) | item << 3};
}

}  // namespace mma

RADDLE_ENGINE_END
