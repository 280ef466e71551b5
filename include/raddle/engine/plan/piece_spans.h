// Pieces that were cut beforehand, end to end on a line as units are by the linear split: by group,
// then KV head, tile and piece; in groups of one tile by piece, then KV head, whose keys lie side
// by side. The line is cut into equal spans, and a work item (a piece for one KV head) belongs to
// the worker in whose span its middle lies. Where a worker's queue begins is found by binary
// search, without the queues before it, so that a GPU has a thread per worker. assign_spans (in
// assign.h) goes along the same line on the host; both give each worker the same items.
#pragma once

#include "raddle/engine/core/search.h"
#include "raddle/engine/plan/pieces.h"

namespace raddle {

/// The pieces of all query tiles, for one KV head.
struct PieceLine {
  const Piece* pieces;
  const i32* piece_begin;  ///< [num_tiles + 1] first piece of a tile
  const i64* cost_before;  ///< [num_pieces + 1] cost of all pieces before one
  i32 num_pieces;
};

/// Which work item: a piece and a KV head.
struct PieceAt {
  i32 piece;
  i32 head;
};

/// The pieces of one group.
struct PieceGroup {
  i32 begin, end;
  bool one_tile;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

RADDLE_FN PieceGroup pieces_of(const Units& units, const PieceLine& line, i32 group) {
  const i32 begin = units.group_tile[group], end = units.group_tile[group + 1];
  return PieceGroup{line.piece_begin[begin], line.piece_begin[end], end - begin == 1};
}

/// The item with number `item`. A group has as many items a KV head as pieces, so that piece
/// item / num_kv_heads, which is `near`, is one of its `group`.
RADDLE_FN PieceAt piece_at(const Units& units, const PieceGroup& group, i32 near, i32 item) {
  if (group.one_tile) return PieceAt{near, item - units.num_kv_heads * near};
  const i32 rest = item - units.num_kv_heads * group.begin;
  const i32 count = group.end - group.begin;
  const i32 head = quotient(rest, count);
  return PieceAt{group.begin + rest - head * count, head};
}

/// The first item of worker w's queue; the number of all items where that worker and all after it
/// have none. `group_of(tile)` is the group of a query tile.
template <class GroupOf>
RADDLE_FN i32 first_item(const Units& units, const PieceLine& line, i64 span, i32 w,
                         const GroupOf& group_of) {
  const i32 heads = units.num_kv_heads;
  const i64* before = line.cost_before;
  const i64 x = span * w;
  if (x >= heads * before[line.num_pieces]) return heads * line.num_pieces;
  // As in even_cut: one search finds the group, though not yet the piece.
  const auto piece_around = [before](i32 begin, i32 end, i64 in_head) {
    return first_where(begin + 1, end, [&](i32 p) { return before[p] > in_head; }) - 1;
  };
  i32 p = piece_around(0, line.num_pieces, quotient(x, i64{heads}));
  const PieceGroup group = pieces_of(units, line, group_of(line.pieces[p].tile));
  i32 item = heads * p;
  i64 start = heads * before[p];  // of the item around x
  if (group.one_tile) {
    const i64 cost = before[p + 1] - before[p];
    const i32 head = static_cast<i32>(quotient(x - start, cost));
    item += head;
    start += head * cost;
  } else {
    const i64 first = before[group.begin], head_cost = before[group.end] - first;
    const i32 head = static_cast<i32>(quotient(x - heads * first, head_cost));
    const i64 head_x = heads * first + head * head_cost;
    p = piece_around(group.begin, group.end, first + x - head_x);
    item = heads * group.begin + head * (group.end - group.begin) + p - group.begin;
    start = head_x + before[p] - first;
  }
  return item + (start + (before[p + 1] - before[p]) / 2 < x ? 1 : 0);
}

/// The work item of a piece and a KV head; the chunks of a tile's pieces are stored in their order.
RADDLE_FN WorkItem item_of(const Units& units, const Split* splits, const PieceLine& line,
                           const PieceAt& at) {
  const Piece piece = line.pieces[at.piece];
  const QueryTile& tile = units.tiles[piece.tile];
  const i32 chunk = at.piece - line.piece_begin[piece.tile];
  const i32 row =
      tile.split >= 0 ? splits[tile.split + at.head].partial_row + chunk * tile.num_rows : -1;
  return WorkItem{piece.tile, at.head, piece.col_begin, piece.col_end, row, 0};
}

RADDLE_ENGINE_END
