// The variant and the online softmax on fragments of logits (FlashAttention-2, algorithm 1).
//
// A lane holds, of each block of 16 rows, rows g and g + 8, and of each tile of 8 keys two
// neighbours (ptx/mma.h); `half` says which of its two rows.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/kernel/mma/products.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A row's running statistics: its largest logit, in units of 1/to_log2 of a power of two, and the
/// sum of the weights of this lane's keys.
template <i32 blocks>
struct RowStats {
  float top[blocks][2];
  float sum[blocks][2];

  RADDLE_DEVICE void clear() {
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        top[r][half] = -math::infinity;
        sum[r][half] = 0.0f;
      }
    }
  }
};

/// Scale, f_logits and f_mask of one tile, for the rows of a lane.
template <class V, i32 blocks, i32 tiles>
class ApplyVariant {
  static constexpr Scan scan = scan_of<V>();
  static constexpr float dropped = scan == Scan::softmax ? -math::infinity : 0.0f;

 public:
  const V& variant;
  const MmaLaunch& launch;
  const QueryTile& tile;
  const Row* rows;        ///< of the tile, padded
  i32 first_row[blocks];  ///< this lane's first row of each block; the second is 8 further down
  i32 request, kv_head;   ///< of the keys
  float scale;

  /// Whether logits come out scaled: a positive scale alone is left to the softmax.
  RADDLE_DEVICE bool scales() const { return has_logits<V> || scan == Scan::sum || scale <= 0.0f; }

  /// `first`: the tile's key that is this warp's first. Keys that do not exist repeat one that
  /// does.
  template <class Keys>
  RADDLE_DEVICE void operator()(Logits<blocks, tiles>& s, const Keys& keys, i32 first,
                                i32 flags) const {
    const i32 mine = first + ptx::lane_index() % 4 * 2;
    if (scales()) apply_logits(s, keys, mine);
    if (flags & (TileFlags::partial | TileFlags::ragged))
      apply_mask(s, keys, mine, (flags & TileFlags::partial) != 0);
  }

 private:
  RADDLE_DEVICE const Row& row(i32 r, i32 half) const { return rows[first_row[r] + 8 * half]; }

  template <class Keys>
  RADDLE_DEVICE Key key_of(const Keys& keys, i32 j) const {
    return Key{request, keys.kv_index[j], keys.kv_pos[j], kv_head};
  }

  template <class Keys>
  RADDLE_DEVICE void apply_logits(Logits<blocks, tiles>& s, const Keys& keys, i32 mine) const {
    RADDLE_UNROLL
    for (i32 n = 0; n < tiles; ++n) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 2; ++e) {
        [[maybe_unused]] const Key key = key_of(keys, mine + 8 * n + e);
        RADDLE_UNROLL
        for (i32 r = 0; r < blocks; ++r) {
          RADDLE_UNROLL
          for (i32 half = 0; half < 2; ++half) {
            float& x = s[r][n][2 * half + e];
            x *= scale;
            if constexpr (has_logits<V>) x = variant.logits(x, row(r, half), key);
          }
        }
      }
    }
  }

  /// First which pairs are kept, a bit a key, in a loop over keys; then what is not is dropped, in
  /// straight code.
  template <class Keys>
  RADDLE_DEVICE void apply_mask(Logits<blocks, tiles>& s, const Keys& keys, i32 mine,
                                bool partial) const {
    u32 kept[blocks][2] = {};
    const u8* bits = launch.levels[tile.level].mask_bits;
    RADDLE_ROLLED
    for (i32 i = 0; i < 2 * tiles; ++i) {
      const i32 j = mine + 8 * (i / 2) + i % 2;
      const i32 column = keys.column[j];
      if (column < 0) continue;
      const Key key = key_of(keys, j);
      RADDLE_UNROLL
      for (i32 r = 0; r < blocks; ++r) {
        RADDLE_UNROLL
        for (i32 half = 0; half < 2; ++half)
          if (!partial || keeps(r, half, key, column, bits)) kept[r][half] |= 1u << i;
      }
    }
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * tiles; ++i) {
        const i32 n = i / 4, e = i % 4;
        if (!(kept[r][e / 2] >> (2 * n + e % 2) & 1)) s[r][n][e] = dropped;
      }
    }
  }

  RADDLE_DEVICE bool keeps(i32 r, i32 half, const Key& key, i32 column, const u8* bits) const {
    if constexpr (has_mask<V>)
      if (!variant.mask(row(r, half), key)) return false;
    if (!bits) return true;
    const i32 m = min(first_row[r] + 8 * half, tile.num_rows - 1);
    return mask_bit(launch.levels[tile.level], tile.group,
                    (tile.row_begin + m) / launch.plan.group_size, column);
  }
};

