// Shared memory of a block that computes short queries: what the loading warpgroup fills, and what
// the threads of the computing warpgroups tell one another.
#pragma once

#include "raddle/engine/kernel/wgmma/announce.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Items of a queue whose states are announced at a time.
constexpr i32 states_at_once = 16;

/// What it takes to announce an item's state and to find the states of its tile.
struct ItemState {
  ArrivalTicket ticket;
  i32 num_rows;  ///< of the tile
};

/// A worker's share of a contraction of few rows, with all that composing them takes.
struct KnownShare {
  static constexpr i32 most_rows = 8, most_sources = 3;
  WorkerShare share;
  i32 expected;  ///< states
  i32 query_tile, num_rows, num_sources;
  SourceRows source[most_sources];
  Row row[most_rows];
};

/// A worker's shares of contractions of several levels, of some of its items, where they are few
/// and small.
template <i32 most_shares>
struct KnownShares {
  static constexpr i32 most = most_shares, none = -1;
  i32 count;  ///< none: they were not
  i32 items;  ///< whose shares these are
  KnownShare share[most];
};

/// Where the states of the queue's first items are announced, in a layout of several levels: an
/// item a warp, or two where there are more items than warps; a contraction a lane.
struct KnownWaiting {
  Waiting waiting[ConsumerTeam::num_warps][2];
  i32 counter[ConsumerTeam::num_warps][32];
  /// Of how many items, where the queue has so many.
  RADDLE_DEVICE static i32 most(i32 items) {
    return items > ConsumerTeam::num_warps ? 2 * ConsumerTeam::num_warps : ConsumerTeam::num_warps;
  }
  /// The lanes of an item, and which of its warp's items a lane's is.
  RADDLE_DEVICE static i32 lanes(i32 items) { return items > ConsumerTeam::num_warps ? 16 : 32; }
  RADDLE_DEVICE static i32 nth(i32 items) {
    return items > ConsumerTeam::num_warps ? ptx::lane_index() / 16 : 0;
  }
};

template <class Kernel>
struct ShortMemory : Memory<Kernel> {
  static constexpr i32 rows = Kernel::tile_rows;
  /// P of a tile: a row of 64 keys for each query.
  using Weights = Slot<rows, 1>;
  static_assert(128 == 2 * Kernel::tile_keys);

  alignas(1024) u8 p[consumer_groups][Weights::bytes];
  /// The state of the other warpgroup, then rows of both: O, and behind it the LSE. Four numbers
  /// more than O has keep the lanes that write a column apart.
  float state[rows][Kernel::dim_vo + 4];
  float reference[consumer_groups][rows];  ///< of an item's rows, where it ends
  /// Of the keys of each warp of a group: the largest logits of a tile, and an item's sums.
  float top[consumer_groups][group_warps][rows];
  float sum[consumer_groups][group_warps][rows];
  /// Of items of the queue, where tiles are composed at once: they have few rows.
  static constexpr i32 state_rows = rows <= rows_at_once<ConsumerTeam> ? rows : 0;
  ItemState item_state[state_rows > 0 ? states_at_once : 1];
  Row state_row[max(state_rows, 1)][state_rows > 0 ? states_at_once : 1];
  KnownShares<Kernel::dim_vo <= 128 ? 16 : 4> known;
  KnownWaiting known_waiting;
  /// What is composed in a rehearsal, and dropped.
  alignas(16) float rehearsal[state_rows > 0 ? max(Kernel::dim_vo, 32) : 1];

  RADDLE_DEVICE static ShortMemory& get() {
    return *static_cast<ShortMemory*>(ptx::shared_memory());
  }
};

}  // namespace wgmma

RADDLE_ENGINE_END
