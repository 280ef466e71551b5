// The shared memory of a block for wide heads.
#pragma once

#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The shared memory of a tile shape, as offsets. A slot of the ring holds K of a tile, or V, or K
/// whose first columns are V.
template <class Kernel, i32 tile_rows, i32 keys_of_tile, i32 num_slots>
struct WideLayout : TeamMemory<WideLayout<Kernel, tile_rows, keys_of_tile, num_slots>> {
  using Memory = TeamMemory<WideLayout>;
  using Memory::base;
  static constexpr i32 teams = Kernel::teams, team_bytes = Kernel::config.shared_bytes;
  static constexpr i32 rows = tile_rows;
  static constexpr i32 shape = rows != short_rows;
  static constexpr i32 tile_keys = keys_of_tile;
  static constexpr i32 warp_keys = tile_keys / num_warps;  ///< keys that one warp loads
  static constexpr i32 slots = num_slots;
  static constexpr i32 key_slots = slots;
  using Keys = TileKeys<tile_keys, false, num_warps>;
  using Source = KeySource;
  using Table = RowTable<warp_keys>;
  struct Scratch {
    Row row[rows];  ///< padding repeats the last one
    i32 request, kv_head;
    i32 next;  ///< the item after this one
  };
  /// Few rows of Q are kept in registers, and their memory is used again.
  static constexpr bool keeps_queries = rows == short_rows;

  static constexpr i32 slot_bytes = tile_keys * Kernel::KeyRows::pitch;
  static constexpr i32 vector_bytes = 4 * max(Kernel::dim_qk, Kernel::dim_vo);
  static constexpr i32 queries_end = rows * Kernel::QueryRows::pitch;
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
  static_assert(end <= Kernel::config.shared_bytes);

  /// Rows of O on their way out, in fp32, each with its LSE behind it, at the end of the ring. All
  /// but the vectors of output parts is free by then.
  static constexpr i32 row_floats = round_up(Kernel::dim_vo, 8) + 4;
  static constexpr i32 out = keys - rows * row_floats * 4;
  static_assert(out >= num_warps * vector_bytes);

  /// Offset of the group of eight rows in which a warp's rows begin,
  template <class Rows>
  RADDLE_DEVICE static i32 part_of(i32 warp) {
    return warp * warp_keys / 8 * 8 * Rows::pitch;
  }
  /// and the number of the warp's first row in that group.
  RADDLE_DEVICE static i32 first_of_part(i32 warp) { return warp * warp_keys % 8; }
  RADDLE_DEVICE static Scratch& scratch() { return *reinterpret_cast<Scratch*>(base() + item); }
  /// A warp's partial logits, over its elements of the heads: fragment `nth`, this lane's part.
  RADDLE_DEVICE static Four& part_of_logits(i32 warp, i32 nth) {
    constexpr i32 fragments = rows / 16 * tile_keys / 8;
    return reinterpret_cast<Four*>(base() +
                                   parts)[(warp * fragments + nth) * 32 + ptx::lane_index()];
  }
  /// A row in fp32 for a warp's transforms: of keys and values,
  RADDLE_DEVICE static float* key_vector(i32 warp) {
    return reinterpret_cast<float*>(base() + vectors + warp * vector_bytes);
  }
  /// of queries, before the ring is used,
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

template <class Kernel>
using ShortWideLayout = WideLayout<Kernel, short_rows, Kernel::short_keys, Kernel::short_slots>;
template <class Kernel>
using LongWideLayout = WideLayout<Kernel, Kernel::long_rows, Kernel::long_keys, Kernel::long_slots>;

}  // namespace mma

RADDLE_ENGINE_END
