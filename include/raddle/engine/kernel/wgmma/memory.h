// The block's shared memory: slots of queries, keys and values as bulk copies write and matrix
// instructions read them, and what the warpgroups tell one another.
#pragma once

#include "raddle/engine/kernel/gpu/kept_columns.h"
#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/wgmma/kernel.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// `rows` rows of 64 · halves numbers of 16 bits: a half after the other, in rows of 128 bytes
/// whose 16-byte chunks are swizzled by their row.
template <i32 rows, i32 halves>
struct Slot {
  static constexpr i32 half_bytes = 128 * rows;
  static constexpr i32 bytes = halves * half_bytes;
  /// Offset of chunk `chunk` (8 numbers) of a row.
  RADDLE_FN static i32 at(i32 row, i32 chunk) {
    return chunk / 8 * half_bytes + 128 * row + ((chunk % 8) ^ (row % 8)) * 16;
  }
  /// Step k (16 numbers of each row) of the matrix whose rows begin at `address`.
  RADDLE_DEVICE static ptx::SharedMatrix columns(u32 address, i32 k) {
    return ptx::swizzled_matrix(address) + static_cast<u32>(k / 4 * half_bytes + k % 4 * 32);
  }
  /// Step k (16 rows, all columns) of the matrix whose rows begin at `address`.
  RADDLE_DEVICE static ptx::SharedMatrix rows_of(u32 address, i32 k) {
    return ptx::swizzled_matrix(address, half_bytes) + static_cast<u32>(k * 2048);
  }
};

/// What the loading warpgroup tells of a KV tile; flags beyond those of gpu/facts.h.
struct TileFlagsOfRing : TileFlags {
  static constexpr i32 first = 64;   ///< of its item
  static constexpr i32 parts = 128;  ///< partial, and its TileParts say which parts are
  /// Tiles of which some pairs are dropped.
  static constexpr i32 masked = partial | ragged | empty | none;
};

/// A KV tile: its flags, its first column, and those of its columns that have keys, unless holes
/// are among them.
struct TileFacts {
  i32 flags, begin, first, end;
};

/// What a mask keeps of the parts of a KV tile (tile_parts.h): for each strip of rows a bit for
/// every `size` keys.
template <class Kernel>
struct TileParts {
  static constexpr i32 size = 16;
  static constexpr i32 strips = max(Kernel::tile_rows / size, 1);
  u8 whole[strips];    ///< all pairs are kept
  u8 partial[strips];  ///< some pairs
};

/// What is known of an item: where its keys lie, and what the variant and the output see.
template <class Kernel>
struct ItemFacts {
  Row row[Kernel::tile_rows];  ///< padding repeats the last one
  KeptColumns kept[Kernel::finds_intervals ? Kernel::tile_rows : 1];
  KeySource source[2];   ///< of the walks that load K and V; source.rest: the first run of columns
  i32 request, kv_head;  ///< of the keys
  i32 item, query_tile, row_begin, num_rows, partial_row;
  union {
    i32 num_tiles;  ///< KV tiles, of short queries
    i32 stages;     ///< of long ones: whether O leaves as a box, by way of the slot of the queries
  };
};

/// Of slots that are used one after another: that of what comes nth, and the parity of the phase
/// that its barriers are in then. A warp that waits for a phase must have seen the slot's last one.
template <i32 count>
struct RingPlace {
  i32 slot, parity;
  RADDLE_FN explicit RingPlace(i32 nth) : slot(nth & (count - 1)), parity(nth >> shift & 1) {}

 private:
  static constexpr i32 shift = count < 4 ? count / 2 : count < 8 ? 2 : 3;
  static_assert(count == 1 << shift);
};

/// Barriers of slots. A phase of `full` ends when a slot is filled, one of `free` when it has been
/// used.
template <i32 count>
struct Ring {
  u64 full[count], free[count];
  RADDLE_FN static RingPlace<count> place(i32 nth) { return RingPlace<count>(nth); }
};

