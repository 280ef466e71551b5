// Fragments of swapped products, Sᵀ = K · Qᵀ and Oᵀ = Vᵀ · Pᵀ, and the variant on them. Keys, or
// columns of O, take the place of rows: of each 8 queries a lane holds 2t and 2t + 1, for the keys
// (columns) g and g + 8 of its warp's 16.
#pragma once

#include "raddle/engine/kernel/gpu/fragments.h"
#include "raddle/engine/kernel/wgmma/short_memory.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Sᵀ of a warp: element e of fragment n is query 8n + 2t + e % 2, key g + 8 · (e / 2).
template <class Kernel>
using ShortLogits = float[Kernel::row_fragments][4];
/// Oᵀ of a warp, for each 64 columns: a fragment as above.
template <class Kernel>
using ShortOutputs = float[Kernel::vo_halves][Kernel::row_fragments][4];
/// What a lane knows of each of its queries.
template <class Kernel>
using OfQueries = float[Kernel::row_fragments][2];

/// The lane's part of a warpgroup's fragments.
struct ShortLane {
  i32 group, warp, g, t;
  RADDLE_DEVICE ShortLane()
      : group(ptx::warp_index() / group_warps),
        warp(ptx::warp_index() % group_warps),
        g(ptx::lane_index() / 4),
        t(ptx::lane_index() % 4) {}
  RADDLE_DEVICE i32 query(i32 n, i32 e) const { return 8 * n + 2 * t + e % 2; }
  RADDLE_DEVICE i32 key(i32 half) const { return 16 * warp + g + 8 * half; }
};

/// f(n, e) for every query of a lane.
template <class Kernel, class F>
RADDLE_DEVICE void each_query(F f) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 2 * Kernel::row_fragments; ++i) f(i / 2, i % 2);
}

/// Scale, f_logits and f_mask of a tile, as gpu_kernel::ApplyVariant's: for fragments whose rows
/// are keys.
template <class Kernel, class Variant>
class ApplyToKeys {
  using S = ShortLogits<Kernel>;
  static constexpr float dropped = scan_of<Variant>() == Scan::softmax ? -math::infinity : 0.0f;
  static_assert(4 * Kernel::row_fragments <= 32, "a bit for each of a lane's pairs");

 public:
  RADDLE_DEVICE ApplyToKeys(const GpuLaunch& launch, const Variant& variant, const ShortLane& lane)
      : launch_(launch), variant_(variant), lane_(lane) {}

  /// Scale and f_logits.
  template <class Keys, class Facts>
  RADDLE_DEVICE void apply_logits(S& s, const Keys& keys, const Facts& facts) const {
    RADDLE_UNROLL
    for (i32 i = 0; i < 4 * Kernel::row_fragments; ++i) {
      float& x = s[i / 4][i % 4];
      x *= launch_.scale;
      if constexpr (has_logits<Variant>)
        x = variant_.logits(x, facts.row[lane_.query(i / 4, i)], key_of(keys, i % 4 / 2, facts));
    }
  }

  /// Drops the pairs of a masked tile that are not kept; returns those that are, a bit each.
  template <class Keys, class Facts>
  RADDLE_DEVICE u32 drop(S& s, const Keys& keys, i32 flags, const Facts& facts) const {
    u32 kept = ~0u;
    if (flags & TileFlags::ragged) kept = existing(keys);
    if constexpr (has_mask<Variant>)
      if (flags & TileFlags::partial) kept &= kept_by_mask(keys, facts);
    if (flags & TileFlags::bits) kept &= kept_by_bits(kept, keys, facts);
    RADDLE_UNROLL
    for (i32 i = 0; i < 4 * Kernel::row_fragments; ++i)
      if (!(kept >> i & 1)) s[i / 4][i % 4] = dropped;
    return kept;
  }

 private:
  static constexpr u32 of_first_key = 0x33333333;  ///< pairs whose key is g

  template <class Keys, class Facts>
  RADDLE_DEVICE Key key_of(const Keys& keys, i32 half, const Facts& facts) const {
    const i32 j = lane_.key(half);
    return Key{facts.request, keys.kv_index[j], keys.kv_pos[j], facts.kv_head};
  }

  template <class Keys>
  RADDLE_DEVICE u32 existing(const Keys& keys) const {
    return (keys.column[lane_.key(0)] < 0 ? 0u : of_first_key) |
           (keys.column[lane_.key(1)] < 0 ? 0u : ~of_first_key);
  }

  /// A loop, because a mask may be long. Keys that do not exist repeat one that does.
  template <class Keys, class Facts>
  RADDLE_DEVICE u32 kept_by_mask(const Keys& keys, const Facts& facts) const {
    const Key key[2] = {key_of(keys, 0, facts), key_of(keys, 1, facts)};
    u32 kept = 0;
    RADDLE_ROLLED
    for (i32 n = 0; n < Kernel::row_fragments; ++n) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e)
        if (variant_.mask(facts.row[lane_.query(n, e)], key[e / 2])) kept |= 1u << (4 * n + e);
    }
    return kept;
  }

  /// By the layout's own mask, of pairs that are `asked` for.
  template <class Keys, class Facts>
  RADDLE_DEVICE u32 kept_by_bits(u32 asked, const Keys& keys, const Facts& facts) const {
    const QueryTile& tile = launch_.plan.query_tiles[facts.query_tile];
    const LevelView& level = launch_.levels[tile.level];
    u32 kept = 0;
    RADDLE_ROLLED
    for (i32 i = 0; i < 4 * Kernel::row_fragments; ++i) {
      if (!(asked >> i & 1)) continue;
      const i32 m = min(lane_.query(i / 4, i), tile.num_rows - 1);
      const i32 row = (tile.row_begin + m) / launch_.plan.group_size;
      if (mask_bit(level, tile.group, row, keys.column[lane_.key(i % 4 / 2)])) kept |= 1u << i;
    }
    return kept;
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const ShortLane& lane_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
