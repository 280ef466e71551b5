// Which kernel a CPU computes long queries with, and in tiles of what shape: pure functions of
// instruction set and dtypes, asked by the planner and by the kernel.
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

/// As many rows as are worth reading K and V in place. Keys are few, so that a plan can cut finely;
/// but rows of O that are wide (MLA: 32 KiB) leave the L1 cache and come back once a tile, which
/// takes as long as 64 keys in tile registers.
RADDLE_FN constexpr TileShape short_query_tile(CpuIsa isa, DType dtype, DType kv_dtype,
                                               i32 dim_vo) {
  return TileShape{16, dim_vo > 256 && multiplies_short_in_tiles(isa, dtype, kv_dtype) ? 128 : 64};
}

/// Enough rows to pay for rearranging K and V: with 256, that takes 7 % of a prefill's time on fp32
/// lanes. Q, S and O of so many leave an L2 cache of 256 KiB, but are read in order, a row for
/// hundreds of products. Where there is AMX, a row costs a sixth of the time, and rearranging about
/// as much.
RADDLE_FN constexpr TileShape long_query_tile(CpuIsa isa, DType dtype, DType kv_dtype) {
  if (isa == CpuIsa::amx && multiplies_in_bf16(isa, dtype, kv_dtype)) return TileShape{512, 128};
  return TileShape{isa >= CpuIsa::avx2 ? 256 : 128, 128};
}

RADDLE_ENGINE_END
