// A block's shared memory where heads are wide.
#pragma once

#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Where a tile shape keeps what; offsets into the block's dynamic shared memory. A slot of the
/// ring holds K of a tile, or V, or K whose first columns are V.
template <class K, i32 tile_rows, i32 keys_of_tile, i32 num_slots>
struct WideLayout : TeamMemory<WideLayout<K, tile_rows, keys_of_tile, num_slots>> {
  using Memory = TeamMemory<WideLayout>;
  using Memory::base;
  static constexpr i32 teams = K::teams, team_bytes = K::config.shared_bytes;
  static constexpr i32 rows = tile_rows;
  static constexpr i32 shape = rows != short_rows;
  static constexpr i32 tile_keys = keys_of_tile;
  static constexpr i32 warp_keys = tile_keys / num_warps;  ///< that one warp loads
  static constexpr i32 slots = num_slots;
  static constexpr i32 key_slots = slots;
  using Keys = TileKeys<tile_keys, false>;
  using Source = KeySource;
  using Table = RowTable<warp_keys>;
  struct Scratch {
    Row row[rows];  ///< padding repeats the last one
    i32 request, kv_head;
    i32 next;  ///< the item after this one
  };
  /// Few rows of Q stay in registers, and leave their memory.
  static constexpr bool keeps_queries = rows == short_rows;

  static constexpr i32 slot_bytes = tile_keys * K::KeyRows::pitch;
  static constexpr i32 vector_bytes = 4 * max(K::dim_qk, K::dim_vo);
  static constexpr i32 queries_end = rows * K::QueryRows::pitch;
  static constexpr i32 parts = keeps_queries ? 0 : queries_end;
  static constexpr i32 vectors = parts + 4 * num_warps * rows * tile_keys;
  static constexpr i32 ring = round_up(max(queries_end, vectors + num_warps * vector_bytes), 128);
  static constexpr i32 keys = ring + slots * slot_bytes;
  static constexpr i32 table = keys + key_slots * static_cast<i32>(sizeof(Keys));
  static constexpr i32 sources = table + num_warps * static_cast<i32>(sizeof(Table));
  static constexpr i32 completed = sources + num_warps * static_cast<i32>(sizeof(Source));
  static constexpr i32 item = completed + 16;
  static constexpr i32 end = item + static_cast<i32>(sizeof(Scratch));
  static_assert(table % 16 == 0 && sources % 16 == 0 && completed % 16 == 0);
  static_assert(end <= K::config.shared_bytes);

  /// Rows of O on their way out, in fp32, and their LSE behind them, where the ring ends: all but
  /// the vectors that output parts see is free by then.
  static constexpr i32 row_floats = round_up(K::dim_vo, 8) + 4;
  static constexpr i32 out = keys - rows * row_floats * 4;
  static_assert(out >= num_warps * vector_bytes);

  /// Where the rows are, in eights, among which a warp's begin;
  template <class Rows>
  RADDLE_DEVICE static i32 part_of(i32 warp) {
    return warp * warp_keys / 8 * 8 * Rows::pitch;
  }
  /// and the number of its first one there.
  RADDLE_DEVICE static i32 first_of_part(i32 warp) { return warp * warp_keys % 8; }
  RADDLE_DEVICE static Scratch& scratch() { return *reinterpret_cast<Scratch*>(base() + item); }
  /// A warp's logits of its elements of the heads: `nth` of its fragments, this lane's.
  RADDLE_DEVICE static Four& part_of_logits(i32 warp, i32 nth) {
    constexpr i32 fragments = rows / 16 * tile_keys / 8;
    return reinterpret_cast<Four*>(base() +
                                   parts)[(warp * fragments + nth) * 32 + ptx::lane_index()];
  }
  /// A row in fp32 for a warp's transforms: of keys and values;
  RADDLE_DEVICE static float* key_vector(i32 warp) {
    return reinterpret_cast<float*>(base() + vectors + warp * vector_bytes);
  }
  /// of queries, before the ring is used;
  RADDLE_DEVICE static float* query_vector(i32 warp) {
    return reinterpret_cast<float*>(base() + ring + warp * vector_bytes);
  }
  /// and of outputs.
  RADDLE_DEVICE static float* vector(i32 warp) {
    return reinterpret_cast<float*>(base() + warp * vector_bytes);
  }
  RADDLE_DEVICE static float* out_row(i32 m) {
    return reinterpret_cast<float*>(base() + out) + m * row_floats;
  }
};

template <class K>
using ShortWideLayout = WideLayout<K, short_rows, K::short_keys, K::short_slots>;
template <class K>
using LongWideLayout = WideLayout<K, K::long_rows, K::long_keys, K::long_slots>;

}  // namespace mma

RADDLE_ENGINE_END
