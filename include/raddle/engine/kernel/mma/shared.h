// A team's shared memory: queries, a ring of KV tiles, and facts about their keys.
#pragma once

#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/mma/kernel.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The states of a short query tile that the warps of a team add up: statistics of all rows, and a
/// slab of rows and columns of O at a time.
struct MergeBuffer {
  float top[num_warps][short_rows];
  float sum[num_warps][short_rows];
  float o[num_warps * slab_rows * slab_pitch];  ///< [num_warps, slab_rows, slab_pitch]
};

/// What the rows of Q were divided by, where K is quantised.
template <i32 rows, bool scaled>
struct RowFactors {};
template <i32 rows>
struct RowFactors<rows, true> {
  float factor[rows];
};

/// The facts of an item's rows and keys that the variant sees, and a row in fp32 for each warp's
/// transforms. It shares memory with the merge buffer, which is used later.
template <i32 rows, i32 dim, bool scaled>
struct ItemScratch : RowFactors<rows, scaled> {
  Row row[rows];  ///< padding repeats the last one
  float vector[num_warps][dim];
  i32 request, kv_head;  ///< request and head of the keys
  i32 next;              ///< the item after this one. Long items also keep how they end:
  i32 num_rows, partial_row;
};

/// The slot of a ring that number `nth` takes, and the round of the ring. Computed as unsigned,
/// which saves the instructions for a sign.
RADDLE_FN constexpr i32 ring_slot(i32 nth, i32 slots) {
  return static_cast<i32>(static_cast<u32>(nth) % static_cast<u32>(slots));
}
RADDLE_FN constexpr i32 ring_round(i32 nth, i32 slots) {
  return static_cast<i32>(static_cast<u32>(nth) / static_cast<u32>(slots));
}

/// Accessors for a team's shared memory, by the offsets of Layout: queries at the front, a ring of
/// slots, the facts of their keys, and tables of row addresses.
template <class Layout>
struct TeamMemory {
  RADDLE_DEVICE static i32 after(i32 at, i32 count) { return at + 1 == count ? 0 : at + 1; }
  /// The memory of a team of the block.
  RADDLE_DEVICE static u8* base_of(i32 team) {
    return static_cast<u8*>(ptx::shared_memory()) + team * Layout::team_bytes;
  }
  RADDLE_DEVICE static i32 team() { return Layout::teams > 1 ? ptx::team_index() : 0; }
  RADDLE_DEVICE static u8* base() { return base_of(team()); }
  /// Rows of Q, or of O on its way out.
  RADDLE_DEVICE static u8* query_memory() { return base(); }
  RADDLE_DEVICE static u8* slot_memory(i32 slot) {
    return base() + Layout::ring + slot * Layout::slot_bytes;
  }
  RADDLE_DEVICE static u32 slot_address(i32 slot) {
    return ptx::shared_address(base()) + static_cast<u32>(Layout::ring + slot * Layout::slot_bytes);
  }
  RADDLE_DEVICE static auto& keys_at(i32 slot) {
    return reinterpret_cast<typename Layout::Keys*>(base() + Layout::keys)[slot];
  }
  RADDLE_DEVICE static auto& row_table(i32 which) {
    return reinterpret_cast<typename Layout::Table*>(base() + Layout::table)[which];
  }
  RADDLE_DEVICE static auto& source(i32 warp) {
    return reinterpret_cast<typename Layout::Source*>(base() + Layout::sources)[warp];
  }
  /// Words in which the warps of a team tell one another bits, such as which contractions their
  /// item completed.
  RADDLE_DEVICE static u32* completed_bits() {
    return reinterpret_cast<u32*>(base() + Layout::completed);
  }
};

