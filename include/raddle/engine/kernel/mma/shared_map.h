// What a team keeps in shared memory: every array once, in the order in which they lie. Sizes
// follow from values rather than types, so that the host can choose tiles and rings by them
// (config.h); the kernel's pointers are offsets of this map (shared.h).
#pragma once

#include "raddle/engine/core/carve.h"
#include "raddle/engine/kernel/gpu/facts.h"
#include "raddle/engine/tile/shared_rows.h"

RADDLE_ENGINE_BEGIN

namespace mma {

using namespace gpu_kernel;  // what all families share

constexpr i32 num_warps = 4;
constexpr i32 num_threads =
    32 * num_warps;  ///< threads of a team, which computes one worker's queue
constexpr i32 short_rows = 16;
constexpr i32 slab_columns = 32;  ///< columns of O that the warps of a team add up at a time
constexpr i32 slab_pitch = slab_columns + 4;
constexpr i32 slab_rows = 8;  ///< rows of O that they add up at a time

/// For wider heads one warp cannot hold a row of O in registers: the warps of a block share rows
/// (wide_queries.h).
constexpr i32 widest_of_a_warp = 256;
RADDLE_FN constexpr bool is_wide(i32 dim_qk, i32 dim_vo) {
  return max(dim_qk, dim_vo) > widest_of_a_warp;
}

/// 16-bit elements in a line of shared memory, 128 bytes. Rows of wide heads are whole lines.
constexpr i32 line = 64;

/// Columns of O that one warp computes, of wide heads.
RADDLE_FN constexpr i32 wide_columns(i32 dim_vo) {
  return round_up(ceil_div(dim_vo, num_warps), line);
}

/// Elements of a row of the ring, which holds K or V of wide heads.
RADDLE_FN constexpr i32 wide_row(i32 dim_qk, i32 dim_vo) {
  return max(round_up(dim_qk, line), num_warps * wide_columns(dim_vo));
}

/// How K and V are stored in the ring: bytes an element, whether keys have scales, and whether a
/// row of K begins with that of V, so that one slot has both: then the loops of wide heads compute,
/// whatever the width.
struct RingRows {
  i32 key_bytes = 2;
  i32 value_bytes = 2;
  bool scaled = false;
  bool k_extends_v = false;
};

/// The tile and the ring of a loop.
struct LoopShape {
  i32 dim_qk, dim_vo;
  i32 rows, keys;  ///< Tq and Tkv
  i32 slots;       ///< of the ring: each holds K or V of a tile
  RingRows ring;

  RADDLE_FN constexpr bool wide() const { return ring.k_extends_v || is_wide(dim_qk, dim_vo); }
  RADDLE_FN constexpr bool is_long() const { return rows != short_rows; }
  RADDLE_FN constexpr i32 widest() const { return max(dim_qk, dim_vo); }

  RADDLE_FN constexpr i32 slot_bytes() const {
    if (wide()) return keys * row_pitch(wide_row(dim_qk, dim_vo));
    return keys *
           max(row_pitch(dim_qk * ring.key_bytes / 2), row_pitch(dim_vo * ring.value_bytes / 2));
  }

  /// Number of tables that say where the rows of a tile of long queries lie; one more than needed,
  /// because a power of two makes the index cheap.
  static constexpr i32 found_slots = 4;

