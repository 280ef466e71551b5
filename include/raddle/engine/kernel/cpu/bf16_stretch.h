// Stretches: consecutive KV tiles whose keys are rearranged together. Their squares stay in the L2
// cache while every strip of query rows walks along them, with its O in the L1 cache.
#pragma once

#include "raddle/engine/kernel/cpu/bf16_squares.h"
#include "raddle/engine/kernel/cpu/scratch.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// KV tiles of a stretch, at most, and bytes of its squares. Of an L2 cache of 2 MiB they leave
/// enough for O and Q of all rows, and for the next stretch's keys.
constexpr i32 max_stretch_tiles = 8;
constexpr i64 max_stretch_bytes = i64{512} << 10;
constexpr i32 tile_slices = ceil_div(max_tile_keys, slice_keys);

/// Some keys of a KV tile, which a strip takes at a time.
struct Slice {
  const KeyTile<bf16>* keys;
  i32 first, n;            ///< of the tile's keys
  bool partial;            ///< some rows may not keep all
  Range kv_index, kv_pos;  ///< hulls; where the slice is partial
  const bf16* k;           ///< squares, see bf16_squares.h
  const bf16* v;

  i32 padded_keys() const { return round_up(n, padded_unit); }
};

/// The keys of a stretch. The next one's are gathered while this one is computed.
struct Stretch {
  KeyTile<bf16>* tiles;
  bool partial[max_stretch_tiles];
  i32 num_tiles = 0;

  i32 num_keys() const {
    i32 n = 0;
    for (i32 i = 0; i < num_tiles; ++i) n += tiles[i].n;
    return n;
  }
};

/// Squares of a stretch, in the order in which a strip uses them: P·V of a slice comes after Q·Kᵀ
/// of the next but one, so that V of slice i lies before K of slice i + 2.
struct Squares {
  bf16* base;
  i64 k_elements, v_elements;  ///< of a slice

  Squares(i32 dim_qk, i32 dim_vo)
      : base(nullptr), k_elements(i64{slice_keys} * dim_qk), v_elements(i64{slice_keys} * dim_vo) {}

  i64 of_slice() const { return k_elements + v_elements; }
  bf16* k(i32 slice) const { return base + slice * of_slice() + v_elements; }
  bf16* v(i32 slice) const { return base + (slice + 2) * of_slice(); }

  /// As many tiles as stay in the cache.
  i32 num_tiles() const {
    const i64 bytes = tile_slices * of_slice() * static_cast<i64>(sizeof(bf16));
    return static_cast<i32>(max(i64{1}, min(i64{max_stretch_tiles}, max_stretch_bytes / bytes)));
  }
  i64 elements() const { return (num_tiles() * tile_slices + 2) * of_slice(); }
};

/// Rows of the next stretch's K and V, a few of which are asked for at every turn: all at once they
/// would fill the buffers that this stretch's loads need. They are to wait in the L2 cache.
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const Stretch& next, i32 num_turns)
      : tile_(next.tiles),
        left_(next.num_keys()),
        keys_a_turn_(num_turns > 0 ? ceil_div(left_, num_turns) : 0) {}

  RADDLE_FN void fetch(i32 dim_qk, i32 dim_vo) {
    for (i32 i = 0; i < keys_a_turn_ && left_ > 0; ++i, --left_) {
      const bf16* k = tile_->k[key_];
      const bf16* v = tile_->v[key_];
      for (i32 d = 0; d < dim_qk; d += 32) simd::prefetch_l2(k + d);
      for (i32 d = 0; d < dim_vo; d += 32) simd::prefetch_l2(v + d);
      if (++key_ < tile_->n) continue;
      key_ = 0;
      ++tile_;
    }
  }

 private:
  const KeyTile<bf16>* tile_ = nullptr;
  i32 key_ = 0;   ///< of this tile, the next to be asked for
  i32 left_ = 0;  ///< keys of all tiles
  i32 keys_a_turn_ = 0;
};

}  // namespace cpu

RADDLE_ENGINE_END