/// The shared memory of a tile shape, as offsets into the team's part.
template <class Kernel, i32 rows, i32 keys_of_tile, i32 num_slots>
struct SharedLayout : TeamMemory<SharedLayout<Kernel, rows, keys_of_tile, num_slots>> {
  using Memory = TeamMemory<SharedLayout>;
  using Memory::base;
  static constexpr i32 teams = Kernel::teams, team_bytes = Kernel::config.shared_bytes;
  static constexpr i32 tile_keys = keys_of_tile;
  static constexpr i32 warp_keys = tile_keys / num_warps;  ///< keys that one warp loads
  static constexpr i32 slots = num_slots;  ///< each holds K or V of a tile, in turns
  using Keys = TileKeys<tile_keys, Kernel::quantized, num_warps>;
  using Scratch = ItemScratch<rows, max(Kernel::dim_qk, Kernel::dim_vo), Kernel::quantized>;
  using Source = typename Either<Kernel::quantized, ScaledSource, KeySource>::Type;
  /// Short queries have a table a warp; long ones, a table for each tile that has been found.
  static constexpr bool has_long = rows != short_rows;
  static constexpr i32 shape = has_long;
  static constexpr i32 found_slots = mma::found_slots;
  using Table = RowTable<has_long ? tile_keys : warp_keys>;
  static constexpr i32 slot_bytes =
      tile_keys * max(Kernel::KeyRows::pitch, Kernel::ValueRows::pitch);
  static constexpr i32 ring =
      rows * max(Kernel::QueryRows::pitch, SharedRows<Kernel::dim_vo>::pitch);
  static constexpr i32 keys = ring + slots * slot_bytes;
  /// The facts of a tile's keys are needed until its V has been used; by then the next keys are
  /// being loaded.
  static constexpr i32 key_slots = mma::key_slots(rows, slots);
  static constexpr i32 table = keys + key_slots * static_cast<i32>(sizeof(Keys));
  static constexpr i32 sources =
      table + (has_long ? found_slots : num_warps) * static_cast<i32>(sizeof(Table));
  static constexpr i32 completed = sources + num_warps * static_cast<i32>(sizeof(Source));
  static constexpr i32 barriers = completed + 16;
  static constexpr i32 merge = barriers + barrier_bytes(rows, slots);
  /// Behind the buffer's statistics: one warp may write these while another still reads item facts.
  static constexpr i32 item =
      merge + static_cast<i32>(sizeof(MergeBuffer) - sizeof(MergeBuffer::o));
  static constexpr i32 end =
      max(item + static_cast<i32>(sizeof(Scratch)), merge + static_cast<i32>(sizeof(MergeBuffer)));
  static_assert(ring % 128 == 0 && slot_bytes % 128 == 0 && table % 16 == 0 && merge % 16 == 0);
  static_assert(end <= Kernel::config.shared_bytes && team_bytes % 128 == 0);

  /// Offset of a warp's rows in a slot. Where a warp computes only the rows that it loaded, the
  /// offset is the same for rows of any length, because an odd number of slots puts K where V was.
  template <class Rows>
  RADDLE_DEVICE static i32 part_of(i32 warp) {
    if (warp_keys < 8) return warp * warp_keys / 8 * 8 * Rows::pitch;
    return warp * (has_long ? warp_keys * Rows::pitch : slot_bytes / num_warps);
  }
  /// Number of the warp's first row there: rows are swizzled in groups of eight, of which a warp
  /// may have half.
  RADDLE_DEVICE static i32 first_of_part(i32 warp) {
    return warp_keys < 8 ? warp * warp_keys % 8 : 0;
  }
  RADDLE_DEVICE static MergeBuffer& merge_buffer_of(i32 team) {
    return *reinterpret_cast<MergeBuffer*>(Memory::base_of(team) + merge);
  }
  RADDLE_DEVICE static MergeBuffer& merge_buffer() { return merge_buffer_of(Memory::team()); }
  /// Two barriers a slot: one for "filled", one for "freed".
  RADDLE_DEVICE static u32 filled(i32 slot) {
    return ptx::shared_address(base() + barriers) + static_cast<u32>(16 * slot);
  }
  RADDLE_DEVICE static u32 freed(i32 slot) { return filled(slot) + 8; }
  /// The barrier for "a table is filled".
  RADDLE_DEVICE static u32 found(i32 which) { return filled(slots) + static_cast<u32>(8 * which); }
  RADDLE_DEVICE static Scratch& scratch() { return *reinterpret_cast<Scratch*>(&merge_buffer().o); }
  RADDLE_DEVICE static float* vector(i32 warp) { return scratch().vector[warp]; }
};

template <class Kernel>
using ShortLayout = SharedLayout<Kernel, short_rows, Kernel::short_keys, Kernel::short_slots>;
template <class Kernel>
using LongLayout = SharedLayout<Kernel, Kernel::long_rows, Kernel::long_keys, Kernel::long_slots>;

}  // namespace mma

RADDLE_ENGINE_END
