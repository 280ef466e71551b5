// Where the keys of a work item lie: runs of columns, pages, rows and scales.
#pragma once

#include "raddle/engine/kernel/gpu/facts.h"
#include "raddle/engine/kernel/gpu/team.h"
#include "raddle/engine/tile/shared_rows.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// The logarithm of a power of two.
RADDLE_DEVICE i32 log2_of(i32 power) { return ptx::count_bits(static_cast<u32>(power - 1)); }

/// Fills in the source of the keys of group `of.group`, of which the query tile sees those in
/// [of.col_begin, of.col_end); `first` and `first_index` are the group's block_begin and kv_begin.
/// One lane does this for its warp. `Of` is QueryTile or Opening.
template <class Of>
RADDLE_DEVICE void open_source(const GpuLaunch& launch, const Of& of, i32 kv_head, i32 first,
                               i32 first_index, i32 element_bytes, const i32* zeros,
                               KeySource& source) {
  const LevelView& level = launch.levels[of.level];
  const KvView& kv = launch.kv[of.level];
  const PoolView* pools[2] = {&kv.k, &kv.v};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const PoolView& pool = *pools[i];
    const i64 origin = kv_head * pool.head_stride + (level.blocks ? 0 : first * pool.block_stride);
    source.row[i] = static_cast<const u8*>(pool.data) + element_bytes * origin;
    source.page_stride[i] = element_bytes * pool.block_stride;
    source.row_stride[i] = element_bytes * (level.blocks ? pool.row_stride : pool.block_stride);
  }
  // Keys without a page table are one page: a list with a single 0.
  const i32 size = level.blocks ? level.block_size : 1 << 30;
  source.pages = level.blocks ? level.blocks + first : zeros;
  source.page_size = size;
  source.page_shift = is_power_of_two(size) ? log2_of(size) : -1;
  source.first_index = first_index;
  source.level = of.level;
  source.group = of.group;
  source.col_begin = of.col_begin;
  source.col_end = of.col_end;
  source.plain = !level.block_index && !level.block_pos && !level.block_first && !level.block_count;
  source.holes = level.block_count != nullptr;
  source.bits = level.mask_bits != nullptr;
}

/// Fills in where the scales of the keys lie.
RADDLE_DEVICE void open_scales(const GpuLaunch& launch, const QueryTile& tile, i32 kv_head,
                               ScaledSource& source) {
  const LevelView& level = launch.levels[tile.level];
  const ScaleView* scales[2] = {&launch.kv_scales[tile.level].k, &launch.kv_scales[tile.level].v};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const ScaleView& scale = *scales[i];
    const i64 first = level.blocks ? 0 : level.block_begin[tile.group] * scale.block_stride;
    source.scale[i] = scale.data ? scale.data + kv_head * scale.head_stride + first : nullptr;
    source.scale_page_stride[i] = scale.block_stride;
    source.scale_row_stride[i] = level.blocks ? scale.row_stride : scale.block_stride;
    source.value[i] = scale.value;
  }
}

/// The entry of the group's page list that holds column c.
RADDLE_DEVICE i32 nth_page(const KeySource& source, i32 c) {
  return source.page_shift >= 0 ? c >> source.page_shift : c / source.page_size;
}

/// Looks up a column of a layout whose indices or positions lie in memory.
RADDLE_COLD Column look_up_column(const LevelView& level, i32 group, i32 c) {
  return column_at(level, group, c);
}

/// column_at, from what open_source worked out; `page` is the entry of the page list.
RADDLE_DEVICE Column find_column(const GpuLaunch& launch, const KeySource& source, i32 c,
                                 i32 page) {
  if (!source.plain) return look_up_column(launch.levels[source.level], source.group, c);
  const i32 index = source.first_index + c;
  return Column{page, c - nth_page(source, c) * source.page_size, index, index, true};
}

/// A row of zeros, as long as the longest row of K or V.
template <i32 dim>
RADDLE_ZEROS(Packed8, zero_row, ceil_div(dim, 8));

/// The row of zeros, from which missing keys are copied: rows of V that were never written may hold
/// NaN, and a weight of zero would not remove it.
template <class Kernel>
RADDLE_DEVICE const u8* zeros() {
  return reinterpret_cast<const u8*>(&zero_row<max(Kernel::dim_qk, Kernel::dim_vo)>);
}

