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

/// A row's end: what its outputs are multiplied by, and its LSE; (0, -inf) where nothing was kept.
struct RowEnd {
  float factor, lse;
};

/// That of this lane's row, which the four lanes of a row find together. Sums end as they are.
template <Scan scan, i32 blocks>
RADDLE_DEVICE RowEnd end_row(const RowStats<blocks>& stats, i32 r, i32 half, float to_log2) {
  if constexpr (scan == Scan::sum) return RowEnd{1.0f, 0.0f};
  float sum = stats.sum[r][half];
  sum += ptx::shuffle_xor(sum, 1);
  sum += ptx::shuffle_xor(sum, 2);
  const float top = stats.top[r][half];
  return RowEnd{sum == 0.0f ? 0.0f : 1.0f / sum,
                top == -math::infinity ? top : (top * to_log2 + math::log2(sum)) * math::ln2};
}

/// Scale, f_logits and f_mask of a tile of item `item`, for the rows of a lane. Holds almost
/// nothing: what a variant or a mask asks for is looked up then, and registers are left to O.
template <class V, i32 blocks, i32 tiles>
class ApplyVariant {
  static constexpr Scan scan = scan_of<V>();
  static constexpr float dropped = scan == Scan::softmax ? -math::infinity : 0.0f;

 public:
  RADDLE_DEVICE ApplyVariant(const MmaLaunch& launch, const V& variant, i32 item)
      : launch_(launch), variant_(variant), item_(item) {}

  /// Whether logits come out scaled: a positive scale alone is left to the softmax.
  RADDLE_DEVICE bool scales() const {
    return has_logits<V> || scan == Scan::sum || launch_.scale <= 0.0f;
  }
  /// What makes logits powers of two.
  RADDLE_DEVICE float to_log2() const { return (scales() ? 1.0f : launch_.scale) * math::log2e; }

  /// `first`: the tile's key that is this warp's first. Keys that do not exist repeat one that
  /// does. `facts` are the item's; row_of(r) is this lane's first row of a block, the second is 8
  /// further down; `halves` is 1 where the second half of every block is padding.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void operator()(Logits<blocks, tiles>& s, const Keys& keys, i32 first, i32 flags,
                                const Facts& facts, RowOf row_of, i32 halves) const {
    const i32 mine = first + ptx::lane_index() % 4 * 2;
    if (scales()) apply_logits(s, keys, mine, facts, row_of, halves);
    if (flags & (TileFlags::partial | TileFlags::ragged))
      apply_mask(s, keys, mine, flags, facts, row_of);
  }

 private:
  /// This lane's rows, taken out of shared memory: of their members, what the variant reads stays
  /// in registers throughout a loop.
  struct LaneRows {
    Row of[blocks][2];
  };
  template <class Facts, class RowOf>
  RADDLE_DEVICE static LaneRows lane_rows(const Facts& facts, RowOf row_of) {
    LaneRows mine;
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) mine.of[r][half] = facts.row[row_of(r) + 8 * half];
    }
    return mine;
  }

  template <class Keys, class Facts>
  RADDLE_DEVICE static Key key_of(const Keys& keys, i32 j, const Facts& facts) {
    return Key{facts.request, keys.kv_index[j], keys.kv_pos[j], facts.kv_head};
  }

  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void apply_logits(Logits<blocks, tiles>& s, const Keys& keys, i32 mine,
                                  const Facts& facts, RowOf row_of, i32 halves) const {
    [[maybe_unused]] const LaneRows lane = lane_rows(facts, row_of);
    // The halves of a single block one after the other, for the second may be padding.
    RADDLE_UNROLL
    for (i32 turn = 0; turn < (blocks == 1 ? 2 : 1); ++turn) {
      if (turn >= halves) continue;
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * tiles; ++i) {
        const i32 n = i / 2, e = i % 2;
        [[maybe_unused]] const Key key = key_of(keys, mine + 8 * n + e, facts);
        RADDLE_UNROLL
        for (i32 r = 0; r < blocks; ++r) {
          RADDLE_UNROLL
          for (i32 half = 0; half < 2; ++half) {
            if (blocks == 1 && half != turn) continue;
            float& x = s[r][n][2 * half + e];
            x *= launch_.scale;
            if constexpr (has_logits<V>) x = variant_.logits(x, lane.of[r][half], key);
          }
        }
      }
    }
  }

  /// First which pairs are kept, a bit a key; then what is not is dropped, in straight code.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void apply_mask(Logits<blocks, tiles>& s, const Keys& keys, i32 mine, i32 flags,
                                const Facts& facts, RowOf row_of) const {
    u32 missing = 0;
    if (flags & TileFlags::ragged) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * tiles; ++i)
        if (keys.column[mine + 8 * (i / 2) + i % 2] < 0) missing |= 1u << i;
    }
    u32 kept[blocks][2];
    RADDLE_UNROLL
    for (i32 i = 0; i < 2 * blocks; ++i) kept[i / 2][i % 2] = ~missing;
    if constexpr (has_mask<V>)
      if (flags & TileFlags::partial) keep_masked(kept, keys, mine, facts, row_of);
    if (flags & TileFlags::bits) keep_bits(kept, keys, mine, row_of);
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * tiles; ++i) {
        const i32 n = i / 4, e = i % 4;
        if (!(kept[r][e / 2] >> (2 * n + e % 2) & 1)) s[r][n][e] = dropped;
      }
    }
  }

  /// Of the pairs kept so far, f_mask keeps some. A loop, for a mask may be long; the facts of a
  /// few keys are read together. Keys that do not exist repeat one that does.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void keep_masked(u32 (&kept)[blocks][2], const Keys& keys, i32 mine,
                                 const Facts& facts, RowOf row_of) const {
    constexpr i32 at_a_time = 2 * min(tiles, 2);
    static_assert(2 * tiles % at_a_time == 0);
    const LaneRows lane = lane_rows(facts, row_of);
    RADDLE_ROLLED
    for (i32 first = 0; first < 2 * tiles; first += at_a_time) {
      u32 dropped_of[blocks][2] = {};
      RADDLE_UNROLL
      for (i32 i = 0; i < at_a_time; ++i) {
        const Key key = key_of(keys, mine + 4 * first + 8 * (i / 2) + i % 2, facts);
        RADDLE_UNROLL
        for (i32 r = 0; r < blocks; ++r) {
          RADDLE_UNROLL
          for (i32 half = 0; half < 2; ++half)
            if (!variant_.mask(lane.of[r][half], key)) dropped_of[r][half] |= 1u << i;
        }
      }
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * blocks; ++i)
        kept[i / 2][i % 2] &= ~(dropped_of[i / 2][i % 2] << first);
    }
  }

  /// Of the pairs kept so far, the layout's own mask keeps some.
  template <class Keys, class RowOf>
  RADDLE_DEVICE void keep_bits(u32 (&kept)[blocks][2], const Keys& keys, i32 mine,
                               RowOf row_of) const {
    const QueryTile& tile = launch_.plan.query_tiles[launch_.plan.items[item_].query_tile];
    const LevelView& level = launch_.levels[tile.level];
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const i32 m = min(row_of(r) + 8 * half, tile.num_rows - 1);
        const i32 row = (tile.row_begin + m) / launch_.plan.group_size;
        RADDLE_ROLLED
        for (i32 i = 0; i < 2 * tiles; ++i) {
          if (!(kept[r][half] >> i & 1)) continue;
          const i32 column = keys.column[mine + 8 * (i / 2) + i % 2];
          if (!mask_bit(level, tile.group, row, column)) kept[r][half] &= ~(1u << i);
        }
      }
    }
  }

  const MmaLaunch& launch_;
  const V& variant_;
  const i32 item_;
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

