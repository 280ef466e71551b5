// A team's shared memory: queries, a ring of KV tiles, what is known of their keys.
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

/// What a KV tile is to the warp that computes it.
struct TileFlags {
  static constexpr i32 partial = 1;  ///< masks keep some of its pairs
  static constexpr i32 ragged = 2;   ///< some of its columns have no key
  static constexpr i32 last = 4;     ///< of its work item
  static constexpr i32 empty = 8;    ///< no columns at all: the item has none
  static constexpr i32 none = 16;    ///< there is no such tile
  static constexpr i32 bits = 32;    ///< partial, and the layout has a mask of its own
};

/// The scales of a tile's keys, 0 where there is no key.
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
  i32 flags[num_warps];  ///< one a warp, where a warp may be tiles ahead of another; else the first
};

/// Where the keys of an item lie: what finding them needs of its layout, worked out once. A warp's
/// own, in shared memory, for registers are what long queries lack.
struct KeySource {
  const u8* row[2];     ///< first row of block 0, of the item's head: K's and V's
  i64 block_stride[2];  ///< bytes
  i64 row_stride[2];    ///< bytes
  const i32* blocks;    ///< the group's list; null: one block of rows
  i32 block_size;
  i32 block_shift;  ///< log2(block_size); -1: it is no power of two
  i32 first_index;  ///< kv_index of column 0
  i32 level, group;
  i32 col_begin, col_end;
  bool plain;    ///< positions are indices, indices count columns
  bool holes;    ///< columns may have no key
  bool bits;     ///< the layout has a mask of its own
  RunWalk runs;  ///< those behind the one that the warp is in
  Span rest;     ///< of that one, where it is not in registers
};

/// The same, and where their scales lie.
struct ScaledSource : KeySource {
  const float* scale[2];      ///< of the first row of block 0, of the item's head; null: `value`
  i64 scale_block_stride[2];  ///< elements
  i64 scale_row_stride[2];
  float value[2];
};

/// The warps' states of one short query tile, a slab of rows and columns at a time.
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

/// What an item's rows and keys are to the variant, and a row in fp32 for each warp's transforms.
/// Takes the place of the merge buffer, for it is used before that.
template <i32 rows, i32 dim, bool scaled>
struct ItemScratch : RowFactors<rows, scaled> {
  Row row[rows];  ///< padding repeats the last one
  float vector[num_warps][dim];
  i32 request, kv_head;  ///< of the keys
  i32 next;              ///< the item after this one; of long items, which also say how they end:
  i32 num_rows, partial_row;
};

/// Where rows that are loaded lie: K's and V's.
template <i32 keys>
struct RowTable {
  const u8* row[2][keys];
};

/// Which slot of a ring number `nth` takes, and in which round of the ring: counted without a sign,
/// whose handling is a chain of instructions that each wait for the one before.
RADDLE_FN constexpr i32 ring_slot(i32 nth, i32 slots) {
  return static_cast<i32>(static_cast<u32>(nth) % static_cast<u32>(slots));
}
RADDLE_FN constexpr i32 ring_round(i32 nth, i32 slots) {
  return static_cast<i32>(static_cast<u32>(nth) / static_cast<u32>(slots));
}

/// What lies where in a team's shared memory, of a layout that says the offsets: queries at the
/// front, a ring of slots, what is known of their keys, and tables of where rows lie.
template <class Layout>
struct TeamMemory {
  RADDLE_DEVICE static i32 after(i32 at, i32 count) { return at + 1 == count ? 0 : at + 1; }
  /// The memory of one of the block's teams.
  RADDLE_DEVICE static u8* base_of(i32 team) {
    return static_cast<u8*>(ptx::shared_memory()) + team * Layout::team_bytes;
  }
  RADDLE_DEVICE static i32 team() { return Layout::teams > 1 ? ptx::team_index() : 0; }
  RADDLE_DEVICE static u8* base() { return base_of(team()); }
  /// A row of Q, or of O on its way out.
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
  /// Which contractions this block brought their last state: a bit each, a word a warp.
  RADDLE_DEVICE static u32* completed_bits() {
    return reinterpret_cast<u32*>(base() + Layout::completed);
  }
};

