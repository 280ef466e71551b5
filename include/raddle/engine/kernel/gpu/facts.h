// Records that a kernel keeps in shared memory: where the keys of an item lie, and the facts about
// the keys of a KV tile that the variant and the softmax see. The host reads their sizes, too.
#pragma once

#include "raddle/engine/tile/walk.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// Two or four elements that are loaded or stored together.
struct alignas(8) Two {
  float x[2];
};
struct alignas(16) Four {
  float x[4];
};
struct alignas(8) TwoFacts {
  i32 x[2];
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
  alignas(8) i32 column[tile_keys];  ///< -1: no key
  i32 kv_index[tile_keys];
  i32 kv_pos[tile_keys];
  i32 flags[num_warps];  ///< one a warp where warps may be tiles apart; else only the first is used
};

/// Where the keys of an item lie: what finding a key needs of the layout, worked out once an item.
/// Each warp has its own, in shared memory, because long queries lack registers.
struct KeySource {
  const u8* row[2];    ///< first row of page 0, of the item's head: K's and V's
  i64 page_stride[2];  ///< bytes
  i64 row_stride[2];   ///< bytes
  const i32* pages;    ///< the group's page list
  i32 page_size;
  i32 page_shift;   ///< log2(page_size); -1: page_size is no power of two
  i32 first_index;  ///< kv_index of column 0
  i32 level, group;
  i32 col_begin, col_end;
  bool plain;    ///< positions equal indices, and indices count columns
  bool holes;    ///< some columns may have no key
  bool bits;     ///< the layout has a mask of its own
  RunWalk runs;  ///< the runs behind the current one
  Span rest;     ///< what is left of the current run, where that is not in registers
};

/// A key source, and where the scales of its keys lie.
struct ScaledSource : KeySource {
  const float* scale[2];     ///< of the first row of page 0, of the item's head; null: `value`
  i64 scale_page_stride[2];  ///< elements
  i64 scale_row_stride[2];
  float value[2];
};

/// Addresses of rows to be loaded: K's and V's.
template <i32 keys>
struct RowTable {
  alignas(16) const u8* row[2][keys];
};

}  // namespace gpu_kernel

RADDLE_ENGINE_END