template <class K, i32 blocks>
RADDLE_DEVICE void shrink(RowStats<blocks>& stats, Output<K, blocks>& o,
                          const float (&factor)[blocks][2], i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      stats.sum[r][half] *= factor[r][half];
      RADDLE_UNROLL
      for (i32 n = 0; n < K::out_tiles; ++n) {
        o[r][n][2 * half] *= factor[r][half];
        o[r][n][2 * half + 1] *= factor[r][half];
      }
    }
  }
}

/// Largest logit, in powers of two, up to which weights take one fused multiply-add: the rounding
/// of the product that is subtracted stays below 2^-17. Huge logits would differ by it, and have no
/// winner.
constexpr float fused_limit = 128.0f;

/// S -> weights, 2^((S - shift) · to_log2), and their sums.
template <bool fused, i32 blocks, i32 tiles>
RADDLE_DEVICE void weigh(Logits<blocks, tiles>& s, RowStats<blocks>& stats,
                         const float (&shift)[blocks][2], float to_log2, i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      const float product = shift[r][half] * to_log2;
      float sum = stats.sum[r][half];
      RADDLE_UNROLL
      for (i32 n = 0; n < tiles; ++n) {
        RADDLE_UNROLL
        for (i32 e = 2 * half; e < 2 * half + 2; ++e) {
          const float x = fused ? ptx::fma(s[r][n][e], to_log2, -product)
                                : (s[r][n][e] - shift[r][half]) * to_log2;
          s[r][n][e] = ptx::exp2(x);
          sum += s[r][n][e];
        }
      }
      stats.sum[r][half] = sum;
    }
  }
}

/// S -> exp(S - max); O and the sums so far shrink where the maximum grew. Logits times to_log2 are
/// in powers of two. `halves` is 1 where the second half of every block is padding.
template <class K, i32 blocks, i32 tiles>
RADDLE_DEVICE void softmax(Logits<blocks, tiles>& s, RowStats<blocks>& stats, Output<K, blocks>& o,
                           float to_log2, i32 halves) {
  float shift[blocks][2];  // what is subtracted
  float rescale[blocks][2];
  bool grew = false;
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      float top = max(s[r][0][2 * half], s[r][0][2 * half + 1]);
      RADDLE_UNROLL
      for (i32 n = 1; n < tiles; ++n) top = max(max(top, s[r][n][2 * half]), s[r][n][2 * half + 1]);
      top = max(top, ptx::shuffle_xor(top, 1));
      top = max(top, ptx::shuffle_xor(top, 2));
      const float before = stats.top[r][half];
      top = max(before, top);
      grew = grew || top > before;
      stats.top[r][half] = top;
      // A row with nothing kept so far: subtracting 0 leaves every logit at -inf, every weight 0.
      shift[r][half] = top == -math::infinity ? 0.0f : top;
      rescale[r][half] = ptx::exp2((before - shift[r][half]) * to_log2);
    }
  }
  if (ptx::any(grew)) shrink<K>(stats, o, rescale, halves);
  // One multiply-add a weight is a tenth of a long tile's time; few tiles need the exact way.
  bool fused = tiles >= 8;
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half)
      fused = fused && !(half < halves && math::abs(shift[r][half] * to_log2) > fused_limit);
  }
  if (tiles >= 8 && !ptx::any(!fused))
    weigh<true>(s, stats, shift, to_log2, halves);
  else
    weigh<false>(s, stats, shift, to_log2, halves);
}

}  // namespace mma

RADDLE_ENGINE_END
