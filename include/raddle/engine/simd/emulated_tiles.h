// The instructions of amx.h as functions on memory, for tests on machines that have AVX512_BF16 but
// no tile registers (CMake's RADDLE_EMULATED_TILES). Tiles that were not configured hold NaN.
#pragma once

#include "raddle/engine/simd/bf16.h"

RADDLE_ENGINE_BEGIN

namespace simd {

struct EmulatedTiles {
  alignas(64) u8 bytes[8][16][64];
  bool configured;

  void configure(bool on) {
    __builtin_memset(bytes, 0xff, sizeof(bytes));
    configured = on;
  }
};
inline thread_local EmulatedTiles emulated_tiles;

RADDLE_FN void configure_tiles() { emulated_tiles.configure(true); }
RADDLE_FN void release_tiles() { emulated_tiles.configure(false); }

template <i32 tile>
RADDLE_FN void tile_load(const void* p, i64 stride) {
  for (i32 r = 0; r < 16; ++r)
    __builtin_memcpy(emulated_tiles.bytes[tile][r], static_cast<const u8*>(p) + r * stride, 64);
}

template <i32 tile>
RADDLE_FN void tile_store(void* p, i64 stride) {
  for (i32 r = 0; r < 16; ++r)
    __builtin_memcpy(static_cast<u8*>(p) + r * stride, emulated_tiles.bytes[tile][r], 64);
}

template <i32 tile>
RADDLE_FN void tile_zero() {
  // Zeros of a tile that is not there would hide a missing configuration.
  if (emulated_tiles.configured) __builtin_memset(emulated_tiles.bytes[tile], 0, 16 * 64);
}

/// Products are exact in fp32; sums are rounded a pair at a time.
template <i32 c, i32 a, i32 b>
RADDLE_FN void tile_dot() {
  for (i32 m = 0; m < 16; ++m) {
    float sums[16];
    __builtin_memcpy(sums, emulated_tiles.bytes[c][m], sizeof(sums));
    for (i32 r = 0; r < 16; ++r) {
      u16 x[2], y[32];
      __builtin_memcpy(x, emulated_tiles.bytes[a][m] + 4 * r, sizeof(x));
      __builtin_memcpy(y, emulated_tiles.bytes[b][r], sizeof(y));
      const auto value = [](u16 bits) { return bits_to_float(static_cast<u32>(bits) << 16); };
      for (i32 n = 0; n < 16; ++n)
        sums[n] += value(x[0]) * value(y[2 * n]) + value(x[1]) * value(y[2 * n + 1]);
    }
    __builtin_memcpy(emulated_tiles.bytes[c][m], sums, sizeof(sums));
  }
}

}  // namespace simd

RADDLE_ENGINE_END
