// Marks of when a worker reached a stage, for profiling.
#pragma once

#include "raddle/engine/kernel/gpu/team.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// Writes a mark that the worker has reached a stage of an item; marks beyond the capacity are
/// dropped.
template <class Kernel>
RADDLE_DEVICE void mark(const GpuLaunch& launch, TimelineStage stage, i32 item) {
  const TimelineView& timeline = launch.timeline;
  if (!timeline.marks || Kernel::Team::thread() != 0) return;
  constexpr i32 stages = static_cast<i32>(TimelineStage::finished);
  TimelineView::Mark* mine = timeline.marks + i64{Kernel::Team::worker()} * timeline.capacity;
  const i32* queue = launch.plan.queue_indptr + Kernel::Team::worker();
  i32 before = item - queue[0];  // items of the worker before this one
  if (item >= launch.plan.queue_indptr[launch.plan.num_workers] &&
      stage != TimelineStage::started) {
    // A drawn item. Drawn items are counted in the first mark, above its stage, since no other item
    // counts there.
    if (stage == TimelineStage::opened) mine->what += 1 << 3;
    before = queue[1] - queue[0] + (mine->what >> 3) - queue[0] - 1;
  }
  const i32 nth = stage == TimelineStage::contracted ? timeline.capacity - 1
                                                     : stages * before + static_cast<i32>(stage);
  if (nth >= timeline.capacity) return;
  mine[nth] = {static_cast<i32>(ptx::global_time()), static_cast<i32>(stage) | item << 3};
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