/// A row's maximum stays what it was until the logits outgrow it by this power of two: weights may
/// reach 2^8, which no dtype minds, and O is seldom rescaled.
constexpr float patience = 8.0f;

/// Largest logit, in powers of two, up to which weights take one fused multiply-add: the rounding
/// of the product that is subtracted stays below 2^-17. Huge logits would differ by it, and have no
/// winner.
constexpr float fused_limit = 128.0f;

/// S -> weights, 2^(S · to_log2 - product), and their sums.
template <i32 blocks, i32 tiles>
RADDLE_DEVICE void weigh(Logits<blocks, tiles>& s, RowStats<blocks>& stats,
                         const float (&product)[blocks][2], float to_log2, i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      float sum = stats.sum[r][half];
      RADDLE_UNROLL
      for (i32 n = 0; n < tiles; ++n) {
        RADDLE_UNROLL
        for (i32 e = 2 * half; e < 2 * half + 2; ++e) {
          s[r][n][e] = ptx::exp2(ptx::fma(s[r][n][e], to_log2, -product[r][half]));
          sum += s[r][n][e];
        }
      }
      stats.sum[r][half] = sum;
    }
  }
}

/// S -= shift.
template <i32 blocks, i32 tiles>
RADDLE_DEVICE void subtract(Logits<blocks, tiles>& s, const float (&shift)[blocks][2]) {
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 i = 0; i < 4 * tiles; ++i) s[r][i / 4][i % 4] -= shift[r][i % 4 / 2];
  }
}

/// S -> exp(S - max); O and the sums so far shrink where the maximum grew by much. Logits times
/// to_log2 are in powers of two. `halves` is 1 where the second half of every block is padding.
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
      float top = ptx::max(s[r][0][2 * half], s[r][0][2 * half + 1]);
      RADDLE_UNROLL
      for (i32 n = 1; n < tiles; ++n)
        top = ptx::max(ptx::max(top, s[r][n][2 * half]), s[r][n][2 * half + 1]);
      top = ptx::max(top, ptx::shuffle_xor(top, 1));
      top = ptx::max(top, ptx::shuffle_xor(top, 2));
      const float before = stats.top[r][half];
      const bool grows = (top - before) * to_log2 > patience;  // of -inf and -inf it does not
      top = grows ? top : before;
      grew = grew || grows;
      stats.top[r][half] = top;
      // A row with nothing kept so far: subtracting 0 leaves every logit at -inf, every weight 0.
      shift[r][half] = top == -math::infinity ? 0.0f : top;
      rescale[r][half] = ptx::exp2((before - shift[r][half]) * to_log2);
    }
  }
  if (ptx::any(grew)) shrink<K>(stats, o, rescale, halves);
  // One multiply-add a weight is a tenth of a long tile's time; few tiles need the exact way.
  bool fused = tiles >= 8;
  float product[blocks][2];
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) shift[r][half] = 0.0f;
      product[r][half] = shift[r][half] * to_log2;
      fused = fused && math::abs(product[r][half]) <= fused_limit;
    }
  }
  if (ptx::any(!fused)) {
    // Of those rows alone: others have the bits that they would have without them.
    RADDLE_UNROLL
    for (i32 i = 0; i < 2 * blocks; ++i) {
      float &by = shift[i / 2][i % 2], &later = product[i / 2][i % 2];
      const bool exact = tiles < 8 || !(math::abs(later) <= fused_limit);
      by = exact ? by : 0.0f;
      later = exact ? 0.0f : later;
    }
    subtract(s, shift);
  }
  weigh(s, stats, product, to_log2, halves);
}

}  // namespace mma

RADDLE_ENGINE_END