/// Where the nth tile of a ring lies.
template <class Kernel>
struct TilePlace {
  i32 slot;    ///< of keys, and of values
  i32 parity;  ///< of the phases of the slot's barriers
  i32 facts;   ///< slot of the facts about it
  RADDLE_FN TilePlace(i32 ring, i32 nth) {
    constexpr i32 slots = Kernel::slots / Kernel::rings, all = Kernel::fact_slots / Kernel::rings;
    const RingPlace<slots> place(nth);
    slot = ring * slots + place.slot, parity = place.parity;
    facts = ring * all + (nth & (all - 1));
  }
};

/// What the computing warps take to compose states, and to gather a row of O for an output part.
template <class Kernel>
struct TeamMemory {
  alignas(16) float vector[ConsumerTeam::num_warps]
                          [max(Kernel::dim_vo, 32)];  ///< a row in fp32 for each warp
  u32 completed[ConsumerTeam::num_warps];
};

/// The facts about the keys of tiles, and what behind the last tile may take their place.
template <class Kernel, bool is_tight = Kernel::is_tight>
struct KeysAndTeam {
  TileKeys<Kernel::tile_keys, false, 1> keys[Kernel::fact_slots];
  TeamMemory<Kernel> team;
};
template <class Kernel>
struct KeysAndTeam<Kernel, true> {
  union {
    TileKeys<Kernel::tile_keys, false, 1> keys[Kernel::fact_slots];
    TeamMemory<Kernel> team;
  };
};

/// What the loading warpgroup fills, for either kernel, and what a contraction takes.
template <class Kernel>
struct Memory {
  using Queries = Slot<Kernel::tile_rows, Kernel::qk_halves>;
  using Keys = Slot<Kernel::tile_keys, Kernel::qk_halves>;
  using Values = Slot<Kernel::tile_keys, Kernel::vo_halves>;
  /// The facts of a tile are read until its softmax is done, which is after the loading warpgroup
  /// may have found the next ones; those of an item until its output has been sent.
  static constexpr i32 fact_slots = Kernel::fact_slots;
  /// A cluster's other block may copy to the next slot before this block has seen the last one
  /// filled, so that each slot has a tail of its own.
  static constexpr i32 tails = Kernel::cluster_size > 1 ? Kernel::slots : 1;
  static constexpr i32 tells = Kernel::cluster_size > 1 ? 4 : 1;  ///< ItemFinder::agree

  u8 q[Kernel::query_slots][Queries::bytes];
  u8 k[Kernel::slots][Keys::bytes];
  u8 v[Kernel::slots][Values::bytes];
  Ring<Kernel::query_slots * Kernel::query_parts> queries;
  Ring<Kernel::slots> key_slots, value_slots;
  Ring<Kernel::item_slots> items;
  KeysAndTeam<Kernel> keys_and_team;
  alignas(16)
      i32 pages[2][Kernel::tile_keys / least_box_rows];  ///< of the boxes of K and of V copied next
  /// Of the tiles that are copied next, if row by row.
  RowTable<Kernel::copies_rows ? Kernel::tile_keys : 1> rows;
  alignas(16) TileFacts tile[fact_slots];
  TileParts<Kernel> parts[Kernel::asks_parts ? fact_slots : 1];
  ItemFacts<Kernel> item[Kernel::item_slots];
  u64 begun;        ///< the copies of the first queries have been started
  u64 tail[tails];  ///< values whose last rows must be cleared have come
  i32 told[tells];  ///< what the first block of a cluster tells the second: items
  u64 told_full[tells];

  /// Which of the barriers of queries is that of a slot's part.
  RADDLE_FN static constexpr i32 barrier_of_queries(i32 slot, i32 part) {
    return slot * Kernel::query_parts + part;
  }
  RADDLE_DEVICE static Memory& get() { return *static_cast<Memory*>(ptx::shared_memory()); }
  RADDLE_DEVICE TeamMemory<Kernel>& team() { return keys_and_team.team; }
};

/// Waits until a slot of keys or values is filled. Products see what copies of single rows have
/// written behind a fence of the threads that start these products.
template <class Kernel>
RADDLE_DEVICE void await_tile(u32 full, i32 parity) {
  ptx::barrier_wait(full, parity);
  if constexpr (Kernel::copies_rows) ptx::fence_proxy();
}

}  // namespace wgmma

RADDLE_ENGINE_END
