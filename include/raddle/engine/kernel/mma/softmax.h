// The variant and the online softmax on fragments of logits (FlashAttention-2, algorithm 1).
//
// A lane holds rows g and g + 8 of each row fragment (16 rows), and two neighbouring keys of each
// key fragment (8 keys); see ptx/mma.h. `half` says which of its two rows.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/kernel/mma/products.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The running statistics of rows: the largest logit, in the unit of which to_log2 makes powers of
/// two, and the sum of the weights of this lane's keys.
template <i32 row_fragments>
struct RowStats {
  float top[row_fragments][2];
  float sum[row_fragments][2];

  RADDLE_DEVICE void clear() {
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        top[r][half] = -math::infinity;
        sum[r][half] = 0.0f;
      }
    }
  }
};

/// The end of a row: the factor for its outputs, and its LSE; (0, -inf) where nothing was kept.
struct RowEnd {
  float factor, lse;
};

/// Finishes this lane's row; the four lanes of a row do this together. Rows of a sum are left as
/// they are.
template <Scan scan, i32 row_fragments>
RADDLE_DEVICE RowEnd end_row(const RowStats<row_fragments>& stats, i32 r, i32 half, float to_log2) {
  if constexpr (scan == Scan::sum) return RowEnd{1.0f, 0.0f};
  float sum = stats.sum[r][half];
  sum += ptx::shuffle_xor(sum, 1);
  sum += ptx::shuffle_xor(sum, 2);
  const float top = stats.top[r][half];
  return RowEnd{sum == 0.0f ? 0.0f : 1.0f / sum,
                top == -math::infinity ? top : (top * to_log2 + math::log2(sum)) * math::ln2};
}

/// Scale, f_logits and f_mask of a tile of item `item`, for the rows of a lane. The object holds
/// almost nothing: what a variant or a mask asks for is read when it is needed, so that O has the
/// registers.
template <class Variant, i32 row_fragments, i32 key_fragments>
class ApplyVariant {
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr float dropped = scan == Scan::softmax ? -math::infinity : 0.0f;

 public:
  RADDLE_DEVICE ApplyVariant(const MmaLaunch& launch, const Variant& variant, i32 item)
      : launch_(launch), variant_(variant), item_(item) {}

  /// Whether logits come out scaled; if the scale is positive and nothing else changes logits, the
  /// softmax applies it.
  RADDLE_DEVICE bool scales() const {
    return has_logits<Variant> || scan == Scan::sum || launch_.scale <= 0.0f;
  }
  /// The factor that turns logits into exponents of two.
  RADDLE_DEVICE float to_log2() const { return (scales() ? 1.0f : launch_.scale) * math::log2e; }

