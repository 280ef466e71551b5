// The block's shared memory: slots of queries, keys and values as bulk copies write and matrix
// instructions read them, and what the warpgroups tell one another.
#pragma once

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
  static constexpr i32 first = 64;  ///< of its item
  /// Tiles of which some pairs are dropped.
  static constexpr i32 masked = partial | ragged | empty | none;
};

/// A KV tile: its flags, its first column, and those of its columns that have keys, unless holes
/// are among them.
struct TileFacts {
  i32 flags, begin, first, end;
};

/// The columns that a row keeps, where those are an interval.
struct KeptColumns {
  i32 first, end;
  static constexpr i32 unknown = -1;  ///< `first` where only the mask itself knows
};

/// What is known of an item: where its keys lie, and what the variant and the output see.
template <class Kernel>
struct ItemFacts {
  Row row[Kernel::long_rows];  ///< padding repeats the last one
  KeptColumns kept[Kernel::long_rows];
  KeySource source[2];   ///< of the walks that load K and V; source.rest: the first run of columns
  i32 request, kv_head;  ///< of the keys
  i32 item, query_tile, num_rows, partial_row;
};

template <class Kernel>
struct Memory {
  using Queries = Slot<Kernel::long_rows, Kernel::qk_halves>;
  using Keys = Slot<Kernel::long_keys, Kernel::qk_halves>;
  using Values = Slot<Kernel::long_keys, Kernel::vo_halves>;
  static constexpr i32 slots = Kernel::slots;
  /// The facts of a tile are read until its softmax is done, which is after the loading warpgroup
  /// may have found the next ones; those of an item until its output has been sent.
  static constexpr i32 fact_slots = 4;

  u8 q[slots][Queries::bytes];
  u8 k[slots][Keys::bytes];
  u8 v[slots][Values::bytes];
  /// A phase of `full` ends when a slot is filled, one of `free` when both groups have used it.
  template <i32 count>
  struct Ring {
    u64 full[count], free[count];
  };
  Ring<slots> queries, key_slots, value_slots;
  Ring<fact_slots> items;
  TileKeys<Kernel::long_keys, false, 1> keys[fact_slots];
  alignas(16) TileFacts tile[fact_slots];
  ItemFacts<Kernel> item[fact_slots];
  alignas(
      16) float vector[ConsumerTeam::num_warps][Kernel::dim_vo];  ///< a row in fp32 for each warp
  u32 completed[ConsumerTeam::num_warps];
  u64 tail;  ///< values whose last rows must be cleared have come

  RADDLE_DEVICE static Memory& get() { return *static_cast<Memory*>(ptx::shared_memory()); }
};

}  // namespace wgmma

RADDLE_ENGINE_END
