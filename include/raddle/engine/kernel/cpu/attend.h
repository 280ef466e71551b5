// One work item, by the kernel that is made for it.
#pragma once

#include "raddle/engine/kernel/cpu/attention.h"
#include "raddle/engine/kernel/cpu/config.h"
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

/// One work item, then whatever contractions it completes.
template <class T>
void attend(const CpuLaunch& launch, i32 index, void* memory) {
  Scratch<T> scratch(launch, memory);
  const WorkItem& item = launch.plan->items[index];
  const bool is_long = launch.plan->query_tiles[item.query_tile].shape == 1;
#if defined(__AMX_BF16__)
  if constexpr (dtype_of<T>::value == DType::bfloat16) {
    if (is_long && is_for_tiles<T>(launch)) {
      TileScratch tiles(launch, static_cast<u8*>(memory) + scratch.bytes);
      TiledItem(launch, item, scratch, tiles).run();
    }
  }
#endif
  if (!is_long || !is_for_tiles<T>(launch)) ItemKernel<T>(launch, item, scratch).run();
  if (item.partial_row >= 0) arrive(launch, item, scratch);
}

}  // namespace cpu

RADDLE_ENGINE_END
