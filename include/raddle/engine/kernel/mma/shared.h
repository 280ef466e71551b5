// A team's shared memory: queries, a ring of KV tiles, and facts about their keys, at the offsets
// of SharedMap.
#pragma once

#include "raddle/engine/kernel/gpu/kept_columns.h"
#include "raddle/engine/kernel/mma/kernel.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The slot of a ring that number `nth` takes, and the round of the ring. Computed as unsigned,
/// which saves the instructions for a sign.
RADDLE_FN constexpr i32 ring_slot(i32 nth, i32 slots) {
  return static_cast<i32>(static_cast<u32>(nth) % static_cast<u32>(slots));
}
RADDLE_FN constexpr i32 ring_round(i32 nth, i32 slots) {
  return static_cast<i32>(static_cast<u32>(nth) / static_cast<u32>(slots));
}

/// The shared memory of a team in the loop of a tile shape.
template <class Kernel, i32 tile_rows, i32 keys_of_tile, i32 num_slots>
struct SharedMemory {
  static constexpr i32 rows = tile_rows;
  static constexpr i32 tile_keys = keys_of_tile;
  static constexpr i32 warp_keys = tile_keys / num_warps;  ///< keys that one warp loads
  static constexpr i32 slots = num_slots;
  static constexpr LoopShape loop{Kernel::dim_qk, Kernel::dim_vo, rows,
                                  tile_keys,      slots,          Kernel::ring_rows};
  static constexpr i32 shape = loop.is_long();
  static constexpr i32 key_slots = loop.key_slots(), found_slots = LoopShape::found_slots;
  static constexpr i32 slot_bytes = loop.slot_bytes();
  using Keys = KeyFacts<tile_keys, Kernel::quantized>;
  using Facts = ItemFacts<rows, Kernel::quantized>;
  using Source = typename Either<Kernel::quantized, ScaledSource, KeySource>::Type;
  /// Short queries and wide heads have a table a warp; long queries, one for each tile that has
  /// been found.
  using Table = RowTable<loop.is_long() && !Kernel::wide ? tile_keys : warp_keys>;

  static constexpr SharedMap map{loop};
  static constexpr i32 ring = map.ring, keys = map.keys, sources = map.sources;
  static_assert(slot_bytes == tile_keys * max(Kernel::KeyRows::pitch, Kernel::ValueRows::pitch));
  static_assert(size_of<KeyFacts>(tile_keys, Kernel::quantized) == sizeof(Keys));
  static_assert(size_of<ItemFacts>(rows, Kernel::quantized) == sizeof(Facts));
  static_assert(ring % 128 == 0 && slot_bytes % 128 == 0 && Kernel::config.shared_bytes % 128 == 0);
  static_assert(map.end <= Kernel::config.shared_bytes);

  RADDLE_DEVICE static i32 after(i32 at, i32 count) { return at + 1 == count ? 0 : at + 1; }

  /// The memory of a team of the block.
  RADDLE_DEVICE static u8* base_of(i32 team) {
    return static_cast<u8*>(ptx::shared_memory()) + team * Kernel::config.shared_bytes;
  }
  RADDLE_DEVICE static i32 team() { return Kernel::teams > 1 ? ptx::team_index() : 0; }
  RADDLE_DEVICE static u8* base() { return base_of(team()); }
  /// Rows of Q, or of O on its way out.
  RADDLE_DEVICE static u8* query_memory() { return base(); }

  RADDLE_DEVICE static u8* slot_memory(i32 slot) { return base() + ring + slot * slot_bytes; }
  RADDLE_DEVICE static u32 slot_address(i32 slot) {
    return ptx::shared_address(base()) + static_cast<u32>(ring + slot * slot_bytes);
  }
  /// Offset in a slot of the rows that a warp loads. A warp of short queries computes only its own
  /// rows, so its part of the slot is a fixed one for rows of any length: K and V take turns in a
  /// ring with an odd number of slots. A warp with less than eight rows has half of a group of
  /// eight, which are swizzled together; then this is the group's offset.
  template <class Rows>
  RADDLE_DEVICE static i32 part_of(i32 warp) {
    if (warp_keys < 8) return warp * warp_keys / 8 * 8 * Rows::pitch;
    return warp * (loop.is_long() ? warp_keys * Rows::pitch : slot_bytes / num_warps);
  }
  /// The number of the warp's first row from that offset on.
  RADDLE_DEVICE static i32 first_of_part(i32 warp) {
    return warp_keys < 8 ? warp * warp_keys % 8 : 0;
  }

