// AMX tiles of bf16, one instruction a function. gcc's intrinsics tell the compiler nothing of the
// memory that they read and write, so that it may move loads and stores across them; these do.
//
// A tile is a register of up to 16 rows of 64 bytes, numbered 0 to 7. Its number is part of the
// instruction, hence a template argument.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace simd {

/// What LDTILECFG reads: each tile's rows and bytes a row.
struct alignas(64) TileConfig {
  u8 palette = 1;
  u8 start_row = 0;
  u8 reserved[14] = {};
  u16 row_bytes[16] = {};
  u8 rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

constexpr i32 tile_rows = 16;
constexpr i32 tile_row_bytes = 64;

RADDLE_FN void tile_configure(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config));
}

/// Gives the tiles back: a thread that keeps them pays for their state at every switch.
RADDLE_FN void tile_release() { asm volatile("tilerelease"); }

template <i32 tile>
RADDLE_FN void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

/// Loads rows that lie `stride` bytes apart.
template <i32 tile>
RADDLE_FN void tile_load(const void* from, i64 stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from), "r"(stride) : "memory");
}

template <i32 tile>
RADDLE_FN void tile_store(void* to, i64 stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(tile), "r"(to), "r"(stride) : "memory");
}

/// c += a · b in fp32, of bf16: a holds rows of pairs along the inner dimension, b its columns'
/// pairs side by side (VNNI).
template <i32 c, i32 a, i32 b>
RADDLE_FN void tile_multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

}  // namespace simd

RADDLE_ENGINE_END
