#include "backend/cuda/scratch.h"

#include "raddle/engine/plan/bounds.h"

namespace raddle::cuda {

void point_to_scratch(void* base, i64 rows, i64 counters, i32 dim_vo, RunView& view) {
  const ScratchOffsets at = scratch_offsets(rows, counters, dim_vo);
  auto* bytes = static_cast<u8*>(base);
  view.partial_o = reinterpret_cast<float*>(bytes);
  view.partial_lse = view.partial_o + rows * dim_vo;
  view.drawn = reinterpret_cast<i32*>(bytes + at.drawn);
  view.arrived = reinterpret_cast<i32*>(bytes + at.arrived);
}

std::unique_lock<std::mutex> StreamScratch::provide(const PlanView& plan, StreamHandle stream,
                                                    RunView& view) {
  const i64 rows = plan.num_partial_rows;
  const i64 counters = i64{plan.num_contractions} * plan.num_kv_heads;
  std::unique_lock lock(mutex_);
  const StreamId id = id_of(stream);
  Set* set = nullptr;
  for (Set& each : sets_)
    if (each.stream == id) set = &each;
  if (!set) {
    if (sets_.size() == most_sets) sets_.pop_front();
    set = &sets_.emplace_back(Set{id, {}});
  }
  if (rows > set->rows || counters > set->counters) {
    const i64 more_rows = max(rows, set->rows), more_counters = max(counters, set->counters);
    const ScratchOffsets at = scratch_offsets(more_rows, more_counters, dim_vo_);
    set->block = {};  // given back first: it may be the part of memory that lacks
    set->rows = set->counters = -1;
    set->block = DevicePool::of(*device_).take(static_cast<std::size_t>(at.end), stream,
                                               "the workspace of this plan");
    clear(set->block, static_cast<std::size_t>(at.drawn),
          static_cast<std::size_t>(at.end - at.drawn), stream);
    set->rows = more_rows;
    set->counters = more_counters;
  }
  point_to_scratch(set->block.data(), set->rows, set->counters, dim_vo_, view);
  return lock;
}

}  // namespace raddle::cuda
