// Chooses the kernel for a run of work items.
#pragma once

#include "raddle/engine/kernel/cpu/config.h"
#include "raddle/engine/kernel/cpu/short_queries.h"
#if defined(__AVX512BF16__)
#include "raddle/engine/kernel/cpu/bf16_long_queries.h"
#endif
#if defined(__AMX_BF16__)
#include "raddle/engine/kernel/cpu/amx_short_products.h"
#endif

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Bytes of scratch memory that a thread needs.
template <class T>
i64 item_scratch_bytes(const CpuLaunch& launch) {
  const i64 bytes = Scratch<T>(launch, nullptr).bytes;
  i64 more = 0;
#if defined(__AVX512BF16__)
  more = Bf16Scratch(launch, nullptr).bytes;
#endif
#if defined(__AMX_BF16__)
  more = max(more, ShortTileScratch(launch, max_run_heads(launch), nullptr).bytes);
#endif
  return bytes + more;
}

/// The most query rows that fp32 lanes multiply as fast as memory delivers K and V: 0 for K and V
/// of 8 bits, because widening these takes too long.
template <class T>
constexpr i32 max_lane_rows = is_quantized<T> ? 0 : 4;

/// A run of short queries, items [first, end). `memory` is the thread's memory behind Scratch.
template <class T>
void attend_short(const CpuLaunch& launch, i32 first, i32 end, i32 next, const Scratch<T>& scratch,
                  [[maybe_unused]] u8* memory) {
  const i32 heads = end - first;
#if defined(__AMX_BF16__)
  constexpr DType kv_dtype = dtype_of<T>::value;
  if constexpr (multiplies_short_in_tiles(CpuIsa::amx, DType::bfloat16, kv_dtype)) {
    const PlanView& plan = *launch.plan;
    const i32 rows = plan.query_tiles[plan.items[first].query_tile].num_rows;
    if (launch.dtype == DType::bfloat16 && rows > max_lane_rows<T>) {
      const ShortTileScratch tiles(launch, max_run_heads(launch), memory);
      const TileProducts<T> products(launch, tiles);
      return ShortRun(launch, first, heads, next, scratch, products).run();
    }
  }
#endif
  const LaneProducts<T> products(launch.dim_qk, launch.dim_vo, launch.k_begin);
  ShortRun(launch, first, heads, next, scratch, products).run();
}

/// A long query, `item`.
template <class T>
void attend_long(const CpuLaunch& launch, const WorkItem& item, const Scratch<T>& scratch,
                 [[maybe_unused]] u8* memory) {
#if defined(__AVX512BF16__)
  constexpr DType kv_dtype = dtype_of<T>::value;
  if constexpr (multiplies_in_bf16(CpuIsa::avx512_bf16, DType::bfloat16, kv_dtype)) {
    if (launch.dtype == DType::bfloat16) {
      Bf16Scratch own(launch, memory);
      return Bf16Item(launch, item, scratch, own).run();
    }
  }
#endif
  ItemKernel<T>(launch, item, scratch).run();
}

/// Items [first, end), which are one run; then whatever contractions they complete.
template <class T>
void attend(const CpuLaunch& launch, i32 first, i32 end, i32 next, void* memory) {
  Scratch<T> scratch(launch, memory);
  u8* rest = static_cast<u8*>(memory) + scratch.bytes;
  const WorkItem* items = launch.plan->items;
  if (launch.plan->query_tiles[items[first].query_tile].shape == short_queries)
    attend_short(launch, first, end, next, scratch, rest);
  else
    attend_long(launch, items[first], scratch, rest);
  for (i32 i = first; i < end; ++i)
    if (items[i].partial_row >= 0) arrive(launch, items[i], scratch);
}

}  // namespace cpu

RADDLE_ENGINE_END