/// Where a tile shape keeps what; offsets into the team's part of dynamic shared memory.
template <class K, i32 rows, i32 keys_of_tile, i32 num_slots>
struct SharedLayout : TeamMemory<SharedLayout<K, rows, keys_of_tile, num_slots>> {
  using Memory = TeamMemory<SharedLayout>;
  using Memory::base;
  static constexpr i32 teams = K::teams, team_bytes = K::config.shared_bytes;
  static constexpr i32 tile_keys = keys_of_tile;
  static constexpr i32 warp_keys = tile_keys / num_warps;  ///< that one warp loads
  static constexpr i32 slots = num_slots;                  ///< K or V of a tile, in turns
  using Keys = TileKeys<tile_keys, K::quantized>;
  using Scratch = ItemScratch<rows, max(K::dim_qk, K::dim_vo), K::quantized>;
  using Source = typename Either<K::quantized, ScaledSource, KeySource>::Type;
  /// Of short queries, each warp has a table; of long ones, each tile that has been found.
  static constexpr bool has_long = rows != short_rows;
  static constexpr i32 shape = has_long;
  static constexpr i32 found_slots = mma::found_slots;
  using Table = RowTable<has_long ? tile_keys : warp_keys>;
  static constexpr i32 slot_bytes = tile_keys * max(K::KeyRows::pitch, K::ValueRows::pitch);
  static constexpr i32 ring = rows * max(K::QueryRows::pitch, SharedRows<K::dim_vo>::pitch);
  static constexpr i32 keys = ring + slots * slot_bytes;
  /// Keys are spoken of until their values are used, when the next keys are on their way already.
  static constexpr i32 key_slots = mma::key_slots(rows, slots);
  static constexpr i32 table = keys + key_slots * static_cast<i32>(sizeof(Keys));
  static constexpr i32 sources =
      table + (has_long ? found_slots : num_warps) * static_cast<i32>(sizeof(Table));
  static constexpr i32 completed = sources + num_warps * static_cast<i32>(sizeof(Source));
  static constexpr i32 barriers = completed + 16;
  static constexpr i32 merge = barriers + barrier_bytes(rows, slots);
  /// Behind the buffer's statistics: a warp may be there while another still computes.
  static constexpr i32 item =
      merge + static_cast<i32>(sizeof(MergeBuffer) - sizeof(MergeBuffer::o));
  static constexpr i32 end =
      max(item + static_cast<i32>(sizeof(Scratch)), merge + static_cast<i32>(sizeof(MergeBuffer)));
  static_assert(ring % 128 == 0 && slot_bytes % 128 == 0 && table % 16 == 0 && merge % 16 == 0);
  static_assert(end <= K::config.shared_bytes && team_bytes % 128 == 0);

  /// Where a warp's rows begin in a slot. Where it computes on these alone, that is the same place
  /// for rows of any length: an odd number of slots puts K where V was.
  template <class Rows>
  RADDLE_DEVICE static i32 part_of(i32 warp) {
    if (warp_keys < 8) return warp * warp_keys / 8 * 8 * Rows::pitch;
    return warp * (has_long ? warp_keys * Rows::pitch : slot_bytes / num_warps);
  }
  /// The number of its first row there: rows are swizzled in eights, of which a warp may have half.
  RADDLE_DEVICE static i32 first_of_part(i32 warp) {
    return warp_keys < 8 ? warp * warp_keys % 8 : 0;
  }
  RADDLE_DEVICE static MergeBuffer& merge_buffer_of(i32 team) {
    return *reinterpret_cast<MergeBuffer*>(Memory::base_of(team) + merge);
  }
  RADDLE_DEVICE static MergeBuffer& merge_buffer() { return merge_buffer_of(Memory::team()); }
  /// Whether a slot is filled, and whether it is free: two barriers a slot.
  RADDLE_DEVICE static u32 filled(i32 slot) {
    return ptx::shared_address(base() + barriers) + static_cast<u32>(16 * slot);
  }
  RADDLE_DEVICE static u32 freed(i32 slot) { return filled(slot) + 8; }
  /// Whether a table is filled.
  RADDLE_DEVICE static u32 found(i32 which) { return filled(slots) + static_cast<u32>(8 * which); }
  RADDLE_DEVICE static Scratch& scratch() { return *reinterpret_cast<Scratch*>(&merge_buffer().o); }
  RADDLE_DEVICE static float* vector(i32 warp) { return scratch().vector[warp]; }
};

template <class K>
using ShortLayout = SharedLayout<K, short_rows, K::short_keys, K::short_slots>;
template <class K>
using LongLayout = SharedLayout<K, K::long_rows, K::long_keys, K::long_slots>;

}  // namespace mma

RADDLE_ENGINE_END