  RADDLE_DEVICE static Keys& keys_at(i32 slot) { return array<Keys>(keys)[slot]; }
  RADDLE_DEVICE static Table& row_table(i32 which) { return array<Table>(map.tables)[which]; }
  RADDLE_DEVICE static Source& source(i32 warp) { return array<Source>(sources)[warp]; }
  /// Words in which the warps of a team tell one another bits, such as which contractions their
  /// item completed.
  RADDLE_DEVICE static u32* completed_bits() { return array<u32>(map.completed); }

  /// Two barriers a slot: one for "filled", one for "freed".
  RADDLE_DEVICE static u32 filled(i32 slot) {
    return ptx::shared_address(base() + map.barriers) + static_cast<u32>(16 * slot);
  }
  RADDLE_DEVICE static u32 freed(i32 slot) { return filled(slot) + 8; }
  /// The barrier for "a table is filled".
  RADDLE_DEVICE static u32 found(i32 which) { return filled(slots) + static_cast<u32>(8 * which); }

  RADDLE_DEVICE static MergeStatistics& statistics_of(i32 team) {
    return *reinterpret_cast<MergeStatistics*>(base_of(team) + map.statistics);
  }
  RADDLE_DEVICE static MergeStatistics& statistics() { return statistics_of(team()); }
  /// [num_warps, slab_rows, slab_pitch]
  RADDLE_DEVICE static float* slabs() { return array<float>(map.slabs); }
  /// What each row keeps, from the opening of an item of long queries to its last tile. It shares
  /// memory with vectors, of which an item needs none before its end unless it changes keys.
  static constexpr bool has_room_for_kept =
      rows * sizeof(KeptColumns) <= num_warps * loop.widest() * sizeof(float);
  RADDLE_DEVICE static KeptColumns* kept_of_rows() { return array<KeptColumns>(map.vectors); }
  RADDLE_DEVICE static Facts& facts() { return *array<Facts>(map.facts); }
  /// A row in fp32 for a warp's transforms.
  RADDLE_DEVICE static float* vector(i32 warp) {
    return array<float>(map.vectors) + warp * loop.widest();
  }

 protected:
  template <class T>
  RADDLE_DEVICE static T* array(i32 offset) {
    return reinterpret_cast<T*>(base() + offset);
  }
};

template <class Kernel>
using ShortMemory = SharedMemory<Kernel, short_rows, Kernel::short_keys, Kernel::short_slots>;
template <class Kernel>
using LongMemory = SharedMemory<Kernel, Kernel::long_rows, Kernel::long_keys, Kernel::long_slots>;

/// The shared memory of a loop of wide heads. A slot of the ring holds K of a tile, or V, or K
/// whose first columns are V.
template <class Kernel, i32 tile_rows, i32 keys_of_tile, i32 num_slots>
struct WideMemory : SharedMemory<Kernel, tile_rows, keys_of_tile, num_slots> {
  using Base = SharedMemory<Kernel, tile_rows, keys_of_tile, num_slots>;
  using Base::base, Base::loop, Base::map, Base::rows;

  /// Few rows of Q are kept in registers, and their memory is used again.
  static constexpr bool keeps_queries = !loop.is_long();

  /// A warp's partial logits, over its elements of the heads: fragment `nth`, this lane's part.
  RADDLE_DEVICE static Four& part_of_logits(i32 warp, i32 nth) {
    constexpr i32 fragments = rows / 16 * Base::tile_keys / 8;
    return Base::template array<Four>(map.parts)[(warp * fragments + nth) * 32 + ptx::lane_index()];
  }
  /// A row in fp32 for a warp's transforms: of keys and values,
  RADDLE_DEVICE static float* key_vector(i32 warp) { return Base::vector(warp); }
  /// of queries, before the ring is used,
  RADDLE_DEVICE static float* query_vector(i32 warp) { return vector_at(map.ring, warp); }
  /// and of outputs.
  RADDLE_DEVICE static float* vector(i32 warp) { return vector_at(0, warp); }

  /// Rows of O on their way out, in fp32, each with its LSE behind it, at the end of the ring. All
  /// but the vectors of output parts is free by then.
  RADDLE_DEVICE static float* out_row(i32 m) {
    return Base::template array<float>(out) + m * row_floats;
  }

 private:
  static constexpr i32 row_floats = round_up(Kernel::dim_vo, 8) + 4;
  static constexpr i32 out = map.keys - rows * row_floats * 4;
  static_assert(out >= 4 * num_warps * loop.widest());

  RADDLE_DEVICE static float* vector_at(i32 offset, i32 warp) {
    return Base::template array<float>(offset) + warp * loop.widest();
  }
};

template <class Kernel>
using ShortWideMemory = WideMemory<Kernel, short_rows, Kernel::short_keys, Kernel::short_slots>;
template <class Kernel>
using LongWideMemory = WideMemory<Kernel, Kernel::long_rows, Kernel::long_keys, Kernel::long_slots>;

}  // namespace mma

RADDLE_ENGINE_END
