// KV panels: consecutive KV tiles whose K and V are packed together. The panel stays in the L2
// cache while every row block passes over its keys, with the row block's O in the L1 cache.
#pragma once

#include "raddle/engine/kernel/cpu/bf16_packing.h"
#include "raddle/engine/kernel/cpu/scratch.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Most KV tiles of a panel, and most bytes of it. Of an L2 cache of 2 MiB this leaves enough for O
/// and Q of all rows, and for the next panel's keys.
constexpr i32 max_panel_tiles = 8;
constexpr i64 max_panel_bytes = i64{512} << 10;
constexpr i32 tile_key_blocks = ceil_div(max_tile_keys, key_block_keys);

/// Some keys of a KV tile, with which a row block is multiplied at a time.
struct KeyBlock {
  const KeyTile<bf16>* keys;
  i32 first, n;            ///< of the tile's keys
  bool partial;            ///< some rows may not keep all
  Range kv_index, kv_pos;  ///< hulls; where the key block is partial
  const bf16* k;           ///< packed, see bf16_packing.h
  const bf16* v;

  i32 padded_keys() const { return round_up(n, padded_unit); }
};

/// Those of a tile from number `first` on, not packed yet.
RADDLE_FN KeyBlock key_block_of(const KeyTile<bf16>& keys, i32 first, bool partial) {
  KeyBlock key_block{&keys,   first,  min(key_block_keys, keys.n - first), partial, {}, {},
                     nullptr, nullptr};
  if (!partial) return key_block;
  key_block.kv_index = key_block.kv_pos = Range{int_max, int_min};
  for (i32 j = first; j < first + key_block.n; ++j) {
    key_block.kv_index = hull(key_block.kv_index, Range{keys.kv_index[j], keys.kv_index[j]});
    key_block.kv_pos = hull(key_block.kv_pos, Range{keys.kv_pos[j], keys.kv_pos[j]});
  }
  return key_block;
}

/// Where the keys of a panel lie in the pool. The kernel gathers the next panel's before it
/// computes this one.
struct KvPanel {
  KeyTile<bf16>* tiles;
  bool partial[max_panel_tiles];
  i32 num_tiles = 0;

  i32 num_keys() const {
    i32 n = 0;
    for (i32 i = 0; i < num_tiles; ++i) n += tiles[i].n;
    return n;
  }
};

/// Packed K and V of a panel, in the order in which a row block uses them: P·V of key block i comes
/// after Q·Kᵀ of key block i + 1 and before Q·Kᵀ of key block i + 2.
struct PackedPanel {
  bf16* base;
  i64 k_elements, v_elements;  ///< of a key block

  PackedPanel(i32 dim_qk, i32 dim_vo)
      : base(nullptr),
        k_elements(i64{key_block_keys} * dim_qk),
        v_elements(i64{key_block_keys} * dim_vo) {}

  i64 of_key_block() const { return k_elements + v_elements; }
  bf16* k(i32 key_block) const { return base + key_block * of_key_block() + v_elements; }
  bf16* v(i32 key_block) const { return base + (key_block + 2) * of_key_block(); }

  /// As many tiles as stay in the cache.
  i32 num_tiles() const {
    const i64 bytes = tile_key_blocks * of_key_block() * static_cast<i64>(sizeof(bf16));
    return static_cast<i32>(max(i64{1}, min(i64{max_panel_tiles}, max_panel_bytes / bytes)));
  }
  i64 elements() const { return (num_tiles() * tile_key_blocks + 2) * of_key_block(); }
};

/// Prefetches rows of the next panel's K and V into the L2 cache, a few at every turn: all at once
/// would occupy the fill buffers that this panel's loads need.
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const KvPanel& next, i32 num_turns)
      : tile_(next.tiles),
        left_(next.num_keys()),
        keys_per_turn_(num_turns > 0 ? ceil_div(left_, num_turns) : 0) {}

  RADDLE_FN void fetch(i32 k_columns, i32 dim_vo) {
    for (i32 i = 0; i < keys_per_turn_ && left_ > 0; ++i, --left_) {
      const bf16* k = tile_->k[key_];
      const bf16* v = tile_->v[key_];
      for (i32 d = 0; d < k_columns; d += 32) simd::prefetch_l2(k + d);
      for (i32 d = 0; d < dim_vo; d += 32) simd::prefetch_l2(v + d);
      if (++key_ < tile_->n) continue;
      key_ = 0;
      ++tile_;
    }
  }

 private:
  const KeyTile<bf16>* tile_ = nullptr;
  i32 key_ = 0;   ///< of this tile, the next to prefetch
  i32 left_ = 0;  ///< keys of all tiles that are not prefetched yet
  i32 keys_per_turn_ = 0;
};

}  // namespace cpu

RADDLE_ENGINE_END
