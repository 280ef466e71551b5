// A team's shared memory: queries, a ring of KV tiles, and facts about their keys.
#pragma once

#include "raddle/engine/kernel/mma/timeline.h"
#include "raddle/engine/tile/walk.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Two or four elements that are loaded or stored together.
struct alignas(8) Two {
  float x[2];
};
struct alignas(16) Four {
  float x[4];
};
struct alignas(8) Packed4 {
  u32 x[2];
};

/// Facts about a KV tile, for the warp that computes it.
struct TileFlags {
  static constexpr i32 partial = 1;  ///< masks drop some of its pairs
  static constexpr i32 ragged = 2;   ///< some of its columns have no key
  static constexpr i32 last = 4;     ///< the last tile of its work item
  static constexpr i32 empty = 8;    ///< no columns: the item has no keys
  static constexpr i32 none = 16;    ///< there is no such tile
  static constexpr i32 bits = 32;    ///< partial, and the layout has a mask of its own
};

/// The scales of a tile's keys; 0 where there is no key.
template <i32 tile_keys, bool scaled>
struct TileScales {};
template <i32 tile_keys>
struct TileScales<tile_keys, true> {
  float scale[2][tile_keys];  ///< K's and V's
};

/// The keys of one KV tile.
template <i32 tile_keys, bool scaled>
struct TileKeys : TileScales<tile_keys, scaled> {
  i32 column[tile_keys];  ///< -1: no key
  i32 kv_index[tile_keys];
  i32 kv_pos[tile_keys];
  i32 flags[num_warps];  ///< one a warp where warps may be tiles apart; else only the first is used
};

/// Where the keys of an item lie: what finding them needs of its layout, worked out once. Each warp
/// has its own, in shared memory, because long queries lack registers.
struct KeySource {
  const u8* row[2];    ///< first row of page 0, of the item's head: K's and V's
  i64 page_stride[2];  ///< bytes
  i64 row_stride[2];   ///< bytes
  const i32* pages;    ///< the group's page list
  i32 page_size;
  i32 page_shift;   ///< log2(page_size); -1: page_size is no power of two
  i32 first_index;  ///< kv_index of column 0
  i32 level, group;
  i32 col_begin, col_end;
  bool plain;    ///< positions equal indices, and indices count columns
  bool holes;    ///< some columns may have no key
  bool bits;     ///< the layout has a mask of its own
  RunWalk runs;  ///< the runs behind the current one
  Span rest;     ///< what is left of the current run, where that is not in registers
};

/// A key source, and where the scales of its keys lie.
struct ScaledSource : KeySource {
  const float* scale[2];     ///< of the first row of page 0, of the item's head; null: `value`
  i64 scale_page_stride[2];  ///< elements
  i64 scale_row_stride[2];
  float value[2];
};

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

/// Addresses of rows to be loaded: K's and V's.
template <i32 keys>
struct RowTable {
  const u8* row[2][keys];
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
  using Keys = TileKeys<tile_keys, Kernel::quantized>;
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
