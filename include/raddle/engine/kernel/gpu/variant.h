// The variant on fragments of logits: scale, f_logits and f_mask.
#pragma once

#include "raddle/engine/kernel/gpu/kept_columns.h"
#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// The keys of a tile whose positions and indices count up from `first`.
struct CountedKeys {
  i32 first;
};
/// The keys of a tile, which count up or have facts of their own.
template <class Facts>
struct AnyKeys {
  bool count_up;
  CountedKeys counted;
  const Facts& facts;
};

/// Scale, f_logits and f_mask of a tile of item `item`, for the rows of a lane. The object holds
/// almost nothing: it reads what a variant or a mask asks for when that is needed, so that O has
/// the registers. Those that are left say about how many groups of keys a mask is asked at a time.
template <class Variant, i32 row_fragments, i32 key_fragments, i32 groups_at_a_time = 1>
class ApplyVariant {
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr float dropped = scan == Scan::softmax ? -math::infinity : 0.0f;

 public:
  RADDLE_DEVICE ApplyVariant(const GpuLaunch& launch, const Variant& variant, i32 item)
      : launch_(launch), variant_(variant), item_(item) {}

  /// Whether logits are scaled here. If the scale is positive and nothing else changes logits, the
  /// softmax applies it.
  RADDLE_DEVICE bool scales() const {
    return has_logits<Variant> || scan == Scan::sum || launch_.scale <= 0.0f;
  }
  /// The factor that turns logits into exponents of two.
  RADDLE_DEVICE float to_log2() const { return (scales() ? 1.0f : launch_.scale) * math::log2e; }