  /// Number of tiles whose key facts are in shared memory. Short queries keep the facts of tiles
  /// whose K has been loaded and whose V is still needed; 3 is rounded up to 4, whose index is
  /// cheaper. Long queries keep the facts of tiles that have been found and of the one being
  /// computed. Wide heads may have K of a tile in every slot.
  RADDLE_FN constexpr i32 key_slots() const {
    if (wide()) return slots;
    if (is_long()) return found_slots;
    return slots / 2 == 2 ? 4 : slots / 2 + 1;
  }
};

/// Statistics of all rows of a short query tile, which the warps of a team add up.
struct MergeStatistics {
  float top[num_warps][short_rows];
  float sum[num_warps][short_rows];
};

/// What the rows of Q were divided by, where K is quantised.
template <i32 rows, bool scaled>
struct RowFactors {};
template <i32 rows>
struct RowFactors<rows, true> {
  float factor[rows];
};

/// The facts of an item's rows and keys that the variant sees, and how the item ends.
template <i32 rows, bool scaled>
struct ItemFacts : RowFactors<rows, scaled> {
  Row row[rows];         ///< padding repeats the last one
  i32 request, kv_head;  ///< request and head of the keys
  i32 next;              ///< the item after this one
  i32 num_rows, partial_row;
};

template <i32 tile_keys, bool scaled>
struct KeyFacts : TileKeys<tile_keys, scaled, num_warps> {
  i32 begin;  ///< of long queries, the tile's first column
};

/// sizeof(Record<count, scaled>), for every number of rows or keys that a tile may have.
template <template <i32, bool> class Record, i32 n = 16>
RADDLE_FN constexpr i64 size_of(i32 count, bool scaled) {
  if constexpr (n <= 128) {
    if (count == n) return scaled ? sizeof(Record<n, true>) : sizeof(Record<n, false>);
    return size_of<Record, 2 * n>(count, scaled);
  }
  return 0;
}

/// Byte offsets in a team's shared memory. At 0 lie the rows of Q, and later those of O on their
/// way out.
struct SharedMap {
  i32 parts = 0;    ///< of wide heads: the warps' parts of the logits
  i32 vectors = 0;  ///< a row in fp32 a warp, for transforms
  i32 ring = 0;
  i32 keys = 0;        ///< KeyFacts of key_slots tiles
  i32 tables = 0;      ///< row addresses: a table a warp; of long queries, a table a tile
  i32 sources = 0;     ///< a KeySource or ScaledSource a warp
  i32 completed = 0;   ///< words in which the warps of a team tell one another bits
  i32 barriers = 0;    ///< two a slot, then one a table; short queries leave theirs unused
  i32 statistics = 0;  ///< MergeStatistics
  i32 slabs = 0;       ///< a slab of rows and columns of O a warp, which the team adds up
  i32 facts = 0;       ///< ItemFacts
  i32 end = 0;

  RADDLE_FN constexpr explicit SharedMap(const LoopShape& of) {
    Carver<16> at;
    const i64 query_bytes = of.rows * (of.wide() ? row_pitch(round_up(of.dim_qk, line))
                                                 : max(row_pitch(of.dim_qk), row_pitch(of.dim_vo)));
    at.place<u8>(of.wide() ? place_parts(of, query_bytes) : query_bytes);
    ring = offset(at.place<u8>(of.slots * of.slot_bytes()));
    keys = offset(at.place<u8>(of.key_slots() * size_of<KeyFacts>(of.keys, of.ring.scaled)));
    const bool table_a_tile = of.is_long() && !of.wide();
    tables = offset(at.place<RowTable<1>>((table_a_tile ? of.found_slots : 1) * of.keys));
    sources =
        offset(of.ring.scaled ? at.place<ScaledSource>(num_warps) : at.place<KeySource>(num_warps));
    completed = offset(at.place<u32>(num_warps));
    const i64 facts_bytes = size_of<ItemFacts>(of.rows, of.ring.scaled);
    if (of.wide()) {
      facts = offset(at.place<u8>(facts_bytes));
    } else {
      barriers = offset(at.place<u64>(2 * of.slots + (of.is_long() ? of.found_slots : 0)));
      statistics = offset(at.place<MergeStatistics>(1));
      // Behind the statistics, which one warp may write while another still reads an item's facts,
      // these and the slabs share memory.
      Carver<16> of_item, of_merge;
      facts = slabs = offset(at.used());
      of_item.place<u8>(facts_bytes);
      vectors = facts + offset(of_item.place<float>(num_warps * of.widest()));
      of_merge.place<float>(num_warps * slab_rows * slab_pitch);
      at.place<u8>(max(of_item.used(), of_merge.used()));
    }
    end = offset(at.used());
  }

 private:
  RADDLE_FN static constexpr i32 offset(i64 bytes) { return static_cast<i32>(bytes); }

  /// Places what lies before the ring of wide heads, and returns its size. Parts of logits and rows
  /// for transforms lie behind Q; where Q stays in registers, they take its place.
  RADDLE_FN constexpr i64 place_parts(const LoopShape& of, i64 query_bytes) {
    Carver<16> at;
    if (of.is_long()) at.place<u8>(query_bytes);
    parts = offset(at.place<float>(num_warps * of.rows * of.keys));
    vectors = offset(at.place<float>(num_warps * of.widest()));
    return round_up(max(query_bytes, at.used()), i64{128});
  }
};

}  // namespace mma

RADDLE_ENGINE_END
