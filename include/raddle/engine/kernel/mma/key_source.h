// Where the keys of a work item lie, and copies of their rows into shared memory: what the streams
// of short and of long queries have in common.
#pragma once

#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// One lane's work, for its warp.
RADDLE_DEVICE void open_source(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                               i32 element_bytes, const i32* zeros, KeySource& source) {
  const LevelView& level = launch.levels[tile.level];
  const KvView& kv = launch.kv[tile.level];
  const i32 first = level.block_begin[tile.group];
  const PoolView* pools[2] = {&kv.k, &kv.v};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const PoolView& pool = *pools[i];
    const i64 origin = kv_head * pool.head_stride + (level.blocks ? 0 : first * pool.block_stride);
    source.row[i] = static_cast<const u8*>(pool.data) + element_bytes * origin;
    source.block_stride[i] = element_bytes * pool.block_stride;
    source.row_stride[i] = element_bytes * (level.blocks ? pool.row_stride : pool.block_stride);
  }
  // One block of rows is a list of one, which says 0.
  const i32 size = level.blocks ? level.block_size : 1 << 30;
  source.blocks = level.blocks ? level.blocks + first : zeros;
  source.block_size = size;
  source.block_shift = (size & (size - 1)) == 0 ? ptx::count_bits(static_cast<u32>(size - 1)) : -1;
  source.first_index = level.kv_begin ? level.kv_begin[tile.group] : 0;
  source.level = tile.level;
  source.group = tile.group;
  source.col_begin = tile.col_begin;
  source.col_end = tile.col_end;
  source.plain = !level.block_index && !level.block_pos && !level.block_first && !level.block_count;
  source.holes = level.block_count != nullptr;
  source.bits = level.mask_bits != nullptr;
}

/// The same for the scales of its keys.
RADDLE_DEVICE void open_scales(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                               ScaledSource& source) {
  const LevelView& level = launch.levels[tile.level];
  const ScaleView* scales[2] = {&launch.kv_scales[tile.level].k, &launch.kv_scales[tile.level].v};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const ScaleView& scale = *scales[i];
    const i64 first = level.blocks ? 0 : level.block_begin[tile.group] * scale.block_stride;
    source.scale[i] = scale.data ? scale.data + kv_head * scale.head_stride + first : nullptr;
    source.scale_block_stride[i] = scale.block_stride;
    source.scale_row_stride[i] = level.blocks ? scale.row_stride : scale.block_stride;
    source.value[i] = scale.value;
  }
}

/// The block of the group's list that holds column c.
RADDLE_DEVICE i32 nth_block(const KeySource& source, i32 c) {
  return source.block_shift >= 0 ? c >> source.block_shift : c / source.block_size;
}

/// A column of a layout whose indices or positions have to be looked up.
RADDLE_COLD Column look_up_column(const LevelView& level, i32 group, i32 c) {
  return column_at(level, group, c);
}

/// column_at, with what open_source worked out; `block` is what the group's list says.
RADDLE_DEVICE Column find_column(const MmaLaunch& launch, const KeySource& source, i32 c,
                                 i32 block) {
  if (!source.plain) return look_up_column(launch.levels[source.level], source.group, c);
  const i32 index = source.first_index + c;
  return Column{block, c - nth_block(source, c) * source.block_size, index, index, true};
}

/// As long as the longest row.
template <i32 dim>
RADDLE_ZEROS(Packed8, zero_row, ceil_div(dim, 8));

/// A row of zeros: where keys that are not there are copied from, for V's rows may hold anything
/// and meet weights of zero.
template <class K>
RADDLE_DEVICE const u8* zeros() {
  return reinterpret_cast<const u8*>(&zero_row<max(K::dim_qk, K::dim_vo)>);
}

/// Everything that finding an item's keys needs, for one warp; its first run is returned.
template <class K, class Source>
RADDLE_DEVICE Span open_item(const MmaLaunch& launch, const WorkItem& item, Source& source) {
  const QueryTile& tile = launch.plan.query_tiles[item.query_tile];
  RunWalk runs(launch.plan, item, tile);
  const Span first = runs.next();
  ptx::sync_warp();  // all lanes have read what it was
  if (ptx::lane_index() == 0) {
    open_source(launch, tile, item.kv_head, static_cast<i32>(sizeof(typename K::Stored)),
                reinterpret_cast<const i32*>(zeros<K>()), source);
    if constexpr (K::quantized) open_scales(launch, tile, item.kv_head, source);
    source.runs = runs;
  }
  ptx::sync_warp();
  return first;
}

/// The item's next run of columns; an empty one at its end.
RADDLE_DEVICE Span next_run(KeySource& source) {
  RunWalk runs = source.runs;
  const Span run = runs.next();
  ptx::sync_warp();  // all lanes have read
  if (ptx::lane_index() == 0) source.runs = runs;
  ptx::sync_warp();
  return run;
}

/// The columns of a span that may be read.
RADDLE_DEVICE Span columns_read(const KeySource& source, const Span& span) {
  return Span{max(span.begin, source.col_begin), min(span.end, source.col_end), span.partial};
}

/// A column that has no key repeats one that has, for variants see only keys that exist.
RADDLE_DEVICE i32 existing_column(const Span& read, i32 column) {
  return min(max(column, read.begin), read.end - 1);
}

/// What the page table says of a column of a span; lists of other kinds are looked up when they are
/// needed.
RADDLE_DEVICE i32 look_up_block(const KeySource& source, const Span& span, i32 column) {
  if (!source.plain) return 0;
  return source.blocks[nth_block(source, existing_column(columns_read(source, span), column))];
}