  /// Changes S in place. `first` is the tile's key that is this warp's first; keys that do not
  /// exist repeat one that does. `facts` are the item's. row_of(r) is this lane's first row of row
  /// fragment r; its second row is 8 further. `halves` is 1 where the second half of every row
  /// fragment is padding.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void operator()(Logits<row_fragments, key_fragments>& s, const Keys& keys,
                                i32 first, i32 flags, const Facts& facts, RowOf row_of,
                                i32 halves) const {
    const i32 mine = first + ptx::lane_index() % 4 * 2;
    if (scales()) apply_logits(s, keys, mine, facts, row_of, halves);
    if (flags & (TileFlags::partial | TileFlags::ragged))
      apply_mask(s, keys, mine, flags, facts, row_of);
  }

 private:
  /// The facts of this lane's rows, read from shared memory once: the members that the variant uses
  /// stay in registers throughout a loop.
  struct LaneRows {
    Row of[row_fragments][2];
  };
  template <class Facts, class RowOf>
  RADDLE_DEVICE static LaneRows lane_rows(const Facts& facts, RowOf row_of) {
    LaneRows mine;
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
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
  RADDLE_DEVICE void apply_logits(Logits<row_fragments, key_fragments>& s, const Keys& keys,
                                  i32 mine, const Facts& facts, RowOf row_of, i32 halves) const {
    [[maybe_unused]] const LaneRows lane = lane_rows(facts, row_of);
    // With a single row fragment the halves are computed one after the other, because the second
    // may be padding.
    RADDLE_UNROLL
    for (i32 turn = 0; turn < (row_fragments == 1 ? 2 : 1); ++turn) {
      if (turn >= halves) continue;
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * key_fragments; ++i) {
        const i32 n = i / 2, e = i % 2;
        [[maybe_unused]] const Key key = key_of(keys, mine + 8 * n + e, facts);
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) {
          RADDLE_UNROLL
          for (i32 half = 0; half < 2; ++half) {
            if (row_fragments == 1 && half != turn) continue;
            float& x = s[r][n][2 * half + e];
            x *= launch_.scale;
            if constexpr (has_logits<Variant>) x = variant_.logits(x, lane.of[r][half], key);
          }
        }
      }
    }
  }

  /// Finds which pairs are kept, one bit a key; then drops the others in straight code.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void apply_mask(Logits<row_fragments, key_fragments>& s, const Keys& keys, i32 mine,
                                i32 flags, const Facts& facts, RowOf row_of) const {
    u32 missing = 0;
    if (flags & TileFlags::ragged) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * key_fragments; ++i)
        if (keys.column[mine + 8 * (i / 2) + i % 2] < 0) missing |= 1u << i;
    }
    u32 kept[row_fragments][2];
    RADDLE_UNROLL
    for (i32 i = 0; i < 2 * row_fragments; ++i) kept[i / 2][i % 2] = ~missing;
    if constexpr (has_mask<Variant>)
      if (flags & TileFlags::partial) keep_masked(kept, keys, mine, facts, row_of);
    if (flags & TileFlags::bits) keep_bits(kept, keys, mine, row_of);
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * key_fragments; ++i) {
        const i32 n = i / 4, e = i % 4;
        if (!(kept[r][e / 2] >> (2 * n + e % 2) & 1)) s[r][n][e] = dropped;
      }
    }
  }

  /// Drops pairs by f_mask. A loop, because a mask may be long; the facts of a few keys are read
  /// together. Keys that do not exist repeat one that does.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void keep_masked(u32 (&kept)[row_fragments][2], const Keys& keys, i32 mine,
                                 const Facts& facts, RowOf row_of) const {
    constexpr i32 at_a_time = 2 * min(key_fragments, 2);
    static_assert(2 * key_fragments % at_a_time == 0);
    const LaneRows lane = lane_rows(facts, row_of);
    RADDLE_ROLLED
    for (i32 first = 0; first < 2 * key_fragments; first += at_a_time) {
      u32 dropped_of[row_fragments][2] = {};
      RADDLE_UNROLL
      for (i32 i = 0; i < at_a_time; ++i) {
        const Key key = key_of(keys, mine + 4 * first + 8 * (i / 2) + i % 2, facts);
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) {
          RADDLE_UNROLL
          for (i32 half = 0; half < 2; ++half)
            if (!variant_.mask(lane.of[r][half], key)) dropped_of[r][half] |= 1u << i;
        }
      }
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * row_fragments; ++i)
        kept[i / 2][i % 2] &= ~(dropped_of[i / 2][i % 2] << first);
    }
  }

  /// Drops pairs by the layout's own mask.
  template <class Keys, class RowOf>
  RADDLE_DEVICE void keep_bits(u32 (&kept)[row_fragments][2], const Keys& keys, i32 mine,
                               RowOf row_of) const {
    const QueryTile& tile = launch_.plan.query_tiles[launch_.plan.items[item_].query_tile];
    const LevelView& level = launch_.levels[tile.level];
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const i32 m = min(row_of(r) + 8 * half, tile.num_rows - 1);
        const i32 row = (tile.row_begin + m) / launch_.plan.group_size;
        RADDLE_ROLLED
        for (i32 i = 0; i < 2 * key_fragments; ++i) {
          if (!(kept[r][half] >> i & 1)) continue;
          const i32 column = keys.column[mine + 8 * (i / 2) + i % 2];
          if (!mask_bit(level, tile.group, row, column)) kept[r][half] &= ~(1u << i);
        }
      }
    }
  }

  const MmaLaunch& launch_;
  const Variant& variant_;
  const i32 item_;
};

