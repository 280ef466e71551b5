// The one normal form of every layout. Ragged tensors, page tables, BSR matrices and cascades all
// become a list of levels; planner and kernels know only this.
//
// A level is a list of groups. A group is a set of query rows that share one list of KV blocks: a
// request of a page table, a row block of a BSR matrix, or all the requests that share a prefix.
// The keys of a group are counted by **columns** of its block list: column c is key c % block_size
// of block c / block_size, and is a hole where an explicit block is shorter than that.
#pragma once

#include "raddle/engine/core/row.h"
#include "raddle/engine/core/tensor.h"

namespace raddle {

/// The most levels of a cascade.
constexpr i32 max_levels = 8;

struct LevelView {
  i32 num_groups;
  i32 block_size;  ///< Bc: rows of a KV block; for ragged keys any value, blocks is null
  i32 block_rows;  ///< Br: query rows that one bit-masked block covers; used with `mask_bits` only
  bool groups_are_requests;  ///< group g is exactly request g, rows in order
  bool keys_are_shared;      ///< some group's rows belong to several requests
  const i32* row_indptr;     ///< [num_groups + 1] into `rows`
  const i32* rows;           ///< rows of the ragged query tensor; null: entry i is row i
  const i32* columns;        ///< [num_groups] number of columns, holes included
  const i32* kv_begin;       ///< [num_groups] kv_index of column 0 (a cascade's suffix); null: 0
  const i32*
      block_begin;  ///< [num_groups] first entry of the group's list; the first KV row when ragged
  const i32*
      blocks;  ///< block numbers, -1 where never read; null: the group's keys are contiguous rows
  const i32* block_index;  ///< [entries] kv_index of a block's first key (kv_begin not added);
                           ///< null: order in the list
  const i32* block_pos;    ///< [entries] kv_pos of a block's first key; null: the kv_index
  const i32* block_first;  ///< [entries] first row used in the block; null: 0
  const i32* block_count;  ///< [entries] keys in the block; null: block_size
  const u8* mask_bits;     ///< bit ((entry * block_rows + row in group) * block_size + offset), LSB
                           ///< first; null: all kept
};

struct LayoutView {
  i32 num_requests;
  i32 num_rows;  ///< rows of the ragged query tensor
  i32 num_levels;
  const i32* qo_indptr;     ///< [num_requests + 1]
  const i32* kv_len;        ///< [num_requests] keys over all levels
  const i32* qo_pos;        ///< [num_rows] position in the text; null: q_index
  const i32* row_request;   ///< [num_rows]; null where every level's groups are the requests
  const LevelView* levels;  ///< the last level holds every query row in exactly one group
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// The row of the ragged query tensor that is row `i` of group `group`.
RADDLE_FN i32 query_row(const LevelView& level, i32 group, i32 i) {
  const i32 at = level.row_indptr[group] + i;
  return level.rows ? level.rows[at] : at;
}

RADDLE_FN i32 group_rows(const LevelView& level, i32 group) {
  return level.row_indptr[group + 1] - level.row_indptr[group];
}

/// The request of row `row`, which lies in group `group`.
RADDLE_FN i32 request_of(const LayoutView& layout, const LevelView& level, i32 group, i32 row) {
  return level.groups_are_requests ? group : layout.row_request[row];
}

/// What the rows of a request have in common.
struct RowsOfRequest {
  i32 request, first, qo_len, kv_len;  ///< first: its first row of the ragged query tensor
};
RADDLE_FN RowsOfRequest rows_of(const LayoutView& layout, i32 request) {
  const i32 first = layout.qo_indptr[request];
  return {request, first, layout.qo_indptr[request + 1] - first, layout.kv_len[request]};
}

/// Row `row` of the ragged query tensor, under head `head` of a group of query heads.
RADDLE_FN Row make_row(const LayoutView& layout, const RowsOfRequest& of, i32 row, i32 head,
                       i32 kv_head, i32 group_size) {
  const i32 q_index = of.kv_len - of.qo_len + (row - of.first);
  const i32 q_pos = layout.qo_pos ? layout.qo_pos[row] : q_index;
  return Row{of.request, row,       q_index,  q_pos, kv_head * group_size + head,
             kv_head,    of.qo_len, of.kv_len};
}

/// The row of a tile that holds fused row `fused` (= row in group · group_size + head in group) of
/// a group.
RADDLE_FN Row make_row(const LayoutView& layout, const LevelView& level, i32 group, i32 fused,
                       i32 kv_head, i32 group_size) {
  const i32 row = query_row(level, group, fused / group_size);
  const RowsOfRequest of = rows_of(layout, request_of(layout, level, group, row));
  return make_row(layout, of, row, fused % group_size, kv_head, group_size);
}

/// Where one column of a group's list lies and which key it is.
struct Column {
  i32 block;   ///< block of the pool; -1 where the table has none
  i32 offset;  ///< row in the block
  i32 kv_index;
  i32 kv_pos;
  bool valid;  ///< false for a hole
};

/// The kv_index of a group's first column.
RADDLE_FN i32 first_kv_index(const LevelView& level, i32 group) {
  return level.kv_begin ? level.kv_begin[group] : 0;
}

RADDLE_FN Column column_at(const LevelView& level, i32 group, i32 c) {
  const i32 base = first_kv_index(level, group);
  if (!level.blocks) return Column{level.block_begin[group] + c, 0, base + c, base + c, true};
  const i32 nth = c / level.block_size;
  const i32 offset = c - nth * level.block_size;
  const i32 entry = level.block_begin[group] + nth;
  const i32 index =
      base + (level.block_index ? level.block_index[entry] : nth * level.block_size) + offset;
  const i32 pos = level.block_pos ? level.block_pos[entry] + offset : index;
  const i32 first = level.block_first ? level.block_first[entry] : 0;
  const bool valid = !level.block_count || offset < level.block_count[entry];
  return Column{level.blocks[entry], first + offset, index, pos, valid};
}

/// The bit that a BSR block stores for (row of the group, column); the level has `mask_bits`.
RADDLE_FN bool mask_bit(const LevelView& level, i32 group, i32 row_in_group, i32 column) {
  const i32 nth = column / level.block_size;
  const i64 entry = level.block_begin[group] + nth;
  const i64 bit = (entry * level.block_rows + row_in_group) * level.block_size +
                  (column - nth * level.block_size);
  return ((level.mask_bits[bit >> 3] >> (bit & 7)) & 1) != 0;
}

RADDLE_ENGINE_END
