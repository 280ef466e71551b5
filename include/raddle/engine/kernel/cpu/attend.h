// A run of work items, by the kernel that is made for them.
#pragma once

#include "raddle/engine/kernel/cpu/config.h"
#include "raddle/engine/kernel/cpu/short_queries.h"
#if defined(__AMX_BF16__)
#include "raddle/engine/kernel/cpu/amx_long_queries.h"
#endif

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Whether the item is computed in tile registers; never known to be so where there are none.
template <class T>
RADDLE_FN bool is_for_tiles([[maybe_unused]] const CpuLaunch& launch) {
#if defined(__AMX_BF16__)
  return multiplies_in_tiles(CpuIsa::amx, launch.dtype, dtype_of<T>::value);
#else
  return false;
#endif
}

/// What a thread needs in scratch memory.
template <class T>
i64 item_scratch_bytes(const CpuLaunch& launch) {
  i64 bytes = Scratch<T>(launch, nullptr).bytes;
#if defined(__AMX_BF16__)
  if (is_for_tiles<T>(launch)) bytes += TileScratch(launch, nullptr).bytes;
#endif
  return bytes;
}

/// A long query, `item`.
template <class T>
void attend_long(const CpuLaunch& launch, const WorkItem& item, const Scratch<T>& scratch,
                 [[maybe_unused]] void* memory) {
#if defined(__AMX_BF16__)
  if constexpr (dtype_of<T>::value == DType::bfloat16) {
    if (is_for_tiles<T>(launch)) {
      TileScratch tiles(launch, static_cast<u8*>(memory) + scratch.bytes);
      return TiledItem(launch, item, scratch, tiles).run();
    }
  }
#endif
  ItemKernel<T>(launch, item, scratch).run();
}

/// Items [first, end), which are one run; then whatever contractions they complete.
template <class T>
void attend(const CpuLaunch& launch, i32 first, i32 end, i32 next, void* memory) {
  Scratch<T> scratch(launch, memory);
  const WorkItem* items = launch.plan->items;
  if (launch.plan->query_tiles[items[first].query_tile].shape == 0)
    ShortRun<T>(launch, first, end - first, next, scratch).run();
  else
    attend_long<T>(launch, items[first], scratch, memory);
  for (i32 i = first; i < end; ++i)
    if (items[i].partial_row >= 0) arrive(launch, items[i], scratch);
}

}  // namespace cpu

RADDLE_ENGINE_END