  /// Changes S in place. `first` is the number of this warp's first key in the tile; keys that do
  /// not exist repeat one that does. `facts` are the item's. row_of(r) is this lane's first row of
  /// row fragment r; its second row is 8 further. `halves` is 1 where the second half of every row
  /// fragment is padding. Under a plain sum, `stats` notes which rows keep a key. `rows`: what each
  /// row of the tile keeps, where that has been asked, and keys.begin is the first column.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void operator()(Logits<row_fragments, key_fragments>& s, const Keys& keys,
                                i32 first, i32 flags, const Facts& facts, RowOf row_of, i32 halves,
                                RowStats<row_fragments>& stats,
                                const KeptColumns* rows = nullptr) const {
    float reach = 0.0f;
    if (scales()) apply_logits(s, keys, first, facts, row_of, halves, reach);
    if (!(flags & (TileFlags::partial | TileFlags::ragged))) {
      if constexpr (scan == Scan::sum) note_all_kept(stats);
      return;
    }
    u32 kept[row_fragments][2];
    keep_existing(kept, keys, first, flags);
    if (!rows || !keep_columns(kept, keys, first, flags, rows, row_of))
      drop_masked(kept, all_groups, keys, first, flags, facts, row_of);
    if constexpr (scan == Scan::sum) note_kept<key_fragments>(stats, kept);
    drop(s, kept);
  }

  /// Scale and f_logits alone. `near`: by near_logits, and `reach` becomes the largest s² of the
  /// lane, by which `is_near` says whether that holds.
  template <bool near = false, class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void apply_logits(Logits<row_fragments, key_fragments>& s, const Keys& keys,
                                  i32 first, const Facts& facts, RowOf row_of, i32 halves,
                                  [[maybe_unused]] float& reach) const {
    const i32 mine = first + ptx::lane_index() % 4 * 2;
    [[maybe_unused]] const LaneRows lane = lane_rows(facts, row_of);
    // With a single row fragment the halves are computed one after the other, because the second
    // may be padding.
    RADDLE_UNROLL
    for (i32 turn = 0; turn < (row_fragments == 1 ? 2 : 1); ++turn) {
      if (turn >= halves) continue;
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * key_fragments; ++i) {
        const i32 n = i / 2, e = i % 2;
        [[maybe_unused]] const Key key = key_of_pair(keys, mine + 8 * n, e, facts);
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) {
          RADDLE_UNROLL
          for (i32 half = 0; half < 2; ++half) {
            if (row_fragments == 1 && half != turn) continue;
            float& x = s[r][n][2 * half + e];
            if constexpr (near) {
              reach = ptx::max(reach, x * x);
              x = variant_.near_logits(x, launch_.scale, lane.of[r][half], key);
            } else {
              x *= launch_.scale;
              if constexpr (has_logits<Variant>) x = variant_.logits(x, lane.of[r][half], key);
            }
          }
        }
      }
    }
  }

  RADDLE_DEVICE bool is_near([[maybe_unused]] float reach) const {
    if constexpr (has_near_logits<Variant>) {
      // Where a limit is infinity, nothing is to be compared, and `reach` is not computed at all.
      const float limit = variant_.near_limit(launch_.scale);
      return limit > 0.0f && (limit == math::infinity || reach <= limit * limit);
    } else {
      return true;
    }
  }

  /// Which pairs of a masked tile are kept, a bit for each of this lane's keys, in order: all of
  /// which the keys exist.
  template <class Keys>
  RADDLE_DEVICE void keep_existing(u32 (&kept)[row_fragments][2], const Keys& keys, i32 first,
                                   i32 flags) const {
    const i32 mine = first + ptx::lane_index() % 4 * 2;
    u32 missing = 0;
    if (flags & TileFlags::ragged) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 2 * key_fragments; ++i)
        if (keys.column[mine + 8 * (i / 2) + i % 2] < 0) missing |= 1u << i;
    }
    RADDLE_UNROLL
    for (i32 i = 0; i < 2 * row_fragments; ++i) kept[i / 2][i % 2] = ~missing;
  }

  /// Of those, the ones in the columns that their row keeps. Returns whether that is all that masks
  /// keep: it may not be known of some row.
  template <class Keys, class RowOf>
  RADDLE_DEVICE static bool keep_columns(u32 (&kept)[row_fragments][2], const Keys& keys, i32 first,
                                         i32 flags, const KeptColumns* rows, RowOf row_of) {
    if (!(flags & TileFlags::partial)) return true;
    if (flags & TileFlags::bits) return false;
    const i32 begin = keys.begin + first + ptx::lane_index() % 4 * 2;
    bool unknown = false;
    RADDLE_UNROLL
    for (i32 i = 0; i < 2 * row_fragments; ++i) {
      const KeptColumns of = rows[row_of(i / 2) + 8 * (i % 2)];
      unknown = unknown || of.first == KeptColumns::unknown;
      kept[i / 2][i % 2] &= bits_between<8 * key_fragments>(begin, of.first, of.end);
    }
    return !ptx::any(unknown);
  }

  /// Keys of a lane, in a row, about which a mask is asked together: a group.
  static constexpr i32 group_keys = 2 * min(key_fragments, 2);
  static constexpr u32 all_groups = (1u << 2 * key_fragments / group_keys) - 1u;

  /// Of those, the ones that masks keep. f_mask is asked about `groups`, a bit each.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void drop_masked(u32 (&kept)[row_fragments][2], u32 groups, const Keys& keys,
                                 i32 first, i32 flags, const Facts& facts, RowOf row_of) const {
    const i32 mine = first + ptx::lane_index() % 4 * 2;
    if constexpr (has_mask<Variant>)
      if (flags & TileFlags::partial) keep_masked(kept, groups, keys, mine, facts, row_of);
    if (flags & TileFlags::bits) keep_bits(kept, keys, mine, row_of);
  }

  /// Drops the others, in straight code.
  RADDLE_DEVICE static void drop(Logits<row_fragments, key_fragments>& s,
                                 const u32 (&kept)[row_fragments][2]) {
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * key_fragments; ++i) {
        const i32 n = i / 4, e = i % 4;
        if (!(kept[r][e / 2] >> (2 * n + e % 2) & 1)) s[r][n][e] = dropped;
      }
    }
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

  template <class Facts>
  RADDLE_DEVICE static Key key_of_pair(const CountedKeys& keys, i32 j, i32 e, const Facts& facts) {
    return Key{facts.request, keys.first + j + e, keys.first + j + e, facts.kv_head};
  }
  template <class Keys, class Facts>
  RADDLE_DEVICE static Key key_of_pair(const AnyKeys<Keys>& keys, i32 j, i32 e,
                                       const Facts& facts) {
    return keys.count_up ? key_of_pair(keys.counted, j, e, facts)
                         : key_of_pair(keys.facts, j, e, facts);
  }
  template <class Keys, class Facts>
  RADDLE_DEVICE static Key key_of(const Keys& keys, i32 j, const Facts& facts) {
    return Key{facts.request, keys.kv_index[j], keys.kv_pos[j], facts.kv_head};
  }

  /// The same of key j + e, where j is even: a pair is read at once.
  template <class Keys, class Facts>
  RADDLE_DEVICE static Key key_of_pair(const Keys& keys, i32 j, i32 e, const Facts& facts) {
    return Key{facts.request, pair_at(keys.kv_index, j).x[e], pair_at(keys.kv_pos, j).x[e],
               facts.kv_head};
  }
  RADDLE_DEVICE static const TwoFacts& pair_at(const i32* facts, i32 j) {
    return *reinterpret_cast<const TwoFacts*>(facts + j);
  }

  /// Drops pairs by f_mask. A loop, because a mask may be long; what it reads of several keys is on
  /// its way at a time. Keys that do not exist repeat one that does.
  template <class Keys, class Facts, class RowOf>
  RADDLE_DEVICE void keep_masked(u32 (&kept)[row_fragments][2], [[maybe_unused]] u32 groups,
                                 const Keys& keys, i32 mine, const Facts& facts,
                                 RowOf row_of) const {
    const LaneRows lane = lane_rows(facts, row_of);
    if constexpr (groups_at_a_time == 1) {  // all groups: a counter takes fewer registers
      RADDLE_ROLLED
      for (i32 first = 0; first < 2 * key_fragments; first += group_keys)
        keep_group(kept, first, lane, keys, mine, facts);
    } else {
      RADDLE_ROLLED
      while (groups != 0) {
        i32 first[groups_at_a_time];  // of the last group twice, where it is alone
        RADDLE_UNROLL
        for (i32 t = 0; t < groups_at_a_time; ++t) {
          first[t] = t > 0 && groups == 0 ? first[0] : group_keys * ptx::lowest_bit(groups);
          groups &= groups - 1u;
        }
        RADDLE_UNROLL
        for (i32 t = 0; t < groups_at_a_time; ++t)
          keep_group(kept, first[t], lane, keys, mine, facts);
      }
    }
  }
  /// `first`: number of the group's first key among the lane's.
  template <class Keys, class Facts>
  RADDLE_DEVICE void keep_group(u32 (&kept)[row_fragments][2], i32 first, const LaneRows& lane,
                                const Keys& keys, i32 mine, const Facts& facts) const {
    u32 dropped_of[row_fragments][2] = {};
    RADDLE_UNROLL
    for (i32 i = 0; i < group_keys; ++i) {
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

  const GpuLaunch& launch_;
  const Variant& variant_;
  const i32 item_;
};

}  // namespace gpu_kernel

RADDLE_ENGINE_END
