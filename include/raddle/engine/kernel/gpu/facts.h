// Facts about the keys of a KV tile, which the variant and the softmax see.
#pragma once

#include "raddle/engine/kernel/gpu/timeline.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// Two or four elements that are loaded or stored together.
struct alignas(8) Two {
  float x[2];
};
struct alignas(16) Four {
  float x[4];
};
struct alignas(8) Packed4 {
  u32 x[2];
};

/// Facts about a KV tile, for the warp that computes it.
struct TileFlags {
  static constexpr i32 partial = 1;  ///< masks drop some of its pairs
  static constexpr i32 ragged = 2;   ///< some of its columns have no key
  static constexpr i32 last = 4;     ///< the last tile of its work item
  static constexpr i32 empty = 8;    ///< no columns: the item has no keys
  static constexpr i32 none = 16;    ///< there is no such tile
  static constexpr i32 bits = 32;    ///< partial, and the layout has a mask of its own
};

/// The scales of a tile's keys; 0 where there is no key.
template <i32 tile_keys, bool scaled>
struct TileScales {};
template <i32 tile_keys>
struct TileScales<tile_keys, true> {
  float scale[2][tile_keys];  ///< K's and V's
};

/// The keys of one KV tile.
template <i32 tile_keys, bool scaled, i32 num_warps>
struct TileKeys : TileScales<tile_keys, scaled> {
  i32 column[tile_keys];  ///< -1: no key
  i32 kv_index[tile_keys];
  i32 kv_pos[tile_keys];
  i32 flags[num_warps];  ///< one a warp where warps may be tiles apart; else only the first is used
};

}  // namespace gpu_kernel

RADDLE_ENGINE_END