template <class Kernel, i32 row_fragments>
RADDLE_DEVICE void shrink(RowStats<row_fragments>& stats, Output<Kernel, row_fragments>& o,
                          const float (&factor)[row_fragments][2], i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      stats.sum[r][half] *= factor[r][half];
      RADDLE_UNROLL
      for (i32 n = 0; n < Kernel::out_fragments; ++n) {
        o[r][n][2 * half] *= factor[r][half];
        o[r][n][2 * half + 1] *= factor[r][half];
      }
    }
  }
}

/// A row's maximum stays as it is until a logit exceeds it by this power of two. Weights may then
/// reach 2^8, which every dtype can hold, and O is seldom rescaled.
constexpr float rescale_threshold = 8.0f;

/// Largest maximum, as a power of two, up to which a weight takes one fused multiply-add: the
/// rounding of the product that is subtracted then stays below 2^-17. For huge logits the error
/// would decide which one wins.
constexpr float fused_limit = 128.0f;

/// S -> weights, 2^(S · to_log2 - product), and their sums.
template <i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void weigh(Logits<row_fragments, key_fragments>& s, RowStats<row_fragments>& stats,
                         const float (&product)[row_fragments][2], float to_log2, i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      float sum = stats.sum[r][half];
      RADDLE_UNROLL
      for (i32 n = 0; n < key_fragments; ++n) {
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
template <i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void subtract(Logits<row_fragments, key_fragments>& s,
                            const float (&shift)[row_fragments][2]) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 i = 0; i < 4 * key_fragments; ++i) s[r][i / 4][i % 4] -= shift[r][i % 4 / 2];
  }
}

/// S -> exp(S - max). O and the sums so far are rescaled where the maximum grew by more than the
/// threshold. Logits times to_log2 are exponents of two. `halves` is 1 where the second half of
/// every row fragment is padding.
template <class Kernel, i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void softmax(Logits<row_fragments, key_fragments>& s, RowStats<row_fragments>& stats,
                           Output<Kernel, row_fragments>& o, float to_log2, i32 halves) {
  float shift[row_fragments][2];  // the maximum that is subtracted
  float rescale[row_fragments][2];
  bool grew = false;
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      float top = ptx::max(s[r][0][2 * half], s[r][0][2 * half + 1]);
      RADDLE_UNROLL
      for (i32 n = 1; n < key_fragments; ++n)
        top = ptx::max(ptx::max(top, s[r][n][2 * half]), s[r][n][2 * half + 1]);
      top = ptx::max(top, ptx::shuffle_xor(top, 1));
      top = ptx::max(top, ptx::shuffle_xor(top, 2));
      const float before = stats.top[r][half];
      const bool grows = (top - before) * to_log2 > rescale_threshold;  // false for -inf and -inf
      top = grows ? top : before;
      grew = grew || grows;
      stats.top[r][half] = top;
      // For a row that has kept nothing so far, subtracting 0 leaves every logit at -inf, and every
      // weight becomes 0.
      shift[r][half] = top == -math::infinity ? 0.0f : top;
      rescale[r][half] = ptx::exp2((before - shift[r][half]) * to_log2);
    }
  }
  if (ptx::any(grew)) shrink<Kernel>(stats, o, rescale, halves);
  // The second multiply-add a weight takes a tenth of a long tile's time; few tiles need this exact
  // way.
  bool fused = key_fragments >= 8;
  float product[row_fragments][2];
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) shift[r][half] = 0.0f;
      product[r][half] = shift[r][half] * to_log2;
      fused = fused && math::abs(product[r][half]) <= fused_limit;
    }
  }
  if (ptx::any(!fused)) {
    // Only for rows that need it: the bits of other rows do not depend on them.
    RADDLE_UNROLL
    for (i32 i = 0; i < 2 * row_fragments; ++i) {
      float &by = shift[i / 2][i % 2], &later = product[i / 2][i % 2];
      const bool exact = key_fragments < 8 || !(math::abs(later) <= fused_limit);
      by = exact ? by : 0.0f;
      later = exact ? 0.0f : later;
    }
    subtract(s, shift);
  }
  weigh(s, stats, product, to_log2, halves);
}

}  // namespace mma

RADDLE_ENGINE_END