/// The key of a tile's column; `block` is what was looked up for it.
RADDLE_DEVICE Column find_key(const MmaLaunch& launch, const KeySource& source, const Span& tile,
                              i32 column, i32 block) {
  const Span read = columns_read(source, tile);
  Column key = find_column(launch, source, existing_column(read, column), block);
  if (column < read.begin || column >= read.end) key.valid = false;
  return key;
}

RADDLE_DEVICE i32 tile_flags(const KeySource& source, const Span& tile, i32 keys, bool last) {
  const Span read = columns_read(source, tile);
  const bool ragged = read.end - read.begin < keys || source.holes;
  const i32 masked = TileFlags::partial | (source.bits ? TileFlags::bits : 0);
  return (tile.partial ? masked : 0) | (ragged ? TileFlags::ragged : 0) |
         (last ? TileFlags::last : 0);
}

/// What there is to say of the tile's key j.
template <class Keys>
RADDLE_DEVICE void describe_key(Keys& keys, i32 j, i32 column, const Column& key) {
  keys.column[j] = key.valid ? column : -1;
  keys.kv_index[j] = key.kv_index;
  keys.kv_pos[j] = key.kv_pos;
}

/// Starts copying the scales of the tile's key j, K's and V's.
template <class Keys>
RADDLE_DEVICE void load_scales(const ScaledSource& source, Keys& keys, i32 j, const Column& key) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    float& to = keys.scale[i][j];
    const float* first = source.scale[i];
    if (first && key.valid)
      ptx::copy_word_async(ptx::shared_address(&to), first +
                                                         key.block * source.scale_block_stride[i] +
                                                         key.offset * source.scale_row_stride[i]);
    else
      to = key.valid ? source.value[i] : 0.0f;
  }
}

/// Where the key's row of K (`which` 0) or V lies; a row that is not there is one of zeros.
template <class K>
RADDLE_DEVICE const u8* row_address(const KeySource& source, i32 which, const Column& key) {
  const u8* row = source.row[which] + key.block * source.block_stride[which] +
                  key.offset * source.row_stride[which];
  return key.valid ? row : zeros<K>();
}

/// copy_rows, where rows are whole lines of 128 bytes: eight lanes copy a row's, and each keeps its
/// place in them. What lies behind the last line that has elements nobody reads.
template <class Rows, i32 row_bytes, i32 warp_keys>
RADDLE_DEVICE void copy_lines(u32 to, i32 first_row, const u8* const* source) {
  static_assert(Rows::swizzled && warp_keys % 4 == 0);
  const i32 lane = ptx::lane_index(), chunk = lane % 8;
  RADDLE_UNROLL
  for (i32 i = 0; i < warp_keys; i += 4) {
    const i32 row = i + lane / 8;
    const u8* from = source[row] + 16 * chunk;
    const u32 at = to + Rows::at(first_row + row, chunk);
    RADDLE_UNROLL
    for (i32 first = 0; first < row_bytes; first += 128) {
      const i32 bytes =
          first + 128 <= row_bytes ? 16 : max(0, min(16, row_bytes - first - 16 * chunk));
      ptx::copy_async(at + static_cast<u32>(first), from + first, bytes);
    }
  }
}

/// Copies a warp's rows of K or V, which `source` tells, to shared memory, as rows from `first_row`
/// on. Of rows that will be widened where they lie, bytes take the first half.
template <class K, class Rows, i32 dim, bool narrow, i32 warp_keys, i32 batch>
RADDLE_DEVICE void copy_rows(u32 to, i32 first_row, const u8* const* source) {
  constexpr i32 row_bytes = dim * static_cast<i32>(sizeof(typename K::Stored));
  constexpr i32 chunks = K::quantized && !narrow ? Rows::chunks / 2 : Rows::chunks;
  const i32 lane = ptx::lane_index();
  if constexpr (K::wide) return copy_lines<Rows, row_bytes, warp_keys>(to, first_row, source);
  const u32 to_first = to + Rows::at(first_row + lane / chunks, lane % chunks);
  // A batch's addresses are all read before its first copy starts, so that one wait serves all.
  constexpr i32 copies = ceil_div(warp_keys * chunks, 32);
  // Where rows divide a warp, its lanes keep their chunk.
  constexpr bool even = 32 % chunks == 0;
  RADDLE_UNROLL
  for (i32 first = 0; first < copies; first += batch) {
    const u8* from[batch];
    RADDLE_UNROLL
    for (i32 i = first; i < min(first + batch, copies); ++i) {
      const i32 row = even ? lane / chunks + 32 / chunks * i : (32 * i + lane) / chunks;
      const i32 chunk = even ? lane % chunks : (32 * i + lane) % chunks;
      from[i - first] = source[min(row, warp_keys - 1)] + 16 * chunk;
    }
    RADDLE_UNROLL
    for (i32 i = first; i < min(first + batch, copies); ++i) {
      const i32 row = even ? lane / chunks + 32 / chunks * i : (32 * i + lane) / chunks;
      const i32 chunk = even ? lane % chunks : (32 * i + lane) % chunks;
      if (warp_keys * chunks % 32 != 0 && row >= warp_keys) continue;
      const u32 at = even ? Rows::rows_after(to_first, 32 / chunks * i)
                          : to + Rows::at(first_row + row, chunk);
      const i32 bytes =
          row_bytes % (16 * chunks) == 0 ? 16 : max(0, min(16, row_bytes - 16 * chunk));
      ptx::copy_async(at, from[i - first], bytes);
    }
  }
}

}  // namespace mma

RADDLE_ENGINE_END
