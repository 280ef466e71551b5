// Which kernels and tile shapes a CPU uses: pure functions of instruction set and dtypes, called by
// the planner and by the kernels.
#pragma once

#include "raddle/engine/core/dtype.h"
#include "raddle/engine/plan/plan.h"

namespace raddle {

/// Instruction sets that kernels are built for, each one including those before it. avx2 means
/// AVX2, FMA and F16C; avx512 means F, BW, DQ and VL on top; avx512_bf16 means AVX512_BF16; amx
/// means tiles of bf16, and AVX512_VBMI.
enum class CpuIsa : i32 { generic, avx2, avx512, avx512_bf16, amx };

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Whether long queries are multiplied in bf16, by pairs or in tile registers.
RADDLE_FN constexpr bool multiplies_in_bf16(CpuIsa isa, DType dtype, DType kv_dtype) {
  return isa >= CpuIsa::avx512_bf16 && dtype == DType::bfloat16 && kv_dtype == DType::bfloat16;
}

/// Whether short queries are multiplied in tile registers, where K and V may become bf16 on the
/// way.
RADDLE_FN constexpr bool multiplies_short_in_tiles(CpuIsa isa, DType dtype, DType kv_dtype) {
  return isa == CpuIsa::amx && dtype == DType::bfloat16 &&
         (kv_dtype == DType::bfloat16 || kv_dtype == DType::float8_e4m3fn);
}

/// Up to this many rows it is faster to read K and V in place than to pack them. A tile has few
/// keys, so that a plan can cut finely; but wide rows of O (MLA: 32 KiB) leave the L1 cache and
/// come back once per tile, which takes as long as 64 keys in tile registers.
RADDLE_FN constexpr TileShape short_query_tile(CpuIsa isa, DType dtype, DType kv_dtype,
                                               i32 dim_vo) {
  return TileShape{16, dim_vo > 256 && multiplies_short_in_tiles(isa, dtype, kv_dtype) ? 128 : 64};
}

/// Enough rows to pay for packing K and V: with 256 rows, packing takes 7 % of a prefill's time on
/// fp32 lanes. Q, S and O of so many rows exceed an L2 cache of 256 KiB, but are read in order,
/// each for hundreds of products. With AMX a row takes a sixth of that time, and packing as long as
/// here.
RADDLE_FN constexpr TileShape long_query_tile(CpuIsa isa, DType dtype, DType kv_dtype) {
  if (isa == CpuIsa::amx && multiplies_in_bf16(isa, dtype, kv_dtype)) return TileShape{512, 128};
  return TileShape{isa >= CpuIsa::avx2 ? 256 : 128, 128};
}

RADDLE_ENGINE_END
