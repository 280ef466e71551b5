// Tile registers (AMX): eight matrices of 16 rows by 64 bytes, and the product of two tiles of bf16
// that adds to one of fp32. All AMX instructions are in this file, as asm with memory operands,
// because gcc 12's intrinsics don't say what they read and write.
//
// C[16, 16] += A[16, 32] · B[32, 16], where B is stored by pairs of its rows: row r of the tile
// holds (B[2r, n], B[2r + 1, n]) for every n.
#pragma once

#include "raddle/engine/simd/bf16.h"
#if defined(RADDLE_EMULATED_TILES)
#include "raddle/engine/simd/emulated_tiles.h"
#endif

RADDLE_ENGINE_BEGIN

namespace simd {

constexpr i32 tile_bytes = 1024;

#if !defined(RADDLE_EMULATED_TILES)
/// Gives all eight tiles of the calling thread their full size.
RADDLE_FN void configure_tiles() {
  struct alignas(64) {
    u8 palette, start_row, reserved[14];
    u16 row_bytes[16];
    u8 rows[16];
  } config{};
  config.palette = 1;
  for (i32 i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = tile_rows;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

/// Tiles in use make context switches longer, and keep a core from its deep sleep. (No destructor
/// does this: unwinding needs a symbol outside of this ISA's namespace.)
RADDLE_FN void release_tiles() { asm volatile("tilerelease"); }

/// Rows are `stride` bytes apart. The operand stands for all memory behind `p`.
template <i32 tile>
RADDLE_FN void tile_load(const void* p, i64 stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(p), "r"(stride),
               "m"(*static_cast<const u8(*)[]>(p)));
}

template <i32 tile>
RADDLE_FN void tile_store(void* p, i64 stride) {
  asm volatile("tilestored %%tmm%c1, (%2,%3,1)"
               : "+m"(*static_cast<u8(*)[]>(p))
               : "i"(tile), "r"(p), "r"(stride));
}

template <i32 tile>
RADDLE_FN void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

/// c += a · b
template <i32 c, i32 a, i32 b>
RADDLE_FN void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}
#endif

}  // namespace simd

RADDLE_ENGINE_END
