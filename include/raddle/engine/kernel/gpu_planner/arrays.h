// The arrays of the planner kernel: those of the layout that it writes, and its scratch. A record
// names each of them, as a pointer (PointerTo), a number of entries or a byte offset (NumberOf).
#pragma once

#include "raddle/engine/core/carve.h"
#include "raddle/engine/plan/linear_split.h"
#include "raddle/engine/plan/pieces.h"
#include "raddle/engine/plan/prefixes.h"

namespace raddle {

/// A group of requests that share a prefix; stored at the leader's index.
struct PrefixGroup {
  i32 number;  ///< in the level
  i32 members;
  i32 rows;
  i32 row_begin;  ///< where its rows begin among those of all groups
  i32 leader;     ///< leader of the group whose number is this index
};

/// Hulls over the rows of a query tile.
struct RowHull {
  Range request;
  Range q_index;
};

template <class T>
using PointerTo = T*;
template <class>
using NumberOf = i64;

/// The arrays of the layout.
template <template <class> class Of>
struct PlannedRecord {
  Of<i32> qo_indptr, kv_len, block_begin;
  Of<i32> row_request, suffix, kv_begin;  // with shared prefixes: of the last level,
  Of<i32> prefix_indptr, prefix_rows, prefix_len, prefix_begin;  // and of the first
};

/// The scratch arrays.
template <template <class> class Of>
struct ScratchRecord {
  Of<i32> tile_indptr;  ///< [groups + 1] query tiles of the groups before, of one level, with those
                        ///< that keep nothing
  Of<i32> group_tile;   ///< [groups of all levels + 1]
  Of<i64> cost_before;  ///< as in Units
  Of<i32> kv_tiles;
  Of<QueryTile> tiles;
  // Of the linear split. Two levels in step have twice as many cuts:
  Of<Cut> cuts;    ///< [num_workers + 1]
  Of<i32> rank;    ///< [num_workers + 1] chunks that begin at cuts up to this one
  Of<i32> row_at;  ///< [num_workers + 1] partial rows before this cut's
  Of<u16> owners;  ///< [items] the worker whose queue has the item
  // Of fixed chunks (PieceLine):
  Of<Piece> pieces;
  Of<i32> piece_begin;        ///< [tiles + 1]
  Of<i64> piece_cost_before;  ///< [pieces + 1]
  // Of both:
  Of<i32> queue;  ///< [num_workers + 1] queue_indptr
  Of<Split> splits;
  Of<i32> qo_indptr;  ///< [requests + 1]
  Of<i32> kv_len;     ///< [requests]
  // With shared prefixes. [requests]:
  Of<PrefixLink> links;        ///< link to a leader; pages is 0 where no other request shares
  Of<i32> depth;               ///< of a leader: pages that all requests linked to it share
  Of<PrefixGroup> group;       ///< of a leader: its group
  Of<i32> row_before;          ///< rows of the group before the request's
  Of<i32> tiles_before;        ///< query tiles of the group's earlier requests, on the last level
  Of<i32> prefix_tile_indptr;  ///< [requests + 1] tile_indptr of the first level
  // [query tiles]:
  Of<i32> first_dependent;  ///< of a tile of a shared prefix: its first dependent among those of
                            ///< its group
  Of<RowHull> hulls;
};

using LayoutArrays = PlannedRecord<PointerTo>;
using ScratchArrays = ScratchRecord<PointerTo>;

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace planner {

/// Goes through the arrays of records in the order in which they lie. For each of them, calls
/// `visit` with the members of its name of the given records.
template <class Visit, template <class> class Of, class... Records>
RADDLE_FN constexpr void visit_arrays(const Visit& visit, const PlannedRecord<Of>& first,
                                      Records&&... of) {
  visit(first.qo_indptr, of.qo_indptr...);
  visit(first.kv_len, of.kv_len...);
  visit(first.block_begin, of.block_begin...);
  visit(first.row_request, of.row_request...);
  visit(first.suffix, of.suffix...);
  visit(first.kv_begin, of.kv_begin...);
  visit(first.prefix_indptr, of.prefix_indptr...);
  visit(first.prefix_rows, of.prefix_rows...);
  visit(first.prefix_len, of.prefix_len...);
  visit(first.prefix_begin, of.prefix_begin...);
}

template <class Visit, template <class> class Of, class... Records>
RADDLE_FN constexpr void visit_arrays(const Visit& visit, const ScratchRecord<Of>& first,
                                      Records&&... of) {
  visit(first.tile_indptr, of.tile_indptr...);
  visit(first.group_tile, of.group_tile...);
  visit(first.cost_before, of.cost_before...);
  visit(first.kv_tiles, of.kv_tiles...);
  visit(first.tiles, of.tiles...);
  visit(first.cuts, of.cuts...);
  visit(first.rank, of.rank...);
  visit(first.row_at, of.row_at...);
  visit(first.owners, of.owners...);
  visit(first.pieces, of.pieces...);
  visit(first.piece_begin, of.piece_begin...);
  visit(first.piece_cost_before, of.piece_cost_before...);
  visit(first.queue, of.queue...);
  visit(first.splits, of.splits...);
  visit(first.qo_indptr, of.qo_indptr...);
  visit(first.kv_len, of.kv_len...);
  visit(first.links, of.links...);
  visit(first.depth, of.depth...);
  visit(first.group, of.group...);
  visit(first.row_before, of.row_before...);
  visit(first.tiles_before, of.tiles_before...);
  visit(first.prefix_tile_indptr, of.prefix_tile_indptr...);
  visit(first.first_dependent, of.first_dependent...);
  visit(first.hulls, of.hulls...);
}

/// The offsets of arrays with so many entries, the next of a block.
template <template <template <class> class> class Record>
RADDLE_FN Record<NumberOf> offsets_of(const Record<NumberOf>& counts, Carver<16>& carve) {
  Record<NumberOf> offsets{};
  visit_arrays([&carve]<class T>(i64 count, i64& offset, T*) { offset = carve.place<T>(count); },
               counts, offsets, Record<PointerTo>{});
  return offsets;
}

/// The arrays at these offsets of a block.
template <template <template <class> class> class Record>
RADDLE_FN Record<PointerTo> arrays_at(const Record<NumberOf>& offsets, u8* base) {
  Record<PointerTo> arrays{};
  visit_arrays(
      [base]<class T>(i64 offset, T*& array) { array = reinterpret_cast<T*>(base + offset); },
      offsets, arrays);
  return arrays;
}

}  // namespace planner

RADDLE_ENGINE_END