/// Fills in the warp's key source for an item, and returns the item's first run of columns.
template <class Kernel, class Source>
RADDLE_DEVICE Span open_item(const GpuLaunch& launch, const WorkItem& item, Source& source) {
  const QueryTile& tile = launch.plan.query_tiles[item.query_tile];
  RunWalk runs(launch.plan, item, tile);
  const Span first = runs.next();
  ptx::sync_warp();  // all lanes have read the source of the item before
  if (ptx::lane_index() == 0) {
    const LevelView& level = launch.levels[tile.level];
    open_source(launch, tile, item.kv_head, level.block_begin[tile.group],
                first_kv_index(level, tile.group),
                static_cast<i32>(sizeof(typename Kernel::Stored)),
                reinterpret_cast<const i32*>(zeros<Kernel>()), source);
    if constexpr (Kernel::quantized) open_scales(launch, tile, item.kv_head, source);
    source.runs = runs;
  }
  ptx::sync_warp();
  return first;
}

/// The item's next run of columns, or its last one that is left; an empty one if none is.
template <bool from_end = false>
RADDLE_DEVICE Span next_run(KeySource& source) {
  RunWalk runs = source.runs;
  const Span run = from_end ? runs.last() : runs.next();
  ptx::sync_warp();  // all lanes have read
  if (ptx::lane_index() == 0) source.runs = runs;
  ptx::sync_warp();
  return run;
}

/// The columns of a span that exist and may be read.
RADDLE_DEVICE Span columns_read(const KeySource& source, const Span& span) {
  return Span{max(span.begin, source.col_begin), min(span.end, source.col_end), span.partial};
}

/// A column without a key repeats one that has a key, because variants see existing keys only.
RADDLE_DEVICE i32 existing_column(const Span& read, i32 column) {
  return min(max(column, read.begin), read.end - 1);
}

/// The page list's entry for a column of a span. 0 for layouts that are not plain: find_column
/// looks their keys up.
RADDLE_DEVICE i32 look_up_page(const KeySource& source, const Span& span, i32 column) {
  if (!source.plain) return 0;
  return source.pages[nth_page(source, existing_column(columns_read(source, span), column))];
}

/// Whether page lists alone say where the keys lie: in pages of a power of two.
RADDLE_DEVICE bool lies_in_pages(const KeySource& source) {
  return source.plain && source.page_shift >= 0;
}

/// The entries of the page list for every 32nd column of a span, from this lane's on; of a source
/// that lies_in_pages.
template <i32 count>
RADDLE_DEVICE void look_up_pages(const KeySource& source, const Span& span, i32 (&page)[count]) {
  const Span read = columns_read(source, span);
  const i32* pages = source.pages;
  const i32 shift = source.page_shift;
  RADDLE_UNROLL
  for (i32 i = 0; i < count; ++i)
    page[i] = pages[existing_column(read, span.begin + 32 * i + ptx::lane_index()) >> shift];
}

/// The key of a tile's column; `page` is the entry that look_up_page returned for it.
RADDLE_DEVICE Column find_key(const GpuLaunch& launch, const KeySource& source, const Span& tile,
                              i32 column, i32 page) {
  const Span read = columns_read(source, tile);
  Column key = find_column(launch, source, existing_column(read, column), page);
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

/// Writes the facts about the tile's key j.
template <class Keys>
RADDLE_DEVICE void describe_key(Keys& keys, i32 j, i32 column, const Column& key) {
  keys.column[j] = key.valid ? column : -1;
  keys.kv_index[j] = key.kv_index;
  keys.kv_pos[j] = key.kv_pos;
}

/// Starts copying the scales of K and V of the tile's key j.
template <class Keys>
RADDLE_DEVICE void load_scales(const ScaledSource& source, Keys& keys, i32 j, const Column& key) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    float& to = keys.scale[i][j];
    const float* first = source.scale[i];
    if (first && key.valid)
      ptx::copy_word_async(ptx::shared_address(&to), first +
                                                         key.block * source.scale_page_stride[i] +
                                                         key.offset * source.scale_row_stride[i]);
    else
      to = key.valid ? source.value[i] : 0.0f;
  }
}

/// Address of a key's row of K (`which` 0) or V; a missing key has the row of zeros.
template <class Kernel>
RADDLE_DEVICE const u8* row_address(const KeySource& source, i32 which, const Column& key) {
  const u8* row = source.row[which] + key.block * source.page_stride[which] +
                  key.offset * source.row_stride[which];
  return key.valid ? row : zeros<Kernel>();
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
